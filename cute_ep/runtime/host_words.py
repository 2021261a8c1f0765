"""Numbers that a kernel tells the host, which polls for them: no copy, and no wait for a stream.

A number is an LL word of page-locked memory: its value below the low 32 bits of its epoch, in one 64-bit store, so a
word that the host sees of an epoch is whole, whatever else it sees. Records have two places by turns, so a second one
may be on its way before the first was taken.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable

from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import LL_BYTES, PARITIES
from cute_ep.runtime.driver import HostMemory
from cute_ep.runtime.launcher import taker

EPOCH_MASK = (1 << 32) - 1
SPIN_S, PAUSE_S = 2e-3, 5e-5
"""How long a wait gives way to other threads after each poll, and how long it sleeps after each of the later ones."""
POLLS_PER_CHECK = 32
"""Polls before a wait looks whether it is in vain, which takes as long as some polls."""
ENDED_EVERY_S = 0.1
"""Between two questions whether the stream has ended its work; asking costs as much as a launch."""


def give_way(seconds: float) -> None:
    """Let other threads run, for so long if it is not 0: then as briefly as can be, where a sleep of 0 takes 80 us."""
    if seconds:
        time.sleep(seconds)
    else:
        os.sched_yield()


class HostWords:
    """Records of at most `room` words that kernels of any device may store, counted from 1."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._memory = HostMemory(PARITIES * room * LL_BYTES // 4)
        self._words = (ctypes.c_uint64 * (PARITIES * room)).from_address(self._memory.address)
        self._numbers = itertools.count(1)
        self._take = taker()

    def begin(self) -> tuple[int, int, int]:
        """The next record: its number, the address of its words, and their epoch."""
        number = next(self._numbers)
        return number, self._memory.address + LL_BYTES * self._first(number), number & EPOCH_MASK

    def take(self, number: int, count: int) -> list[int] | None:
        """The values of a record of so many words; None: not all have come.

        Raises:
            EPInputError: a later record has begun to take its place.
        """
        first, epoch = self._first(number), number & EPOCH_MASK
        if self._take is not None:
            taken = self._take(self._memory.address + LL_BYTES * first, count, epoch)
            if taken is not None:
                return taken
        if self._words[first + count - 1] >> 32 != epoch and not self._is_later(first + count - 1, epoch):
            return None  # the last word is as a rule among the last to come
        found = self._words[first : first + count]
        if min(found) >> 32 == max(found) >> 32 == epoch:
            return [word & EPOCH_MASK for word in found]
        if any(self._is_later(place, epoch) for place in range(first, first + count)):
            raise EPInputError(
                f"record {number} of the host: must be waited for before a second one after it is begun; at most "
                f"{PARITIES} may be on their way"
            )
        return None

    def wait(self, number: int, count: int, failed: Callable[[], bool], ended: Callable[[], bool]) -> list[int] | None:
        """`take` a record as soon as it is there; other threads run meanwhile. None: it does not come.

        Args:
            failed: whether the kernels before the one that tells have reported why it tells nothing.
            ended: whether the stream has done its work; raises what its device has.
        """
        began, polls, asked, pause = time.monotonic(), 0, 0.0, 0.0
        while (found := self.take(number, count)) is None:
            polls += 1
            if pause or polls % POLLS_PER_CHECK == 0:
                elapsed = time.monotonic() - began
                pause, due = 0.0 if elapsed < SPIN_S else PAUSE_S, elapsed - asked > ENDED_EVERY_S
                asked = elapsed if due else asked
                if failed() or (due and ended()):
                    return self.take(number, count)  # it may have come in between
            give_way(pause)
        return found

    def free(self) -> None:
        """Give the memory back; no kernel may store to it any more. Records that were not taken do not come."""
        self._words, self._take = type(self._words)(), None
        self._memory.free()

    def _first(self, number: int) -> int:
        """Where a record begins, in words."""
        return number % PARITIES * self._room

    def _is_later(self, place: int, epoch: int) -> bool:
        """Whether a word is of a later record than that of an epoch. Epochs compare as signed numbers."""
        return 0 < (self._words[place] >> 32) - epoch & EPOCH_MASK < 1 << 31
