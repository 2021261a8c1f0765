"""`tokens_per_rank`: how many tokens a rank gets of a whole batch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_ep import EPConfig, EPConfigError, tokens_per_rank
from cute_ep.layouts.maps.routing import MAX_RANKS, MAX_TOKENS_PER_RANK


@pytest.mark.parametrize(
    ("batch", "ranks", "want"),
    [(4196, 8, 525), (10, 3, 4), (1, 1, 1), (1, 8, 1), (8, 8, 1), (9, 8, 2), (32768, 1, 32768), (1048576, 32, 32768)],
)
def test_tokens_are_rounded_up(batch: int, ranks: int, want: int) -> None:
    assert tokens_per_rank(batch, ranks) == want
    assert EPConfig(128, ranks, 1, tokens_per_rank(batch, ranks), ranks).max_tokens_per_rank == want


@given(st.integers(1, 40000), st.integers(1, MAX_RANKS))
def test_they_are_enough_for_the_batch_and_no_more_than_that(batch: int, ranks: int) -> None:
    if batch > ranks * MAX_TOKENS_PER_RANK:
        return
    tokens = tokens_per_rank(batch, ranks)
    assert (tokens - 1) * ranks < batch <= tokens * ranks


def test_replicated_tokens_are_all_of_every_rank() -> None:
    assert tokens_per_rank(4196, 8, skip_a2a=True) == 4196


def test_numbers_of_numpy_are_numbers() -> None:
    tokens = tokens_per_rank(np.int64(10), np.int32(3))
    assert (tokens, type(tokens)) == (4, int)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 8), "batch_tokens = 0: must be a positive integer"),
        ((-3, 8), "batch_tokens = -3: must be a positive integer"),
        ((4.0, 8), "batch_tokens = 4.0: must be a positive integer"),
        ((True, 8), "batch_tokens = True: must be a positive integer"),
        (("8", 8), "batch_tokens = '8': must be a positive integer"),
        ((8, 0), "world_size = 0: must be an integer in [1, 1024]"),
        ((8, 1025), "world_size = 1025: must be an integer in [1, 1024]"),
        ((8, None), "world_size = None: must be an integer in [1, 1024]"),
        ((8, 2, 1), "skip_a2a = 1: must be True or False"),
        ((262145, 8), "batch_tokens = 262145: must not exceed 262144, 32768 for each rank; split the batch"),
        ((32769, 8, True), "batch_tokens = 32769: must not exceed 32768, 32768 for each rank; split the batch"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told(arguments: tuple[Any, ...], said: str) -> None:
    batch, ranks, *skip = arguments
    with pytest.raises(EPConfigError, match=re.escape(said)):
        tokens_per_rank(batch, ranks, **({"skip_a2a": skip[0]} if skip else {}))
