"""A pair beside a matmul where it needs no GPU: what a layer has of matmuls, what times mean, how ranks meet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.errors import EPError
from cute_ep.bench import beside


def test_a_layer_has_as_many_operations_as_its_matmuls() -> None:
    """6 k hidden width operations a token, and two for each element of a matmul's inner size."""
    matmul = beside.Matmul(rows=4 * 7, inner=3, columns=5)
    assert matmul.in_layer(5, top_k=2, hidden=9, width=7) == pytest.approx(6 * 5 * 2 * 9 / (2 * 4 * 3 * 5))


class Work(SimpleNamespace):
    """A graph whose calls take so long alone."""

    def replays(self, us: float) -> int:
        return beside.Repeated.replays(self, us)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list:
    """What was begun at once, and how often; each replay of either takes 10 us a call."""
    found: list = []

    def times(highest: object, *work: tuple) -> list[float]:
        found.append(work)
        return [10.0 * one.calls * replays for one, replays in work]

    monkeypatch.setattr(beside, "times", times)
    return found


def test_the_other_is_at_work_all_the_time(begun: list) -> None:
    one, other = Work(us=100.0, calls=8), Work(us=30.0, calls=4)
    assert beside.beside(list, one, other) == 10
    ((_, once), (_, more)) = begun[0]
    assert once == 1 and more * other.us * other.calls >= 4 * one.us * one.calls > (more - 1) * other.us * other.calls


def test_a_layer_is_what_takes_longer_and_apart_is_both(begun: list) -> None:
    pair, matmul = Work(us=1.0, calls=8), Work(us=1.0, calls=4)
    assert beside.layer(list, pair, matmul, 1.5) == 15, "12 matmuls for 8 pairs"
    assert beside.apart(list, pair, matmul, 1.5) == 25
    assert [[replays for _, replays in work] for work in begun] == [[1, 3], [1], [3]]


# ---- ranks in threads


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> beside.Threads:
    """Three, of no GPU."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return beside.Threads(["cuda:0", "cuda:1", "cuda:2"])


def test_ranks_agree_on_the_highest_of_each_value(ranks: beside.Threads) -> None:
    """Many times, so that no rank reads what another has written for the next meeting."""

    def work(rank: int, highest: beside.Highest) -> dict[str, float]:
        found = [highest([number + rank, number - rank]) for number in range(200)]
        assert found == [[number + 2, number] for number in range(200)]
        return {"rank": rank}

    assert ranks.on_all(work) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_the_error_of_a_rank_ends_the_others(ranks: beside.Threads) -> None:
    def work(rank: int, highest: beside.Highest) -> dict[str, float]:
        if rank == 1:
            raise EPError("rank 1 has no memory")
        highest([0.0])
        raise AssertionError("nobody met")

    with pytest.raises(EPError, match="rank 1 has no memory"):
        ranks.on_all(work)


def test_a_cublas_that_cannot_be_told_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    with pytest.raises(EPError, match=r"libcublas\.so\.0: no cublasSetSmCountTarget"):
        beside.set_matmul_sms(16)
