"""Small types of DeepEP's interface: events and tuning parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

import torch


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
