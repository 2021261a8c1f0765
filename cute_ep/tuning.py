"""How a launch is shaped: CTAs, their roles, tokens a chunk. Data and a look-up; every choice gives the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.config import EPConfig
from cute_ep.layouts.arena import message_bytes
from cute_ep.layouts.routing import MAX_CHUNK_ENTRIES

CTAS_PER_SM = 2

SPLIT_FROM_TOKENS = 2048
"""From this many tokens on, some CTAs only send and the others only receive; below, every CTA does both."""
DISPATCH_SENDERS = 64
COMBINE_SENDERS = 180
"""CTAs that only send in the split shape, of 264 (132 SMs)."""
REFERENCE_CTAS = 264
CHUNK_BYTES = 57344
MOST_TOKENS_PER_CHUNK = 8
CHUNKS_WANTED = 64
"""A chunk grows until one rank has this many, within CHUNK_BYTES of messages and MOST_TOKENS_PER_CHUNK."""


@dataclass(frozen=True)
class Shape:
    """Launch shape of one call: grid, CTAs below `send_ctas` send, CTAs from `receive_from` receive."""

    grid: int
    send_ctas: int
    receive_from: int


def tokens_per_chunk(cfg: EPConfig, tokens: int) -> int:
    """Tokens that share one completion flag."""
    by_bytes = max(1, CHUNK_BYTES // message_bytes(cfg.format, cfg.hidden))
    by_number = max(1, tokens // CHUNKS_WANTED)
    entries = cfg.top_k + cfg.fused_shared_expert
    return min(by_bytes, by_number, MOST_TOKENS_PER_CHUNK, MAX_CHUNK_ENTRIES // entries)


def launch_shape(operation: str, cfg: EPConfig, tokens: int, chunk: int, max_ctas: int) -> Shape:
    """Shape of one launch.

    Args:
        operation: "dispatch", "dispatch_async", ..., "combine_wait" (mode and format do not matter).
        tokens: this rank's tokens; the other ranks' numbers may differ.
        chunk: tokens a chunk.
        max_ctas: CTAs that are resident together (the SM budget times CTAS_PER_SM).
    """
    expected = tokens or cfg.max_tokens_per_rank  # a rank without tokens knows nothing of the others'
    grid = min(max_ctas, max(32, cfg.peers * -(-expected // chunk)))
    if operation.endswith("_async"):
        return Shape(grid, grid, grid)
    if operation.endswith("_wait"):
        return Shape(grid, 0, 0)
    if tokens < SPLIT_FROM_TOKENS or grid < 8:
        return Shape(grid, grid, 0)
    of_reference = DISPATCH_SENDERS if operation == "dispatch" else COMBINE_SENDERS
    senders = max(1, min(grid - 1, grid * of_reference // REFERENCE_CTAS))
    return Shape(grid, senders, senders)
