"""Communicators that give way to larger ones: of each kind of rows there is one, for the most tokens seen.

When a call needs more room than there is, all ranks connect a larger communicator, which then serves smaller calls too.
Before that they tell each other which of the smaller ones they still need, and close those that nobody does. A rank
needs one with which it has captured a CUDA graph, until the end: replays run no Python. And it needs one while a `Hold`
of it lives, which whoever will call it again has. What is kept is looked at again when the next larger one connects.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.integrations.common.checks import Names
from cute_ep.integrations.common.connections import SAME, Connections, serves
from cute_ep.runtime.meeting import Meeting


def gather(group: dist.ProcessGroup, one: Any) -> list:
    """What every rank gives, in the order of ranks; collective. EPError: a rank does not come, or connects instead."""
    call = "agree on which memory to give back"
    with Meeting(group, call) as meeting:
        return meeting.gather(one, meeting.patience_s, call)


class Hold:
    """Keeps the communicator that it was made for open as long as it lives, or until it is ended."""

    __slots__ = ("_all", "_communicator")

    def __init__(self, communicator: EPCommunicator, everyone: set[int]) -> None:
        """`everyone`: the ids of all holds of the communicator; adding and discarding one is atomic."""
        self._communicator, self._all = communicator, everyone
        everyone.add(id(self))

    def end(self) -> None:
        """From now on a larger communicator may take the place of this one."""
        self._all.discard(id(self))

    __del__ = end

    def check_open(self, name: str) -> None:
        """EPInputError, which begins with `name`, if the communicator is closed."""
        if self._communicator.closed:
            raise EPInputError(
                f"{name}: the memory that it needs was given back, by destroy() or, once it had been combined, for a "
                "dispatch of more tokens; dispatch again"
            )


class GrowingConnections(Connections):
    """Connections of which larger ones take the place of smaller ones."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._holds: dict[EPCommunicator, set[int]] = defaultdict(set)
        self._captured: set[EPCommunicator] = set()

    def hold(self, communicator: EPCommunicator) -> Hold:
        """A hold of a communicator that was `get`, for calls to come."""
        return Hold(communicator, self._holds[communicator])

    def note_capture(self, communicator: EPCommunicator) -> bool:
        """To be called with each launch: keeps the communicator open for good if it goes into a CUDA graph. Whether it
        does."""
        capturing = self.capturing()
        if capturing:
            self._captured.add(communicator)
        return capturing

    def _connect(self, cfg: EPConfig, sms: int | None, names: Names = SAME) -> EPCommunicator:
        """Connect, and before that close what is smaller and needed by no rank."""
        smaller = [own for own in self._open if serves(cfg, own)]
        if smaller:
            wanted = gather(self._group, {own: self._is_needed(self._open[own]) for own in smaller})
            for own in smaller:
                if not any(needed.get(own, True) for needed in wanted):
                    self._close(own)
            self._found.clear()  # smaller calls take the larger one from now on
        return super()._connect(cfg, sms, names)

    def _is_needed(self, communicator: EPCommunicator) -> bool:
        return communicator in self._captured or bool(self._holds[communicator])

    def _close(self, cfg: EPConfig) -> None:
        communicator = self._open[cfg]
        super()._close(cfg)
        self._holds.pop(communicator, None)
        self._captured.discard(communicator)
