"""Ctrl-C at random places: see `interrupts`."""

from __future__ import annotations

import dis
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from types import CodeType, FrameType

import cute_ep
from cute_ep.api.errors import EPError
from cute_ep.runtime.connection import connected

from .group import Group, group_of, small_config, small_input, sms_for

INTERRUPTS = 200
LOST_GROUPS = 4
"""Groups of several ranks that are interrupted: on a GPU each takes until its timeout to end."""
SECONDS = 25


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Byte codes before which Python may deliver a signal: those behind a call, and the first of a function."""
    every = list(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in pairwise(every)
        if before.opname == "RESUME" or before.opname.startswith("CALL")
    )


class Interrupter:
    """Sends SIGINT to this process at a random one of the places in cute_ep where Python may deliver it."""

    def __init__(self, random: Random) -> None:
        self.random, self.most = random, 0
        self._inside = str(Path(cute_ep.__file__).parent)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """The first time nothing is sent but places are counted; from then on about one call in three is spared."""
        self._passed = 0
        self._at = self.random.randint(1, self.most * 3 // 2) if self.most else 0
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            self.most = max(self.most, self._passed)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        if not frame.f_code.co_filename.startswith(self._inside):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self._passed += 1
            if self._passed == self._at:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def interrupts(devices: Sequence[str], library: Path | None) -> str:
    """Ctrl-C anywhere in the calls of one rank: the next rounds are right, or an EPError says what to do. In those of
    several ranks of a process: a fresh group is right."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    random = Random(9)
    interrupter = Interrupter(random)
    count = {"interrupted": 0, "refused": 0, "right": 0}
    given = [small_input(1), small_input(1, tokens=7), small_input(1, tokens=31)]
    cfg, one = small_config(1), list(devices[:1])
    with ExitStack() as stack:
        group = Group(stack.enter_context(connected(cfg, one, sms=sms_for(one), library=library)), given)
        started = time.monotonic()
        while count["interrupted"] < INTERRUPTS and time.monotonic() - started < SECONDS:
            try:
                with interrupter.armed():
                    group.round(random, random.randrange(len(given)))
                count["right"] += 1
                continue
            except KeyboardInterrupt:
                count["interrupted"] += 1
            except EPError:
                count["refused"] += 1
                stack.close()
                group.use(stack.enter_context(connected(cfg, one, sms=sms_for(one), library=library)))
            group.poison()
    assert count["interrupted"] and count["right"], count
    for _ in range(LOST_GROUPS if len(devices) > 1 else 0):
        with group_of(devices, library, small_input(len(devices))) as group:
            try:
                for _ in range(3):
                    with interrupter.armed():
                        group.round(random)
            except KeyboardInterrupt:
                count["interrupted"] += 1
    with group_of(devices, library, small_input(len(devices))) as group:
        group.round(random)
    return ", ".join(f"{number} {name}" for name, number in count.items())
