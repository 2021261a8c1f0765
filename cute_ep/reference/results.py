"""What one rank of the reference backend sends, and what it writes when it has received: copies, by `reference`.

All of it computes as kernels do, without the modes of torch in which the caller is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.calls import DispatchInput
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.modes import no_modes, writing_modes
from cute_ep.api.rounds import PendingDispatch
from cute_ep.api.row_tensors import as_bits
from cute_ep.api.validate import check_global_scale
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.routing import LOST_ROW, NO_ROW
from cute_ep.layouts.maps.scales import ATOM, TRANSPOSED
from cute_ep.reference.combine import dispatch_round
from cute_ep.reference.dispatch import Source, count_rows, encode_checked, lower_halves, rows_first

ANNOUNCED = ("row_offsets", "row_counts", "scales_offsets", "num_rows", "source_ranges")
OF_ROWS = ("tokens", "scales", "row_scales", "src_info", "row_weights")
"""Tensors of `DispatchBuffers` that say which rows there are, and that hold them."""
UNKNOWN = -(2**31)
"""What `num_rows` and `row_offsets` hold before all ranks have dispatched."""


@dataclass(frozen=True, eq=False)
class ReadAgain:
    """What combine reads again of a dispatch's arguments, as it was then."""

    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None

    def check_ids(self, dispatched: Dispatched) -> None:
        """EPInputError unless the ids of the batch are the same still."""
        _check_unchanged("topk_ids", self.topk_ids, dispatched.topk_ids)

    def check_weights(self, dispatched: Dispatched, weights: torch.Tensor | None) -> None:
        """EPInputError unless `weights` are others than those of the batch, or the same still."""
        if weights is not None and weights is dispatched.router_weights:
            _check_unchanged("router_weights", self.router_weights, weights)


def _check_unchanged(name: str, before: torch.Tensor, now: torch.Tensor) -> None:
    if not torch.equal(as_bits(before), as_bits(now)):
        raise EPInputError(f"{name}: changed since dispatch; combine reads it again, so leave it until then")


@dataclass(frozen=True, eq=False, repr=False)
class OwnDispatched(Dispatched):
    """A `Dispatched` that knows the round that it is of, and what combine reads again."""

    number: int = 0
    read_again: ReadAgain | None = None

    def _changed(self, changes: Mapping[str, Any]) -> Self:
        made = super()._changed(changes)
        return replace(made, read_again=ReadAgain(copied(made.topk_ids), copied(made.router_weights)))


class OwnPending(PendingDispatch):
    """A `PendingDispatch` that has what combine reads again."""

    read_again: ReadAgain


def read_scale(input_scale: float | torch.Tensor | None) -> float | None:
    """A global scale as it is now. EPInputError: a tensor's is out of range."""
    if not isinstance(input_scale, torch.Tensor):
        return input_scale
    value = input_scale.item()
    check_global_scale(value, "input_scale")
    return value


