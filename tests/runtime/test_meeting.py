"""What processes of one group tell each other when they connect, and what they hear of one that fails."""

from __future__ import annotations

import threading

import pytest

from cute_ep.api.errors import EPError
from cute_ep.runtime.meeting import Meeting

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
        assert isinstance(got[rank], EPError) and " waited 0.2 s for rank(s) [1], and " in str(got[rank]), got


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
