"""Schedules: what every rank enqueues, and in which order; `runs` runs them.

A schedule is data: calls of one rank, the same on all. D, A, W are dispatch, dispatch_async and dispatch_wait of a
batch, c, a, w combine, combine_async and combine_wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS

FEW, MANY = LAMPORT_TOKENS, LAMPORT_TOKENS + 1
"""The most tokens whose rows travel through the Lamport regions, and the fewest whose rows do not."""
TOKENS = {
    "few": (17, FEW, 1, 200, 0, 96, 333),
    "many": (MANY, MANY + 60, MANY + 33, MANY + 80, MANY + 7, MANY + 71, MANY + 20),
    "both": (MANY, 17, FEW, MANY + 80, 0, 96, MANY + 7),
}
"""Tokens a rank and batch, by turns; none is that of the round before last, so headers differ too."""
Calls = list[tuple[str, int]]
"""(letter, number of the batch, from 1) of each call."""


def calls_of(text: str) -> Calls:
    """ "A1 A2 W1" as calls."""
    return [(word[0], int(word[1:])) for word in text.split()]


def fused(rounds: int, ahead: int) -> Calls:
    """D1 D2 c1 D3 c2 ...: dispatches `ahead` of the combine of their batch."""
    calls = []
    for step in range(1, rounds + ahead + 1):
        calls += [("D", step)] if step <= rounds else []
        calls += [("c", step - ahead)] if step > ahead else []
    return calls


def split(rounds: int) -> Calls:
    """A1 A2 W1 a1 A3 W2 a2 w1 ...: halves, with two rounds of each phase outstanding."""
    calls = [("A", 1)]
    for step in range(1, rounds + 2):
        calls += [("A", step + 1)] if step < rounds else []
        calls += [("W", step), ("a", step)] if step <= rounds else []
        calls += [("w", step - 1)] if step > 1 else []
    return calls


ORDERS: dict[str, Callable[[int], Calls]] = {
    "turns": lambda rounds: fused(rounds, 0),
    "ahead": lambda rounds: fused(rounds, 1),
    "two ahead": lambda rounds: fused(rounds, 2),
    "dispatches": lambda rounds: fused(rounds, rounds),
    "combines": lambda rounds: [call for n in range(1, rounds + 1) for call in calls_of(f"D{n} c{n} c{n} c{n} c{n}")],
    "split": split,
    "split combines": lambda rounds: [
        call for n in range(1, rounds + 1) for call in calls_of(f"A{n} W{n} a{n} a{n} w{n} a{n} w{n} w{n}")
    ],
}
"""Name -> calls of so many batches. "combines" gives the rows of each batch back four times, other rows each time."""


@dataclass(frozen=True)
class Case:
    """One schedule.

    Attributes:
        order: out of ORDERS.
        tokens: out of TOKENS.
        fmt: dispatch format.
        rounds: batches.
        slow: rank 0 launches one CTA, and so reads long after its peers have sent.
        idle: the last rank has no tokens. It waits for nobody in combine, so it is ahead of all others if nothing
            holds it.
        streams: dispatches on one stream, combines on another, with an event between a batch's; ranks with a GPU each.
        crossed: in the last combine rank 0 gives back the first batch, and the others the last one.
        sms: budget of each rank, which has pipelines for many tokens; None: the default.
        joins: senders of a dispatch receive when they have sent.
        hidden: elements of a row.
        by_rank: all calls of a rank are enqueued before any of the next one's; otherwise call after call on all ranks.
    """

    order: str
    tokens: str = "both"
    fmt: str = "bf16"
    rounds: int = 9
    slow: bool = False
    idle: bool = False
    streams: bool = False
    crossed: bool = False
    sms: int | None = None
    joins: bool = False
    hidden: int = 1024
    by_rank: bool = True


CASES = {
    "turns": Case("turns", "few"),
    "ahead": Case("ahead", fmt="nvfp4_row"),
    "two ahead": Case("two ahead"),
    "dispatches": Case("dispatches", fmt="nvfp4_row"),
    "combines": Case("combines", "many", slow=True, idle=True),
    "combines of few": Case("combines", "few", idle=True),
    "split": Case("split", "many", slow=True),
    "split of few": Case("split", "few", fmt="nvfp4_row"),
    "split of both": Case("split", by_rank=False),
    "split combines": Case("split combines"),
    "streams": Case("split", streams=True),
    "crossed": Case("dispatches", "few", crossed=True),
    "combines on few SMs": Case("combines", "many", idle=True, sms=4),
    "two ahead on few SMs": Case("two ahead", slow=True, sms=4),
    "senders join": Case("two ahead", idle=True, sms=4, joins=True, hidden=3584),
}
"""The schedules that GPU tests run; `mutants` says which of them finds which mistake."""


def config_of(case: Case, ranks: int, timeout_s: float = 30) -> EPConfig:
    """The deployment of a case."""
    return EPConfig(case.hidden, 8 * ranks, 4, max(TOKENS["both"]), ranks, case.fmt, timeout_s)


@dataclass(frozen=True)
class Step:
    """One call with its place: `output` counts the outputs of its kind (dispatched batches or combines) of the run, and
    `turn` the combines of one batch. Halves of one round have the same."""

    kind: str
    number: int
    output: int
    turn: int

    @property
    def mode(self) -> str:
        """Combine mode."""
        return "partial" if self.output % 3 == 2 else "exact"


def steps_of(calls: Calls) -> list[Step]:
    """Calls with their places."""
    steps: list[Step] = []
    turns: dict[int, int] = defaultdict(int)
    pending: deque[Step] = deque()
    combines = 0
    for kind, number in calls:
        if kind == "w":
            sent = pending.popleft()
            steps.append(Step(kind, number, sent.output, sent.turn))
        elif kind in "ac":
            steps.append(Step(kind, number, combines, turns[number]))
            pending += [steps[-1]] if kind == "a" else []
            turns[number] += 1
            combines += 1
        else:
            steps.append(Step(kind, number, number - 1, 0))
    return steps