def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy, None of None."""
    with no_modes():
        return None if tensor is None else tensor.clone()


@no_modes()
def make_source(cfg: EPConfig, given: DispatchInput) -> Source:
    """What a rank sends in a dispatch, from arguments that were checked. EPInputError: as `read_scale`."""
    x = given.x.clone(memory_format=torch.contiguous_format)
    weights, scales, row_scales = map(copied, (given.router_weights, given.scales, given.row_scales))
    scale = read_scale(given.input_scale)
    copies = DispatchInput(x, given.topk_ids.clone(), weights, scale, scales, row_scales, given.frame)
    return encode_checked(cfg, copies)


def check_frames(cfg: EPConfig, frame: int | None, others: Mapping[int, Source]) -> None:
    """EPInputError unless other ranks of a dispatch over nodes have this frame."""
    for peer, other in sorted(others.items()) if cfg.nodes > 1 else ():
        own, theirs = map(cfg.frame_rows, (frame, other.frame))
        if own != theirs:
            raise EPInputError(f"frame = {own}: must be {theirs}, as in the dispatch of rank {peer}")


@writing_modes()
def withhold(buffers: DispatchBuffers) -> None:
    """Announce no rows, as it is not known how many there will be."""
    buffers.num_rows.fill_(UNKNOWN)
    buffers.row_offsets.fill_(UNKNOWN)


@writing_modes()
def fill(cfg: EPConfig, rank: int, sources: Mapping[int, Source], out: OwnDispatched) -> tuple[int, int, int] | None:
    """Write the output of rank `rank`'s dispatch into `out`. Where `out`, or a block, has no room for rows, they are
    lost: what a status record of ROW_CAPACITY says of it, else None."""
    check_frames(cfg, sources[rank].frame, sources)
    if cfg.block_rows is not None:
        cfg = replace(cfg, block_rows=out.tokens.shape[0] // cfg.groups)
    result, buffers = reference.receive(cfg, rank, sources), tensors_of(out)
    result.headers[:, HeaderWord.ROUND] = out.number
    rows, capacity = int(result.num_rows), out.tokens.shape[0]
    if rows > capacity:
        result.row_map[result.row_map >= 0] = LOST_ROW
        for name in ANNOUNCED:
            if buffers[name] is not None:
                getattr(result, name).zero_()
        buffers = {name: buffer for name, buffer in buffers.items() if name not in OF_ROWS}
    if out.row_expert_ids is not None:
        out.row_expert_ids.fill_(NO_ROW)
    for name, buffer in buffers.items():
        value = getattr(result, name)
        if buffer is None or (name == "row_expert_ids" and rows > capacity):
            continue
        if stay(cfg, name, zeroed=out.buffers.zeroed_by(cfg)):
            write_rows(cfg, name, buffer, value, result.src_info)
        elif name == "scales" and cfg.scales_as == TRANSPOSED:
            buffer[:, :rows] = value
        else:
            buffer[: value.shape[0]] = value
    if cfg.block_rows is not None:
        arrived = count_rows(cfg, rank, sources)
        full = (arrived > result.row_counts).nonzero().flatten().tolist()
        return (full[0] + 1, int(result.row_counts[full[0]]), int(arrived[full[0]])) if full else None
    return (0, capacity, rows) if rows > capacity else None


def stay(cfg: EPConfig, name: str, *, zeroed: bool) -> bool:
    """Whether rows of a tensor that no token has stay as they are: all those of blocks, else `tokens` of padding that
    is not `zeroed`."""
    return name in OF_ROWS if cfg.block_rows is not None else name == "tokens" and not zeroed


def write_rows(cfg: EPConfig, name: str, to: torch.Tensor, of: torch.Tensor, src_info: torch.Tensor) -> None:
    """Copy into the first rows of a tensor those of `of` that a token has, by `src_info`."""
    rows, to, layout = (src_info[:, 0] >= 0).to(to.device), to[: len(of)], cfg.scales_as
    if name == "scales" and layout is not None:
        to, of = rows_first(to, layout), rows_first(of, layout)
        rows = rows.view(to.shape[: to.dim() - (2 if layout == ATOM else 1)])
    if to.dtype.itemsize == 1:
        to, of = to.view(torch.uint8), of.view(torch.uint8)
    to[rows] = of[rows]


@dataclass(frozen=True, eq=False)
class Returned:
    """What a rank returns in a combine: its rows, and what combine reads of the batch, as they were; the mode, and
    the round of its dispatch, 0 where that is unknown; its frame."""

    rows: torch.Tensor
    row_map: torch.Tensor
    weights: torch.Tensor | None
    topk_ids: torch.Tensor
    mode: str
    dispatch: int
    frame: int | None

    def check_agreement(self, others: Mapping[int, Returned]) -> None:
        """EPInputError unless the others have this mode and return rows of one dispatch, if both know theirs."""
        for peer, other in sorted(others.items()):
            if other.mode != self.mode:
                raise EPInputError(f"mode = {self.mode!r}: must be {other.mode!r}, as in the combine of rank {peer}")
            if self.dispatch != other.dispatch and self.dispatch and other.dispatch:
                raise EPInputError(
                    f"dispatched = batch of dispatch round {self.dispatch}: must be that of round {other.dispatch}, as "
                    f"in the combine of rank {peer}; all ranks must combine the batches of the same dispatch rounds in "
                    "the same order"
                )


def rows_needed(dispatched: Dispatched) -> int:
    """Rows of a batch that is in place: `num_rows`, or of one without as many as its `row_map` names."""
    if dispatched.num_rows is not None:
        return int(dispatched.num_rows)
    named = dispatched.row_map[dispatched.row_map != LOST_ROW]
    return int(named.max()) + 1 if named.numel() else 0


def check_row_count(rows: torch.Tensor, dispatched: Dispatched) -> None:
    """EPInputError when `rows` has fewer than the batch, or the batch is not in place."""
    if dispatched.row_offsets[0] == UNKNOWN:
        raise EPInputError(f"dispatched: all ranks must dispatch before rank {dispatched.rank} combines")
    need, name = rows_needed(dispatched), "num_rows"
    if dispatched.num_rows is None:
        name = "dispatched.row_map.max() + 1"
    if rows.shape[0] < need:
        raise EPInputError(f"rows.shape[0] = {rows.shape[0]}: must be at least {name} = {need}")


@no_modes()
def combine_send(cfg: EPConfig, rows: torch.Tensor, dispatched: Dispatched, mode: str) -> Returned:
    """What a rank sends in a combine; `rows` has enough of them."""
    need = rows_needed(dispatched)
    # if rows were lost `need` is 0: every entry's is NaN, and of the shared expert's those that did not fit
    _, shared = cfg.shared_slice(dispatched.topk_ids.shape[0], dispatched.rank)
    held = rows[: min(max(need, shared), dispatched.tokens.shape[0])]
    more = max(shared - held.shape[0], 0) + 1
    lost = reference.round_to(torch.full((more, cfg.hidden), torch.nan, dtype=torch.float32), torch.bfloat16)
    row_map, weights = dispatched.row_map.clamp(max=held.shape[0]), copied(dispatched.weights)
    number = dispatch_round(cfg, dispatched)
    ids = dispatched.topk_ids.clone()
    return Returned(torch.cat([held, lost]), row_map, weights, ids, mode, number, dispatched.frame)


@writing_modes()
def add_up(cfg: EPConfig, rank: int, given: Mapping[int, Any], weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the output of rank `rank`'s combine into `out`. `given`: the `Returned` of each rank; EPInputError unless
    they agree, and each expert's rank has a row where this rank's ids have the expert."""
    mode = given[rank].mode
    given[rank].check_agreement(given)
    server, row, travelled = _entries(cfg, rank, given)
    _check_rows_come(cfg, server, row, mode)
    weights = travelled if mode == "partial" else weights
    outputs = reference.ExpertOutputs(cfg, {peer: one.rows for peer, one in given.items()}, given)
    if weights is None:
        made = reference.unweighted_source(outputs, rank, out.dtype)
    else:
        made = reference.round_to(reference.sum_source(outputs, rank, weights, mode), out.dtype)
    out.copy_(made)


