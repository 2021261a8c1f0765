"""The work of `ElasticBuffer`, in two forms.

- One row per (token, rank): as in normal mode a dispatch to ranks, in which a token's entry for a rank stands at the
  last of its slots with experts of that rank. So combine in exact mode adds in DeepEP V2's order. Top-k entries travel
  as words.
- One row per (token, expert): cute_ep's own. Its combine adds a token's rows on their rank first, by torch ops, and
  sends the sums as rows per (token, rank); or it sends all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.integrations.connections import Connections, config_of
from cute_ep.integrations.deep_ep.normal import NormalMode, Returned, Route, as_wide, dispatch_layout
from cute_ep.integrations.rows import RankIndex, rank_index, without_rows
from cute_ep.layouts.maps.record import align_up


class Layout(NamedTuple):
    """Sizes of a dispatch that its handle keeps; as the arguments of `ElasticBuffer.dispatch`."""

    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    do_expand: bool


@dataclass(eq=False, repr=False)
class EPHandle:
    """What `ElasticBuffer.dispatch` returns for later calls, with the attributes of DeepEP's handle. n is the number of
    rows per (token, rank) that this rank gets or has room for.

    Attributes:
        layout: the sizes, which `num_experts`, `num_max_tokens_per_rank`, `expert_alignment` and `do_expand` also have.
        num_sms: SMs for kernels of communicators that the dispatch connected.
        topk_idx: [T, K] int64 expert ids.
        ranks: [T, K] int32, the rank of an entry that is the last of its token there, else -1.
        num_recv_tokens, num_expanded_tokens: rows per (token, rank), and padded rows per (token, expert), that came;
            without `do_cpu_sync` what there is room for.
        num_recv_tokens_per_expert_list: entries of each local expert, rounded up; empty without `do_cpu_sync`.
        dst_buffer_slot_idx: [T, K] int32, how many tokens before go to the rank of an entry too; -1 where masked.
        psum_num_recv_tokens_per_scaleup_rank: [R] int32, rows per (token, rank) of sources 0 .. s.
        psum_num_recv_tokens_per_expert: [L] int32. With `do_expand` the end of each expert's rows, without padding;
            otherwise sums of rounded numbers of entries.
        num_unaligned_recv_tokens_per_expert: [L] int32 entries of each local expert.
        recv_src_metadata: [n, 2 + K] int32 of each row per (token, rank): source * num_max_tokens_per_rank + token;
            source * K + the last of its slots here; the row of each slot with `do_expand`, else -1.
        token_metadata_at_forward, channel_linked_list: None.
    """

    layout: Layout
    num_sms: int
    topk_idx: torch.Tensor
    ranks: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    dst_buffer_slot_idx: torch.Tensor
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    def __post_init__(self) -> None:
        self.num_experts, self.num_max_tokens_per_rank, self.expert_alignment, self.do_expand = self.layout
        self.route: Route | None = None

    def arrive(self, index: RankIndex, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """Say what came.

        Args:
            index: of the rows per (token, rank).
            slots: [n, K] int64, of each entry its row with `do_expand`, otherwise its local expert; -1 where it is not
                of this rank.
            counts: [L] int32 entries of each local expert.
        """
        _, room, entries = index.live.shape
        source, token = index.entry // room, index.entry % room
        column = torch.arange(entries, device=slots.device)
        last = torch.where(slots >= 0, column, 0).amax(1)
        rows = slots if self.do_expand else torch.full_like(slots, -1)
        head = torch.stack([source * self.num_max_tokens_per_rank + token, source * entries + last], dim=1)
        self.recv_src_metadata = torch.cat([head, rows], dim=1).int()
        self.psum_num_recv_tokens_per_scaleup_rank = index.source_ends
        self.num_unaligned_recv_tokens_per_expert = counts
        padded = align_up(counts, self.expert_alignment)
        ends = padded.cumsum(0)
        self.psum_num_recv_tokens_per_expert = (ends - padded + counts if self.do_expand else ends).int()
        self.slots = slots


class ElasticMode(NormalMode):
    """Dispatch and combine of an `ElasticBuffer`.

    Args:
        connections: of the group.
        sms: how many kernels may take, of communicators connected from now on; an attribute.
        timeout_s: how long a rank waits for another one.
        reduce: whether expanded rows are added on their rank first.
    """

    def __init__(self, connections: Connections, sms: int, timeout_s: float, *, reduce: bool) -> None:
        super().__init__(connections, lambda: self.sms)
        self.sms, self._timeout_s, self._reduce = sms, timeout_s, reduce

    def route(self, ids: torch.Tensor, layout: Layout, sms: int, *, wait: bool) -> EPHandle:
        """Where tokens go, and how many rows come or can come; `wait` for all ranks' numbers on the host."""
        ranks, entries = self._ranks, ids.shape[1]
        local, alignment = layout.num_experts // ranks, layout.expert_alignment
        by_rank, by_expert, goes = dispatch_layout(ids, layout.num_experts, ranks)
        if wait:
            counts = self.exchange_counts(by_rank, by_expert, len(ids))
            rows, _, padded = self.wait_for_counts(counts, alignment)
            expanded = sum(padded)
        else:
            rows, padded = ranks * layout.num_max_tokens_per_rank, []
            expanded = align_up(rows * min(entries, local) + (alignment - 1) * local, alignment)
        server = torch.where(ids >= 0, ids // local, -1)
        slot = torch.arange(entries, device=ids.device)
        again = ((server[:, :, None] == server[:, None, :]) & (slot > slot[:, None])).any(2)
        before = (goes.cumsum(0) - 1).gather(1, server.clamp(min=0))
        return EPHandle(
            layout,
            sms,
            ids,
            torch.where(again, -1, server).int(),
            rows,
            expanded,
            padded,
            torch.where(server >= 0, before, -1).int(),
        )

    def by_rank(
        self, handle: EPHandle, x: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(rows, their scale factors, [rows, K] local experts, [rows, K] weights), one row per (token, rank)."""
        rows, most = handle.num_recv_tokens, handle.num_max_tokens_per_rank
        got, factors, returned, _ = self.dispatch(x, scales, handle.ranks, most, rows)
        if handle.route is not None and weights is None:
            return got, factors, handle.slots.clone(), None
        route = handle.route or Route(handle.ranks, most, rows, returned, {})
        sent = torch.zeros(handle.ranks.shape, dtype=torch.float32, device=x.device) if weights is None else weights
        local, received = self.dispatch_entries(handle.topk_idx, sent, handle.num_experts, route)
        if handle.route is None:
            experts = handle.num_experts // self._ranks
            number = torch.where(local < 0, experts, local).flatten()
            counts = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
            counts.scatter_add_(0, number, torch.ones_like(number, dtype=torch.int32))
            handle.arrive(rank_index(returned.batch, rows), local.clone(), counts[:experts])
            handle.route = route
        return got, factors, local, None if weights is None else received

    def expanded(
        self, handle: EPHandle, x: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor | None]:
        """(rows, their scale factors, None, [rows] weights), one row per (token, expert)."""
        rows, wire = handle.num_expanded_tokens, None
        cfg = config_of(
            x.shape[1],
            handle.num_experts,
            handle.topk_idx.shape[1],
            handle.num_max_tokens_per_rank,
            self._ranks,
            "bf16" if scales is None else "mxfp8",
            self._timeout_s,
            scale_layout=None if scales is None else "linear",
            row_alignment=handle.expert_alignment,
        )
        if scales is not None:  # a format with as many bytes of scale factors, and rows that need no alignment
            wire = as_wide(scales, x.shape[1]).view(torch.uint8)
        communicator = self._connections.get(cfg, self.sms)
        out = communicator.allocate(max(rows, 1))
        batch = communicator.dispatch(x.contiguous(), handle.topk_idx, weights, scales=wire, out=out)
        index = rank_index(batch, handle.num_recv_tokens)
        if handle.route is None:
            slots = torch.where(index.live, batch.row_map, -1).flatten(0, 1)[index.entry]
            slots = slots.masked_fill(~index.filled[:, None], -1)
            home = Returned(communicator, self._as_sent_home(batch, index, handle))
            handle.arrive(index, slots.long(), batch.row_counts.clone())
            handle.route = Route(handle.ranks, handle.num_max_tokens_per_rank, handle.num_recv_tokens, home, {})
        factors = received = None
        if scales is not None and batch.scales is not None:
            factors = batch.scales[:rows].contiguous().view(scales.dtype)[:, : scales.shape[1]].contiguous()
        if weights is not None and batch.weights is not None:
            place = torch.where(index.live, batch.row_map, rows).long().flatten()
            received = torch.zeros(rows + 1, dtype=torch.float32, device=x.device)
            received = received.scatter_(0, place, batch.weights.flatten())[:rows]
        return batch.tokens[:rows], factors, None, received

    def _as_sent_home(self, batch: Dispatched, index: RankIndex, handle: EPHandle) -> Dispatched:
        """The batch that combine returns rows of: all, or one per (token, rank), at the last of its slots."""
        if not self._reduce:
            return without_rows(batch)
        last = index.live & (index.live.flip(2).cumsum(2).flip(2) == 1)
        row_map = torch.where(last, index.row[:, :, None], -1).int()
        ids = torch.where(handle.ranks >= 0, handle.topk_idx, -1)
        return without_rows(batch.derived(row_map=row_map, tokens=index.entry, topk_ids=ids))

    def combine_rows(self, handle: EPHandle, rows: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] bfloat16: biases and a token's rows, added as `ElasticBuffer.combine` says."""
        assert handle.route is not None
        communicator, batch = handle.route.of_rows
        if handle.do_expand and self._reduce:
            rows = _reduced(rows, handle.slots)
        if not biases:
            return communicator.combine(rows, batch)
        home = communicator.combine(rows, batch, mode="unweighted")
        total = biases[0].float()
        for bias in biases[1:]:
            total = total + bias.float()
        for slot in range(home.shape[1]):
            total = total + home[:, slot].float()
        return total.bfloat16()

    def combine_entries(self, handle: EPHandle, weights: torch.Tensor) -> torch.Tensor:
        """[T, K] float32: each entry's weight from its rank; 0 where masked."""
        assert handle.route is not None
        if handle.do_expand:
            weights = weights[handle.slots.clamp(min=0)]
        return self.combine_weights(torch.where(handle.slots >= 0, weights, 0), handle.route)

    def _room(self, tokens: int) -> int:
        return tokens


def _reduced(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[n, hidden] bfloat16: sums of the rows in ascending order of slots, in float32; slots: [n, K] rows, -1: none."""
    total = torch.zeros((len(slots), rows.shape[1]), dtype=torch.float32, device=rows.device)
    for column in slots.unbind(1):
        total += torch.where(column[:, None] >= 0, rows[column.clamp(min=0)], 0)
    return total.bfloat16()
