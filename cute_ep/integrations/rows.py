"""Rows of a batch in another order, one per (token, rank), and back: by torch ops on the batch's device, exact to the
bit. Nothing waits for the device, so CUDA graphs capture it.

| shape | a row is | experts' rows |
| --- | --- | --- |
| expert-major, what dispatch returns | a (token, expert) | one behind the other, or in blocks (`block_rows`) |
| `rank_major` | a (token, rank), beside it the local experts and their weights | the caller weights and sums them |

Combine finds rows through a batch's `row_map`. So a view has a batch of its own (`Dispatched.derived`), with which
combine takes rows in the view's order, without a copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import READ_BY_COMBINE, Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.routing import LOST_ROW, NO_ROW
from cute_ep.layouts.maps.scales import ATOM, TRANSPOSED


class RankIndex(NamedTuple):
    """Which row each (source, token) gets in a batch with one row per (token, rank), N of them.

    Attributes:
        live: [R, Tmax, K] bool, entries that have a row in the batch.
        row: [R, Tmax] int64, the (source, token)'s row; N where it has none.
        entry: [N] int64, source * Tmax + token of each row; 0 where there is no token.
        filled: [N] bool, whether a token has the row.
        source_ends: [R] int32, as of `RankRows`.
    """

    live: torch.Tensor
    row: torch.Tensor
    entry: torch.Tensor
    filled: torch.Tensor
    source_ends: torch.Tensor


class RankRows(NamedTuple):
    """A batch with one row per (token, rank), by source rank, then token. N is the number of rows that there is room
    for; rows that no token has hold anything.

    Attributes:
        tokens: [N, columns], as in `DispatchBuffers`.
        scales: [N, factors] block scale factors, row-major; None when the format has none.
        row_scales: [N] bfloat16; None when the format has none.
        expert_ids: [N, K] int64 local experts of the token's entries, -1 where an entry is masked or of another rank,
            and where no token has the row.
        weights: [N, K] float32 router weights, 0 where `expert_ids` is -1; None when the batch has none.
        source_ends: [R] int32; rows of source s end before source_ends[s] and begin at source_ends[s - 1], or with a
            stride at s * stride.
        batch: what `combine(rows, batch, mode="partial")` takes with rows in this order. It adds a token's rows over
            ranks, without weights.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    row_scales: torch.Tensor | None
    expert_ids: torch.Tensor
    weights: torch.Tensor | None
    source_ends: torch.Tensor
    batch: Dispatched


def rank_index(batch: Dispatched, rows: int, stride: int | None = None) -> RankIndex:
    """Rows for a batch's tokens, one per (token, rank): by source rank, then token, without gaps or with a stride.

    Args:
        batch: what dispatch returned.
        rows: room for rows; with a stride R * stride. Tokens that do not fit get none.
        stride: rows of source s begin at s * stride; None: behind those of the source before.
    """
    sources, tokens, _ = batch.row_map.shape
    device = batch.row_map.device
    live = present(batch) & (batch.row_map < batch.tokens.shape[0])
    has = live.any(dim=2)
    inside = has.cumsum(1) - 1
    counts = inside[:, -1] + 1
    if stride is None:
        begins = counts.cumsum(0) - counts
    else:
        begins = torch.arange(0, sources * stride, stride, device=device)
        counts = counts.clamp(max=stride)
        has = has & (inside < stride)
    row = torch.where(has, begins[:, None] + inside, rows).clamp(max=rows)
    # what has no row goes to one place behind the last
    entry = torch.full((rows + 1,), NO_ROW, dtype=torch.int64, device=device)
    entry.scatter_(0, row.flatten(), torch.arange(sources * tokens, device=device))
    filled = entry[:rows] >= 0
    return RankIndex(live, row, torch.where(filled, entry[:rows], 0), filled, (begins + counts).int())


