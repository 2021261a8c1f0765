"""What adapters need of a batch beside its rows, by torch ops on its device, which CUDA graphs capture."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep import Dispatched
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.routing import NO_ROW


class RankIndex(NamedTuple):
    """Which row each (source, token) gets in a batch with one row per (token, rank), N of them.

    Attributes:
        live: [R, Tmax, K] bool, entries that have a row in the batch.
        entry: [N] int64, source * Tmax + token of each row; 0 where there is no token.
        filled: [N] bool, whether a token has the row.
        source_ends: [R] int32; rows of source s end before source_ends[s] and begin at source_ends[s - 1].
    """

    live: torch.Tensor
    entry: torch.Tensor
    filled: torch.Tensor
    source_ends: torch.Tensor


def rank_index(batch: Dispatched, rows: int) -> RankIndex:
    """Rows for a batch's tokens, one per (token, rank), by source rank, then token, as far as they fit into `rows`."""
    sources, tokens, _ = batch.row_map.shape
    device = batch.row_map.device
    # kernels leave `row_map` alone where there is no token
    exists = torch.arange(tokens, device=device) < batch.headers[:, HeaderWord.TOKENS, None]
    live = exists[:, :, None] & (batch.row_map >= 0) & (batch.row_map < batch.tokens.shape[0])
    has = live.any(dim=2)
    inside = has.cumsum(1) - 1
    counts = inside[:, -1] + 1
    begins = counts.cumsum(0) - counts
    row = torch.where(has, begins[:, None] + inside, rows).clamp(max=rows)
    # what has no row goes to one place behind the last
    entry = torch.full((rows + 1,), NO_ROW, dtype=torch.int64, device=device)
    entry.scatter_(0, row.flatten(), torch.arange(sources * tokens, device=device))
    filled = entry[:rows] >= 0
    return RankIndex(live, torch.where(filled, entry[:rows], 0), filled, (begins + counts).int())


def find_sources(batch: Dispatched, nodes: int, frame: int, ranges: torch.Tensor) -> None:
    """Say of the rows of blocks over nodes which rank each came from. Rewrites the tokens of `batch.src_info`, which
    count nodes in frames, to those of the source rank.

    Args:
        ranges: [L, R] int64, written: rows of each rank in a block, and from bit 32 on where they begin.
    """
    assert batch.source_ranges is not None
    (experts, rails, _), ranks = batch.source_ranges.shape, ranges.shape[1]
    tokens = batch.src_info[:, 0].view(experts, -1)
    place = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device).expand(tokens.shape)
    ends = batch.source_ranges.sum(2).int()  # of each rail
    rail = torch.searchsorted(ends, place.contiguous(), right=True)
    filled = place < batch.row_counts[:, None]
    part = torch.where(filled, rail * nodes + tokens // frame, ranks).long()
    counts = torch.zeros(experts, ranks + 1, dtype=torch.int64, device=tokens.device)
    counts = counts.scatter_add_(1, part, torch.ones_like(part))[:, :ranks]
    packed = counts | (counts.cumsum(1) - counts) << 32
    ranges.copy_(packed.view(experts, rails, nodes).transpose(1, 2).flatten(1))
    tokens.remainder_(frame)
