"""Rounds in flight: what a sending half hands to its receiving half, and in which order the halves may come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.types import CombineMode

Result = TypeVar("Result")


class PendingDispatch(NamedTuple):
    """A dispatch that was sent and not yet received: hand it to `dispatch_wait`, in the order of sending."""

    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None
    return_slices_log2: int
    keep_alive: tuple[torch.Tensor | None, ...]
    frame: int | None = None


class PendingCombine(NamedTuple):
    """A combine that was sent and not yet received: hand it to `combine_wait`, in the order of sending."""

    dispatched: Dispatched
    mode: CombineMode
    rows: torch.Tensor


@dataclass(frozen=True)
class Plan(Generic[Result]):
    """A call whose arguments were checked and prepared: `launch` enqueues it and returns what the call returns.

    For one host thread that drives several ranks: what is left to do between their launches is short.
    """

    launch: Callable[[], Result]


MAX_OUTSTANDING = 2
"""Sends of one phase before their waits: there are two buffers, and the third send would wait for the first wait."""


class Rounds:
    """The rounds of one phase that a rank has enqueued: counts them, keeps those that were sent and not received, and
    refuses an order that the buffers cannot serve. Numbers begin at 1."""

    def __init__(self, phase: str) -> None:
        self.phase, self.sent, self.received = phase, 0, 0
        self._outstanding: deque[Any] = deque()

    def check_send(self) -> None:
        """EPInputError when MAX_OUTSTANDING sends already wait."""
        if self.sent - self.received >= MAX_OUTSTANDING:
            raise EPInputError(
                f"{self.phase}_async: {MAX_OUTSTANDING} are outstanding; call {self.phase}_wait for the oldest first"
            )

    def check_fused(self) -> None:
        """EPInputError when a split round is outstanding: a fused launch would receive that one."""
        if self.sent != self.received:
            raise EPInputError(
                f"{self.phase}: {self.sent - self.received} split round(s) outstanding; receive them first with "
                f"{self.phase}_wait (without an argument it takes the oldest, also one whose pending was lost)"
            )

    def oldest(self, pending: object | None, rank: int) -> Any:
        """What `count_sent` was given for the oldest round that is outstanding.

        Raises:
            EPInputError: there is none, or `pending` is given and is not that.
        """
        if pending is not None and not any(pending is one for one in self._outstanding):
            whose = f"{self.phase}_async of this communicator, rank {rank},"
            raise EPInputError(
                f"pending = {type(pending).__name__}: must be what {whose} returned, and not received before"
            )
        if not self._outstanding:
            raise EPInputError(f"{self.phase}_wait: no round is outstanding; call {self.phase}_async first")
        if pending is not None and pending is not self._outstanding[0]:
            number = self.received + 1 + next(at for at, one in enumerate(self._outstanding) if one is pending)
            raise EPInputError(
                f"pending = round {number} of {self.phase}: must be round {self.received + 1}, the oldest of "
                f"{len(self._outstanding)} that are outstanding"
            )
        return self._outstanding[0]

    def count_sent(self, pending: object) -> None:
        """A sending half was enqueued; `pending` is what its receiving half will need."""
        self._outstanding.append(pending)
        self.sent += 1

    def count_received(self) -> None:
        """The receiving half of the oldest outstanding round was enqueued."""
        self._outstanding.popleft()
        self.received += 1

    def count_fused(self) -> None:
        """A fused launch was enqueued."""
        self.sent += 1
        self.received += 1
