"""The work of `ElasticBuffer`. Where there is one row per (token, rank), rank-major, it stands for the last of the
token's slots with experts of that rank, so combine in exact mode adds in DeepEP V2's order. Where there is one per
(token, expert), combine adds a token's rows on their rank, and the sum goes home as the last of them; or all rows go
home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cute_ep import DispatchBuffers, Dispatched, EPConfig, EPInputError
from cute_ep.integrations.common import checks
from cute_ep.integrations.deep_ep import calls
from cute_ep.integrations.deep_ep.normal import NormalMode, Sent
from cute_ep.integrations.deep_ep.route import BY_RANK, Route
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK, NO_ROW, ROW_ALIGNMENTS
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.runtime.routes import count_routes
from cute_ep.runtime.sums import sum_rows

NAMES: checks.Names = {
    **calls.NAMES,
    "max_tokens_per_rank": "num_max_tokens_per_rank",
    "timeout_s": "num_gpu_timeout_secs",
    "row_alignment": "expert_alignment",
}


class Layout(NamedTuple):
    """Sizes of a dispatch that its handle keeps; as the arguments of `ElasticBuffer.dispatch`."""

    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    do_expand: bool

    def check(self, ranks: int) -> None:
        """EPInputError: a size breaks its rule."""
        experts, most, alignment, expand = self
        calls.check_experts(experts, ranks)
        checks.require(most != 0, "num_max_tokens_per_rank = {}: must be positive, here or in the constructor", most)
        checks.integer("num_max_tokens_per_rank", most, 1, MAX_TOKENS_PER_RANK)
        checks.integer("expert_alignment", alignment)
        if expand and alignment not in ROW_ALIGNMENTS:
            known = ", ".join(map(str, ROW_ALIGNMENTS))
            raise EPInputError(f"expert_alignment = {alignment}: must be one of {known} with do_expand")


class computed:
    """A property that is computed anew, as graph replays bring something else, unless it was given another value."""

    def __init__(self, compute: Callable[[Any], torch.Tensor]) -> None:
        self._compute = compute

    def __get__(self, instance: Any, owner: type) -> torch.Tensor:
        return self._compute(instance)


@dataclass(eq=False, repr=False, kw_only=True)
class EPHandle(Route):
    """What `ElasticBuffer.dispatch` returns for later calls, with the attributes of DeepEP's handle, some computed when
    they are asked for. n is the number of rows per (token, rank) that this rank gets or has room for.

    Attributes:
        layout: the sizes, which `num_experts`, `num_max_tokens_per_rank`, `expert_alignment` and `do_expand` also have.
        num_sms: SMs for kernels of communicators that the dispatch connected.
        topk_idx: [T, K] int64 expert ids.
        num_recv_tokens, num_expanded_tokens: n, and padded rows per (token, expert), or room for them.
        num_recv_tokens_per_expert_list: entries of each local expert, rounded up; empty without `do_cpu_sync`.
        dst_buffer_slot_idx: [T, K] int32, how many tokens before go to the rank of an entry too; -1 where masked.
        psum_num_recv_tokens_per_scaleup_rank: [R] int32, rows per (token, rank) of sources 0 .. s.
        psum_num_recv_tokens_per_expert: [L] int32 sums of rounded numbers of entries; with `do_expand` the end of each
            expert's rows, without padding.
        num_unaligned_recv_tokens_per_expert: [L] int32 entries of each local expert.
        recv_src_metadata: [n, 2 + K] int32: source * num_max_tokens_per_rank + token; source * K + the last slot here;
            the row of each slot with `do_expand`, else -1.
    """

    layout: Layout
    num_sms: int
    topk_idx: torch.Tensor
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int] = field(default_factory=list)
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    def __post_init__(self) -> None:
        self.num_experts, self.num_max_tokens_per_rank, self.expert_alignment, self.do_expand = self.layout

    @property
    def num_recv_tokens(self) -> int:
        return self.rows

    @property
    def order(self) -> dict[str, Any]:
        return {"row_alignment": self.expert_alignment, "zero_padding": False} if self.do_expand else BY_RANK

    def most_rows(self, tokens: int) -> int:
        """Before `ElasticMode.dispatch_counted`."""
        return self.room

    @property
    def room(self) -> int:
        """Rows that dispatch returns and combine takes."""
        return self.num_expanded_tokens if self.do_expand else self.rows

    def _own_experts(self) -> torch.Tensor:
        """[n, K] int32, -1 where an entry is not of this rank."""
        found = self.sent.batch.row_expert_ids
        assert found is not None
        return found[: self.rows]

    def entries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of n rows per (token, rank) the source and the token, [n], and [n, K] int64 slots: of each entry its row with
        `do_expand`, otherwise its local expert; -1 where it is not of this rank."""
        batch = self.sent.batch
        if self.do_expand:
            index, most = rank_index(batch, self.rows), batch.row_map.shape[1]
            slots = torch.where(index.live, batch.row_map, -1).flatten(0, 1)[index.entry]
            slots = slots.masked_fill(~index.filled[:, None], -1).long()
            return index.entry // most, index.entry % most, slots
        own, ends = self._own_experts(), batch.row_offsets[1:]
        row = torch.arange(len(own), dtype=torch.int32, device=own.device)
        source = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
        return source, batch.src_info[: self.rows, 0], own.long()

    @computed
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        goes, ids = self.routes.goes, self.routes.ids
        server = ids.clamp(min=0, max=self.num_experts - 1) // (self.num_experts // goes.shape[1])
        before = (goes.cumsum(0) - 1).gather(1, server.long())
        return torch.where(ids >= 0, before, -1).int()

    @computed
    def recv_src_metadata(self) -> torch.Tensor:
        source, token, slots = self.entries()
        entries = slots.shape[1]
        last = torch.where(slots >= 0, torch.arange(entries, device=slots.device), 0).amax(1)
        rows = slots if self.do_expand else torch.full_like(slots, -1)
        head = torch.stack([source * self.num_max_tokens_per_rank + token, source * entries + last], dim=1)
        return torch.cat([head, rows], dim=1).int()

    @computed
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        batch = self.sent.batch
        return rank_index(batch, self.rows).source_ends if self.do_expand else batch.row_offsets[1:]

    @computed
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        if self.do_expand:
            return self.sent.batch.row_counts
        own, experts = self._own_experts(), self.num_experts // self.routes.goes.shape[1]
        number = torch.where(own < 0, experts, own).flatten().long()
        counts = torch.zeros(experts + 1, dtype=torch.int32, device=number.device)
        counts.scatter_add_(0, number, torch.ones_like(number, dtype=torch.int32))
        return counts[:experts]

    @computed
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        counts = self.num_unaligned_recv_tokens_per_expert
        if self.do_expand:
            return self.sent.batch.row_offsets[:-1] + counts
        return align_up(counts, self.expert_alignment).cumsum(0, dtype=torch.int32)


