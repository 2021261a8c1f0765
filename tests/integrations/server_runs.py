"""The same requests to several servers of one model, and a comparison of what they say and how fast.

Servers start at once and stay: while one answers, the others are idle. So the idle time between two rounds is the same
for all, and is spent once.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.integrations.server_compare import compare
from tests.integrations.server_load import Api, Request, Round, play
from tests.integrations.server_process import Server, ServerError, free_ports, tail

START = time.monotonic()
TELL_EVERY = 15
"""Seconds between lines about servers that start."""
WARM_UP = 10
"""Requests before the rounds, in which servers compile what they need."""


def say(words: str) -> None:
    """Print a line of progress, with the seconds since the program's start."""
    sys.stdout.write(f"[{time.monotonic() - START:6.1f} s] {words}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Case:
    """A server.

    Attributes:
        name: of the case.
        words: the command, given its port.
        environment: more of it.
        health: path that a GET answers with 200 once it is healthy.
        settled: raises ServerError if a round has left requests in the server at a port.
    """

    name: str
    words: Callable[[int], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    settled: Callable[[int], None] = lambda port: None


class Played(NamedTuple):
    """What came of a case.

    Attributes:
        start: seconds that the server took to start.
        rounds: two, with an idle time between them.
    """

    start: float
    rounds: tuple[Round, Round]


class Outcome(NamedTuple):
    """What came of cases, by name: of those that played both rounds, and what failed in the others, with the end of the
    server's log."""

    played: dict[str, Played]
    failed: dict[str, str]


class Run:
    """A case's server, and what has come of it."""

    def __init__(self, case: Case, port: int, folder: Path) -> None:
        self.case, self.rounds, self.failed = case, list[Round](), ""
        self.start: float | None = None
        self.log = folder / f"{case.name.replace(' ', '_')}.log"
        self.server = Server(case.words(port), port, self.log, case.environment, case.health)

    def try_to(self, do: Callable[[], None]) -> None:
        """Do something, unless this has failed before; note what fails."""
        if self.failed:
            return
        try:
            do()
        except ServerError as wrong:
            self.failed = str(wrong)
        except OSError as wrong:
            self.failed = f"{type(wrong).__name__}: {wrong}\n{tail(self.log)}"
        if self.failed:
            say(f"{self.case.name}: {self.failed}")

    def look(self) -> None:
        """Note whether it is healthy."""
        if self.start is None and (seconds := self.server.healthy_after()) is not None:
            self.start = seconds
            say(f"{self.case.name}: healthy after {seconds:.0f} s")

    def late(self, timeout: float) -> None:
        """ServerError unless it has been healthy."""
        if self.start is None:
            raise self.server.late(timeout)

    def play(self, api: Api, requests: Sequence[Request], timeout: float) -> None:
        """A round. ServerError: requests failed, or are left in the server."""
        made = play(api, self.server.port, requests, timeout=timeout)
        self.rounds.append(made)
        table = made.table()
        told = f"{table['answers']} answers, {table['aborted']} aborted, {table['errors']} errors"
        say(f"{self.case.name}, {len(requests)} requests: {told}, {table['tokens_per_second']:.0f} tokens/s")
        self.server.check()
        if made.errors:
            raise ServerError(f"{len(made.errors)} errors; {made.errors[0]}\n{tail(self.log)}")
        self.case.settled(self.server.port)


def await_servers(runs: Sequence[Run], timeout: float) -> None:
    """Until each is healthy or has failed, which it has after `timeout` seconds too."""
    end, told = time.monotonic() + timeout, time.monotonic()
    while waiting := [run for run in runs if run.start is None and not run.failed]:
        for run in waiting:
            run.try_to(run.look)
        if time.monotonic() > told + TELL_EVERY:
            told = time.monotonic()
            last = tail(waiting[0].log, 1).splitlines()[-1:]
            say(f"waiting for {len(waiting)}; {waiting[0].case.name}: {' '.join(last)[:150]}")
        if time.monotonic() > end:
            for run in waiting:
                run.try_to(functools.partial(run.late, timeout))
        time.sleep(0.2)


def play_cases(
    cases: Sequence[Case],
    api: Api,
    requests: Sequence[Request],
    folder: Path,
    *,
    idle: float,
    start_timeout: float = 300,
    timeout: float = 60,
) -> Outcome:
    """Two rounds of the requests to each server, in turn. All servers are ended.

    Args:
        folder: for logs.
        idle: seconds between the rounds, of each server at least.
        start_timeout: seconds until all servers must be healthy.
        timeout: seconds for each request.
    """
    whole = [one for one in requests if one.abort_after is None]
    with ExitStack() as stack:
        runs = []
        for case, port in zip(cases, free_ports(len(cases)), strict=True):
            runs.append(Run(case, port, folder))
            stack.callback(runs[-1].server.end, grace=2)
        await_servers(runs, start_timeout)
        for asked in (whole[:WARM_UP], requests, requests):
            if any(run.rounds[1:] and not run.failed for run in runs):
                say(f"{idle:.0f} s without a request")
                time.sleep(idle)
            for run in runs:
                run.try_to(functools.partial(run.play, api, asked, timeout))
    good = [run for run in runs if not run.failed]
    played = {run.case.name: Played(run.start or 0, (run.rounds[1], run.rounds[2])) for run in good}
    return Outcome(played, {run.case.name: run.failed for run in runs if run.failed})


def pairs_of(played: Mapping[str, Played], ours: str, theirs: str) -> list[tuple[str, str, Round, Round]]:
    """What to compare: (two words, two rounds). Each case with itself after the idle time, eagerly with graphs, and
    `ours` with `theirs`, the names' beginnings. Names are like "cute_ep graphs"."""
    result = [(f"{name} 1", f"{name} 2", *one.rounds) for name, one in played.items()]

    def add(one: str, other: str, number: int) -> None:
        if one in played and other in played:
            rounds = played[one].rounds[number], played[other].rounds[number]
            result.append((f"{one} {number + 1}", f"{other} {number + 1}", *rounds))

    for backend in (ours, theirs):
        add(f"{backend} eager", f"{backend} graphs", 0)
    for mode in ("eager", "graphs"):
        for number in range(2):
            add(f"{ours} {mode}", f"{theirs} {mode}", number)
    return result


def summary(outcome: Outcome, ours: str, theirs: str, bound: float) -> dict[str, Any]:
    """All as JSON can have it, with a list of what is wrong: failures, aborts that did not come, and differences beyond
    what rounding explains.

    Args:
        bound: how far two servers' log probabilities of a token may be apart.
    """
    played, failed = outcome
    wrong = [f"{name}: {why}" for name, why in failed.items()]
    rounds: dict[str, Any] = {}
    for name, one in played.items():
        rounds[name] = {"start_s": round(one.start, 1), "rounds": [each.table() for each in one.rounds]}
        wrong += [f"{name}: no request was aborted" for each in one.rounds if not each.table()["aborted"]]
    compared = []
    for left, right, first, second in pairs_of(played, ours, theirs):
        result = compare(first, second)
        far = sum(off > bound for off in (*result.offs, *(each.off for each in result.differences)))
        compared.append({"of": left, "with": right, **result.table(), "beyond_bound": far})
        if far:
            wrong.append(f"{left} / {right}: {far} log probabilities are more than {bound} apart")
    return {"bound": bound, "servers": rounds, "comparisons": compared, "wrong": wrong}


def print_summary(made: Mapping[str, Any]) -> None:
    """Two short tables."""
    lines = [
        f"{'server':34} {'start':>6} " + " ".join(f"{word:>9}" for word in ("tok/s 1", "tok/s 2", "p50 s", "p95 s"))
    ]
    for name, one in made["servers"].items():
        first, second = one["rounds"]
        numbers = first["tokens_per_second"], second["tokens_per_second"], second["last_p50_s"], second["last_p95_s"]
        lines.append(f"{name:34} {one['start_s']:6.1f} " + " ".join(f"{number:9.2f}" for number in numbers))
    lines.append(f"{'compared':70} {'equal':>5} {'diff':>4} {'p50':>7} {'p99':>7} {'first':>7} beyond {made['bound']}")
    for one in made["comparisons"]:
        words = f"{one['of']} / {one['with']}"
        offs = f"{one['off_p50']:7.4f} {one['off_p99']:7.4f} {one['first_off_most']:7.4f}"
        lines.append(f"{words:70} {one['equal']:5} {one['different']:4} {offs} {one['beyond_bound']}")
    lines += [f"wrong: {one.splitlines()[0]}" for one in made["wrong"][:10]]
    sys.stdout.write("\n".join(lines) + "\n")
