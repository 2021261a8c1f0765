"""Waits of the host for other ranks: bounded, and not silent."""

from __future__ import annotations

import logging
import time

FIRST_WORD_S = 5.0
"""After so many seconds a wait says for the first time who is missing, then whenever it has taken twice as long."""


class Wait:
    """One wait for other ranks, from now on.

    Args:
        limit_s: how long it may take.
        log: of the module that waits.
    """

    def __init__(self, limit_s: float, log: logging.Logger) -> None:
        self._began, self._limit_s, self._log, self._next_s = time.monotonic(), limit_s, log, FIRST_WORD_S

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the limit; not positive when it is over."""
        return self._limit_s - self.elapsed

    @property
    def until_word(self) -> float:
        """Seconds until there is something to say or the limit is reached; not negative."""
        return max(0.0, min(self._next_s - self.elapsed, self.left))

    @property
    def is_due(self) -> bool:
        """Whether it is time to say who is missing."""
        return self.elapsed >= self._next_s

    def say(self, rank: int, missing: str, what: str) -> None:
        """Warn, when it is due, that this rank waits.

        Args:
            missing: the ranks that are waited for, in words.
            what: that they have yet to do, a verb and more.
        """
        if not self.is_due:
            return
        while self.is_due:
            self._next_s *= 2
        self._log.warning(
            "rank %d has waited %.3g s for %s to %s; it gives up after %g s",
            rank,
            self.elapsed,
            missing,
            what,
            self._limit_s,
        )
