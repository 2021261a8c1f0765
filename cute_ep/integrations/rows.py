"""What adapters need of a batch beside its rows, by torch ops on its device, exact to the bit. Nothing waits for the
device, so CUDA graphs capture it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep.api.dispatched import READ_BY_COMBINE, Dispatched
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.routing import NO_ROW


class RankIndex(NamedTuple):
    """Which row each (source, token) gets in a batch with one row per (token, rank), N of them.

    Attributes:
        live: [R, Tmax, K] bool, entries that have a row in the batch.
        row: [R, Tmax] int64, the (source, token)'s row; N where it has none.
        entry: [N] int64, source * Tmax + token of each row; 0 where there is no token.
        filled: [N] bool, whether a token has the row.
        source_ends: [R] int32; rows of source s end before source_ends[s] and begin at source_ends[s - 1].
    """

    live: torch.Tensor
    row: torch.Tensor
    entry: torch.Tensor
    filled: torch.Tensor
    source_ends: torch.Tensor


def rank_index(batch: Dispatched, rows: int) -> RankIndex:
    """Rows for a batch's tokens, one per (token, rank): by source rank, then token.

    Args:
        batch: what dispatch returned.
        rows: room for rows. Tokens that do not fit get none.
    """
    sources, tokens, _ = batch.row_map.shape
    device = batch.row_map.device
    live = present(batch) & (batch.row_map < batch.tokens.shape[0])
    has = live.any(dim=2)
    inside = has.cumsum(1) - 1
    counts = inside[:, -1] + 1
    begins = counts.cumsum(0) - counts
    row = torch.where(has, begins[:, None] + inside, rows).clamp(max=rows)
    # what has no row goes to one place behind the last
    entry = torch.full((rows + 1,), NO_ROW, dtype=torch.int64, device=device)
    entry.scatter_(0, row.flatten(), torch.arange(sources * tokens, device=device))
    filled = entry[:rows] >= 0
    return RankIndex(live, row, torch.where(filled, entry[:rows], 0), filled, (begins + counts).int())


def without_rows(batch: Dispatched, router_weights: torch.Tensor | None) -> Dispatched:
    """What combine reads of a batch, without the memory of its rows and scale factors.

    Args:
        router_weights: [T, K] float32 that exact mode multiplies by, unless combine is given others.
    """
    kept = {name: getattr(batch, name) for name in (*READ_BY_COMBINE, "weights")}
    rows = batch.src_info if len(batch.src_info) == len(batch.tokens) else batch.tokens
    return Dispatched.of_tensors(
        kept | {"tokens": rows},
        rank=batch.rank,
        topk_ids=batch.topk_ids,
        router_weights=router_weights,
        return_slices=batch.return_slices,
    )


def present(batch: Dispatched) -> torch.Tensor:
    """[R, Tmax, K] bool: entries of tokens that exist which this rank serves. Kernels leave `row_map` alone where
    there is no token."""
    token = torch.arange(batch.row_map.shape[1], device=batch.row_map.device)
    exists = token < batch.headers[:, HeaderWord.TOKENS, None]
    return exists[:, :, None] & (batch.row_map >= 0)
