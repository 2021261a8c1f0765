"""What the calls of all buffers have in common, and small types of DeepEP's interface: events, tuning parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import NoReturn, ParamSpec, Self, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from cute_ep import EPCommunicator, EPError, EPInputError
from cute_ep.api.tensors import check_written
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import Names, require
from cute_ep.integrations.common.pools import Words
from cute_ep.layouts.maps.formats import FP8
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS
from cute_ep.reference.routes import NO_EXPERT
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.runtime.pool import Hold
from cute_ep.torch_internals import set_gradients

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""bfloat16 rows, or float8_e4m3fn rows and their scale factors."""
NAMES: Names = {"hidden": "x.shape[1]", "top_k": "topk_idx.shape[1]", "world_size": "group.size()"}


class EventHandle:
    """What the current CUDA stream has been given so far; without a GPU, where results are finished, nothing."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap(AbstractContextManager["EventOverlap"]):
    """An event that a call returned, None without its `async_finish`, and `extra_tensors`, which live
    as long as it. As a context manager it makes the current stream wait at the end of the block."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[torch.Tensor] | None = None) -> None:
        self.event, self.extra_tensors, self._release = event, extra_tensors, False
        self._hook: Callable[[], None] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event, which must not be None, then call the registered hook."""
        assert self.event is not None, "there is no event: the call that returned this had async_finish=False"
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Have `hook_after_wait` called once, by the next `current_stream_wait`."""
        assert self._hook is None, "a hook is registered already"
        self._hook = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        """Itself; the block that it is used for then drops the event at its end, if `release_handle`."""
        self._release = release_handle
        return self

    def __exit__(self, *error: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)
        self._release = False


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning parameters, which have no effect: `cute_ep.Tuning` has launch shapes, `set_num_sms` SMs."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: communicators allocate their memory when a call needs it."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


def without_gradients(call: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """As `torch.no_grad`, in less of the host's time."""

    @wraps(call)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        try:
            set_gradients(False)
            return call(*args, **kwargs)
        finally:
            set_gradients(True)

    return wrapped


def refuse(buffer: type, names: str) -> None:
    """Give a class the methods of DeepEP, static or not, that the adapter does not have: they raise EPError."""

    def method(name: str) -> Callable[..., NoReturn]:
        def refused(*arguments: object, **named: object) -> NoReturn:
            raise EPError(f"{name}: this adapter does not have it (docs/deep_ep.md)")

        refused.__name__, refused.__doc__ = name, "Not supported: raises EPError."
        return refused

    for name in names.split():
        setattr(buffer, name, method(name))


@dataclass(frozen=True)
class LayoutWords(Words):
    """Words of entries behind which `layout.routes_of` may have put more. `own`: communicators that sent such last."""

    ids: str = "topk_idx"
    room: str = "num_tokens_per_rank, num_tokens_per_expert or num_worst_tokens"
    own: set[EPCommunicator] = field(default_factory=set)

    def entry(self, communicator: EPCommunicator, index: int, experts: int, seen: int) -> str:
        more = communicator.cfg.world_size * communicator.cfg.nodes if communicator in self.own else 0
        beyond = seen == NO_EXPERT or seen < 0
        return super().entry(communicator, index, experts - more, seen if beyond else seen - more)


class Pooled:
    """What both buffers have: the pool of a process group, and words of what kernels have found wrong."""

    _most_ranks = MAX_RANKS

    def __init__(self, group: dist.ProcessGroup) -> None:
        checks.group("group", group, self._most_ranks)
        self.group, self._pool, self._words = group, GroupPool(group, grows=True), LayoutWords()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that calls run on: the current one. EPError: there is no GPU."""
        if self._pool.device.type == "cpu":
            raise EPError("get_comm_stream: there are no streams without a GPU")
        return torch.cuda.current_stream()


def check_experts(num_experts: int, ranks: int, name: str = "num_experts") -> None:
    """EPInputError unless each rank has as many experts."""
    checks.integer(name, num_experts, 1, MAX_EXPERTS)
    ok = num_experts % ranks == 0
    require(ok, "{} = {}: must be a positive multiple of the group's {} ranks", name, num_experts, ranks)


def check_open(hold: Hold) -> None:
    """EPInputError if the communicator that a handle needs was closed."""
    if hold.communicator.closed:
        why = "by destroy() or, once it had been combined, for a dispatch of more tokens"
        raise EPInputError(f"handle: the memory that it needs was given back, {why}; dispatch again")


def check_payload(x: Rows, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows, scale factors or None) of a dispatch's `x`. EPInputError unless these are `Rows`: with 32-bit scale
    factors, at most one for 128 elements, as many rows of them as of the payload."""
    if not isinstance(x, tuple):
        checks.given("x", x, shape=(None, None), dtype=torch.bfloat16, device=device)
        return x, None
    require(len(x) == 2, "len(x) = {}: must be 2, rows and their scale factors", len(x))
    payload, scales = x
    checks.given("x[0]", payload, shape=(None, None), dtype=torch.float8_e4m3fn, device=device)
    rows, hidden = payload.shape
    multiple = FP8.block
    require(hidden > 0 and hidden % multiple == 0, "x[0].shape[1] = {}: must be a multiple of {}", hidden, multiple)
    checks.given("x[1]", scales, shape=(rows, None), dtype=(torch.float32, torch.int32), device=device)
    columns, most = scales.shape[1], hidden // multiple
    require(columns <= most, "x[1].shape[1] = {}: must not exceed x[0].shape[1] / {} = {}", columns, multiple, most)
    return payload, scales


def check_stats(stats: torch.Tensor | None, experts: int, device: torch.device) -> None:
    """EPInputError unless a dispatch can add numbers of rows of so many local experts to this, or it is None."""
    if stats is not None:
        name = "cumulative_local_expert_recv_stats"
        checks.given(name, stats, shape=(experts,), dtype=torch.int32, device=device)
        check_written(name, stats)


def paired(rows: torch.Tensor, factors: torch.Tensor | None) -> Rows:
    """`Rows` to return."""
    return rows if factors is None else (rows, factors)


def finished(asked: bool) -> EventOverlap:
    """The event to return, of what the current stream has been given."""
    return EventOverlap(EventHandle() if asked else None)
