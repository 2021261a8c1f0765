"""A whole quantised layer of the sizes at which Modular MAX tests one."""

from __future__ import annotations

import pytest
import torch

from tests.quantised_layer import LIMITS, Sizes, check

from .conftest import LIBRARY, connected

LARGE = Sizes(hidden=7168, inner=2048, experts=64, top_k=8, tokens=(117, 64))


@pytest.mark.parametrize("fmt", LIMITS)
def test_it_is_near_a_layer_that_quantises_alike_and_one_that_does_not(fmt: str) -> None:
    """On two GPUs, or on one that two ranks share."""
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cuda:0"] * 2
    with connected(LARGE.config(fmt), devices) as ranks:
        check(LARGE, ranks, str(LIBRARY))
