"""A pair beside a matmul where it needs no GPU: what a layer has of matmuls, what times mean, the table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from perf import beside
from perf.cases import Shape


def test_a_layer_has_as_many_operations_as_its_matmuls() -> None:
    """6 k hidden width operations a token, and two for each element of a matmul's inner size."""
    matmul = beside.Matmul(rows=4 * beside.LAYER_WIDTH, inner=3, columns=5)
    assert matmul.in_layer(5, Shape(hidden=9, num_experts=4, top_k=2)) == pytest.approx(6 * 5 * 2 * 9 / (2 * 4 * 3 * 5))


class Work(SimpleNamespace):
    """A graph whose calls take so long alone."""

    def replays(self, us: float) -> int:
        return beside.Repeated.replays(self, us)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list:
    """What was begun at once, and how often; each replay of either takes 10 us a call."""
    found: list = []

    def times(host: object, *work: tuple) -> list[float]:
        found.append(work)
        return [10.0 * one.calls * replays for one, replays in work]

    monkeypatch.setattr(beside, "times", times)
    return found


def test_the_other_is_at_work_all_the_time(begun: list) -> None:
    one, other = Work(us=100.0, calls=8), Work(us=30.0, calls=4)
    assert beside.beside(None, one, other) == 10
    ((_, once), (_, more)) = begun[0]
    assert once == 1 and more * other.us * other.calls >= 4 * one.us * one.calls > (more - 1) * other.us * other.calls


def test_a_layer_is_what_takes_longer_and_apart_is_both(begun: list) -> None:
    pair, matmul = Work(us=1.0, calls=8), Work(us=1.0, calls=4)
    assert beside.layer(None, pair, matmul, 1.5) == 15, "12 matmuls for 8 pairs"
    assert beside.apart(None, pair, matmul, 1.5) == 25
    assert [[replays for _, replays in work] for work in begun] == [[1, 3], [1], [3]]


def test_rows_become_a_table() -> None:
    row = {"peer": "cute_ep", "tokens": 4096, "sms": None, "left": 0, "pair_us": 387.4, "layer_us": 4503.0}
    head, _, line = beside.markdown_rows([row]).splitlines()
    assert dict(zip(head.split(" | "), line.split(" | "), strict=True)) == {
        "| peer": "| cute_ep",
        "tokens": "4096",
        "sms": "all",
        "left": "0",
        "pair_us": "387",
        "matmul_us": "",
        "pair_beside_us": "",
        "matmul_beside_us": "",
        "layer_us": "4503",
        "apart_us |": " |",
    }
