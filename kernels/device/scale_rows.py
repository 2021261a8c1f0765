"""Scale factors of an output, whatever their layout: one set of strides, and zeros where a group is padded."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_ep.kernels.device.atoms import fill
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.memory import Row, item_coord, part_at, pointer, row_address, vectors_at, words_at
from cute_ep.layouts.maps.arguments import Scales
from cute_ep.layouts.maps.scales import ATOM_ROWS, LANE_ROWS, WORD_BYTES


def _scale_word_offset(scales: Scales, row: Int32 | Uint32, column: Int32 | Uint32) -> Int64:
    """`ScaleMap.at` in products of two 32-bit numbers, which are one instruction."""
    in_block = remainder(row, ATOM_ROWS)
    inside = remainder(in_block, 32) * scales.inner + quotient(in_block, 32) * scales.middle
    return Int64(quotient(row, ATOM_ROWS)) * Int64(scales.outer) + Int64(column) * Int64(scales.step) + inside


def store_scale_word(scales: Scales, row: Int32 | Uint32, column: Int32 | Uint32, word: Uint32) -> None:
    """Store one word of scale factors."""
    cute.arch.store(pointer(scale_row_address(scales, row, column), Uint32), word)


def scale_row_address(scales: Scales, row: Int32 | Uint32, column: Int32 | int = 0) -> Int64:
    """Address of a word of scale factors, by default word 0 of a row."""
    return row_address(scales.data, _scale_word_offset(scales, row, column), WORD_BYTES)


def scale_row(scales: Scales, home: Int64, words: Int32) -> Row:
    """The first `words` scale words of the row whose word 0 is at `home`."""
    return words_at(home, words, scales.step)


@cute.jit
def zero_scale_rows(scales: Scales, first: Int32, end: Int32, share: tuple[Int32, int], lane: Int32) -> None:
    """Zero the scale words of rows first .. end - 1 in word columns part, part + parts, ... with one warp; `share` is
    (part, parts).

    The rows lie in one 128-row block, and end there when it is an atom: then lane l takes the four rows l, l + 32, ...,
    whose words of a column are 16 contiguous bytes, the last ones zeros.
    """
    part, parts = share
    if scales.is_atom:
        in_block = remainder(first, ATOM_ROWS)
        taken = quotient(in_block - lane + 31, 32)  # words of a column that belong to rows before `first`
        if first == end:
            taken = Int32(LANE_ROWS)
        home = scale_row_address(scales, first - in_block + lane, part)
        step = Int64(scales.step) * (WORD_BYTES * parts)
        for _ in cutlass.range(part, scales.words, parts, unroll=1):
            if taken <= 0:
                fill(0, vectors_at(home, 0))
            else:
                if (taken & 1) != 0:
                    cute.arch.store(pointer(row_address(home, taken, WORD_BYTES), Uint32), Uint32(0))
                if taken <= 2:
                    cute.arch.store(pointer(row_address(home, 2, WORD_BYTES), Int64), Int64(0))
            home = part_at(home, step)
    else:
        rows = end - first
        columns = quotient(scales.words - part + parts - 1, parts)
        for item in cutlass.range(lane, rows * columns, 32, unroll=1):
            row, turn = item_coord(item, rows)
            store_scale_word(scales, first + row, part + turn * parts, Uint32(0))
