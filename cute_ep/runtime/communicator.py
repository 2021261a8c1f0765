"""The CUDA communicator: one rank's dispatch and combine on one GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import DispatchBuffers, Dispatched, Origin, tensors_of
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.rounds import PendingCombine, PendingDispatch, Plan, Rounds
from cute_ep.api.types import CombineMode
from cute_ep.api.validate import (
    OUTPUT_TYPES,
    check_apart,
    check_batch,
    check_buffers,
    check_epilogue_data,
    check_input_scale,
    check_output,
    check_rows,
    check_tensor,
    check_tokens,
    check_unscaled,
    combine_weights,
    overlap,
)
from cute_ep.layouts.maps.arena import message_of, segment_words
from cute_ep.layouts.maps.formats import BF16
from cute_ep.layouts.maps.routing import division_magic
from cute_ep.layouts.maps.scales import has_tiles
from cute_ep.layouts.maps.variants import COMBINE_KERNELS, DISPATCH_KERNELS, SEND_KERNELS, Hooks
from cute_ep.runtime.arguments import address, scale_arguments
from cute_ep.runtime.driver import DeviceMemory, Kernel, architecture, current_stream
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.status import Status
from cute_ep.tuning.launch_shape import Shape, Tuning

UNENCODED = "_unencoded"
"""Ends the name under which a communicator keeps the kernel that sends rows as they are."""
SHAPES_KEPT = 1024
"""Launch shapes that a communicator keeps, one for each operation and number of tokens."""


def load_kernels(cfg: EPConfig, device: torch.device, library: Library, hooks: Hooks) -> dict[str, Kernel]:
    """All kernels that one rank of `cfg` may launch, loaded on its device, by name.

    Raises:
        VariantMissing: a kernel is not in the library.
    """
    arch = architecture(device)
    entries = {}
    for name in (*DISPATCH_KERNELS, *COMBINE_KERNELS):
        entries[name] = library.find(name, arch, cfg.dispatch_format if name in SEND_KERNELS else None, hooks)
    if cfg.format.scale:
        entries |= {f"{name}{UNENCODED}": library.find(name, arch, BF16.name, hooks) for name in SEND_KERNELS}
    with torch.cuda.device(device), ExitStack() as undo:
        torch.cuda.synchronize()  # the first call on a device makes its context
        kernels: dict[str, Kernel] = {}
        for name, entry in entries.items():
            kernels[name] = Kernel(entry)
            undo.callback(kernels[name].unload)
        undo.pop_all()
    return kernels


def unload_kernels(kernels: Mapping[str, Kernel], device: torch.device) -> None:
    """Give back what `load_kernels` took; none of them may be running."""
    with torch.cuda.device(device):
        for kernel in kernels.values():
            kernel.unload()


def _read_by_combine(dispatched: Dispatched) -> tuple[torch.Tensor | None, ...]:
    """What combine reads of a batch, so what must be there until it has run."""
    return dispatched.topk_ids, dispatched.row_map, dispatched.headers, dispatched.weights


class _Shaped(NamedTuple):
    """A launch shape as launches need it.

    Attributes:
        pdl: whether two such launches fit side by side: then the next may start early (`docs/protocol.md`,
            Resident CTAs).
        arguments: kernel arguments that follow from the shape, to be left as they are.
    """

    grid: int
    slices_log2: int
    packed: int
    pdl: bool
    arguments: dict[str, int]

    @classmethod
    def of(cls, shape: Shape, max_ctas: int) -> _Shaped:
        pdl = 2 * shape.grid <= max_ctas
        roles = {"send_ctas": shape.send_ctas, "receive_from": shape.receive_from, "pdl": int(pdl)}
        return cls(shape.grid, shape.slices_log2, int(shape.packed), pdl, roles)


class Communicator(EPCommunicator):
    """One rank on a GPU.

    Calls only enqueue work: they run on the current stream of the rank's device, or, when several ranks share one GPU,
    on the rank's own `stream` (ranks wait for each other, so they may not share a stream). Nothing synchronises with
    the host, so calls can be captured into a CUDA graph, given `out` buffers. Graph replays run no Python: call
    `synchronize` to hear of a timeout or of wrong input.

    Attributes:
        tuning: launch shapes; another one may be set at any time, for the calls from then on.
    """

    stream: torch.cuda.Stream

    def __init__(
        self,
        cfg: EPConfig,
        rank: int,
        device: torch.device,
        arena: DeviceMemory,
        peers: list[int],
        *,
        kernels: dict[str, Kernel],
        hooks: Hooks,
        max_ctas: int,
        tuning: Tuning,
        shared_device: bool,
        group: object,
        release: Callable[[Communicator], None],
    ) -> None:
        self.cfg, self.rank, self.device = cfg, rank, device
        self.arena, self.hooks = arena, hooks
        self.group, self.origin = group, Origin(rank)
        self.max_ctas, self.tuning = max_ctas, tuning
        self._shapes: dict[tuple[str, int, bool], _Shaped] = {}  # found so far, with this tuning:
        self._shapes_of = tuning
        self.stream = torch.cuda.Stream(device)
        self._shared_device = shared_device
        self._release = release
        self._closed = False
        self._interrupted = False
        self._pdl = False  # whether the last launch lets the next one start early
        self._streams: set[int] = set()  # raw handles of the streams that were given work since `synchronize`
        self._receivers: WeakKeyDictionary[DispatchBuffers, dict[str, Kernel]] = WeakKeyDictionary()  # bound to buffers
        self._dispatches, self._combines = Rounds("dispatch"), Rounds("combine")
        alone = cfg.skip_a2a
        self._status = Status(rank, (rank,) if alone else tuple(range(cfg.peers)))
        layout = cfg.arena
        arena.store(int(layout.peers.offset), peers)
        counts = {"ranks": cfg.peers, "local_experts": cfg.local_experts, "top_k": cfg.top_k}
        fmt = cfg.format
        message = message_of(fmt, cfg.hidden)
        self._scale_bytes = fmt.scale_bytes(cfg.hidden)
        constants = {
            "arena": arena.address,
            "status": self._status.address,
            "timeout_ns": int(cfg.timeout_s * 1e9),
            "rank": 0 if alone else rank,
            **counts,
            "experts": cfg.peers * cfg.local_experts,
            "first_expert": rank * cfg.local_experts if alone else 0,
            "all_experts": cfg.num_experts,
            "max_tokens": cfg.max_tokens_per_rank,
            "hidden": cfg.hidden,
            **{f"{name}_magic": division_magic(count) for name, count in counts.items()},
            "shared_groups": int(cfg.fused_shared_expert),
            "payload_bytes": fmt.payload_bytes(cfg.hidden),
            "scale_bytes": self._scale_bytes,
            "row_scale_bytes": fmt.row_scale_bytes,
            "scales_at": message.scales.offset,
            "row_scale_at": message.row_scale.offset,
            "row_alignment": cfg.alignment,
            "segment_words": segment_words(fmt),
        }
        if not cfg.fused_shared_expert:
            constants |= {"shared_first": 0, "shared_rows": 0}
        self._kernels = kernels
        for name, kernel in kernels.items():
            kernel.bind(constants | layout.arguments(partial=name.endswith("_partial")))
        torch.cuda.synchronize(device)

    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        self._check_usable()
        return DispatchBuffers.allocate(self.cfg, self.device, capacity)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        out: DispatchBuffers | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
    ) -> Dispatched:
        return self._plan_dispatch(None, x, topk_ids, router_weights, input_scale, out, scales, row_scales).launch()

    def plan_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        out: DispatchBuffers | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
    ) -> Plan[Dispatched]:
        here = current_stream(self.device.index)
        return self._plan_dispatch(here, x, topk_ids, router_weights, input_scale, out, scales, row_scales)

    def _plan_dispatch(
        self,
        planned_on: int | None,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None,
        input_scale: float | torch.Tensor | None,
        out: DispatchBuffers | None,
        scales: torch.Tensor | None,
        row_scales: torch.Tensor | None,
    ) -> Plan[Dispatched]:
        """planned_on: of `_launch`, None where the launch follows at once."""
        self._check_usable()
        self._dispatches.check_fused()
        sent, shaped, arguments = self._prepare_send(
            "dispatch", x, topk_ids, router_weights, input_scale, scales, row_scales
        )
        buffers, kernel, received = self._prepare_receive(self._send_kernel("dispatch", scales), out)
        arguments.update(received)
        if out is not None and overlap(x, buffers.tokens):
            check_apart("out.tokens", buffers.tokens, x=x)

        def launch() -> Dispatched:
            self._dispatches.check_fused()
            count = self._dispatches.count_fused
            self._launch(kernel, shaped, arguments, sent.keep_alive, count, buffers=buffers, planned_on=planned_on)
            return self._result(sent, buffers)

        return Plan(launch)

    def dispatch_async(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
    ) -> PendingDispatch:
        self._check_usable()
        self._dispatches.check_send()
        sent, shaped, arguments = self._prepare_send(
            "dispatch_async", x, topk_ids, router_weights, input_scale, scales, row_scales
        )
        kernel = self._kernels[self._send_kernel("dispatch_async", scales)]
        self._launch(kernel, shaped, arguments, sent.keep_alive, self._dispatches.count_sent, sent)
        return sent

    def dispatch_wait(self, pending: PendingDispatch | None = None, out: DispatchBuffers | None = None) -> Dispatched:
        self._check_usable()
        pending = self._dispatches.oldest(pending, self.rank)
        tokens = pending.topk_ids.shape[0]
        buffers, kernel, received = self._prepare_receive("dispatch_wait", out)
        shaped = self._shape("dispatch_wait", tokens)
        arguments = {**shaped.arguments, **received, **self._shared_arguments(tokens)}
        self._launch(kernel, shaped, arguments, (), self._dispatches.count_received, buffers=buffers)
        return self._result(pending, buffers)

    def combine(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None = None,
        mode: CombineMode = "exact",
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._plan_combine(None, rows, dispatched, router_weights, mode, out, dtype, epilogue_data).launch()

    def plan_combine(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None = None,
        mode: CombineMode = "exact",
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> Plan[torch.Tensor]:
        here = current_stream(self.device.index)
        return self._plan_combine(here, rows, dispatched, router_weights, mode, out, dtype, epilogue_data)

    def _plan_combine(
        self,
        planned_on: int | None,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None,
        mode: CombineMode,
        out: torch.Tensor | None,
        dtype: torch.dtype,
        epilogue_data: torch.Tensor | None,
    ) -> Plan[torch.Tensor]:
        """planned_on: of `_launch`, None where the launch follows at once."""
        self._check_usable()
        self._combines.check_fused()
        self._check_batch(dispatched)
        weights = self._weights(mode, router_weights, dispatched)
        sent = self._prepare_return(rows, dispatched)
        result, received = self._prepare_sum(rows, dispatched, weights, mode, out, dtype, epilogue_data)
        shaped = self._shape("combine", dispatched.topk_ids.shape[0], whole_rows=mode != "partial")
        kernel, arguments = self._kernels[f"combine_{mode}"], {**shaped.arguments, **sent, **received}
        tensors = (rows, result, weights, epilogue_data, *_read_by_combine(dispatched))

        def launch() -> torch.Tensor:
            self._combines.check_fused()
            if planned_on is not None and dispatched.origin is not None:  # its buffers may have been used again since
                self._check_batch(dispatched)
            self._launch(kernel, shaped, arguments, tensors, self._combines.count_fused, planned_on=planned_on)
            return result

        return Plan(launch)

    def combine_async(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode = "exact") -> PendingCombine:
        self._check_usable()
        self._combines.check_send()
        self._check_batch(dispatched)
        if mode != "exact":  # which may be given its weights by `combine_wait`
            self._weights(mode, None, dispatched)
        sent = self._prepare_return(rows, dispatched)
        shaped = self._shape("combine_async", dispatched.topk_ids.shape[0])
        tensors = (rows, *_read_by_combine(dispatched))
        kernel = self._kernels[f"combine_async_{'partial' if mode == 'partial' else 'exact'}"]
        pending = PendingCombine(dispatched, mode, rows)
        self._launch(kernel, shaped, shaped.arguments | sent, tensors, self._combines.count_sent, pending)
        return pending

    def combine_wait(
        self,
        pending: PendingCombine | None = None,
        router_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check_usable()
        dispatched, mode, rows = self._combines.oldest(pending, self.rank)
        weights = self._weights(mode, router_weights, dispatched)
        result, received = self._prepare_sum(rows, dispatched, weights, mode, out, dtype, epilogue_data)
        shaped = self._shape("combine_wait", dispatched.topk_ids.shape[0])
        arguments = {**shaped.arguments, **received, **self._rows_arguments(rows, dispatched)}
        tensors = (rows, result, weights, epilogue_data, *_read_by_combine(dispatched))
        self._launch(self._kernels[f"combine_wait_{mode}"], shaped, arguments, tensors, self._combines.count_received)
        return result

    def synchronize(self) -> None:
        """Wait for this rank's work, on whatever streams, and raise what its kernels reported: EPTimeout, EPInputError.

        Graph replays are not seen: those on the current stream, and where ranks share a GPU the rank's own, are waited
        for.
        """
        self._check_open()
        used, self._streams = self._streams, set()  # another thread may launch from now on
        here = {stream.cuda_stream: stream for stream in (self._work_stream(), self._current_stream())}
        try:
            if used <= set(here):
                for stream in here.values():
                    stream.synchronize()
            else:  # one of them may be gone by now, so they are not waited for one by one
                torch.cuda.synchronize(self.device)
        except BaseException:
            self._streams |= used
            raise
        self._status.raise_failure()
        self._status.raise_input_error()

    def close(self) -> None:
        """Release the communicator's memory. After a timeout the arena is kept, since peers may still write to it."""
        if not self._closed:
            self._closed = True
            self._release(self)

    def free(self) -> None:
        """Give back what the rank made itself; the group, which calls this when no kernel of the rank can run any more,
        gives back kernels and arena."""
        self._status.free()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`, which must not hide an error that ended the block: with one process per rank it waits for the other
        ranks, so the error is written to stderr first, and what goes wrong with closing behind it."""
        if error is None or not isinstance(self.group, Meeting):
            self.close()
            return
        sys.stderr.write(
            f"cute_ep rank {self.rank}: {type(error).__name__}: {error}; waiting for the other ranks to close\n"
        )
        try:
            self.close()
        except (EPError, RuntimeError) as failure:
            sys.stderr.write(f"cute_ep rank {self.rank}: not closed, its memory stays allocated: {failure}\n")

    @property
    def failed(self) -> bool:
        return self._interrupted or self._status.failed

    def _work_stream(self) -> torch.cuda.Stream:
        return self.stream if self._shared_device else self._current_stream()

    def _current_stream(self) -> torch.cuda.Stream:
        """The caller's; torch takes 1 us to look up a device by anything but its index."""
        return torch.cuda.current_stream(self.device.index)

    def _expected(self, tokens: int) -> int:
        """Tokens to choose launch shapes for: a rank without any knows nothing of the others'."""
        return tokens or self.cfg.max_tokens_per_rank

    def _shape(self, operation: str, tokens: int, *, whole_rows: bool = False) -> _Shaped:
        if self._shapes_of is not self.tuning:
            self._shapes, self._shapes_of = {}, self.tuning
        key = operation, tokens, whole_rows
        shaped = self._shapes.get(key)
        if shaped is None:
            if len(self._shapes) >= SHAPES_KEPT:
                self._shapes.clear()
            shape = self.tuning.shape(operation, self._expected(tokens), self.max_ctas, whole_rows=whole_rows)
            shaped = self._shapes[key] = _Shaped.of(shape, self.max_ctas)
        return shaped

    @property
    def _weights_dtype(self) -> torch.dtype | None:
        return None if self.hooks.router_weights else torch.float32

    def _send_kernel(self, operation: str, scales: torch.Tensor | None) -> str:
        """Name of the kernel for rows to encode, or for rows that only move."""
        return operation if scales is None else f"{operation}{UNENCODED}"

    def _prepare_send(
        self,
        operation: str,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None,
        input_scale: float | torch.Tensor | None,
        scales: torch.Tensor | None,
        row_scales: torch.Tensor | None,
    ) -> tuple[PendingDispatch, _Shaped, dict[str, int]]:
        check_tokens(self.cfg, x, topk_ids, router_weights, self.device, scales, row_scales, self._weights_dtype)
        if input_scale is not None:
            if scales is not None:
                check_unscaled(input_scale)
            input_scale = self._scale_tensor(input_scale)
        tokens = x.shape[0]
        shaped = self._shape(operation, tokens)
        return_slices = self._shape("combine", tokens).slices_log2
        arguments = {
            **shaped.arguments,
            "x": x.data_ptr(),
            "scales": address(scales),
            "given_row_scales": address(row_scales),
            "topk_ids": topk_ids.data_ptr(),
            "topk_ids_wide": int(topk_ids.dtype == torch.int64),
            "router_weights": address(router_weights),
            "global_scale": address(input_scale),
            "tokens": tokens,
            "message_slices": shaped.slices_log2,
            "packed": shaped.packed,
            "return_slices": return_slices,
            **self._shared_arguments(tokens),
        }
        keep_alive = (x, topk_ids, router_weights, input_scale, scales, row_scales)
        return PendingDispatch(topk_ids, router_weights, return_slices, keep_alive), shaped, arguments

    def _scale_tensor(self, input_scale: float | torch.Tensor) -> torch.Tensor:
        """An input scale on the device."""
        if self.hooks.input_scale is not None:
            check_tensor("input_scale", input_scale, device=self.device)
            return input_scale
        check_input_scale(self.cfg.format, input_scale)
        if not isinstance(input_scale, torch.Tensor):
            return torch.full((1,), input_scale, dtype=torch.float32, device=self.device)
        check_tensor("input_scale", input_scale.view(1), shape=(1,), dtype=torch.float32, device=self.device)
        return input_scale

    def _shared_arguments(self, tokens: int) -> dict[str, int]:
        """The tokens that the shared expert takes; bound where there is none."""
        if not self.cfg.fused_shared_expert:
            return {}
        first, count = self.cfg.shared_slice(tokens, self.rank)
        return {"shared_first": first, "shared_rows": count}

    def _prepare_receive(
        self, name: str, out: DispatchBuffers | None
    ) -> tuple[DispatchBuffers, Kernel, dict[str, int]]:
        """The buffers to receive into, the kernel of a name, and those of its arguments that name the buffers: none
        where the caller gives the same buffers again, since then the kernel is bound to them."""
        receivers = self._receivers.get(out) if isinstance(out, DispatchBuffers) else None
        if out is not None and receivers is not None:
            tokens = out.tokens
            if tokens.requires_grad or tokens.is_inference():  # not when they were checked, perhaps
                check_buffers(self.cfg, out, self.device)
            kernel = receivers.get(name)
            if kernel is None:
                kernel = receivers[name] = self._kernels[name].bound(self._buffer_arguments(out))
            return out, kernel, {}
        if out is None:
            with torch.cuda.stream(self._work_stream()):
                out = DispatchBuffers.allocate(self.cfg, self.device)
        else:
            check_buffers(self.cfg, out, self.device)
            self._receivers[out] = {}
        return out, self._kernels[name], self._buffer_arguments(out)

    def _buffer_arguments(self, out: DispatchBuffers) -> dict[str, int]:
        capacity = out.tokens.shape[0]
        return {
            "out_tokens": out.tokens.data_ptr(),
            "out_row_scales": address(out.row_scales),
            "row_offsets": out.row_offsets.data_ptr(),
            "row_counts": out.row_counts.data_ptr(),
            "scales_offsets": address(out.scales_offsets),
            "expert_ids": out.expert_ids.data_ptr(),
            "src_info": out.src_info.data_ptr(),
            "num_rows": out.num_rows.data_ptr(),
            "row_map": out.row_map.data_ptr(),
            "headers": out.headers.data_ptr(),
            "weights": address(out.weights),
            "capacity": capacity,
            "has_tiles": int(has_tiles(self.cfg.scales_as, capacity, self.cfg.alignment)),
            **scale_arguments(self.cfg.scales_as, self._scale_bytes, out.scales, capacity, self.cfg.alignment),
        }

    def _result(self, sent: PendingDispatch, out: DispatchBuffers) -> Dispatched:
        return Dispatched.inside(
            out,
            rank=self.rank,
            topk_ids=sent.topk_ids,
            router_weights=sent.router_weights,
            return_slices=sent.return_slices,
            origin=self.origin,
        )

    def _prepare_return(self, rows: torch.Tensor, dispatched: Dispatched) -> dict[str, int]:
        check_rows(self.cfg, rows, dispatched)
        return {
            "row_map": dispatched.row_map.data_ptr(),
            "headers": dispatched.headers.data_ptr(),
            "weights": address(dispatched.weights),
            **self._rows_arguments(rows, dispatched),
        }

    def _rows_arguments(self, rows: torch.Tensor, dispatched: Dispatched) -> dict[str, int]:
        """Rows that dispatch had no room for are lost whatever `rows` holds there. They are read from row 0: where
        there is none, from memory that holds as much."""
        capacity = min(rows.shape[0], dispatched.tokens.shape[0])
        return {"rows": rows.data_ptr() or self.arena.address, "capacity": capacity}

    def _prepare_sum(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        weights: torch.Tensor | None,
        mode: str,
        out: torch.Tensor | None,
        dtype: torch.dtype,
        epilogue_data: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, int]]:
        tokens = dispatched.topk_ids.shape[0]
        shape, dtype = check_output(self.cfg, mode, tokens, dtype, out, self.device)
        check_epilogue_data(mode, self.hooks.epilogue, epilogue_data, self.device)
        if out is not None:
            if overlap(rows, out):
                check_apart("out", out, rows=rows)
        else:
            with torch.cuda.stream(self._work_stream()):
                out = torch.empty(shape, dtype=dtype, device=self.device)
        return out, {
            "out": out.data_ptr(),
            "out_type": int(OUTPUT_TYPES[dtype]),
            "topk_ids": dispatched.topk_ids.data_ptr(),
            "topk_ids_wide": int(dispatched.topk_ids.dtype == torch.int64),
            "router_weights": address(weights),
            "epilogue_data": address(epilogue_data),
            "tokens": tokens,
            "return_slices": dispatched.return_slices,
            **self._shared_arguments(tokens),
        }

    def _has_made(self, dispatched: Dispatched) -> bool:
        """Whether this communicator made the batch, so has checked what is in it, and its buffers still hold it."""
        return isinstance(dispatched, Dispatched) and dispatched.is_latest_of(self.origin)

    def _check_batch(self, dispatched: Dispatched) -> None:
        if not self._has_made(dispatched):
            check_batch(self.cfg, self.rank, dispatched, self.device, self.origin)

    def _weights(self, mode: str, router_weights: torch.Tensor | None, dispatched: Dispatched) -> torch.Tensor | None:
        checked = self._has_made(dispatched)
        return combine_weights(self.cfg, mode, router_weights, dispatched, self._weights_dtype, checked=checked)

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
        self._status.raise_failure()

    def _launch(
        self,
        kernel: Kernel,
        shaped: _Shaped,
        arguments: dict[str, int],
        tensors: tuple[torch.Tensor | None, ...],
        count: Callable[..., None],
        *counted: object,
        buffers: DispatchBuffers | None = None,
        planned_on: int | None = None,
    ) -> None:
        """Enqueue one kernel on the work stream, after what the caller's stream has enqueued so far, and count it. An
        interrupt in between would leave the host and the device with different counts: no call is taken after it.

        Args:
            arguments: parameters that are not bound.
            tensors, buffers: what the kernel reads and writes.
            count, counted: of `Rounds`, and its arguments.
            planned_on: raw handle of the stream on which memory was prepared for the launch, if that was earlier.

        Raises:
            EPInputError: another stream is current than `planned_on`.
        """
        self._check_usable()
        stream = current_stream(self.device.index)
        if planned_on is not None and stream != planned_on:
            raise EPInputError(
                f"launch: the current stream is {stream:#x}: must be {planned_on:#x}, on which the call was planned"
            )
        if self._shared_device and stream != self.stream.cuda_stream:
            self.stream.wait_stream(self._current_stream())
            for tensor in (*tensors, *(tensors_of(buffers).values() if buffers else ())):
                if tensor is not None:
                    tensor.record_stream(self.stream)
            stream = self.stream.cuda_stream
        early, self._pdl = shaped.pdl and self._pdl, shaped.pdl
        self._streams.add(stream)
        if buffers is not None:
            buffers.use.begin()
        try:
            if torch.cuda.current_device() == self.device.index:
                kernel.launch(shaped.grid, arguments, stream, early=early)
            else:
                with torch.cuda.device(self.device):
                    kernel.launch(shaped.grid, arguments, stream, early=early)
            count(*counted)
        except BaseException as error:
            self._interrupted = not isinstance(error, Exception)
            raise
