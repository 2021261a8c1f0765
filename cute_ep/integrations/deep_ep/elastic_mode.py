"""The work of `ElasticBuffer`, in two forms.

- One row per (token, rank): rank-major rows. A token's row stands for the last of its slots with experts of that rank,
  so combine in exact mode adds in DeepEP V2's order.
- One row per (token, expert): cute_ep's own. Its combine adds a token's rows on their rank first, and the sum goes home
  as the row of the last of them; or all rows go home.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_ep import Dispatched, EPConfig
from cute_ep.integrations.common.checks import Names, named_config
from cute_ep.integrations.deep_ep.normal import FORMATS, Layout, NormalMode, Route, first_rows
from cute_ep.integrations.deep_ep.rows import rank_index
from cute_ep.layouts.maps.record import align_up
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.runtime.routes import RouteCounts, count_routes
from cute_ep.runtime.sums import sum_rows

NAMES: Names = {
    "hidden": "x.shape[1]",
    "top_k": "topk_idx.shape[1]",
    "max_tokens_per_rank": "num_max_tokens_per_rank",
    "world_size": "group.size()",
    "timeout_s": "num_gpu_timeout_secs",
    "row_alignment": "expert_alignment",
}


class Entries(NamedTuple):
    """Of n rows per (token, rank) the source and the token, [n], and [n, K] int64 `slots`: of each entry its row with
    `do_expand`, otherwise its local expert; -1 where it is not of this rank."""

    source: torch.Tensor
    token: torch.Tensor
    slots: torch.Tensor


class ByRank:
    """What a dispatch of n = `rows` rank-major rows brought, to this rank's `experts`. All is computed when it is asked
    for, since the replay of a CUDA graph brings something else.

    Attributes:
        own: [n, K] int32 local experts of the rows' entries, -1 where an entry is not of this rank.
        source_ends: [R] int32, rows of sources 0 .. s.
        counts: [experts] int32 entries of each.
    """

    def __init__(self, batch: Dispatched, rows: int, experts: int) -> None:
        self._batch, self._rows, self._experts = batch, rows, experts

    @property
    def own(self) -> torch.Tensor:
        assert self._batch.row_expert_ids is not None
        return self._batch.row_expert_ids[: self._rows]

    @property
    def source_ends(self) -> torch.Tensor:
        return self._batch.row_offsets[1:]

    def entries(self) -> Entries:
        own, ends = self.own, self.source_ends
        row = torch.arange(len(own), dtype=torch.int32, device=own.device)
        source = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
        return Entries(source, self._batch.src_info[: self._rows, 0], own.long())

    @property
    def counts(self) -> torch.Tensor:
        own = self.own
        number = torch.where(own < 0, self._experts, own).flatten().long()
        counts = torch.zeros(self._experts + 1, dtype=torch.int32, device=number.device)
        counts.scatter_add_(0, number, torch.ones_like(number, dtype=torch.int32))
        return counts[: self._experts]


class Expanded:
    """What a dispatch of rows per (token, expert) brought, as `ByRank` of the n rows per (token, rank) that they would
    make. `begins`: [experts] int32, of each expert's rows."""

    def __init__(self, batch: Dispatched, counts: torch.Tensor, rows: int) -> None:
        self._batch, self._rows = batch, rows
        self.counts, self.begins = counts, batch.row_offsets[:-1]

    def entries(self) -> Entries:
        index, most = rank_index(self._batch, self._rows), self._batch.row_map.shape[1]
        slots = torch.where(index.live, self._batch.row_map, -1).flatten(0, 1)[index.entry]
        slots = slots.masked_fill(~index.filled[:, None], -1).long()
        return Entries(index.entry // most, index.entry % most, slots)

    @property
    def source_ends(self) -> torch.Tensor:
        return rank_index(self._batch, self._rows).source_ends


class computed:
    """A property that is computed each time it is read, unless the object was given another value."""

    def __init__(self, compute: Callable[[Any], torch.Tensor]) -> None:
        self._compute = compute

    def __get__(self, instance: Any, owner: type) -> torch.Tensor:
        return self._compute(instance)


@dataclass(eq=False, repr=False)
class EPHandle:
    """What `ElasticBuffer.dispatch` returns for later calls, with the attributes of DeepEP's handle. n is the number of
    rows per (token, rank) that this rank gets or has room for. Attributes that need more than the dispatch are computed
    when they are asked for.

    Attributes:
        layout: the sizes, which `num_experts`, `num_max_tokens_per_rank`, `expert_alignment` and `do_expand` also have.
        num_sms: SMs for kernels of communicators that the dispatch connected.
        topk_idx: [T, K] int64 expert ids.
        routes: what they say.
        num_recv_tokens, num_expanded_tokens: rows per (token, rank), and padded rows per (token, expert), that came;
            without `do_cpu_sync` what there is room for.
        num_recv_tokens_per_expert_list: entries of each local expert, rounded up; empty without `do_cpu_sync`.
        route: where tokens go, and what combine returns.
        arrived: what came, once it was dispatched.
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
    routes: RouteCounts
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    route: Route
    arrived: ByRank | Expanded | None = None
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    def __post_init__(self) -> None:
        self.num_experts, self.num_max_tokens_per_rank, self.expert_alignment, self.do_expand = self.layout

    def _arrived(self) -> ByRank | Expanded:
        assert self.arrived is not None
        return self.arrived

    @computed
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        goes, ids = self.routes.goes, self.routes.ids
        server = ids.clamp(min=0, max=self.num_experts - 1) // (self.num_experts // goes.shape[1])
        before = (goes.cumsum(0) - 1).gather(1, server.long())
        return torch.where(ids >= 0, before, -1).int()

    @computed
    def recv_src_metadata(self) -> torch.Tensor:
        source, token, slots = self._arrived().entries()
        entries = slots.shape[1]
        last = torch.where(slots >= 0, torch.arange(entries, device=slots.device), 0).amax(1)
        rows = slots if self.do_expand else torch.full_like(slots, -1)
        head = torch.stack([source * self.num_max_tokens_per_rank + token, source * entries + last], dim=1)
        return torch.cat([head, rows], dim=1).int()

    @computed
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        return self._arrived().source_ends

    @computed
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        return self._arrived().counts

    @computed
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        if isinstance(self.arrived, Expanded):
            return self.arrived.begins + self.arrived.counts
        return align_up(self._arrived().counts, self.expert_alignment).cumsum(0, dtype=torch.int32)


class ElasticMode(NormalMode):
    """Dispatch and combine of an `ElasticBuffer`. `sms`, an attribute: how many kernels may take, of communicators
    connected from now on; `reduce`: whether expanded rows are added on their rank first."""

    names: Names = NAMES
    _made = staticmethod(named_config)

    def __init__(self, pool: GroupPool, sms: int, timeout_s: float, *, reduce: bool) -> None:
        super().__init__(pool, lambda device: self.sms)
        self.sms, self._timeout_s, self._reduce = sms, timeout_s, reduce

    def config(self, hidden: int, route: Route, *, scaled: bool) -> EPConfig:
        """As of `NormalMode`, also of rows per (token, expert)."""
        layout = route.layout
        if layout is None or not layout.do_expand:
            return super().config(hidden, route, scaled=scaled)
        entries, most = route.routes.ids.shape[1], layout.num_max_tokens_per_rank
        sizes = hidden, layout.num_experts, entries, most, self._ranks
        options = {"timeout_s": self._timeout_s, **FORMATS[scaled]}
        return named_config(self.names, sizes, row_alignment=layout.expert_alignment, **options)

    def route(self, ids: torch.Tensor, layout: Layout) -> Route:
        """Where tokens go, for as many rows as can come."""
        routes, most = count_routes(ids, layout.num_experts, self._ranks), layout.num_max_tokens_per_rank
        return Route(routes, layout.num_experts, most, self._ranks * most, layout=layout)

    def handle(self, ids: torch.Tensor, layout: Layout, route: Route, *, wait: bool) -> EPHandle:
        """What a dispatch along a route returns; `wait` for all ranks' numbers of rows on the host."""
        alignment, local, rows = layout.expert_alignment, layout.num_experts // self._ranks, route.rows
        padded: list[int] = []
        if wait:
            counts = self._pool.exchange_counts(
                route.routes, layout.num_experts, opening=self._opening, timeout_s=self._timeout_s
            )
            rows, padded = counts.arriving, counts.padded(alignment)
            expanded = sum(padded)
        else:
            expanded = align_up(rows * min(ids.shape[1], local) + (alignment - 1) * local, alignment)
        route.rows = rows
        return EPHandle(layout, self.sms, ids, route.routes, rows, expanded, padded, route)

    def send(
        self, handle: EPHandle, x: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(rows, their scale factors, [rows, K] local experts, [rows, K] weights); of expanded rows None, [rows]
        weights."""
        route, experts = handle.route, handle.num_experts // self._ranks
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        exact, before = handle.do_expand or bool(handle.num_recv_tokens_per_expert_list), route.of_rows
        got, factors, batch = self.dispatch((x, scales), weights, route, rows, exact=exact)
        assert route.of_rows is not None
        kept, new = route.of_rows.batch, route.of_rows is not before
        if handle.do_expand:
            if new:
                handle.arrived = Expanded(kept, batch.row_counts, handle.num_recv_tokens)
            return got, factors, None, None if weights is None else first_rows(batch.row_weights, rows)
        if new:
            handle.arrived = ByRank(kept, rows, experts)
        local, received = self.entries(batch, rows, handle.routes.ids.shape[1])
        return got, factors, local, None if weights is None else received

    def combine_rows(self, handle: EPHandle, rows: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] bfloat16: biases and a token's rows, added as `ElasticBuffer.combine` says."""
        communicator, batch = self._home(handle.route)
        if handle.do_expand and self._reduce:
            rows, batch = sum_rows(rows, batch, sms=handle.num_sms)
        if not handle.do_expand or self._reduce:
            batch = batch.derived(topk_ids=handle.routes.last_ids)
        if not biases:
            ones = torch.ones(batch.topk_ids.shape, dtype=torch.float32, device=rows.device)
            return communicator.combine(rows, batch, ones, mode="exact")
        home = communicator.combine(rows, batch, mode="unweighted")
        total = biases[0].float()
        for bias in biases[1:]:
            total = total + bias.float()
        for slot in range(home.shape[1]):
            total = total + home[:, slot].float()
        return total.bfloat16()

    def combine_entries(self, handle: EPHandle, weights: torch.Tensor) -> torch.Tensor:
        """[T, K] float32: each entry's weight from its rank; 0 where masked."""
        assert handle.arrived is not None
        slots = handle.arrived.entries().slots
        if handle.do_expand:
            weights = weights[slots.clamp(min=0)]
        return self.combine_weights(torch.where(slots >= 0, weights, 0), handle.route)
