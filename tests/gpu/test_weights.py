"""Router weights of partial sums on GPUs: the table of `tests.weights_cases`. A refused call has sent nothing, or the
next round of all ranks would time out or have other bits."""

from __future__ import annotations

import pytest

from tests import weights_cases
from tests.gpu.conftest import connected
from tests.weights_cases import CFG, COMBINES, MADE, TOKENS, WITH_WEIGHTS


@pytest.mark.parametrize("rank_major", [False, True], ids=["expert-major", "rank-major"])
def test_partial_sums_need_the_weights_of_their_dispatch(devices: list[str], rank_major: bool) -> None:
    some = [made for made in MADE.values() if made.rank_major == rank_major]
    with connected(some[0].cfg, devices[: CFG.world_size]) as ranks:
        for made in some:
            for combine in COMBINES.values():
                for tokens in TOKENS.values():
                    weights_cases.check_combine(ranks, made, tokens, combine)


def test_partial_sums_take_no_weights_at_combine(devices: list[str]) -> None:
    with connected(CFG, devices[: CFG.world_size]) as ranks:
        for tokens in TOKENS.values():
            for combine in WITH_WEIGHTS.values():
                weights_cases.check_weights_refused(ranks, tokens, combine)


def test_a_partial_round_whose_wait_was_given_weights_is_ended_by_another_wait(devices: list[str]) -> None:
    with connected(CFG, devices[: CFG.world_size]) as ranks:
        for tokens in TOKENS.values():
            weights_cases.check_wait_refused(ranks, tokens)
