"""DeepEP's low-latency mode: blocks of rows per local expert, weighted sums at the source, and calls in two halves."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_ep import Dispatched, EPInputError
from cute_ep.api.types import FormatName
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.blocks import PACKED_COLUMNS, Blocks, block_config
from cute_ep.integrations.common.checks import Names, as_rows, require, roomy_config
from cute_ep.integrations.common.halves import Halves, Hook
from cute_ep.integrations.deep_ep import calls
from cute_ep.integrations.deep_ep.calls import EventOverlap, Pooled, Rows, without_gradients
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_TOKENS_PER_RANK
from cute_ep.runtime.pool import Hold

NAMES: Names = {
    **calls.NAMES,
    "max_tokens_per_rank": "num_max_dispatch_tokens_per_rank",
    "block_rows": "group.size() * num_max_dispatch_tokens_per_rank",
}
HOOK = "return_recv_hook = True: must be False with async_finish"
MADE = "what low_latency_dispatch returned"
UNMEASURED = ", waits are not measured"
DISPATCH, COMBINE = "low_latency_dispatch", "low_latency_combine"


class _Fields(NamedTuple):
    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class LowLatencyHandle(_Fields):
    """What a low-latency dispatch returns for its combine: DeepEP's five fields, of which `src_info` is [L, S] int32,
    the row's token index on its source rank, and `layout_range` [L, R] int64, rows of each source in a block: first <<
    32 | number. `hold` keeps the communicator open until the combine; `batch` is None before the hook was called."""

    hold: Hold
    batch: Dispatched | None = None


class LowLatency(Pooled):
    """The calls of low-latency mode, over the communicators of a group. All runs on the current stream."""

    _most_ranks = MAX_EXPERTS  # over nodes

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._halves = Halves(self._pool, "give them up with clean_low_latency_buffer(...)")
        self._combine_memory: torch.Tensor | None = None
        self._combine_views: dict[tuple[int, ...], torch.Tensor] = {}
        self._captured_memory: list[torch.Tensor] = []  # which graphs use

    def _begin(self, previous_event: EventOverlap | None, async_finish: bool, on_comm_stream: bool) -> None:
        """Have the current stream wait. EPInputError: options do not go together, or an earlier call was wrong."""
        event = None
        if previous_event is not None:
            event = checks.kind("previous_event", previous_event, EventOverlap, "an EventOverlap, or None").event
        ok = not on_comm_stream or (event is not None and async_finish)
        require(ok, "allocate_on_comm_stream = True: must come with previous_event and async_finish")
        if event is not None:
            event.current_stream_wait()
        self._words.raise_found(self._pool)

    @without_gradients
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send tokens to their experts, into one block of S = R * num_max_dispatch_tokens_per_rank slots per expert.
        Nothing waits on the host, unless it connects: in the first call of its kind, and when
        `num_max_dispatch_tokens_per_rank` exceeds what was seen before.

        Args:
            x: [T, hidden] bfloat16; with `use_fp8` it is quantised while sent, a scale factor per 128 elements, with
                `round_scale` a power of two, with `use_ue8m0` too packed as exponents.
            topk_idx: [T, K], -1 masks.
            num_max_dispatch_tokens_per_rank: at least T, the same on all ranks.
            dispatch_wait_recv_cost_stats: must be None.
            return_recv_hook: send only, without `async_finish`. The caller calls the hook before using results, in the
                order of dispatches; at most two may be outstanding. The next call drops the round of a lost hook.

        Returns:
            Rows [L, S, hidden] bfloat16, or float8_e4m3fn and scale factors [L, S, hidden / 128] float32 (packed: [L,
            S, hidden / 512] int32), neighbours along S; [L] int32 rows of each block, which come first, by source rank
            (over nodes: by rail, then node), then token; the handle; the event; the hook, or None.
        """
        self._begin(None, async_finish, False)
        pool, ranks, device = self._pool, self._pool.size, self._pool.device
        require(not (async_finish and return_recv_hook), HOOK)
        checks.absent(UNMEASURED, dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats)
        require(not use_ue8m0 or (use_fp8 and round_scale), "use_ue8m0 = True: must come with use_fp8, round_scale")
        most, stats = num_max_dispatch_tokens_per_rank, cumulative_local_expert_recv_stats
        checks.integer("num_max_dispatch_tokens_per_rank", most, 1, MAX_TOKENS_PER_RANK)
        calls.check_experts(num_experts, ranks)
        checks.given("x", x, shape=(None, None), dtype=torch.bfloat16, device=device)
        tokens, hidden = x.shape
        require(tokens <= most, "x.shape[0] = {}: must not exceed num_max_dispatch_tokens_per_rank = {}", tokens, most)
        checks.given("topk_idx", topk_idx, shape=(tokens, None), dtype=checks.ID_TYPES, device=device)
        whole = not use_ue8m0 or hidden % PACKED_COLUMNS == 0
        require(whole, "x.shape[1] = {}: must be a multiple of {}", hidden, PACKED_COLUMNS)
        calls.check_stats(stats, num_experts // ranks, device)
        kind: FormatName = "bf16" if not use_fp8 else "fp8_pow2" if round_scale else "fp8"
        sizes = hidden, num_experts, topk_idx.shape[1], most, ranks
        nodes = pool.ranks_per_node
        cfg = roomy_config(NAMES, sizes, block_config, dispatch_format=kind, ranks_per_node=nodes)
        self._halves.drop_lost()
        communicator = pool.get(cfg, names=NAMES)
        self._halves.make_way(communicator, DISPATCH, whole=not return_recv_hook)
        blocks, experts = Blocks(communicator, ranks * most, packed=use_ue8m0), cfg.local_experts
        out, layout_range = blocks.out, torch.empty(experts, ranks, dtype=torch.int64, device=device)
        assert out.source_ranges is not None
        if nodes is None:
            layout_range = out.source_ranges.view(torch.int64).view(experts, ranks)  # rows are the lower halves
        handle = LowLatencyHandle(out.src_info[:, 0].view(experts, -1), layout_range, most, hidden, num_experts)
        handle.hold = pool.hold(communicator)

        def received(batch: Dispatched) -> None:
            handle.batch = batch
            blocks.received()
            if nodes is not None:
                find_sources(batch, cfg.nodes, most, layout_range)
            if stats is not None:
                stats.add_(out.row_counts)

        # a copy, since combine reads them again; not narrowed, since the kernel checks them
        sent = as_rows(x), topk_idx.clone(memory_format=torch.contiguous_format), None
        hook = self._halves.dispatch(communicator, DISPATCH, sent, out, received, hooked=return_recv_hook, frame=most)
        return calls.paired(blocks.rows, blocks.scales), out.row_counts, handle, calls.finished(async_finish), hook

    @without_gradients
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Send rows home and add them up with weights at the source, in float32, rounded once, to [T, hidden] bfloat16.

        Args:
            x: [L, S, hidden] bfloat16, in the order of the dispatch's rows. Not read with `zero_copy`: then rows are
                what `get_next_low_latency_combine_buffer` gave.
            topk_idx: as in the dispatch, or -1 since: the entry's row, which must be finite, then has weight 0.
            handle: what the dispatch returned, once its hook was called.
            return_recv_hook: as in `low_latency_dispatch`.
            out: overwritten; None allocates it.
            combine_wait_recv_cost_stats: must be None.
        """
        self._begin(None, async_finish, False)
        require(not (async_finish and return_recv_hook), HOOK)
        checks.absent(UNMEASURED, combine_wait_recv_cost_stats=combine_wait_recv_cost_stats)
        own, place = checks.kind("handle", handle, LowLatencyHandle, MADE), self._pool.device
        batch, hold = own.batch, own.hold
        calls.check_open(hold)
        if batch is None:
            rule = "must be called before its rows are combined; dispatch again if it was lost"
            raise EPInputError(f"handle: the dispatch's hook {rule}")
        entries, extents = tuple(batch.topk_ids.shape), (*own.src_info.shape, own.hidden)
        checks.given("topk_idx", topk_idx, shape=entries, dtype=checks.ID_TYPES, device=place)
        checks.given("topk_weights", topk_weights, shape=entries, dtype=torch.float32, device=place)
        if zero_copy:
            rows = self.get_next_low_latency_combine_buffer(own)
        else:
            checks.given("x", x, shape=extents, dtype=torch.bfloat16, device=place)
            rows = as_rows(x)
        if out is not None:
            read = {"x": rows, "topk_idx": topk_idx, "topk_weights": topk_weights}
            checks.output("out", out, (entries[0], own.hidden), place, torch.bfloat16, **read)
        communicator = hold.communicator
        self._halves.make_way(communicator, COMBINE, whole=not return_recv_hook)
        weights = torch.where(topk_idx >= 0, topk_weights, 0)
        if out is None:
            out = torch.empty((entries[0], own.hidden), dtype=torch.bfloat16, device=place)
        rows, hooked = rows.view(-1, own.hidden), return_recv_hook
        hook = self._halves.combine(
            communicator, COMBINE, rows, batch, out, hold.end, hooked=hooked, mode="exact", weights=weights
        )
        return out, calls.finished(async_finish), hook

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> torch.Tensor:
        """[L, S, hidden] bfloat16 memory to fill for a combine with `zero_copy`, which all handles share."""
        own = checks.kind("handle", handle, LowLatencyHandle, MADE)
        extents = *own.src_info.shape, own.hidden
        if extents not in self._combine_views:
            elements, memory = own.src_info.numel() * own.hidden, self._combine_memory
            with torch.inference_mode(False):  # a later caller need not be in it
                if memory is None or memory.numel() < elements:
                    memory = torch.empty(elements, dtype=torch.bfloat16, device=self._pool.device)
                    self._combine_memory, self._combine_views = memory, {}
                self._combine_views[extents] = memory[:elements].view(extents)
        if self._pool.capturing():
            self._captured_memory.append(self._combine_views[extents])
        return self._combine_views[extents]

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Give up every round whose hook was not called, which all ranks must have sent: it is received and dropped,
        and its hook raises EPError. Otherwise nothing: both modes may be mixed, whatever the arguments say."""
        self._halves.give_up()


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
