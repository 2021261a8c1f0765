"""Router weights of partial sums on the CPU: the table of `tests.weights_cases`."""

from __future__ import annotations

from collections.abc import Callable

from cute_ep.reference.backend import connect_reference
from tests import weights_cases
from tests.weights_cases import Made


@weights_cases.tokens
@weights_cases.combines
@weights_cases.made
def test_partial_sums_need_the_weights_of_their_dispatch(made: Made, combine: Callable, tokens: tuple) -> None:
    weights_cases.check_combine(connect_reference(made.cfg), made, tokens, combine)


@weights_cases.tokens
@weights_cases.with_weights
def test_partial_sums_take_no_weights_at_combine(combine: Callable, tokens: tuple) -> None:
    weights_cases.check_weights_refused(connect_reference(weights_cases.CFG), tokens, combine)


@weights_cases.tokens
def test_a_partial_round_whose_wait_was_given_weights_is_ended_by_another_wait(tokens: tuple) -> None:
    weights_cases.check_wait_refused(connect_reference(weights_cases.CFG), tokens)
