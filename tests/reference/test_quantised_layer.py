"""A whole quantised layer on the CPU (`tests/quantised_layer.py` has the limits; `tests/gpu/test_quantised_layer.py` a
large one)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_ep import connect_local
from tests import quantised_layer
from tests.quantised_layer import LIMITS, Sizes, check

SMALL = Sizes(hidden=512, inner=256, experts=8, top_k=4, tokens=(24, 9))


@pytest.mark.parametrize("fmt", LIMITS)
def test_it_is_near_a_layer_that_quantises_alike_and_one_that_does_not(fmt: str) -> None:
    check(SMALL, connect_local(SMALL.config(fmt), ["cpu"] * 2))


@pytest.mark.parametrize("fmt", LIMITS)
@pytest.mark.parametrize("part", ["fused_silu", "dequantize"])
def test_a_step_that_is_a_little_wrong_is_noticed(fmt: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner rows of the neighbour on the left, or a tenth of the elements of decoded rows lost."""
    right: Callable[..., Any] = getattr(quantised_layer, part)

    def wrong(*arguments: Any, **named: Any) -> Any:
        made = right(*arguments, **named)
        if part == "fused_silu":
            return made._replace(scales=made.scales.roll(1, dims=1))
        return torch.where(torch.arange(made.shape[1]) % 10 == 3, 0, made)

    monkeypatch.setattr(quantised_layer, part, wrong)
    with pytest.raises(AssertionError, match="cosine"):
        check(SMALL, connect_local(SMALL.config(fmt), ["cpu"] * 2))
