"""Rounds of the reference backend: what the ranks send, and who fills which results when all have sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cute_ep.api.errors import EPError, EPTimeout
from cute_ep.api.flags import Flag
from cute_ep.api.rounds import Rounds
from cute_ep.layouts.maps.routing import Phase

Receiver = Callable[[Mapping[int, Any]], None]
"""Fills one rank's results from what every rank has sent."""


@dataclass(eq=False)
class Round:
    """One collective call of all its ranks: arguments as they arrive, receivers as they are called."""

    number: int
    arguments: dict[int, Any] = field(default_factory=dict)
    receivers: dict[int, Receiver] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)


class Collective:
    """The rounds of dispatch or of combine. A rank's n-th call belongs to the n-th call of every other rank.

    Attributes:
        ranks: who exchanges messages.
        order: the counters of the ranks that live in this process.
    """

    def __init__(self, name: str, phase: Phase, ranks: Sequence[int], here: Sequence[int] | None = None) -> None:
        self.name, self.phase, self.ranks = name, phase, ranks
        self.order = {rank: Rounds(name) for rank in (ranks if here is None else here)}
        # by number, ascending; a round that all ranks here have been given is dropped
        self._live: dict[int, Round] = {}
        self._errors: dict[int, EPError] = {}
        self._cut: set[int] = set()
        self._closed: set[int] = set()

    def joined(self, rank: int) -> Mapping[int, Any]:
        """What has arrived already for the round that the next `send` of `rank` joins, by rank."""
        one = self._live.get(self.order[rank].sent + 1)
        return {} if one is None else one.arguments

    def send(self, rank: int, pending: object, arguments: Any) -> int:
        """Join the next round, which `pending` stands for; its number. Where an interrupt or an error ends this before
        all have been told, `raise_error` refuses every later call."""
        post = self._prepare_post(rank, arguments)
        self._cut.add(rank)
        self.order[rank].count_sent(pending)
        number = self.order[rank].sent
        one = self._live.setdefault(number, Round(number))
        one.arguments[rank] = arguments
        post(number)
        self._cut.discard(rank)
        self._progress(one)
        return number

    def _prepare_post(self, rank: int, arguments: Any) -> Callable[[int], None]:
        """What tells other processes, given the number of the round: nothing, as there are none."""
        return lambda number: None

    def receive(self, rank: int, receiver: Receiver) -> bool:
        """Receive the oldest round that `rank` has sent: `receiver` is called once all have sent. Whether it was.
        Counted last: a round whose receiver was interrupted can be received again."""
        number = self.order[rank].received + 1
        one = self._live.setdefault(number, Round(number))
        one.receivers[rank] = receiver
        one.filled.discard(rank)
        self._progress(one)
        self.order[rank].count_received()
        if len(one.filled) == len(self.order) and all(number <= order.received for order in self.order.values()):
            del self._live[number]
        return rank in one.filled

    def is_filled(self, rank: int, number: int) -> bool:
        """Whether the results of a round that `rank` has received are in place."""
        return number not in self._live or rank in self._live[number].filled

    def missing(self, number: int) -> tuple[int, ...]:
        """The ranks that have not joined a round."""
        one = self._live.get(number)
        return () if one is None else tuple(rank for rank in self.ranks if rank not in one.arguments)

    def behind(self, rank: int) -> list[Flag]:
        """The calls of peers that the oldest round needs which `rank` waits for."""
        waiting = self._waiting(rank)
        return self._calls(waiting[0], self.missing(waiting[0])) if waiting else []

    def _calls(self, number: int, missing: Sequence[int]) -> list[Flag]:
        """A round's calls of the ranks that have not made them."""
        seen = {peer: self.order[peer].sent if peer in self.order else number - 1 for peer in missing}
        return [Flag("calls", (peer,), 1, self.name, number, peer, last, number) for peer, last in seen.items()]

    def completed(self, rank: int) -> int:
        """Rounds that `rank` has received and whose results are in place."""
        return self.order[rank].received - len(self._waiting(rank))

    def _waiting(self, rank: int) -> list[int]:
        """Rounds that `rank` has received and whose results are not in place."""
        received = self.order[rank].received
        return [number for number, one in self._live.items() if number <= received and rank not in one.filled]

    def timeout(self, rank: int, number: int, missing: Sequence[int], details: Sequence[str] = ()) -> EPTimeout:
        """The error of `rank` that waits for round `number` in vain."""
        lines = details or [
            f"rank {flag.peer}: expected {number} {self.name} calls, saw {flag.seen}"
            + (", has closed its communicator" if flag.peer in self._closed else "")
            for flag in self._calls(number, missing)
        ]
        return EPTimeout(self.phase.name, rank, tuple(missing), tuple(lines))

    def overdue(self, rank: int, patience: int = 1) -> EPTimeout | None:
        """The error for the oldest round that `rank` has received and whose results are not in place, if there are
        `patience` of them, or that round is one for which a peer has closed."""
        waiting = self._waiting(rank)
        if not waiting:
            return None
        missing = self.missing(waiting[0])
        if len(waiting) < patience and self._closed.isdisjoint(missing):
            return None
        return self.timeout(rank, waiting[0], missing)

    def close(self, rank: int) -> None:
        """`rank` joins no more rounds."""
        self._closed.add(rank)

    def raise_error(self, rank: int) -> None:
        """EPError when it is not known whether all have been told what `rank` sent; once, when its results could not be
        written."""
        if rank in self._cut:
            raise EPError(f"rank {rank}: a call was interrupted while it sent; close, and connect again")
        if rank in self._errors:
            raise self._errors.pop(rank)

    def _progress(self, one: Round) -> None:
        """Fill what can be filled. What fails for a rank is that rank's error: the call may be another one's."""
        if len(one.arguments) < len(self.ranks):
            return
        for rank in [rank for rank in one.receivers if rank not in one.filled]:  # in the order of their calls
            try:
                one.filled.add(rank)
                one.receivers[rank](one.arguments)
            except BaseException as error:
                if isinstance(error, EPError):
                    self._errors[rank] = error
                else:
                    what = f"{self.name} round {one.number} has no results"
                    self._errors[rank] = EPError(f"rank {rank}: {what}, {type(error).__name__}: {error}")
                    self._errors[rank].__cause__ = error
                if not isinstance(error, Exception):
                    raise


class Exchange:
    """Dispatch and combine of the ranks of one process, or of one rank that exchanges messages with nobody."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.dispatch = Collective("dispatch", Phase.ROUTE_TABLE, ranks)
        self.combine = Collective("combine", Phase.RETURN_ROUND, ranks)

    def close(self, rank: int) -> None:
        """`rank` joins no more rounds; those that it has joined still count."""
        self.dispatch.close(rank)
        self.combine.close(rank)
