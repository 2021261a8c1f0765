"""The CUDA communicator: one rank's dispatch and combine on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Set
from types import TracebackType

import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.calls import DispatchInput, SumOptions, row_input
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError
from cute_ep.api.flags import Flags
from cute_ep.api.host import refuse_capture
from cute_ep.api.rounds import MAX_OUTSTANDING, PendingCombine, PendingDispatch, Plan, Rounds
from cute_ep.api.types import CombineMode
from cute_ep.api.validate import check_buffers, check_input
from cute_ep.api.validate_combine import check_batch, check_rows, check_sum
from cute_ep.layouts.maps.arguments import Ids, Input, Output, Scales, Sums, combine_numbers, dispatch_numbers
from cute_ep.layouts.maps.routing import Phase
from cute_ep.layouts.maps.variants import combine_mode
from cute_ep.runtime.arguments import (
    NO_BATCH,
    NO_IDS,
    NO_INPUT,
    NO_SHARED,
    NO_SUMS,
    batch_record,
    group_record,
    ids_record,
    input_record,
    output_record,
    rows_record,
    sums_record,
    wire_record,
)
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.flags import find_behind, flag_bytes
from cute_ep.runtime.launch_cache import LaunchCache, LaunchShape
from cute_ep.runtime.launcher import missing
from cute_ep.runtime.launching import Call, Launching
from cute_ep.runtime.meeting import close_after
from cute_ep.runtime.parts import UNENCODED, RankParts
from cute_ep.runtime.repeats import (
    Repeats,
    of_combine,
    of_dispatch,
    of_received,
    of_returned,
    of_sent,
    of_summed,
)
from cute_ep.runtime.status import Status
from cute_ep.runtime.streams import give_back, take_stream
from cute_ep.torch_internals import current_stream


def _sender(operation: str, given: DispatchInput) -> str:
    """Name of the kernel for rows to encode, or for rows that only move."""
    return operation if given.scales is None else f"{operation}{UNENCODED}"


def wait_for(device: torch.device, used: Set[int], *here: torch.cuda.Stream) -> None:
    """Wait for streams that were used, by their raw handles, and for those that are `here`. Others than these may be
    gone by now, so they are not waited for one by one, but the whole device is."""
    known = {stream.cuda_stream: stream for stream in here}
    if used <= set(known):
        for stream in known.values():
            stream.synchronize()
    else:
        torch.cuda.synchronize(device)


class Communicator(Launching):
    """One rank on a GPU.

    Calls only enqueue work: they run on the current stream of the rank's device, or, when several ranks share one GPU,
    on the rank's own `stream` (ranks wait for each other, so they may not share a stream). Nothing synchronises with
    the host, so calls can be captured into a CUDA graph, given `out` buffers. Graph replays run no Python: call
    `synchronize` to hear of a timeout or of wrong input.

    """

    def __init__(
        self, parts: RankParts, peers: list[int], *, group: object, release: Callable[[Communicator], None]
    ) -> None:
        """peers: addresses of all ranks' arenas, as this rank's device sees them; release: called by `close`, once."""
        cfg, rank, device, arena = parts.cfg, parts.rank, parts.device, parts.arena
        super().__init__(parts, group)
        self.arena, self.max_ctas = arena, parts.max_ctas
        self._kernels, self._cache = parts.kernels, LaunchCache.of(parts)
        self.ring_bytes, self.most_slices = self._cache.ring_bytes, self._cache.most_slices  # for `bench.tune`
        self._release = release
        self._dispatches, self._combines = Rounds("dispatch"), Rounds("combine")
        first = parts.first_rank
        named = (rank,) if cfg.skip_a2a else tuple(range(first, first + cfg.peers))
        self._status = Status(first + rank, named)
        layout = cfg.arena
        arena.store(int(layout.peers.offset), peers)
        group_arguments, wire = group_record(cfg, rank, arena.address, self._status.address), wire_record(cfg)
        for name, kernel in parts.kernels.items():
            kernel.bind("group", group_arguments)
            kernel.bind("arena", layout.arguments(partial=combine_mode(name) == "partial"))
            kernel.bind("wire", wire)
        if missing() is None:
            self._repeats = Repeats(cfg, device, parts.kernels, self._status.reports)
        torch.cuda.synchronize(device)
        self.stream = take_stream(device)

    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        self._check_usable()
        return DispatchBuffers.allocate(self.cfg, self.device, capacity)

    # ---- dispatch

    def _dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Dispatched:
        operation, kind = "dispatch", None
        if self._may_repeat(self._dispatches):
            operation, kind = of_dispatch(self.cfg, given, out)
        again = self._launch_again(operation, kind, self._dispatches.count_fused, out=out)
        if again is not None:
            shape, made = again
            sent = PendingDispatch(given.topk_ids, given.router_weights, shape.return_slices_log2, (), given.frame)
            return Dispatched.received(out or made, self.origin, sent)
        self._check_dispatch(given)
        call, sent = self._fused_dispatch(given, out)
        batch = self._launch_dispatch(call, sent, given)
        self._keep(operation, kind, call)
        return batch

    def _send_row(self, row: torch.Tensor, topk_ids: torch.Tensor, out: DispatchBuffers) -> None:
        kind = row.data_ptr(), out, topk_ids
        if self._may_repeat(self._dispatches):
            again = self._launch_again("send_row", kind, self._dispatches.count_fused, out=out)
            if again is not None:
                return
        given = row_input(row, topk_ids, self.cfg.hidden)
        self._check_dispatch(given)
        call, sent = self._fused_dispatch(given, out)
        self._launch_dispatch(call, sent, given)
        self._keep("send_row", kind, call)

    def _plan_dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Plan[Dispatched]:
        stream = current_stream(self.device.index)
        self._check_dispatch(given)
        call, sent = self._fused_dispatch(given, out)

        def launch() -> Dispatched:
            self._check_usable()
            self._dispatches.check_fused()
            self._check_planned_on(stream)
            return self._launch_dispatch(call, sent, given)

        return Plan(launch)

    def _check_dispatch(self, given: DispatchInput) -> None:
        self._check_usable()
        self._dispatches.check_fused()
        check_input(self.origin, given)

    def _fused_dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> tuple[Call, PendingDispatch]:
        sent, shape, ids, sending = self._sending("dispatch", given)
        buffers, kernel, received, scales = self._receiving(_sender("dispatch", given), out)
        if out is not None:
            self._cache.check_apart(out, **given._asdict())
        numbers = dispatch_numbers(shape.grid, shape.shared, ids, sending, received, scales)
        return Call(kernel, shape, numbers, sent.keep_alive, buffers), sent

    def _launch_dispatch(self, call: Call, sent: PendingDispatch, given: DispatchInput) -> Dispatched:
        self._look(given)
        self._launch(call, self._dispatches.count_fused)
        return self._received(call, sent)

    def _send_dispatch_again(self, given: DispatchInput) -> PendingDispatch | None:
        if not self._may_repeat(self._dispatches, outstanding=MAX_OUTSTANDING - 1):
            return None

        def pending(shape: LaunchShape) -> PendingDispatch:
            return PendingDispatch(
                given.topk_ids, given.router_weights, shape.return_slices_log2, given[:6], given.frame
            )

        again = self._launch_again("dispatch_async", of_sent(given), self._dispatches.count_sent, pending)
        return None if again is None else again[1]

    def _send_dispatch(self, given: DispatchInput) -> PendingDispatch:
        sent, shape, ids, sending = self._sending("dispatch_async", given)
        numbers = dispatch_numbers(shape.grid, shape.shared, ids, sending, (), ())
        kernel = self._kernels[_sender("dispatch_async", given)]
        self._look(given)
        call = Call(kernel, shape, numbers, sent.keep_alive)
        self._launch(call, self._dispatches.count_sent, sent)
        self._keep("dispatch_async", of_sent(given), call)
        return sent

    def _receive_dispatch(self, pending: PendingDispatch, out: DispatchBuffers | None) -> Dispatched:
        operation, kind = "dispatch_wait", None
        if self._may_repeat(self._dispatches, MAX_OUTSTANDING):
            operation, kind = of_received(self.cfg, pending, out)
        again = self._launch_again(operation, kind, self._dispatches.count_received, out=out)
        if again is not None:
            return Dispatched.received(out or again[1], self.origin, pending)
        buffers, kernel, received, scales = self._receiving("dispatch_wait", out)
        if out is not None:
            self._cache.check_apart(out, topk_ids=pending.topk_ids, router_weights=pending.router_weights)
        shape = self._cache.shape(self.tuning, "dispatch_wait", pending.topk_ids.shape[0])
        numbers = dispatch_numbers(shape.grid, shape.shared, NO_IDS, NO_INPUT, received, scales)
        call = Call(kernel, shape, numbers, (), buffers)
        self._launch(call, self._dispatches.count_received)
        self._keep(operation, kind, call)
        return self._received(call, pending)

    def _sending(self, operation: str, given: DispatchInput) -> tuple[PendingDispatch, LaunchShape, Ids, Input]:
        """What a sending launch leaves for its receiving one, its shape, and its records."""
        scale = given.input_scale
        if not (scale is None or isinstance(scale, torch.Tensor)):
            scale = torch.full((1,), scale, dtype=torch.float32, device=self.device)
        shape = self._cache.shape(self.tuning, operation, given.x.size(0))
        keep_alive = (given.x, given.topk_ids, given.router_weights, scale, given.scales, given.row_scales)
        returned = shape.return_slices_log2
        sent = PendingDispatch(given.topk_ids, given.router_weights, returned, keep_alive, given.frame)
        record = input_record(given, scale, shape.slices_log2, shape.returns)
        return sent, shape, ids_record(given.topk_ids), record

    def _receiving(
        self, name: str, out: DispatchBuffers | None
    ) -> tuple[DispatchBuffers, Kernel, Output | tuple[()], Scales | tuple[()]]:
        """The buffers to receive into, the kernel of a name, and its records of the buffers: none where the kernel is
        bound to them, because the caller gives the same buffers again."""
        if out is None:
            with self._on_work_stream():
                out = DispatchBuffers.allocate(self.cfg, self.device)
        else:
            bound = self._cache.receiver(name, out)
            if bound is not None:
                return out, bound, (), ()
            check_buffers(self.cfg, out, self.device)
            self._cache.remember(out)
        return out, self._kernels[name], output_record(self.cfg, out), self._cache.scales_of(out)

    def _received(self, call: Call, sent: PendingDispatch) -> Dispatched:
        assert call.out is not None
        return Dispatched.received(call.out, self.origin, sent)

    # ---- combine

    def _combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> torch.Tensor:
        whole = self._whole(dispatched) if self._may_repeat(self._combines) else None
        kind = None if whole is None else of_combine(rows, dispatched, whole, mode, options)
        again = self._launch_again("combine", kind, self._combines.count_fused)
        if again is not None:
            return again[1] if options.out is None else options.out
        self._check_combine(rows, dispatched)
        call, result = self._fused_combine(rows, dispatched, mode, options)
        self._launch(call, self._combines.count_fused)
        self._keep("combine", kind, call, result)
        return result

    def _plan_combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> Plan[torch.Tensor]:
        stream = current_stream(self.device.index)
        self._check_combine(rows, dispatched)
        call, result = self._fused_combine(rows, dispatched, mode, options)

        def launch() -> torch.Tensor:
            self._check_combine(rows, dispatched)  # its buffers may have been used again since
            self._check_planned_on(stream)
            self._launch(call, self._combines.count_fused)
            return result

        return Plan(launch)

    def _check_combine(self, rows: torch.Tensor, dispatched: Dispatched) -> None:
        self._check_usable()
        self._combines.check_fused()
        check_batch(self.origin, dispatched)
        check_rows(self.cfg, rows, self.device)

    def _fused_combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> tuple[Call, torch.Tensor]:
        shape, weights, sums, result = self._summing("combine", rows, dispatched, mode, options)
        returned = rows_record(rows, dispatched, self.arena.address)
        numbers = combine_numbers(
            shape.grid, shape.shared, ids_record(dispatched.topk_ids), returned, batch_record(dispatched), sums
        )
        tensors = (rows, result, weights, options.epilogue_data)
        kernel = self._kernels[f"combine_{mode}{shape.suffix}"]
        return Call(kernel, shape, numbers, tensors, None, dispatched), result

    def _send_combine_again(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode
    ) -> PendingCombine | None:
        whole = self._whole(dispatched) if self._may_repeat(self._combines, MAX_OUTSTANDING - 1) else None
        if whole is None:
            return None
        pending, kind = PendingCombine(dispatched, mode, rows), of_returned(rows, dispatched, whole, mode)
        again = self._launch_again("combine_async", kind, self._combines.count_sent, lambda shape: pending)
        return None if again is None else pending

    def _send_combine(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode) -> PendingCombine:
        check_rows(self.cfg, rows, self.device)
        shape = self._cache.shape(self.tuning, "combine_async", dispatched.topk_ids.shape[0])
        returned = rows_record(rows, dispatched, self.arena.address)
        numbers = combine_numbers(shape.grid, NO_SHARED, NO_IDS, returned, batch_record(dispatched), NO_SUMS)
        name = f"combine_async_{'partial' if mode == 'partial' else 'exact'}"
        kernel = self._kernels[f"{name}{shape.suffix}"]
        pending, call = PendingCombine(dispatched, mode, rows), Call(kernel, shape, numbers, (rows,), None, dispatched)
        self._launch(call, self._combines.count_sent, pending)
        whole = self._whole(dispatched)
        if whole is not None:
            self._keep("combine_async", of_returned(rows, dispatched, whole, mode), call)
        return pending

    def _receive_combine(self, pending: PendingCombine, options: SumOptions) -> torch.Tensor:
        kind = of_summed(pending, options) if self._may_repeat(self._combines, MAX_OUTSTANDING) else None
        again = self._launch_again("combine_wait", kind, self._combines.count_received)
        if again is not None:
            return again[1] if options.out is None else options.out
        dispatched, mode, rows = pending
        shape, weights, sums, result = self._summing("combine_wait", rows, dispatched, mode, options)
        returned = rows_record(rows, dispatched, self.arena.address)
        ids = ids_record(dispatched.topk_ids)
        numbers = combine_numbers(shape.grid, shape.shared, ids, returned, NO_BATCH, sums)
        tensors = (rows, result, weights, options.epilogue_data)
        call = Call(self._kernels[f"combine_wait_{mode}"], shape, numbers, tensors, None, dispatched)
        self._launch(call, self._combines.count_received)
        self._keep("combine_wait", kind, call, result)
        return result

    def _summing(
        self, operation: str, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> tuple[LaunchShape, torch.Tensor | None, Sums, torch.Tensor]:
        """(shape, weights, record, output) of a combine that receives, once its arguments were checked."""
        weights, extents, dtype = check_sum(self.origin, rows, dispatched, mode, options)
        result = options.out
        if result is None:
            with self._on_work_stream():
                result = torch.empty(extents, dtype=dtype, device=self.device)
        shape = self._cache.shape(self.tuning, operation, dispatched.topk_ids.size(0), whole_rows=mode != "partial")
        return shape, weights, sums_record(dispatched, weights, result, options, shape.flagged), result

    def synchronize(self) -> None:
        """Wait for this rank's work, on whatever streams, and raise what its kernels reported: EPTimeout, EPInputError.

        Graph replays are not seen: those on the current stream, and where ranks share a GPU the rank's own, are waited
        for.
        """
        self._check_open()
        refuse_capture(self.device, "synchronize")
        used, self._streams = self._streams, set()  # another thread may launch from now on
        try:
            wait_for(self.device, used, self._work_stream(), self._current_stream())
        except BaseException:
            self._streams |= used
            raise
        self._status.raise_failure(self.flags)
        self._status.raise_input_error(self._looked())

    def take_input_errors(self) -> dict[Phase, tuple[int, int, int]]:
        return {} if self._closed else self._status.take_input_errors()

    def flags(self) -> Flags:
        self._check_open()
        stream = take_stream(self.device)
        try:
            return find_behind(self.cfg, self.rank, self.arena.read(flag_bytes(self.cfg.arena), stream))
        finally:
            give_back(stream)

    def close(self) -> None:
        """Release the communicator's memory, once all kernels of the group have ended."""
        if not self._closed:
            refuse_capture(self.device, "close")
            self._closed = True
            self._release(self)

    def free(self) -> None:
        """Give back what the rank made itself; the group, which calls this when no kernel of the rank can run any more,
        gives back kernels and arena."""
        self._status.free()
        give_back(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)

    @property
    def shares_device(self) -> bool:
        return self._shared_device

    @property
    def failed(self) -> bool:
        return self._interrupted or self._status.failed

    def _check_open(self) -> None:
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._interrupted:
            raise EPError(
                f"rank {self.rank}: a call was interrupted while it was being launched, so it is not known whether the "
                "rank takes part in its round; close the communicators of all ranks and connect again"
            )
        if self._status.failed:
            self._status.raise_failure(self.flags)
