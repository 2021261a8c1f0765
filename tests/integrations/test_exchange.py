"""Passes of all ranks of one process: what there is room for, and when the host waits for the number of rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_ep.api.config import EPConfig
from cute_ep.api.rounds import Plan
from cute_ep.integrations.transformers import exchange
from cute_ep.integrations.transformers.exchange import UNCOUNTED_ENTRIES, Exchange, Round
from cute_ep.runtime.local_pool import LocalPool
from cute_ep.runtime.routes import RouteCounts, count_routes

RANKS, EXPERTS, SLOTS, HIDDEN = 4, 8, 4, 64
LARGEST = UNCOUNTED_ENTRIES // SLOTS
"""Tokens of the largest pass that does not wait."""


@pytest.fixture
def ranks() -> Iterator[Exchange]:
    """As if each had a device. They share the CPU, whose calls are done when they return."""
    cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, max_tokens_per_rank=LARGEST, world_size=RANKS)
    pool = LocalPool([torch.device("cpu")] * RANKS, grows=True)
    made = Exchange(pool, cfg)
    made.waits = False
    yield made
    pool.close()


def routes(kind: str, tokens: int) -> Tensor:
    """[T, K] ids: of all experts, of the first rank's, of the last rank's, or of none."""
    ids = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(0)).topk(SLOTS).indices
    ids[::3, 1] = -1
    local = EXPERTS // RANKS
    return {"any": ids, "first": ids % local, "last": EXPERTS - 1 - ids % local, "none": ids * 0 - 1}[kind]


def counted(ids: Tensor, weights: Tensor) -> RouteCounts:
    return count_routes(ids, EXPERTS, RANKS, weights=weights)


def passed(ranks: Exchange, ids: Tensor) -> tuple[list[int], Tensor]:
    """(rows that there was room for, sums) of a pass without gradients, whose ranks multiply rows by 1, 2, ..."""
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(len(ids), HIDDEN, generator=generator), torch.rand(ids.shape, generator=generator)
    one = Round(ranks, counted(ids, weights), gradients=False, mode="partial")
    rows = one.dispatch(x)
    assert [len(each) for each in rows] == one.rows
    outs = [each * (rank + 1) for rank, each in enumerate(rows)]
    return one.rows, one.combine(outs, weights, x)


@pytest.mark.parametrize("gradients", [False, True])
def test_there_is_room_for_the_rows_that_come(gradients: bool, ranks: Exchange) -> None:
    """Of four ranks one gets all, and two get none."""
    ranks.waits = not gradients
    ids, x = torch.tensor([[0, 1, 1, -1], [2, -1, -1, -1]]), torch.randn(2, HIDDEN, requires_grad=gradients)
    one = Round(ranks, counted(ids, torch.rand(2, SLOTS)), gradients=gradients, mode="partial")
    assert [len(rows) for rows in one.dispatch(x)] == one.rows == [3, 1, 0, 0]


@pytest.mark.parametrize("kind", ["any", "first", "last", "none"])
@pytest.mark.parametrize("tokens", [1, LARGEST, LARGEST + 1])
def test_large_passes_have_room_for_what_comes_and_small_ones_for_any(
    kind: str, tokens: int, ranks: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give the bits of the other."""
    ids = routes(kind, tokens)
    come = [int((ids // (EXPERTS // RANKS) == rank).sum()) for rank in range(RANKS)]
    room, sums = passed(ranks, ids)
    assert room == ([ids.numel()] * RANKS if tokens <= LARGEST else come)
    monkeypatch.setattr(exchange, "UNCOUNTED_ENTRIES", 0 if tokens <= LARGEST else ids.numel())
    other, again = passed(ranks, ids)
    assert other == (come if tokens <= LARGEST else [ids.numel()] * RANKS)
    assert torch.equal(sums, again) and sums.any() == (kind != "none")


def test_small_passes_do_not_wait(ranks: Exchange, no_wait: None) -> None:
    """Those with gradients and larger ones do."""
    ids = routes("any", LARGEST + 1)
    weights = torch.ones(ids.shape)
    Round(ranks, counted(ids[1:], weights[1:]), gradients=False, mode="partial")
    for first, gradients in ((1, True), (0, False)):
        with pytest.raises(AssertionError, match="the host waits"):
            Round(ranks, counted(ids[first:], weights[first:]), gradients=gradients, mode="partial")


# ---- exchanges that nobody has any more


@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_a_collector_between_the_launches_of_two_ranks_closes_nothing(
    step: str, ranks: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits for the kernel of the first rank, which waits for the second's. The next call closes."""
    cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, max_tokens_per_rank=4, world_size=2)
    lost = [Exchange(LocalPool([torch.device("cpu")] * 2, grows=True), cfg)]
    gone = lost[0].communicators
    ids = routes("any", 8)
    last = ranks.communicators[-1]
    open_between: list[bool] = []
    plan = getattr(type(last), f"_plan_{step}")

    def planned(self: Any, *given: Any) -> Plan:
        launch = plan(self, *given).launch

        def collected() -> Any:
            if self is last:  # all others are launched
                lost.clear()
                gc.collect()
                open_between.append(not any(one.closed for one in gone))
            return launch()

        return Plan(collected)

    monkeypatch.setattr(type(last), f"_plan_{step}", planned)
    passed(ranks, ids)
    assert open_between[:1] == [True]
    assert step == "dispatch" or not any(one.closed for one in gone)
    passed(ranks, ids)
    assert all(one.closed for one in gone)


def test_an_exchange_is_closed_once_however_it_ends() -> None:
    cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, max_tokens_per_rank=4, world_size=2)
    for ends in ([LocalPool.close, LocalPool.close], [LocalPool.abandon, LocalPool.abandon]):
        pool = LocalPool([torch.device("cpu")] * 2, grows=True)
        made = Exchange(pool, cfg)
        for end in ends:
            end(pool)
        assert all(one.closed == (ends[0] is LocalPool.close) for one in made.communicators)
        LocalPool([]).sweep()
        assert all(one.closed for one in made.communicators)