class ElasticMode(NormalMode):
    """Dispatch and combine of an `ElasticBuffer`. `sms`, an attribute: how many kernels may take, of communicators
    connected from now on; `reduce`: whether expanded rows are added on their rank first."""

    names: checks.Names = NAMES
    _over_nodes = False
    _made: Callable[..., EPConfig] = staticmethod(checks.named_config)

    def __init__(self, pool: GroupPool, words: calls.LayoutWords, sms: int, timeout_s: float, *, reduce: bool) -> None:
        super().__init__(pool, lambda device: self.sms, words, timeout_s)
        self.sms, self._reduce = sms, reduce

    def handle(self, ids: torch.Tensor, layout: Layout) -> EPHandle:
        """Where tokens go, with room for as many rows as can come."""
        experts, most, alignment, _ = layout
        ranks, local = self._pool.size, experts // self._pool.size
        routes, rows = count_routes(ids, experts, ranks), ranks * most
        expanded = align_up(rows * min(ids.shape[1], local) + (alignment - 1) * local, alignment)
        return EPHandle(
            routes, experts, most, rows, layout=layout, num_sms=self.sms, topk_idx=ids, num_expanded_tokens=expanded
        )

    def dispatch_counted(self, sent: Sent, handle: EPHandle) -> tuple[DispatchBuffers, torch.Tensor | None]:
        """`dispatch` of as many rows as come, of which a handle is told; the host waits for all ranks' numbers."""
        routes = handle.routes
        exchange = self.counting(routes.words).exchange(routes.sent, handle.num_experts)
        room = self.room(sent, handle)
        early = None if room is None else self.send_early(sent, handle, room, room.carve())
        counts = exchange.wait()
        padded = counts.padded(handle.expert_alignment)
        handle.rows, handle.num_expanded_tokens = counts.arriving, sum(padded)
        handle.num_recv_tokens_per_expert_list = padded
        return self.dispatch(sent, handle, handle.room, early=early)

    def _agreed_tokens(self, route: Route) -> int:
        return route.tokens

    def sums(self, rows: torch.Tensor, handle: Route, biases: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] bfloat16: biases and a token's rows, added as `ElasticBuffer.combine` says."""
        assert isinstance(handle, EPHandle)
        communicator, batch = self._home(handle.sent)
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

    def sums_of_weights(self, weights: torch.Tensor, handle: Route) -> torch.Tensor:
        """[T, K] float32: each entry's weight from its rank; 0 where masked."""
        assert isinstance(handle, EPHandle)
        _, _, slots = handle.entries()
        if handle.do_expand:
            weights = weights[slots.clamp(min=0)]
        return super().sums_of_weights(torch.where(slots >= 0, weights, 0), handle)


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
