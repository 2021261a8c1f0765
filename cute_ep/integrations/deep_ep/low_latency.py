"""DeepEP's low-latency mode: blocks of a fixed number of rows per local expert, weighted sums at the source, and each
call in two halves if wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.types import FormatName
from cute_ep.integrations.blocks import PACKED_COLUMNS, Blocks, block_config
from cute_ep.integrations.connections import Connections
from cute_ep.integrations.deep_ep.calls import Rows, begin, check_experts, finished, require, without_gradients
from cute_ep.integrations.deep_ep.events import EventOverlap


class _Fields(NamedTuple):
    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class LowLatencyHandle(_Fields):
    """What a low-latency dispatch returns for its combine: DeepEP's five fields, and the batch once it is received.

    Attributes:
        src_info: [L, S] int32, the row's token index on its source rank.
        layout_range: [L, R] int64, rows of each source in a block: first << 32 | number.
        communicator: that of the dispatch.
        batch: which combine returns rows of; None before the hook was called.
    """

    communicator: EPCommunicator
    batch: Dispatched | None = None


class LowLatency:
    """The calls of low-latency mode, over the communicators of a group. All runs on the current stream."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._combine_buffers: dict[tuple[int, ...], torch.Tensor] = {}

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
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Send tokens to their experts, into one block of S = R * num_max_dispatch_tokens_per_rank slots per expert.
        Nothing waits on the host, once connected.

        Args:
            x: [T, hidden] bfloat16; with `use_fp8` it is quantised while sent, a scale factor per 128 elements.
            topk_idx: [T, K] int64 expert ids, -1 masks.
            num_max_dispatch_tokens_per_rank: the same on all ranks.
            cumulative_local_expert_recv_stats: [L] int32, to which the numbers of rows are added.
            dispatch_wait_recv_cost_stats: must be None.
            round_scale: make scale factors powers of two.
            use_ue8m0: pack their exponents, four in an int32; with `round_scale`.
            return_recv_hook: send only. The caller calls the hook before using results, in the order of dispatches; at
                most two may be outstanding. Not with `async_finish`.

        Returns:
            Rows [L, S, hidden] bfloat16, or float8_e4m3fn and scale factors [L, S, hidden / 128] float32 (packed: [L,
            S, hidden / 512] int32), neighbours along S; [L] int32 rows of each block, which come first, by source rank,
            then token; the handle; the event; the hook, or None.

        Raises:
            EPInputError: an argument breaks its rule.
        """
        begin(None, async_finish, False)
        _check_options(async_finish, return_recv_hook, dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats)
        require(not use_ue8m0 or (use_fp8 and round_scale), "use_ue8m0 = True: must come with use_fp8, round_scale")
        ranks, hidden = self._connections.size, x.shape[1]
        require(
            not use_ue8m0 or hidden % PACKED_COLUMNS == 0,
            "x.shape[1] = {}: must be a multiple of {}",
            hidden,
            PACKED_COLUMNS,
        )
        check_experts(num_experts, ranks)
        sizes = hidden, num_experts, topk_idx.shape[1], num_max_dispatch_tokens_per_rank, ranks
        fp8: FormatName = "fp8_pow2" if round_scale else "fp8"
        cfg = block_config(*sizes, fp8 if use_fp8 else "bf16")
        communicator = self._connections.get(cfg)
        blocks, experts = Blocks(communicator, packed=use_ue8m0), cfg.local_experts
        out = blocks.out
        assert out.source_ranges is not None
        layout_range = out.source_ranges.view(torch.int64).view(experts, ranks)  # rows are the lower halves
        source_tokens = out.src_info[:, 0].view(experts, -1)
        handle = LowLatencyHandle(source_tokens, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts)
        handle.communicator = communicator

        def receive(batch: Dispatched) -> None:
            handle.batch = batch
            blocks.received()
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(out.row_counts)

        ids, hook = topk_idx.to(torch.int32, copy=True), None  # a copy, since combine reads them again
        if return_recv_hook:
            pending = communicator.dispatch_async(x.contiguous(), ids)
            hook = _once(lambda: receive(communicator.dispatch_wait(pending, out)))
        else:
            receive(communicator.dispatch(x.contiguous(), ids, out=out))
        rows = blocks.rows if blocks.scales is None else (blocks.rows, blocks.scales)
        return rows, out.row_counts, handle, finished(async_finish), hook

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
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Send rows home and add them up with weights at the source, in float32, rounded once.

        Args:
            x: [L, S, hidden] bfloat16, in the order of the dispatch's rows. Not read with `zero_copy`.
            topk_idx: as in the dispatch. An entry may have become -1 since: its row, which must be finite, then has
                weight 0.
            topk_weights: [T, K] float32.
            handle: what the dispatch returned, once its hook was called.
            use_logfmt: without effect; rows travel as bfloat16.
            zero_copy: take the rows from `get_next_low_latency_combine_buffer`.
            return_recv_hook: as in `low_latency_dispatch`.
            out: [T, hidden] bfloat16, overwritten; None allocates it.
            combine_wait_recv_cost_stats: must be None.

        Returns:
            [T, hidden] bfloat16; the event; the hook, or None.

        Raises:
            EPInputError: an argument breaks its rule.
        """
        begin(None, async_finish, False)
        _check_options(async_finish, return_recv_hook, combine_wait_recv_cost_stats=combine_wait_recv_cost_stats)
        own = _own(handle)
        batch, communicator = own.batch, own.communicator
        if batch is None:
            raise EPInputError("handle: the dispatch's hook must be called before its rows are combined")
        for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            want, got = tuple(batch.topk_ids.shape), tuple(tensor.shape)
            require(got == want, "{}.shape = {}: must be {}, as in the dispatch", name, got, want)
        extents = *own.src_info.shape, own.hidden
        rows = self.get_next_low_latency_combine_buffer(own) if zero_copy else x.contiguous()
        require(rows.shape == extents, "x.shape = {}: must be {}", tuple(rows.shape), extents)
        weights = torch.where(topk_idx >= 0, topk_weights, 0)
        if out is None:
            out = torch.empty((len(topk_idx), own.hidden), dtype=torch.bfloat16, device=rows.device)
        rows, hook = rows.view(-1, own.hidden), None
        if return_recv_hook:
            pending = communicator.combine_async(rows, batch.derived(router_weights=weights), mode="exact")
            hook = _once(lambda: communicator.combine_wait(pending, out=out))
        else:
            communicator.combine(rows, batch, weights, mode="exact", out=out)
        return out, finished(async_finish), hook

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> torch.Tensor:
        """[L, S, hidden] bfloat16 memory to fill for a combine with `zero_copy`; the same for all handles of these
        sizes. EPInputError: the handle is none."""
        own = _own(handle)
        extents = *own.src_info.shape, own.hidden
        if extents not in self._combine_buffers:
            with torch.inference_mode(False):  # a later caller need not be in it
                memory = torch.empty(extents, dtype=torch.bfloat16, device=self._connections.device)
            self._combine_buffers[extents] = memory
        return self._combine_buffers[extents]

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing: both modes may be mixed."""


def _own(handle: tuple) -> LowLatencyHandle:
    if not isinstance(handle, LowLatencyHandle):
        raise EPInputError(f"handle = {type(handle).__name__}: must be what low_latency_dispatch returned")
    return handle


def _check_options(async_finish: bool, return_recv_hook: bool, **stats: torch.Tensor | None) -> None:
    """EPInputError where the options of a call do not go together, or it shall measure waits."""
    require(not (async_finish and return_recv_hook), "return_recv_hook = True: must be False with async_finish")
    for name, tensor in stats.items():
        require(tensor is None, "{} = tensor: must be None, waits are not measured", name)


def _once(call: Callable[[], object]) -> Callable[[], None]:
    """`call`, that later calls of the hook leave out."""
    calls = [call]

    def hook() -> None:
        if calls:
            calls.pop()()

    return hook
