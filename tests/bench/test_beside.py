"""A pair beside a matmul where it needs no GPU: what a layer has of matmuls, what times mean, how ranks meet."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.errors import EPError
from cute_ep.bench import beside


def test_a_layer_has_as_many_operations_as_its_matmuls() -> None:
    """6 k hidden width operations a token, and two for each element of a matmul's inner size."""
    matmul = beside.Matmul(rows=4 * 7, inner=3, columns=5)
    assert matmul.in_layer(5, top_k=2, hidden=9, width=7) == pytest.approx(6 * 5 * 2 * 9 / (2 * 4 * 3 * 5))


Repeated = beside.Repeated


class Work(SimpleNamespace):
    """A graph whose calls take so long alone."""

    def replays(self, us: float) -> int:
        return Repeated.replays(self, us)


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
    pairs, matmuls = Work(us=1.0, calls=8), Work(us=1.0, calls=12)
    assert beside.layer(list, pairs, matmuls) == 15
    assert beside.apart(list, pairs, matmuls) == 25
    assert [[replays for _, replays in work] for work in begun] == [[1, 1], [1], [1]]


@pytest.mark.parametrize(("in_layer", "calls"), [(6.0, (8, 48)), (1.5, (8, 12)), (1.0, (8, 8)), (64.0, (8, 512))])
def test_graphs_have_as_many_matmuls_as_the_layers_of_their_pairs(in_layer: float, calls: tuple[int, int]) -> None:
    assert beside.calls_of(in_layer) == calls


def test_numbers_of_calls_are_right_to_a_hundredth() -> None:
    for hundredths in range(100, 6400):
        pairs, matmuls = beside.calls_of(hundredths / 100)
        assert abs(matmuls / pairs / (hundredths / 100) - 1) <= beside.RIGHT and pairs <= beside.MOST_PAIRS


class Gpu:
    """What `Beside` asks of torch.cuda: one with so many SMs."""

    sms = 132

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[int] = []
        self.made: list[tuple] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda priority: priority)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        properties = SimpleNamespace(multi_processor_count=self.sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(beside, "set_matmul_sms", self.told.append)
        monkeypatch.setattr(beside, "Repeated", self.repeat)
        monkeypatch.setattr(beside, "times", lambda highest, *work: [10.0 * one.calls * count for one, count in work])

    def repeat(self, highest: object, stream: int, calls: int, call) -> Work:
        """A graph of calls that take 10 us each."""
        call(0)
        self.made.append((stream, calls, self.told[-1:]))
        return Work(us=10.0, calls=calls)


def test_the_matmul_leaves_sms_and_the_pair_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    rank = beside.Beside(list, beside.Matmul(2, 3, 4), 1.5)
    pair = rank.pair(lambda number: None)
    alone = {"pair_us": 10, "matmul_us": 10, "pair_beside_us": 10, "matmul_beside_us": 10}
    assert rank.measure(pair, 24, in_turn=False) == alone | {"layer_us": 15}
    assert rank.measure(pair, 0, in_turn=True) == alone | {"layer_us": 15, "apart_us": 25}
    assert gpu.told == [108, 0, 0, 0], "and is told again to take all"
    assert gpu.made == [(-1, 8, []), (0, 12, [108]), (0, 12, [0])]
    assert torch.equal(rank.c, rank.a @ rank.b)


def test_a_matmul_that_fails_leaves_the_next_one_all_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    rank = beside.Beside(list, beside.Matmul(2, 3, 4), 1.5)
    pair = rank.pair(lambda number: None)
    rank.a = rank.a[:, :2]
    with pytest.raises(RuntimeError):
        rank.measure(pair, 24, in_turn=False)
    assert gpu.told == [108, 0]


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


def test_the_first_error_is_raised(ranks: beside.Threads) -> None:
    """Not what a lower rank raises because of it."""
    failed = threading.Event()

    def work(rank: int, highest: beside.Highest) -> None:
        if rank == 2:
            try:
                raise EPError("rank 2 has no memory")
            finally:
                threading.Timer(0.2, failed.set).start()
        failed.wait(10)
        raise EPError(f"rank {rank} gave up")

    with pytest.raises(EPError, match="rank 2 has no memory"):
        ranks.on_all(work)


def test_a_cublas_that_cannot_be_told_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    with pytest.raises(EPError, match=r"libcublas\.so\.0: no cublasSetSmCountTarget"):
        beside.set_matmul_sms(16)
