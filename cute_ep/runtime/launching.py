"""How a rank launches on its GPU: on which stream, after what, and what of it can be launched again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.provenance import Origin
from cute_ep.api.rounds import Rounds
from cute_ep.runtime.driver import Kernel
from cute_ep.runtime.launch_cache import LaunchCache, LaunchShape
from cute_ep.runtime.parts import RankParts
from cute_ep.runtime.repeats import MAKING, Kind, Repeats
from cute_ep.torch_internals import current_stream, profiler_enabled

UNLAUNCHED = (EPError, RuntimeError)
"""What ends a call before it is launched: the driver, or torch where it allocates. A handler of signals may raise all
else, at any moment."""


class Call(NamedTuple):
    """A launch that is ready.

    Attributes:
        numbers: what the kernel is told, besides what it is bound to.
        tensors: what it reads and writes, besides those of `out` and `batch`.
        out: the buffers that it receives into.
        batch: whose rows it returns.
    """

    kernel: Kernel
    shape: LaunchShape
    numbers: tuple[int, ...]
    tensors: tuple[torch.Tensor | None, ...] = ()
    out: DispatchBuffers | None = None
    batch: Dispatched | None = None


def _read_by_combine(dispatched: Dispatched) -> tuple[torch.Tensor | None, ...]:
    """What combine reads of a batch, so what must be there until it has run."""
    return dispatched.topk_ids, dispatched.row_map, dispatched.headers, dispatched.weights


class Launching(EPCommunicator):
    """One rank on a GPU, as far as launches go.

    Attributes:
        tuning: launch shapes; another one may be set at any time, for the calls from then on.
    """

    stream: torch.cuda.Stream
    _kernels: Mapping[str, Kernel]
    _cache: LaunchCache

    def __init__(self, parts: RankParts, group: object) -> None:
        self.cfg, self.rank, self.device, self.hooks = parts.cfg, parts.rank, parts.device, parts.hooks
        self.group, self.origin = group, Origin(parts.cfg, parts.rank, parts.device, parts.hooks)
        self.tuning = parts.tuning
        self._shared_device = parts.shared_device
        self._interrupted = False
        self._pdl = False  # whether the last launch lets the next one start early
        self._streams: set[int] = set()  # raw handles of the streams that were given work since `synchronize`
        self._repeats: Repeats | None = None

    def _work_stream(self) -> torch.cuda.Stream:
        return self.stream if self._shared_device else self._current_stream()

    def _on_work_stream(self) -> AbstractContextManager:
        """Make the work stream the current one, to allocate what a launch writes. torch takes microseconds for it, also
        where it is."""
        return torch.cuda.stream(self.stream) if self._shared_device else nullcontext()

    def _current_stream(self) -> torch.cuda.Stream:
        """The caller's; torch takes 1 us to look up a device by anything but its index."""
        return torch.cuda.current_stream(self.device.index)

    def _check_planned_on(self, stream: int) -> None:
        """EPInputError where another stream, a raw handle, is current: on this one memory was prepared."""
        current = current_stream(self.device.index)
        if current != stream:
            raise EPInputError(
                f"launch: the current stream is {current:#x}: must be {stream:#x}, on which the call was planned"
            )

    def _may_repeat(self, rounds: Rounds, outstanding: int = 0) -> bool:
        """Whether a call that needs at most so many outstanding rounds may be launched without more checks, if it is
        like one before."""
        return self._repeats is not None and rounds.sent - rounds.received <= outstanding

    def _whole(self, dispatched: Dispatched) -> bool | None:
        """Whether it is a batch of this communicator of which nothing need be checked; False: it was put together from
        tensors, which are. None: it is neither."""
        if not isinstance(dispatched, Dispatched):
            return None
        return False if dispatched.stamp is None else dispatched.is_whole(self.origin) or None

    def _launch_again(
        self,
        operation: str,
        kind: Kind | None,
        count: Callable[..., None],
        pending_of: Callable[[LaunchShape], object] | None = None,
        out: DispatchBuffers | None = None,
    ) -> tuple[LaunchShape, Any] | None:
        """Launch a call if one of its kind was launched, and count it with `count`, of `Rounds`.

        Args:
            kind: of a function of `repeats`; None: the call is not to be launched so.
            pending_of: makes what `count` is given.
            out: the caller's buffers that it receives into.

        Returns:
            Its shape, and what was made for it. None: nothing was launched.
        """
        repeats = self._repeats
        if repeats is None or kind is None or self._closed or self._interrupted or self._check_finite:
            return None
        stream = current_stream(self.device.index)
        if profiler_enabled() or (self._shared_device and stream != self.stream.cuda_stream):
            return None
        calls, inference = repeats.calls[operation], torch.is_inference_mode_enabled()
        try:
            again = calls.launch(stream, self._pdl, *kind, self.tuning, inference)
            if again is None:
                return None
            shape, made = again
            self._pdl = bool(shape.grid.pdl)
            self._streams.add(stream)
            if out is not None or operation in MAKING:
                (out or made).memory.generation.number += 1  # what they held is gone
            if pending_of is None:
                count()
            else:
                made = pending_of(shape)
                count(made)
        except BaseException as error:
            self._interrupted |= not isinstance(error, UNLAUNCHED)
            raise
        return shape, made

    def _keep(self, operation: str, kind: Kind | None, call: Call, result: torch.Tensor | None = None) -> None:
        """Let calls of the kind of one that was launched be launched again."""
        if self._repeats is not None and kind is not None:
            kind = *kind, self.tuning, torch.is_inference_mode_enabled()
            bound = call.kernel not in self._kernels.values()
            spans = self._cache.spans(call.out) if bound and call.out is not None else None
            self._repeats.keep(operation, kind, call.kernel, call.shape, call.numbers, spans, result)

    def _launch(self, call: Call, count: Callable[..., None], *counted: object) -> None:
        """Enqueue one kernel on the work stream, after what the caller's stream has enqueued so far, and count it with
        `count`, of `Rounds`. An interrupt in between would leave the host and the device with different counts: no
        call is taken after it."""
        kernel, shape, numbers, tensors, out, batch = call
        stream = current_stream(self.device.index)
        if self._shared_device and stream != self.stream.cuda_stream:
            self.stream.wait_stream(self._current_stream())
            received = tensors_of(out).values() if out else ()
            for tensor in (*tensors, *received, *(_read_by_combine(batch) if batch else ())):
                if tensor is not None:
                    tensor.record_stream(self.stream)
            stream = self.stream.cuda_stream
        pdl = bool(shape.grid.pdl)
        early, self._pdl = pdl and self._pdl, pdl
        self._streams.add(stream)
        if out is not None:
            out.memory.generation.number += 1  # what it held is gone
        try:
            if torch.cuda.current_device() == self.device.index:
                kernel.launch(shape.ctas, numbers, stream, early=early, pairs=shape.pairs, threads=shape.threads)
            else:
                with torch.cuda.device(self.device):
                    kernel.launch(shape.ctas, numbers, stream, early=early, pairs=shape.pairs, threads=shape.threads)
            count(*counted)
        except BaseException as error:
            self._interrupted |= not isinstance(error, UNLAUNCHED)
            raise
