"""`ElasticBuffer`, with DeepEP V2's calls: it checks arguments and options, and leaves the work to `elastic_mode`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cute_ep import EPConfigError, EPError, EPInputError, memory_bytes
from cute_ep.api.host import refuse_capture
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.blocks import columns_first
from cute_ep.integrations.common.checks import demand, named_config, require
from cute_ep.integrations.deep_ep import calls
from cute_ep.integrations.deep_ep.calls import EventHandle, EventOverlap, Pooled, Rows, without_gradients
from cute_ep.integrations.deep_ep.elastic_mode import NAMES, ElasticMode, EPHandle, Layout
from cute_ep.integrations.deep_ep.normal import Bias, rows_and_entries
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK, MAX_TOP_K
from cute_ep.runtime.gpus import sm_budget

SIZE_UNIT = 2 << 20
"""Bytes that sizes of buffers are a multiple of."""
OVERLAPPED_SMS, ALONE_SMS = 24, 64
"""SMs for kernels that leave room for others, and for those that need not."""
HANDLE = "what dispatch returned"


class ElasticBuffer(Pooled):
    """One rank's end of DeepEP V2's dispatch and combine, as `Buffer` is of V1's; the same holds of options, errors and
    first calls. Later calls wait on the host with `do_cpu_sync` only. All results are deterministic.

    Args:
        num_bytes: kept as an attribute; None: what `get_buffer_size_hint` says. Memory is allocated when it is needed.
        num_cpu_bytes: must be 0.
        num_max_tokens_per_rank: default of `dispatch`.
        allow_multiple_reduction: whether `combine` adds a token's expanded rows on their rank before it sends them.
        prefer_overlap_with_compute: whether kernels take few SMs where a call does not say how many.
        num_gpu_timeout_secs: how long a rank waits for another one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        demand(group is not None, "group: must be a torch.distributed process group")
        demand(not num_cpu_bytes, "num_cpu_bytes = {}: must be 0, buffers are on GPUs only", num_cpu_bytes)
        most = num_max_tokens_per_rank
        checks.integer("num_max_tokens_per_rank", most, 0, MAX_TOKENS_PER_RANK, error=EPConfigError)
        checks.seconds("num_gpu_timeout_secs", num_gpu_timeout_secs)
        super().__init__(group)
        self.rank_idx, self.num_ranks = self._pool.rank, self._pool.size
        self.num_max_tokens_per_rank, self.num_allocated_qps = most, num_allocated_qps
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        if num_bytes is None:
            known = most and hidden
            num_bytes = _size_hint(self.num_ranks, most, hidden, num_topk, error=EPConfigError) if known else 0
        self.num_bytes, timeout_s = num_bytes, float(num_gpu_timeout_secs)
        self._mode = ElasticMode(self._pool, self._words, OVERLAPPED_SMS, timeout_s, reduce=allow_multiple_reduction)

    def destroy(self) -> None:
        """Give all memory back; collective. Handles from before cannot be combined then; later calls connect again."""
        self._pool.close()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that a bfloat16 communicator takes with as many experts as entries; for information."""
        return _size_hint(group.size(), num_max_tokens_per_rank, hidden, num_topk)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(1, ranks): all are on one machine."""
        return 1, self.num_ranks

    get_logical_domain_size = get_physical_domain_size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *others: float, **named: float) -> int:
        """SMs that kernels take by default: 24 with `prefer_overlap_with_compute`, else 64, if there are so many."""
        wanted, device = OVERLAPPED_SMS if self.prefer_overlap_with_compute else ALONE_SMS, self._pool.device
        return wanted if device.type == "cpu" else min(wanted, sm_budget(device, None))

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: nothing leaves the machine."""
        return 0

    @staticmethod
    def capture() -> EventHandle:
        """What the current stream has been given so far."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait on the host for this rank's work, and then for all ranks to do so. EPError: a rank does not come within
        the group's timeout, or has ended. EPInputError, once all are here: an earlier argument was wrong. EPError:
        during a capture."""
        refuse_capture(self._pool.device, "barrier")
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize()
        self._pool.barrier()
        self._words.raise_found(self._pool)

    @without_gradients
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to every rank that has one of its experts.

        Args:
            x: as of `Buffer.dispatch`.
            topk_idx: [T, K] int64 expert ids, -1 masks; None with a handle.
            num_max_tokens_per_rank: the most tokens of a rank, the same on all; None: the handle's, the buffer's.
            expert_alignment: multiple that each expert's rows are padded to with `do_expand`, and to which numbers of
                entries are rounded up; None: the handle's, 1.
            num_sms: SMs for kernels of communicators that this call connects; 0: `get_theoretical_num_sms`.
            handle: what an earlier dispatch of as many tokens returned: they go the same ways again.
            do_cpu_sync: wait for the number of rows; None: without a handle.
            do_expand: a row for each (token, expert), by expert, source rank, token, in place of one for each (token,
                rank), by source rank, token.
            do_zero_padding: make rows that pad an expert zero, else they hold anything.

        Returns:
            Rows as `x`, as many as came, or without `do_cpu_sync` as many as any routing can bring, of which those
            behind the last hold anything; [rows, K] int64 local expert ids, -1 elsewhere (None with `do_expand`); their
            float32 weights, 0 elsewhere, with `do_expand` one a row, 0 for padding (None without `topk_weights`); the
            handle, which is the given one if there is one; the event.
        """
        self._begin(previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
        mode, ranks, device = self._mode, self.num_ranks, self._pool.device
        payload, scales = calls.check_payload(x, device)
        tokens, made, stats = payload.shape[0], handle, cumulative_local_expert_recv_stats
        require(do_expand or not do_zero_padding, "do_zero_padding = True: must come with do_expand")
        checks.integer("num_sms", num_sms, 0)
        checks.sms("num_sms", num_sms or None, error=EPInputError)
        if made is None:
            if topk_idx is None or num_experts is None:
                raise EPInputError("topk_idx, num_experts: must be given without a handle")
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            layout = Layout(num_experts, most, 1 if expert_alignment is None else expert_alignment, do_expand)
            layout.check(ranks)
            checks.given("topk_idx", topk_idx, shape=(tokens, None), dtype=torch.int64, device=device)
            checks.integer("topk_idx.shape[1]", topk_idx.shape[1], 1, min(MAX_TOP_K, num_experts))
            require(tokens <= most, "x.shape[0] = {}: must not exceed num_max_tokens_per_rank = {}", tokens, most)
            shape = tuple(topk_idx.shape)
        else:
            layout, shape = checks.kind("handle", made, EPHandle, HANDLE).layout, tuple(made.topk_idx.shape)
            given = num_experts, num_max_tokens_per_rank, expert_alignment, do_expand
            for name, value, own in zip(Layout._fields, given, layout, strict=True):
                require(value is None or value == own, "{} = {}: must be {}, as of the handle", name, value, own)
            require(topk_idx is None, "topk_idx: must be None with a handle")
            require(not do_cpu_sync, "do_cpu_sync = True: must be False with a handle")
            require(tokens == shape[0], "x.shape[0] = {}: must be {}, as of the handle", tokens, shape[0])
        if topk_weights is not None:
            checks.given("topk_weights", topk_weights, shape=shape, dtype=torch.float32, device=device)
            topk_weights = topk_weights.contiguous()
        calls.check_stats(stats, layout.num_experts // ranks, device)
        mode.sms = num_sms or self.get_theoretical_num_sms(0, 0)
        if made is None:
            assert topk_idx is not None
            ids = topk_idx.clone(memory_format=torch.contiguous_format) if do_handle_copy else topk_idx
            made = mode.handle(ids, layout)
        made.zeroes = do_zero_padding and layout.expert_alignment > 1
        mode.config(payload.shape[1], made, scaled=scales is not None)  # checks sizes
        sent = payload, scales, topk_weights
        if handle is None and (do_cpu_sync is None or do_cpu_sync):
            buffers, factors = mode.dispatch_counted(sent, made)
        else:
            exact = do_expand or bool(made.num_recv_tokens_per_expert_list)
            buffers, factors = mode.dispatch(sent, made, made.room, exact=exact)
        if do_expand:
            entries, (rows, weights) = None, buffers.first_of(("tokens", "row_weights"), made.room)
        else:
            rows, entries, weights = rows_and_entries(buffers, made, shape[1])
        if stats is not None:
            stats.add_(made.num_unaligned_recv_tokens_per_expert)
        if factors is not None and use_tma_aligned_col_major_sf:
            factors = columns_first(factors, VECTOR_BYTES // factors.itemsize)
        weights = None if topk_weights is None else weights
        return calls.paired(rows, factors), entries, weights, made, calls.finished(async_with_compute_stream)

    @without_gradients
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows home and add them up, without weights, in float32: biases first, then by ascending slot, a rank's
        sum at the last of its slots; rounded once. `x` is [rows, hidden] bfloat16, in the order of the dispatch's rows,
        `topk_weights` float32 [rows, K], or one a row with `do_expand`, to bring home as well, `bias` up to two [T,
        hidden] bfloat16. Returns [T, hidden] bfloat16; [T, K] float32, 0 where masked, or None; the event."""
        self._begin(previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
        own = checks.kind("handle", handle, EPHandle, HANDLE)
        shape = (own.room,) if own.do_expand else (own.room, own.topk_idx.shape[1])
        home = self._mode.bring_home(x, own, bias, topk_weights, shape)
        return *home, calls.finished(async_with_compute_stream)

    def _begin(
        self, event: EventHandle | EventOverlap | None, second: EventHandle | EventOverlap | None, on_comm_stream: bool
    ) -> None:
        """Have the current stream wait for previous events. EPInputError: as of `LowLatency._begin`."""
        for name, one in (("previous_event", event), ("previous_event_before_epilogue", second)):
            checks.kind(name, one, EventHandle | EventOverlap | None, "an EventHandle or EventOverlap, or None")
        require(event is None or on_comm_stream, "previous_event: must come with allocate_on_comm_stream")
        for one in (event, second):
            if one is not None:
                one.current_stream_wait()
        self._words.raise_found(self._pool)


calls.refuse(ElasticBuffer, "engram_write engram_fetch get_engram_storage_size_hint")
calls.refuse(ElasticBuffer, "pp_set_config pp_send pp_recv get_pp_buffer_size_hint")
calls.refuse(ElasticBuffer, "create_agrs_session destroy_agrs_session agrs_new_session agrs_set_config all_gather")
calls.refuse(ElasticBuffer, "agrs_get_inplace_tensor get_agrs_num_max_session_bytes get_agrs_buffer_size_hint")


def _size_hint(ranks: int, tokens: int, hidden: int, entries: int, *, error: type[EPError] = EPInputError) -> int:
    """`ElasticBuffer.get_buffer_size_hint`."""
    checks.integer("num_topk", entries, 0, MAX_TOP_K, error=error)
    entries = max(entries, 1)
    names = {**NAMES, "hidden": "hidden", "top_k": "num_topk"}
    cfg = named_config(names, (hidden, align_up(entries, ranks), entries, tokens, ranks), error=error)
    return align_up(memory_bytes(cfg), SIZE_UNIT)
