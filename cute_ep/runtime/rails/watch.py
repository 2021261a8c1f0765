"""The bound on exchanges of an engine that would wait for ever: a thread that looks how far they are.

Kernels tell the host which exchange has begun and which has ended, so it sees those of graph replays, too. One that
lasts longer than `timeout_s` has a record as a kernel's wait would: `EPTimeout` names the ranks that have not begun it.
To know them, a rank that waits for some time posts the round in the group's store; who has posted nothing is late.

After any failure, a kernel's too, the engine is ended, so that what the host has queued comes to its end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.mail import Channel, Piece
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime import driver_calls
from cute_ep.runtime.rails.waiting import within
from cute_ep.runtime.status import Status

Made = TypeVar("Made")
LOG = logging.getLogger(__name__)

PHASES = {Channel.FRAMES: Phase.FRAME, Channel.SUMS: Phase.SUMS}
MOST_TICK_S = 0.25
MOST_POST_S = 1.0
"""A rank that has waited so long, or a quarter of the timeout, posts for which round."""


class Watched(Protocol):
    """An engine, as it is watched."""

    def rounds(self, channel: Channel) -> tuple[int, int]:
        """The last exchange that has begun, and the last that has ended; 0: none."""

    def give_up(self) -> None:
        """End what is under way, and have this rank's kernels wait for nobody any more."""


class Board(Protocol):
    """Where ranks leave words for each other (`Meeting`)."""

    def post(self, name: str, text: str) -> None:
        """Leave this rank's word."""

    def posted(self, name: str, rank: int) -> str:
        """That of another rank, or ""."""


class Watch:
    """Looks at one rank's engine until `stop`.

    Args:
        status: its records, one for each rank of the rail.
        failed: whether some wait of this rank has failed.
        timeout_s: how long an exchange may last.
    """

    def __init__(
        self, engine: Watched, status: Status, board: Board, *, failed: Callable[[], bool], timeout_s: float
    ) -> None:
        self._engine, self._status, self._board = engine, status, board
        self._others = [rank for rank in status.peers if rank != status.rank]
        self._failed, self._timeout_s = failed, timeout_s
        self._tick_s, self._post_s = min(MOST_TICK_S, timeout_s / 8), min(MOST_POST_S, timeout_s / 4)
        self._since: dict[Channel, tuple[int, float]] = {}
        self._posted: dict[Channel, int] = dict.fromkeys(Channel, 0)
        self._failed_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cute_ep rail", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        try:
            with driver_calls.relaxed_capture():
                while not self._stop.wait(self._tick_s):
                    if self._look():
                        return
        except Exception:  # nobody may wait for what is not watched, nor take it for right
            LOG.exception("rank %s: exchanges between nodes end, they cannot be watched any more", self._status.rank)
            for channel in Channel:
                self._report(channel, self._others)
            self._engine.give_up()

    def _look(self) -> bool:
        """Whether the engine was ended."""
        if self._failed():
            self._failed_since = self._failed_since or time.monotonic()
            if time.monotonic() - self._failed_since > self._timeout_s / 2:  # until then peers may take what was sent
                self._engine.give_up()
                return True
            return False
        for channel in Channel:
            lasted = self._lasted(channel)
            begun = self._since[channel][0]
            if lasted > self._post_s and self._posted[channel] < begun:
                self._posted[channel] = begun
                self._ask(partial(self._board.post, channel.name, str(begun)), None)
            if lasted > self._timeout_s and self._still_lasts(channel, begun):
                nobody: Sequence[int] = ()
                late = self._ask(partial(self._late, channel, begun), nobody)
                self._report(channel, late or self._others)
                self._engine.give_up()
                return True
        return False

    def _lasted(self, channel: Channel) -> float:
        """Seconds since the exchange that is under way was first seen; 0: none is."""
        begun, ended = self._engine.rounds(channel)
        now = time.monotonic()
        if begun <= ended or self._since.get(channel, (0, now))[0] != begun:
            self._since[channel] = begun, now
        return now - self._since[channel][1]

    def _still_lasts(self, channel: Channel, begun: int) -> bool:
        """After the time in which a rank that began later than this one would have posted."""
        self._stop.wait(self._post_s + 2 * self._tick_s)
        return self._engine.rounds(channel) == (begun, begun - 1)

    def _late(self, channel: Channel, begun: int) -> Sequence[int]:
        """The ranks of which nobody knows that they have begun an exchange."""
        return [rank for rank in self._others if int(self._board.posted(channel.name, rank) or 0) < begun]

    def _ask(self, call: Callable[[], Made], otherwise: Made) -> Made:
        """What the board says; `otherwise`: it is gone, or silent, as that of a host that has lost its network."""
        try:
            return within(MOST_POST_S, call, "reach the group's store")
        except EPError as error:
            LOG.warning("rank %s: %s", self._status.rank, error)
            return otherwise

    def _report(self, channel: Channel, ranks: Sequence[int]) -> None:
        """A record for each of these ranks, whose part of the exchange that is under way has not come."""
        begun, ended = self._engine.rounds(channel)
        for rank in ranks if begun > ended else ():
            self._status.report(rank, PHASES[channel], len(Piece), begun, ended)
