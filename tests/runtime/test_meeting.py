"""What processes of one group tell each other when they connect, and what they hear of one that fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cute_ep.api import waits
from cute_ep.api.errors import EPError
from cute_ep.runtime import meeting, process
from cute_ep.runtime.meeting import STATE, Meeting
from cute_ep.runtime.process import Process, machine

from .as_threads import RANKS, collective


def test_every_rank_hears_what_all_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    got = collective(monkeypatch, lambda rank: Meeting(None).on_all_ranks(lambda: 10 * rank, lambda made: made + 1))
    assert got == [(10 * rank, [1, 11, 21]) for rank in range(RANKS)]


@pytest.mark.parametrize("at", ["make", "share"])
def test_a_step_that_fails_on_one_rank_fails_on_all_and_is_undone(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    undone = []

    def step(name: str, rank: int) -> int:
        if name == at and rank == 1:
            raise MemoryError("2 GiB")
        return rank

    got = collective(
        monkeypatch,
        lambda rank: Meeting(None).on_all_ranks(
            lambda: step("make", rank), lambda made: step("share", made), undone.append
        ),
    )
    assert isinstance(got[1], MemoryError)
    for rank in (0, 2):
        assert isinstance(got[rank], EPError)
        assert str(got[rank]) == "rank 1 could not connect: MemoryError: 2 GiB"
    assert sorted(undone) == ([0, 2] if at == "make" else [0, 1, 2])


def test_an_interrupt_of_one_rank_is_told_to_the_others_which_undo_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    undone: list[int] = []

    def make(rank: int) -> int:
        if rank == 1:
            raise KeyboardInterrupt
        return rank

    def meet(rank: int) -> object:
        try:
            return Meeting(None).on_all_ranks(lambda: make(rank), undo=undone.append)
        except KeyboardInterrupt:
            return "interrupted"

    got = collective(monkeypatch, meet)
    assert got[1] == "interrupted" and sorted(undone) == [0, 2]
    assert [str(got[rank]) for rank in (0, 2)] == ["rank 1 could not connect: KeyboardInterrupt: "] * 2


def test_a_rank_that_does_not_come_is_named_after_the_time_that_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def meet(rank: int) -> None:
        here = Meeting(None)
        here.wait(30)
        if rank != 1:
            here.wait(0.2)

    got = collective(monkeypatch, meet)
    assert got[1] is None
    for rank in (0, 2):
        assert isinstance(got[rank], EPError) and " waited 0.2 s for rank(s) [1] to connect; the " in str(got[rank]), (
            got
        )


def test_a_rank_that_comes_late_goes_on_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others gave before they gave up is not taken for what they would have given next."""
    made: list[int] = []
    gone = threading.Event()

    def meet(rank: int) -> list[str]:
        here, words = Meeting(None), []
        if rank == 1:
            gone.wait(30)
        for step in (lambda: here.gather(("theirs", None), 0.2), lambda: here.on_all_ranks(lambda: made.append(rank))):
            try:
                step()
            except EPError as error:
                words.append(str(error))
                gone.set()
        return words

    for rank, words in enumerate(collective(monkeypatch, meet)):
        assert len(words) == 2 and all("waited 0.2 s for rank(s) [1]" in text for text in words), (rank, words)


# ---- one verdict


class Slow:
    """A store whose calls take a while, so that those of several ranks come in any order."""

    def __init__(self, store: Any, random: Random) -> None:
        self._store, self._random = store, random

    def __getattr__(self, name: str) -> Callable:
        def call(*arguments: Any) -> Any:
            time.sleep(self._random.random() * 2e-3)
            return getattr(self._store, name)(*arguments)

        return call


def verdicts(monkeypatch: pytest.MonkeyPatch, seed: int) -> set[bool]:
    """Whether a step was complete, as the ranks see it who arrive, and give up, at about the same time."""
    random = Random(seed)
    times = [(random.random() * 8e-3, random.random() * 8e-3) for _ in range(RANKS)]

    def meet(rank: int) -> bool:
        here, (late, patience) = Meeting(None), times[rank]
        here._store = Slow(here._store, Random(seed + rank))
        time.sleep(late)
        try:
            here.wait(patience)
        except EPError:
            return False
        return True

    return set(collective(monkeypatch, meet))


def test_a_step_is_complete_for_all_ranks_or_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """However close to each other the last part and the end of somebody's patience are."""
    seen = [verdicts(monkeypatch, seed) for seed in range(100)]
    assert all(len(one) == 1 for one in seen)
    assert {True} in seen and {False} in seen