def rank_major(cfg: EPConfig, batch: Dispatched, rows: int | None = None, *, stride: int | None = None) -> RankRows:
    """The batch with one row per (token, rank): a token that several local experts have comes once.

    Runs on the current stream and allocates what it returns. The batch stays as it is, and combine still takes it.

    Args:
        cfg: of the communicator that dispatched.
        batch: in bfloat16, or with scale factors in layout `linear` or `transposed`.
        rows: room for rows, at most as many as the batch has; None: for any routing, R * max_tokens_per_rank. Rows that
            do not fit are left out, and combine returns NaN for their tokens.
        stride: rows for each source, whose first row is at a multiple of it; in place of `rows`. None: no gaps.

    Raises:
        EPInputError: the configuration has a fused shared expert, blocks, or scale factors in layout `atom128x4`.
    """
    _check(cfg)
    sources, tokens, _ = batch.row_map.shape
    capacity = batch.tokens.shape[0]
    room = min(sources * tokens if rows is None else rows, capacity) if stride is None else sources * stride
    index = rank_index(batch, room, stride)
    live, entry, masked = index.live, index.entry, ~index.filled[:, None]

    from_row = torch.where(live, batch.row_map, 0).amax(dim=2).flatten()[entry].long()
    expert = torch.searchsorted(batch.row_offsets[1:], batch.row_map, right=True)
    expert_ids = torch.where(live, expert, NO_ROW).flatten(0, 1)[entry].masked_fill(masked, NO_ROW)
    weights = batch.weights
    if weights is not None:
        weights = torch.where(live, weights, 0).flatten(0, 1)[entry].masked_fill(masked, 0)

    served = present(batch)
    first = served & (served.cumsum(2) == 1)
    place = index.row[:, :, None]
    found = torch.where(live & (place < room), place, LOST_ROW)
    own = torch.ones(batch.topk_ids.shape, dtype=torch.float32, device=live.device)
    derived = batch.derived(
        row_map=torch.where(first, found, NO_ROW).int(),
        tokens=entry,
        weights=torch.ones(batch.row_map.shape, dtype=torch.float32, device=live.device),
        router_weights=own,
    )
    scales = None
    if batch.scales is not None:
        transposed = cfg.scales_as == TRANSPOSED
        scales = batch.scales[:, from_row].t().contiguous() if transposed else _taken(batch.scales, from_row)
    row_scales = None if batch.row_scales is None else batch.row_scales[from_row]
    tokens_of = _taken(batch.tokens, from_row)
    return RankRows(tokens_of, scales, row_scales, expert_ids, weights, index.source_ends, derived)


def without_rows(batch: Dispatched, router_weights: torch.Tensor | None = None) -> Dispatched:
    """What combine reads of a batch, without the memory of its rows and scale factors.

    Args:
        router_weights: [T, K] float32 that exact mode multiplies by; None: ones.
    """
    if router_weights is None:
        router_weights = torch.ones(batch.topk_ids.shape, dtype=torch.float32, device=batch.topk_ids.device)
    kept = {name: getattr(batch, name) for name in (*READ_BY_COMBINE, "weights")}
    rows = batch.src_info if len(batch.src_info) == len(batch.tokens) else batch.tokens
    return Dispatched.of_tensors(
        kept | {"tokens": rows},
        rank=batch.rank,
        topk_ids=batch.topk_ids,
        router_weights=router_weights,
        return_slices=batch.return_slices,
    )


def _check(cfg: EPConfig) -> None:
    if cfg.fused_shared_expert:
        raise EPInputError("cfg.fused_shared_expert = True: must be False, only routed rows have another shape")
    if cfg.scales_as == ATOM:
        raise EPInputError(
            f"cfg.scale_layout = {ATOM!r}: must be 'linear', a tile of 128 rows cannot be taken apart by rows"
        )
    if cfg.block_rows is not None:
        raise EPInputError(f"cfg.block_rows = {cfg.block_rows}: must be None, rows in blocks have their shape")


def present(batch: Dispatched) -> torch.Tensor:
    """[R, Tmax, K] bool: entries of tokens that exist which this rank serves. Kernels leave `row_map` alone where
    there is no token."""
    token = torch.arange(batch.row_map.shape[1], device=batch.row_map.device)
    exists = token < batch.headers[:, HeaderWord.TOKENS, None]
    return exists[:, :, None] & (batch.row_map >= 0)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same rows in the largest integers that they consist of: torch indexes few types of 8 bits, and moves large
    elements faster."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dim() == 1:
        return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    size = tensor.shape[1] * tensor.itemsize
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.view(next(kind for width, kind in kinds.items() if size % width == 0))


def _taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by their numbers."""
    return _words(rows).index_select(0, index).view(rows.dtype)
