"""Each mistake of mail is found by its schedule, which finds nothing in the sources as they are."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.mail import Channel
from tests.edits import Edit
from tests.gpu import mail_schedules
from tests.gpu.mail_mistakes import MAIL_MUTANTS
from tests.gpu.node_rounds import FRAMES, Rounds, Step, config
from tests.reference.ranks import at_once
from tests.storm_rail import Threads

from . import emulated_nodes, test_storm
from .emulated_mail import Emulated
from .emulated_nccl import over_nccl
from .mail_mistakes import FOUND, HASTY, MISTAKES

SEEDS, TRIES = 3, 20
"""Runs of a schedule that must find nothing; most runs until one finds a mistake, which takes luck with some."""
TURNS = 12
LATE_S, LATE_READER_S = 2e-3, 1e-2
"""Longest times by which a kernel is late in a storm, and one that reads mail."""
READERS = ("unpack_frames", "sum_nodes")


class Slow:
    """A kernel that now and then begins late."""

    def __init__(self, kernel: Emulated, random: Random) -> None:
        self.kernel, self.random = kernel, random

    def launch(self, grid: int, given: Sequence[int], stream: int) -> None:
        longest = LATE_READER_S if self.kernel.name in READERS else LATE_S
        time.sleep(self.random.choice((0, 0, self.random.random())) * longest)
        self.kernel.launch(grid, given, stream)


def in_threads(ranks: Sequence[int], steps: Iterable[Step]) -> None:
    """All steps of a rank in a thread of its own: its calls wait for other ranks."""
    steps = list(steps)

    def work(rank: int) -> None:
        for step in steps:
            step(rank)

    for one in at_once(ranks, work):
        if isinstance(one, EPError):
            raise one


def in_a_storm(seed: int, timeout_s: float, *, copies: bool) -> None:
    cfg = config(3, 1, hidden=128, timeout_s=timeout_s)
    with emulated_nodes.connected(cfg) as made:
        for ep in made:
            kernels = ep.mail.parts.kernels.items()
            slow = {name: Slow(one, Random(f"{seed} {ep.rank} {name}")) for name, one in kernels}
            ep.mail.parts = replace(ep.mail.parts, kernels=slow)
        mail_schedules.storm(
            made, lambda _, count: Threads(count), turns=TURNS, seed=seed, copies=copies, run=in_threads
        )


def over_queues(seed: int, timeout_s: float) -> None:
    with over_nccl(config(2, 1, hidden=128, timeout_s=timeout_s)) as (made, _):
        rounds = Rounds(made, 5, FRAMES, wide=True, run=in_threads)
        for turn in range(seed, seed + 5):
            rounds.run(rounds.fused(turn % 5) + rounds.halves((turn + 1) % 5, (turn + 3) % 5))
        rounds.check()


def with_a_rank_that_has_given_up(seed: int, timeout_s: float) -> None:
    with emulated_nodes.connected(config(2, 1, hidden=128, timeout_s=min(timeout_s / 3, 2))) as made:
        mail_schedules.given_up(made, in_threads)


SCHEDULES: dict[str, Callable[[int, float], None]] = {
    "storm": lambda seed, timeout_s: in_a_storm(seed, timeout_s, copies=seed % 2 == 0),
    "late reads": partial(in_a_storm, copies=False),
    "queues": over_queues,
    "given up": with_a_rank_that_has_given_up,
}


USERS = {
    "RankMail": [emulated_nodes],
    "NodesCommunicator": [emulated_nodes],
    "Emulated": [emulated_nodes],
    "Storm": [mail_schedules, test_storm],
}
"""What may be changed, and the modules that make ranks of it."""


def make_mistake(edits: Sequence[Edit], patch: pytest.MonkeyPatch) -> None:
    """Have ranks made of changed modules."""
    for name in dict.fromkeys(edit.file for edit in edits):
        real = importlib.import_module(name)
        text = Path(str(real.__file__)).read_text()
        for edit in edits:
            if edit.file == name:
                text = edit.changed(text)
        changed = ModuleType(name)
        exec(compile(text, f"{name}, changed", "exec"), vars(changed))
        for made, users in USERS.items():
            if getattr(getattr(real, made, None), "__module__", "") == name:
                for user in users:
                    patch.setattr(user, made, getattr(changed, made))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_sources_have_no_mistake(name: str) -> None:
    for seed in range(1 if name == "given up" else SEEDS):
        SCHEDULES[name](seed, 30)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mistake(MISTAKES[name].edits, monkeypatch)
    with pytest.raises((AssertionError, EPError)):
        for seed in range(TRIES):
            SCHEDULES[MISTAKES[name].schedule](seed, 2)


def test_sources_that_a_put_reads_late_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack waits until peers have read what it overwrites: so rounds need less than engines promise."""
    make_mistake([HASTY], monkeypatch)
    for seed in range(SEEDS):
        SCHEDULES["late reads"](seed, 30)


def test_an_engine_that_reads_its_sources_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mistake([HASTY], monkeypatch)
    with pytest.raises(AssertionError):
        test_storm.test_sources_may_be_written_when_a_put_returns(Channel.SUMS, copies=False)


def test_every_mistake_is_in_the_table() -> None:
    model = (Path(__file__).parents[1] / "protocol" / "mail.pml").read_text()
    known = re.findall(r"#define (\w+) \d+ +/\*", model), MISTAKES, MAIL_MUTANTS
    for column, names in enumerate(known):
        assert {row[column] for row in FOUND.values()} == {*names, ""}
