"""Router weights of partial sums before a launch: the table of `tests.weights_cases`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cute_ep.api.errors import EPInputError
from cute_ep.runtime.communicator import Communicator
from tests import weights_cases
from tests.fake_gpu import Launches, MakeRank
from tests.weights_cases import ASKS, CFG, MADE, REFUSES, Made, Round


def ranks_of(make_rank: MakeRank, made: Made) -> list[Communicator]:
    return [make_rank(made.cfg, rank) for rank in range(CFG.world_size)]


@weights_cases.tokens
@weights_cases.combines
@weights_cases.made
def test_a_partial_combine_without_weights_of_its_dispatch_launches_nothing(
    make_rank: MakeRank, launches: Launches, made: Made, combine: Callable, tokens: tuple
) -> None:
    """And one with them is told where they are, on all ranks."""
    one = Round(ranks_of(make_rank, made), made, tokens)
    before = len(launches)
    if made.factors is None:
        with launches.forbidden(), pytest.raises(EPInputError, match=ASKS):
            combine(one.ranks, one.rows, one.changed)
        return
    combine(one.ranks, one.rows, one.changed)
    sent = [launch for launch in list(launches)[before:] if not launch.kernel.startswith("combine_wait")]
    assert {launch.kernel for launch in launches.of("combine")} <= {
        *("combine_partial", "combine_async_partial", "combine_wait_partial"),
    }
    assert [launch.arguments["batch.weights"] for launch in sent] == [
        batch.weights.data_ptr() for batch in one.changed if batch.weights is not None
    ]


@weights_cases.tokens
@weights_cases.with_weights
def test_a_partial_combine_that_is_given_weights_launches_nothing(
    make_rank: MakeRank, launches: Launches, combine: Callable, tokens: tuple
) -> None:
    for made in (MADE["with weights"], MADE["without"]):
        one = Round(ranks_of(make_rank, made), made, tokens)
        with launches.forbidden(), pytest.raises(EPInputError, match=REFUSES):
            combine(one.ranks, one.rows, one.batches, one.weights)


@weights_cases.tokens
def test_a_wait_that_is_given_weights_launches_nothing_and_may_be_repeated(
    make_rank: MakeRank, launches: Launches, tokens: tuple
) -> None:
    one = Round(ranks_of(make_rank, MADE["with weights"]), MADE["with weights"], tokens)
    rank, rows, batch = one.ranks[0], one.rows[0], one.batches[0]
    sent = rank.combine_async(rows, batch)
    with launches.forbidden(), pytest.raises(EPInputError, match=REFUSES):
        rank.combine_wait(sent, one.weights[0])
    with launches.forbidden(), pytest.raises(EPInputError, match="1 split round"):
        rank.combine(rows, batch)
    rank.combine_wait(sent)
    assert launches.last().kernel == "combine_wait_partial"