def _entries(cfg: EPConfig, source: int, given: Mapping[int, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rank that owns the expert, its row, the weight that it has for the row) of each entry of the tokens of rank
    `source`, [T, top_k]; world_size, -1 and 0 where an entry is masked or its expert is of another group."""
    ids = lower_halves(given[source].topk_ids)
    server = torch.where(ids >= 0, ids // cfg.local_experts, cfg.world_size)
    if cfg.skip_a2a:
        server[server != source] = cfg.world_size
    row, (index, first) = torch.full_like(ids, -1), cfg.place(source, given[source].frame)
    weights, last = torch.zeros(ids.shape, dtype=torch.float32), first + len(ids)
    for rank, one in given.items():
        here = server == rank
        row[here] = one.row_map[index, first:last][here]
        if one.weights is not None:
            weights[here] = one.weights[index, first:last][here]
    return server, row, weights


def _check_rows_come(cfg: EPConfig, server: torch.Tensor, row: torch.Tensor, mode: str) -> None:
    """EPInputError where kernels would wait for a row in vain. In partial mode one a (token, rank) is enough."""
    for rank in range(cfg.world_size):
        asked, there = server == rank, (server == rank) & (row >= 0)
        if mode == "partial":
            asked, there = asked.any(1), there.any(1)
        if found := (asked & ~there).nonzero().tolist():
            raise EPInputError(
                f"dispatched.row_map of rank {rank}: has no row for topk_ids{found[0]}, which the source waits for; "
                "mask the entry there with -1, or give it a row"
            )


@writing_modes()
def withhold_sums(out: torch.Tensor) -> None:
    """NaN, as it is not known what the sums will be."""
    out.fill_(torch.nan)
