"""The CUDA communicator: one rank's dispatch and combine on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType

import torch

from cute_ep.config import EPConfig
from cute_ep.dispatched import DispatchBuffers, Dispatched
from cute_ep.driver import DeviceMemory, HostMemory, Kernel, architecture
from cute_ep.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.arena import return_slots
from cute_ep.layouts.routing import Phase, StatusWord
from cute_ep.layouts.variants import COMBINE_KERNELS, DISPATCH_KERNELS
from cute_ep.library import Library
from cute_ep.rounds import PendingCombine, PendingDispatch, Rounds
from cute_ep.tuning import Shape, launch_shape, tokens_per_chunk
from cute_ep.validate import (
    check_buffers,
    check_input_scale,
    check_mode,
    check_rows,
    check_tensor,
    check_tokens,
    combine_weights,
)


class Communicator:
    """One rank of an expert-parallel group on a GPU. Made by `connect` or `connect_local`.

    Calls only enqueue work: they run on the current stream of the rank's device, or, when several ranks share one GPU,
    on the rank's own `stream` (ranks wait for each other, so they may not share a stream). Every rank makes the same
    calls in the same order. Nothing synchronises with the host, so calls can be captured into a CUDA graph, given
    `out` buffers.

    A kernel that waits longer than `cfg.timeout_s` gives up; EPTimeout is raised by the next call or `synchronize`,
    and the communicator is unusable afterwards. What a kernel finds wrong with its input (EPInputError) is raised by
    `synchronize` only, so that one rank's bad input does not stop the others. Graph replays run no Python: call
    `synchronize` to hear of either.
    """

    def __init__(
        self,
        cfg: EPConfig,
        rank: int,
        device: torch.device,
        arena: DeviceMemory,
        peers: list[int],
        *,
        library: Library,
        max_ctas: int,
        shared_device: bool,
        release: Callable[[Communicator], None],
    ) -> None:
        self.cfg, self.rank, self.device = cfg, rank, device
        self.arena = arena
        self.max_ctas = max_ctas
        self.stream = torch.cuda.Stream(device)
        self._shared_device = shared_device
        self._release = release
        self._closed = False
        self._dispatches, self._combines = Rounds("dispatch"), Rounds("combine")
        self._status = HostMemory(len(StatusWord) * (cfg.world_size + 1))
        self._peers = torch.tensor(peers, dtype=torch.int64, device=device)
        self._group = {
            "arena": arena.address,
            "peers": self._peers.data_ptr(),
            "status": self._status.address,
            "timeout_ns": int(cfg.timeout_s * 1e9),
            "rank": rank,
            "ranks": cfg.world_size,
            "experts": cfg.num_experts,
            "local_experts": cfg.local_experts,
            "top_k": cfg.top_k,
            "max_tokens": cfg.max_tokens_per_rank,
            "hidden": cfg.hidden,
            "slots": return_slots(cfg.world_size, cfg.top_k),
        }
        arch = architecture(device)
        self._kernels: dict[str, Kernel] = {}
        with torch.cuda.device(device):
            for name in (*DISPATCH_KERNELS, *COMBINE_KERNELS):
                fmt = cfg.dispatch_format if name in DISPATCH_KERNELS else None
                self._kernels[name] = Kernel(library.find(name, arch, fmt, cfg.hidden, cfg.top_k))
        torch.cuda.synchronize(device)

    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        """Output memory for `capacity` rows (default: as many as any routing can bring), to pass as `out`."""
        return DispatchBuffers.allocate(self.cfg, self.device, capacity)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        out: DispatchBuffers | None = None,
    ) -> Dispatched:
        """Send this rank's tokens to their experts and receive the tokens for its own experts, in one launch.

        Args:
            x: [T, hidden] bfloat16, 0 <= T <= max_tokens_per_rank (T may differ between ranks).
            topk_ids: [T, top_k] int32 expert ids; -1 masks an entry.
            router_weights: [T, top_k] float32; travel along, so that combine may use them ("partial" must).
            input_scale: float32[1] on the device, the format's global scale G; None: 1.
            out: buffers from `allocate`, overwritten; None allocates new ones.

        Returns:
            The rows for this rank's experts; valid once the stream has run.

        Raises:
            EPInputError: an argument breaks its contract. Nothing was launched.
            EPTimeout: an earlier call's wait had timed out.
        """
        self._dispatches.check_fused()
        sent, arguments = self._prepare_send(x, topk_ids, router_weights, input_scale)
        buffers, received = self._prepare_receive(out)
        shape = self._shape("dispatch", x.shape[0], sent.tokens_per_chunk)
        self._launch("dispatch", shape, arguments | received, (*sent.keep_alive, *_tensors(buffers)))
        self._dispatches.sent += 1
        self._dispatches.received += 1
        return self._result(sent, buffers)

    def dispatch_async(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> PendingDispatch:
        """The sending half of `dispatch`. At most two may be outstanding before their `dispatch_wait`."""
        self._dispatches.check_send()
        sent, arguments = self._prepare_send(x, topk_ids, router_weights, input_scale)
        shape = self._shape("dispatch_async", x.shape[0], sent.tokens_per_chunk)
        self._launch("dispatch_async", shape, arguments | _NO_DISPATCH_OUTPUT, sent.keep_alive)
        self._dispatches.sent += 1
        return sent

    def dispatch_wait(self, pending: PendingDispatch, out: DispatchBuffers | None = None) -> Dispatched:
        """The receiving half of `dispatch`, in the order of sending; same bytes as the fused call.

        Each batch in flight needs buffers of its own.
        """
        self._dispatches.check_wait(pending.number)
        buffers, received = self._prepare_receive(out)
        shape = self._shape("dispatch_wait", pending.topk_ids.shape[0], pending.tokens_per_chunk)
        self._launch("dispatch_wait", shape, _NO_DISPATCH_INPUT | received, _tensors(buffers))
        self._dispatches.received += 1
        return self._result(pending, buffers)

    def combine(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None = None,
        mode: str = "exact",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring the expert outputs home and sum them with the router weights, in one launch.

        Args:
            rows: [capacity, hidden] bfloat16, row i the expert's output for row i of `dispatched.tokens`.
            dispatched: what dispatch returned for these rows.
            router_weights: [T, top_k] float32, in exact mode only; None: the weights that dispatch was given.
            mode: "exact" sums K rows at the source in float32; "partial" sums on the expert's rank first, rounds that
                sum to bfloat16 and sends one row a rank: fewer bytes, one more rounding a rank.
            out: [T, hidden] bfloat16, overwritten; None allocates it.

        Returns:
            [T, hidden] bfloat16; zero where a token has only masked entries.

        Raises:
            EPInputError, EPTimeout: as `dispatch`.
        """
        self._combines.check_fused()
        weights = combine_weights(self.cfg, mode, router_weights, dispatched)
        sent = self._prepare_return(rows, dispatched)
        result, received = self._prepare_sum(dispatched, weights, out)
        shape = self._shape("combine", result.shape[0], dispatched.tokens_per_chunk)
        self._launch(f"combine_{mode}", shape, sent | received, (rows, result, weights))
        self._combines.sent += 1
        self._combines.received += 1
        return result

    def combine_async(self, rows: torch.Tensor, dispatched: Dispatched, mode: str = "exact") -> PendingCombine:
        """The sending half of `combine`. At most two may be outstanding before their `combine_wait`."""
        self._combines.check_send()
        check_mode(mode)
        if mode == "partial":
            combine_weights(self.cfg, mode, None, dispatched)
        sent = self._prepare_return(rows, dispatched)
        shape = self._shape("combine_async", dispatched.topk_ids.shape[0], dispatched.tokens_per_chunk)
        self._launch(f"combine_async_{mode}", shape, sent | _NO_COMBINE_OUTPUT, (rows,))
        self._combines.sent += 1
        return PendingCombine(self._combines.sent, dispatched, mode, rows)

    def combine_wait(
        self,
        pending: PendingCombine,
        router_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The receiving half of `combine`, in the order of sending; same bytes as the fused call."""
        self._combines.check_wait(pending.number)
        dispatched = pending.dispatched
        weights = combine_weights(self.cfg, pending.mode, router_weights, dispatched)
        result, received = self._prepare_sum(dispatched, weights, out)
        shape = self._shape("combine_wait", result.shape[0], dispatched.tokens_per_chunk)
        self._launch(f"combine_wait_{pending.mode}", shape, _NO_COMBINE_INPUT | received, (result, weights))
        self._combines.received += 1
        return result

    def synchronize(self) -> None:
        """Wait for this rank's work and raise what its kernels reported.

        Raises:
            EPTimeout: a peer did not arrive in time; names the peers, the phase, the epochs expected and seen.
            EPInputError: an expert id outside [-1, num_experts), or more rows than the output buffers hold.
        """
        self._work_stream().synchronize()
        self._raise_timeout()
        self._raise_input_error()

    def close(self) -> None:
        """Release the communicator's memory. After a timeout the arena is kept, since peers may still write to it."""
        if not self._closed:
            self._closed = True
            self._release(self)

    def free(self) -> None:
        """Give back everything but the arena; the group calls this when no kernel of the rank can run any more."""
        with torch.cuda.device(self.device):
            for kernel in self._kernels.values():
                kernel.unload()
        self._status.free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def failed(self) -> bool:
        """Whether a wait of this rank has timed out."""
        width = len(StatusWord)
        return any(self._status.words[: width * self.cfg.world_size : width])

    def _work_stream(self) -> torch.cuda.Stream:
        return self.stream if self._shared_device else torch.cuda.current_stream(self.device)

    def _shape(self, operation: str, tokens: int, chunk: int) -> Shape:
        return launch_shape(operation, self.cfg, tokens, chunk, self.max_ctas)

    def _prepare_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None,
        input_scale: torch.Tensor | None,
    ) -> tuple[PendingDispatch, dict[str, int]]:
        check_tokens(self.cfg, x, topk_ids, router_weights, self.device)
        check_input_scale(self.cfg.format, input_scale)
        if input_scale is not None and not isinstance(input_scale, torch.Tensor):
            input_scale = torch.tensor([input_scale], dtype=torch.float32, device=self.device)
        if input_scale is not None:
            check_tensor("input_scale", input_scale.view(1), shape=(1,), dtype=torch.float32, device=self.device)
        chunk = tokens_per_chunk(self.cfg, x.shape[0])
        arguments = {
            "x": x.data_ptr(),
            "topk_ids": topk_ids.data_ptr(),
            "router_weights": _address(router_weights),
            "global_scale": _address(input_scale),
            "tokens": x.shape[0],
            "chunk": chunk,
            "chunks": -(-x.shape[0] // chunk),
        }
        pending = PendingDispatch(
            self._dispatches.sent + 1, topk_ids, router_weights, chunk, (x, topk_ids, router_weights, input_scale)
        )
        return pending, arguments

    def _prepare_receive(self, out: DispatchBuffers | None) -> tuple[DispatchBuffers, dict[str, int]]:
        if out is None:
            with torch.cuda.stream(self._work_stream()):
                out = self.allocate()
        else:
            check_buffers(self.cfg, out, self.device)
        return out, {
            "out_tokens": out.tokens.data_ptr(),
            "out_scales": _address(out.scales),
            "row_offsets": out.row_offsets.data_ptr(),
            "scales_offsets": _address(out.scales_offsets),
            "expert_ids": out.expert_ids.data_ptr(),
            "src_info": out.src_info.data_ptr(),
            "num_rows": out.num_rows.data_ptr(),
            "row_map": out.row_map.data_ptr(),
            "headers": out.headers.data_ptr(),
            "weights": _address(out.weights),
            "capacity": out.tokens.shape[0],
        }

    def _result(self, sent: PendingDispatch, out: DispatchBuffers) -> Dispatched:
        return Dispatched(
            **vars(out),
            topk_ids=sent.topk_ids,
            router_weights=sent.router_weights,
            tokens_per_chunk=sent.tokens_per_chunk,
        )

    def _prepare_return(self, rows: torch.Tensor, dispatched: Dispatched) -> dict[str, int]:
        check_rows(self.cfg, rows, dispatched)
        return {
            "rows": rows.data_ptr(),
            "row_map": dispatched.row_map.data_ptr(),
            "headers": dispatched.headers.data_ptr(),
            "weights": _address(dispatched.weights),
            "capacity": rows.shape[0],
        }

    def _prepare_sum(
        self, dispatched: Dispatched, weights: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, int]]:
        tokens = dispatched.topk_ids.shape[0]
        if out is None:
            with torch.cuda.stream(self._work_stream()):
                out = torch.empty(tokens, self.cfg.hidden, dtype=torch.bfloat16, device=self.device)
        else:
            check_tensor(
                "out", out, shape=(tokens, self.cfg.hidden), dtype=torch.bfloat16, device=self.device, alignment=16
            )
        return out, {
            "out": out.data_ptr(),
            "topk_ids": dispatched.topk_ids.data_ptr(),
            "router_weights": weights.data_ptr(),
            "tokens": tokens,
            "chunk": dispatched.tokens_per_chunk,
            "chunks": -(-tokens // dispatched.tokens_per_chunk),
        }

    def _launch(
        self, name: str, shape: Shape, arguments: dict[str, int], tensors: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Enqueue one kernel on the work stream, after what the caller's stream has enqueued so far."""
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")
        self._raise_timeout()
        stream = self._work_stream()
        if self._shared_device and stream != (current := torch.cuda.current_stream(self.device)):
            stream.wait_stream(current)
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)
        every = self._group | arguments | {"send_ctas": shape.send_ctas, "receive_from": shape.receive_from}
        guard = nullcontext() if torch.cuda.current_device() == self.device.index else torch.cuda.device(self.device)
        with guard:
            self._kernels[name].launch(shape.grid, every, stream.cuda_stream)

    def _records(self) -> list[tuple[int, int, int, int]]:
        """(phase, index, expected, seen) of every peer, then of this rank's input."""
        width, words = len(StatusWord), self._status.words
        starts = range(0, width * (self.cfg.world_size + 1), width)
        return [(words[at], words[at + 1], words[at + 2], words[at + 3]) for at in starts]

    def _raise_timeout(self) -> None:
        if not self.failed:
            return
        missing = {peer: record for peer, record in enumerate(self._records()[:-1]) if record[0]}
        details = [
            f"{Phase(phase).name} of rank {peer}, index {index}: expected epoch {expected}, saw {seen}"
            for peer, (phase, index, expected, seen) in missing.items()
        ]
        phases = sorted({Phase(record[0]).name for record in missing.values()})
        raise EPTimeout(" / ".join(phases), self.rank, tuple(missing), tuple(details))

    def _raise_input_error(self) -> None:
        """Raise what a kernel found wrong with this rank's input, once."""
        phase, index, expected, seen = self._records()[-1]
        if not phase:
            return
        self._status.words[len(StatusWord) * self.cfg.world_size] = Phase.NONE
        if phase == Phase.EXPERT_ID:
            signed = seen - (1 << 32) if seen >> 31 else seen
            raise EPInputError(
                f"rank {self.rank}: topk_ids.flatten()[{index}] = {signed}: must be -1 or in [0, {expected})"
            )
        raise EPInputError(f"rank {self.rank}: out holds {expected} rows, but row {index} arrived")


_NO_DISPATCH_OUTPUT = dict.fromkeys(
    (
        "out_tokens",
        "out_scales",
        "row_offsets",
        "scales_offsets",
        "expert_ids",
        "src_info",
        "num_rows",
        "row_map",
        "headers",
        "weights",
        "capacity",
    ),
    0,
)
_NO_DISPATCH_INPUT = dict.fromkeys(("x", "topk_ids", "router_weights", "global_scale", "tokens", "chunk", "chunks"), 0)
_NO_COMBINE_OUTPUT = dict.fromkeys(("out", "topk_ids", "router_weights", "tokens", "chunk", "chunks"), 0)
_NO_COMBINE_INPUT = dict.fromkeys(("rows", "row_map", "headers", "weights", "capacity"), 0)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _tensors(buffers: DispatchBuffers) -> tuple[torch.Tensor | None, ...]:
    return tuple(vars(buffers).values())
