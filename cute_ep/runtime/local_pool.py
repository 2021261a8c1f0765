"""Pools of communicators whose ranks are all in this process. `pool` has the rules."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import RLock
from typing import Any

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.host import is_capturing
from cute_ep.api.interface import EPCommunicator
from cute_ep.runtime import connection
from cute_ep.runtime.pool import Opened, Pool, serves

CALLING = RLock()
"""Of whoever launches the calls of all ranks of a process, opens or closes. What opens or closes waits for all kernels
that run in the process and keeps other threads from launching what these wait for."""
_ABANDONED: deque[list[Opened]] = deque()
"""What pools had open that nobody has any more. A garbage collector, which finds that, may run between the launches of
two ranks, where closing would wait for the second one for ever."""


class LocalPool(Pool):
    """Communicators of all ranks of a group, which are in this process, a device each; its methods may be called from
    any thread. What is open when nobody has the pool any more is closed by the next call of `sweep` of any pool, and so
    is what gives way once nothing holds it.

    Attributes:
        devices: one a rank, as of `connect_local`.
    """

    def __init__(self, devices: Sequence[torch.device], *, grows: bool = False) -> None:
        super().__init__(grows=grows)
        self.devices = list(devices)
        self._end = weakref.finalize(self, _ABANDONED.append, self._open)
        self._end.atexit = False

    @cached_property
    def device(self) -> torch.device:
        """Of the first rank."""
        return self.devices[0]

    def abandon(self) -> None:
        """Have the next `sweep` close all, whatever holds it."""
        if self._end.detach():
            _ABANDONED.append(self._open)

    def sweep(self) -> None:
        """Close what nobody has any more, of this pool and of others that were abandoned; between two calls only. What
        is on a GPU stays for a later call during a capture."""
        with CALLING:
            for _ in range(len(_ABANDONED)):
                group = _ABANDONED.popleft()
                if any(is_capturing(one.first.device) for one in group):
                    _ABANDONED.append(group)
                    continue
                for one in group:
                    for communicator in one.communicators:
                        communicator.close()
            if self._grows and len(self._open) > 1 and not self.capturing():
                for one in list(self._open):
                    if self._has_successor(one) and not self._is_needed(one):
                        self._close(one)

    def close(self, communicators: Sequence[EPCommunicator] | None = None) -> None:
        with CALLING:
            super().close(communicators)

    def _has_successor(self, one: Opened) -> bool:
        return any(other is not one and serves(other.first.cfg, one.first.cfg) for other in self._open)

    def _connect(self, cfg: EPConfig, check: Callable[[], None], **options: Any) -> tuple[EPCommunicator, ...]:
        check()
        with CALLING:
            self.sweep()
            return tuple(connection.connect_local(cfg, self.devices, **options))
