"""Rounds in flight: what a sending half hands to its receiving half, and in which order the halves may come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from cute_ep.dispatched import Dispatched
from cute_ep.errors import EPInputError

Result = TypeVar("Result")


class PendingDispatch(NamedTuple):
    """A dispatch that was sent and not yet received: hand it to `dispatch_wait`, in the order of sending."""

    rounds: Rounds
    number: int
    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None
    return_pieces: int
    keep_alive: tuple[torch.Tensor | None, ...]


class PendingCombine(NamedTuple):
    """A combine that was sent and not yet received: hand it to `combine_wait`, in the order of sending."""

    rounds: Rounds
    number: int
    dispatched: Dispatched
    mode: str
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
    """Counts the rounds of one phase that were enqueued, and refuses an order that the buffers cannot serve."""

    def __init__(self, phase: str) -> None:
        self.phase, self.sent, self.received = phase, 0, 0

    def check_own(self, own: bool, pending: object, rank: int) -> None:
        """EPInputError unless a half was sent here: `own`."""
        if not own:
            whose = f"{self.phase}_async of this communicator, rank {rank},"
            raise EPInputError(f"pending = {type(pending).__name__}: must be what {whose} returned")

    def check_send(self) -> None:
        """EPInputError when MAX_OUTSTANDING sends already wait."""
        if self.sent - self.received >= MAX_OUTSTANDING:
            raise EPInputError(
                f"{self.phase}_async: {MAX_OUTSTANDING} are outstanding; call {self.phase}_wait for the oldest first"
            )

    def check_wait(self, number: int) -> None:
        """EPInputError unless round `number` is the oldest that was sent and not received."""
        if number != self.received + 1 or self.received == self.sent:
            raise EPInputError(
                f"{self.phase}_wait: this is round {number}, but the next to receive is {self.received + 1} "
                f"({self.sent - self.received} outstanding)"
            )

    def check_fused(self) -> None:
        """EPInputError when a split round is outstanding: a fused launch would receive that one."""
        if self.sent != self.received:
            raise EPInputError(
                f"{self.phase}: {self.sent - self.received} split round(s) outstanding; call {self.phase}_wait first"
            )

    def count_fused(self) -> None:
        """A fused launch was enqueued."""
        self.sent += 1
        self.received += 1