def test_without_compare_and_set_ranks_would_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant that shows that the test above can fail."""

    def settle(self: Meeting, reason: str = "") -> None:
        if reason:
            self._store.set(STATE, f"{self._step - 1} {reason}")
            raise EPError(reason)

    monkeypatch.setattr(Meeting, "_settle", settle)
    assert any(len(verdicts(monkeypatch, seed)) == 2 for seed in range(100))


# ---- attempts


def test_ranks_that_try_again_meet_however_many_attempts_the_late_one_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts without rank 1: it is refused twice at once, then all meet."""
    gone, both = threading.Event(), threading.Barrier(2, timeout=30)
    monkeypatch.setattr(meeting, "group_timeout", lambda group: 30.0 if gone.is_set() else 0.2)

    def attempt() -> str:
        try:
            return str(Meeting(None).gather("here"))
        except EPError as error:
            return str(error)

    def meet(rank: int) -> list[str]:
        if rank == 1:
            gone.wait(30)
        missed = [attempt() for _ in range(2)]
        if rank != 1:
            both.wait()
            gone.set()
        return [*missed, attempt()]

    for words in collective(monkeypatch, meet):
        assert isinstance(words, list)
        assert all("waited 0.2 s for rank(s) [1] to connect" in text for text in words[:2]), words
        assert "makes attempt 2, rank 1 has made 0" in words[1] and words[2] == str(["here"] * RANKS)


def test_a_rank_that_waits_for_one_that_is_ahead_is_told_and_meets_it_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has begun an attempt and left it without a word, as one that was killed and started again."""
    monkeypatch.setattr(meeting, "SURELY_S", 0.2)
    began = time.monotonic()

    def meet(rank: int) -> list[str]:
        if rank == 0:
            meeting.dist.PrefixStore("cute_ep/0,1,2", meeting.default_store()).add("began/0", 1)
            return [str(Meeting(None).gather("here"))]
        with pytest.raises(EPError) as caught:
            Meeting(None)
        return [str(caught.value), str(Meeting(None).gather("here"))]

    first, *others = collective(monkeypatch, meet)
    assert first == [str(["here"] * RANKS)] and time.monotonic() - began < 20
    for told, met in others:  # type: ignore[misc]
        assert "rank(s) [0] left attempt 1 to connect for a later one" in told and met == str(["here"] * RANKS)


def test_ranks_that_call_something_else_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    got = collective(monkeypatch, lambda rank: Meeting(None, "call barrier" if rank == 2 else "connect"))
    wants = "rank 0 wants to connect, rank 1 wants to connect, rank 2 wants to call barrier"
    assert [str(one) for one in got] == [f"{wants}: must be the same on all ranks, in the same order of calls"] * RANKS


# ---- what is said meanwhile


def test_a_wait_says_who_is_missing_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    wait = waits.Wait(100, logging.getLogger("cute_ep.test"))
    said = []
    for second in range(100):
        now[0] = float(second)
        assert wait.until_word == 0 or wait.until_word <= 100 - second
        caplog.clear()
        wait.say(0, "rank(s) [1]", "connect")
        if caplog.messages:
            said.append(second)
            text = f"rank 0 has waited {second} s for rank(s) [1] to connect; it gives up after 100 s"
            assert caplog.messages == [text] and caplog.records[0].levelname == "WARNING"
    assert said == [5, 10, 20, 40, 80]


# ---- processes


def test_a_process_sees_whether_another_one_has_ended() -> None:
    """Also one that nobody has waited for, and one whose number another process has by now."""
    own = Process.own()
    assert not own.sees_end_of(own)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        while not Path(f"/proc/{child.pid}/stat").exists():
            time.sleep(0.01)
        other = Process(own.machine, own.namespace, child.pid, process._state_and_start(child.pid)[1])  # type: ignore[index]
        assert not own.sees_end_of(other)
        assert own.sees_end_of(other._replace(started="1"))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert own.sees_end_of(other)
    finally:
        child.kill()
        child.communicate()
    assert own.sees_end_of(other)


@pytest.mark.parametrize("unseen", [{"machine": "other"}, {"namespace": "pid:[1]"}, {"namespace": ""}])
def test_the_end_of_a_process_elsewhere_is_not_guessed(unseen: dict[str, str]) -> None:
    gone = Process.own()._replace(started="1")
    assert not Process.own().sees_end_of(gone._replace(**unseen))
    assert not Process.own().sees_end_of(gone._replace(started=None))


def test_a_machine_is_known_by_its_boot_id_or_else_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    identity = machine()
    assert identity and identity == machine()
    monkeypatch.setattr(process, "BOOT_ID", tmp_path / "hidden")
    assert machine() == process.platform.node()
