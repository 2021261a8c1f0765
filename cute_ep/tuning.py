"""How a launch is shaped: CTAs, their roles, pieces of a row. Data and a look-up; every choice gives the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.config import EPConfig
from cute_ep.layouts.arena import MAX_PIECES, PIECED_TOKENS, message_bytes

CTAS_PER_SM = 2
REFERENCE_CTAS = 264
"""CTAs of the GPU (H200, 132 SMs) that the tables below were measured on."""


@dataclass(frozen=True)
class Entry:
    """What was fastest up to a number of tokens a rank.

    Attributes:
        tokens: the entry holds up to this many.
        grid: CTAs at most.
        senders: share of the CTAs that only send while the others only receive; 0: every CTA does both.
        pieces: pieces of a row.
    """

    tokens: int
    grid: int
    senders: float
    pieces: int


MANY = 1 << 30
DISPATCH = (
    Entry(2, 128, 1 / 8, 16),
    Entry(32, 128, 1 / 4, 8),
    Entry(192, REFERENCE_CTAS, 1 / 4, 4),
    Entry(PIECED_TOKENS, REFERENCE_CTAS, 48 / 264, 4),
    Entry(MANY, REFERENCE_CTAS, 48 / 264, 1),
)
"""4 x H200, hidden 7168, 256 experts, top-8, 2026-11-21: `perf/LOG.md`."""
SMALL_MESSAGE_BYTES = 5000
"""Messages up to this size are whole from the fourth entry on: a piece would be a few packets."""
COMBINE = (
    Entry(2, 64, 0, 16),
    Entry(32, 128, 0, 16),
    Entry(192, REFERENCE_CTAS, 0, 8),
    Entry(PIECED_TOKENS, REFERENCE_CTAS, 0, 4),
    Entry(MANY, REFERENCE_CTAS, 180 / 264, 1),
)


@dataclass(frozen=True)
class Shape:
    """Launch shape of one call: grid, CTAs below `send_ctas` send, CTAs from `receive_from` receive."""

    grid: int
    send_ctas: int
    receive_from: int


def _entry(table: tuple[Entry, ...], tokens: int) -> Entry:
    return next(entry for entry in table if tokens <= entry.tokens)


def pieces_log2(cfg: EPConfig, tokens: int) -> tuple[int, int]:
    """Base-2 logarithms of the pieces of a message and of a returned row, when a rank has `tokens` tokens."""
    message, returned = _entry(DISPATCH, tokens).pieces, _entry(COMBINE, tokens).pieces
    if tokens > DISPATCH[2].tokens and message_bytes(cfg.format, cfg.hidden) <= SMALL_MESSAGE_BYTES:
        message = 1
    assert max(message, returned) <= MAX_PIECES
    return message.bit_length() - 1, returned.bit_length() - 1


def launch_shape(operation: str, cfg: EPConfig, tokens: int, max_ctas: int) -> Shape:
    """Shape of one launch.

    Args:
        operation: "dispatch", "dispatch_async", ..., "combine_wait" (mode and format do not matter).
        tokens: this rank's tokens; the other ranks' numbers may differ.
        max_ctas: CTAs that are resident together (the SM budget times CTAS_PER_SM).
    """
    expected = tokens or cfg.max_tokens_per_rank  # a rank without tokens knows nothing of the others'
    entry = _entry(DISPATCH if operation.startswith("dispatch") else COMBINE, expected)
    grid = min(max_ctas, entry.grid if entry.grid < REFERENCE_CTAS else max_ctas)
    if operation.endswith("_async"):
        return Shape(grid, grid, grid)
    if operation.endswith("_wait"):
        return Shape(grid, 0, 0)
    senders = round(grid * entry.senders)
    if not senders or grid < 4:
        return Shape(grid, grid, 0)
    return Shape(grid, senders, senders)
