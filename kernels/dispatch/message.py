"""The parts of a message: a token's payload, then its scale factors, then its own scale (`message_map`).

    payload       (word, vector)   (4, V) : (1, 4)
    scales        (word, word)     (1, S) : (1, 1)     read and written in vectors too
    row scale     (word, word)     (1, 1) : (1, 1)     a bfloat16, in the lower half

Each takes the address of a message, in the own arena or a peer's.
"""

from __future__ import annotations

from cutlass import Int32, Int64

from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.memory import WORDS, Row, part_at, row_at, words_at
from cute_ep.layouts.maps.arguments import Wire


def message_scales(wire: Wire, message: Int64, words: Int32) -> Row:
    """The first `words` scale words."""
    return words_at(_scales(wire, message), words)


def scale_vectors(wire: Wire, message: Int64, words: Int32) -> Row:
    """The vectors of the first `words` scale words, the last one maybe in part."""
    return row_at(_scales(wire, message), quotient(words + (WORDS - 1), WORDS))


def message_row_scale(wire: Wire, message: Int64) -> Row:
    """The token's own scale."""
    return words_at(part_at(message, wire.row_scale_at), 1)


def _scales(wire: Wire, message: Int64) -> Int64:
    return part_at(message, wire.scales_at)
