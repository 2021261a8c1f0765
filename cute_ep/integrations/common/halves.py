"""Calls in two halves: rounds that were sent and wait for the hook that receives them. A communicator receives in the
order of sending, and has room for MAX_OUTSTANDING rounds. A hook that nobody has any more, as where a request was
aborted between the halves, would end that: so the next call receives its round and drops it. No other rank has to take
part, since all have sent the round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_ep import DispatchBuffers, Dispatched, EPCommunicator, EPError, EPInputError
from cute_ep.api.rounds import MAX_OUTSTANDING
from cute_ep.api.types import CombineMode
from cute_ep.runtime.group_pool import GroupPool


@dataclass(eq=False)
class Round:
    """One that `call` has sent. `receive` is what its hook does, `drop` receives for nobody. `captured`: whether it was
    sent into a CUDA graph; `lost`: whether nobody has the hook any more; `ended`: None, "received" or "given up"."""

    communicator: EPCommunicator
    call: str
    receive: Callable[[], object]
    drop: Callable[[], object]
    captured: bool
    lost: bool = False
    ended: str | None = None


class Hook:
    """Receives one round. Later calls do nothing, and a call that raises can be made again."""

    __slots__ = ("_halves", "_round")

    def __init__(self, halves: Halves, one: Round) -> None:
        self._halves, self._round = halves, one

    def __call__(self) -> None:
        """EPInputError: an earlier call's hook must be called first. EPError: the round was given up."""
        one, halves = self._round, self._halves
        if one.ended == "received":
            return
        if one.ended is not None:
            raise EPError(f"hook of {one.call}: its round was {one.ended}; make the call again")
        halves.drop_lost()
        if halves.oldest(one) is not one:
            raise EPInputError(f"hook of {one.call}: must be called after those of earlier calls; or {halves.remedy}")
        one.receive()
        halves.end(one, "received")

    def __del__(self) -> None:
        self._round.lost = True


class Halves:
    """The rounds of an adapter that wait for their hooks, in the order of sending. `remedy`: how to give them up."""

    def __init__(self, pool: GroupPool, remedy: str) -> None:
        self._pool, self.remedy = pool, remedy
        self._waiting: list[Round] = []

    def make_way(self, communicator: EPCommunicator, call: str, *, whole: bool) -> None:
        """Before `call` sends a round, and if it is `whole` receives it: drops lost ones. Rounds of different calls do
        not wait for each other. EPInputError: as many wait for their hooks as there may be."""
        self.drop_lost()
        waiting, most = sum(1 for one in self._waiting if _same(one, communicator, call)), MAX_OUTSTANDING
        if waiting and (whole or waiting >= most):
            rule = "before a call without one" if whole else f"at most {most} may be left"
            found = f"{call}: {waiting} hook(s) of earlier calls have not been called"
            raise EPInputError(f"{found}: must be called first, {rule}; or {self.remedy}")

    def dispatch(
        self,
        communicator: EPCommunicator,
        call: str,
        sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        out: DispatchBuffers,
        received: Callable[[Dispatched], object],
        *,
        hooked: bool,
        **options: Any,
    ) -> Hook | None:
        """Send rows, ids and weights, with `options` of a dispatch, behind `make_way`. `received` gets the batch: now,
        or if `hooked` from a hook."""
        captured = self._pool.note_capture(communicator)
        if not hooked:
            received(communicator.dispatch(*sent, out=out, **options))
            return None
        pending = communicator.dispatch_async(*sent, **options)

        def wait() -> Dispatched:
            return communicator.dispatch_wait(pending, out)

        return self.sent(Round(communicator, call, lambda: received(wait()), wait, captured))

    def combine(
        self,
        communicator: EPCommunicator,
        call: str,
        rows: torch.Tensor,
        batch: Dispatched,
        out: torch.Tensor,
        received: Callable[[], object] = object,
        *,
        hooked: bool,
        mode: CombineMode,
        weights: torch.Tensor | None = None,
    ) -> Hook | None:
        """As `dispatch`: rows to `out`, then `received`. A round that is dropped leaves `out` alone."""
        captured = self._pool.note_capture(communicator)
        if not hooked:
            communicator.combine(rows, batch, weights, mode=mode, out=out)
            received()
            return None
        pending = communicator.combine_async(rows, batch, mode=mode)

        def receive() -> None:
            communicator.combine_wait(pending, weights, out=out)
            received()

        def drop() -> None:
            communicator.combine_wait(pending, weights)

        return self.sent(Round(communicator, call, receive, drop, captured))

    def sent(self, one: Round) -> Hook:
        """The hook of a round, which was sent."""
        self._waiting.append(one)
        return Hook(self, one)

    def drop_lost(self) -> None:
        """Receive rounds whose hooks nobody has any more, as far as none that waits is before them."""
        for one in [one for one in self._waiting if one.lost]:
            if self.oldest(one) is one:
                self._drop(one)

    def give_up(self) -> None:
        """Receive all rounds and drop them; their hooks then raise EPError."""
        for one in list(self._waiting):
            self._drop(one)

    def forget(self) -> None:
        """End all rounds without receiving them, as the communicators are closed."""
        for one in list(self._waiting):
            self.end(one, "given up by destroy()")

    def _drop(self, one: Round) -> None:
        capturing = self._pool.capturing()
        if capturing and not one.captured:
            rule = f"no graph may receive its round; before a capture {self.remedy}"
            raise EPError(f"{one.call}: an earlier call's hook was lost, and {rule}")
        if one.captured and not capturing:
            raise EPError(f"{one.call}: was captured into a CUDA graph without its hook; destroy() and begin again")
        one.drop()
        self.end(one, "given up")

    def end(self, one: Round, how: str) -> None:
        """It waits no more."""
        self._waiting.remove(one)
        one.ended, one.receive, one.drop = how, object, object  # they hold tensors

    def oldest(self, one: Round) -> Round:
        """The first that waits of its call and communicator."""
        return next(other for other in self._waiting if _same(other, one.communicator, one.call))


def _same(one: Round, communicator: EPCommunicator, call: str) -> bool:
    return one.communicator is communicator and one.call == call
