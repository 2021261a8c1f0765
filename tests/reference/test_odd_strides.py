"""Dimensions of one element may have any stride: each tensor of each call, against the plain call, bit for bit."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from tests.odd_strides import odd_ones, with_stride
from tests.size_one_calls import Made, calls

CPU = torch.device("cpu")


def opened(cfg: EPConfig) -> EPCommunicator:
    return connect_reference(cfg)[0]


CALLS = calls(opened, CPU)


def results(name: str, odd: tuple[str, int, int] | None = None) -> tuple[Made, Made]:
    """(what a call returns, its tensors), one of which may have an odd stride."""
    call, tensors = CALLS[name]()
    if odd is not None:
        tensor = tensors[odd[0]]
        assert tensor is not None
        tensors = {**tensors, odd[0]: with_stride(tensor, *odd[1:])}
    return {key: None if one is None else one.clone() for key, one in call(tensors).items()}, tensors


@pytest.mark.parametrize("name", CALLS)
def test_odd_strides_of_dimensions_of_one_element_change_nothing(name: str) -> None:
    want, plain = results(name)
    tried = list(odd_ones(plain))
    assert tried
    for odd in tried:
        got, _ = results(name, odd)
        assert got.keys() == want.keys()
        for key, one in want.items():
            if one is not None:
                assert_bits(got[key], one, f"{name}, {odd}: {key}")


def test_the_table_has_every_tensor_of_a_round() -> None:
    """With a dimension of one element, in some call."""
    tried = {odd[0] for name in CALLS for odd in odd_ones(CALLS[name]()[1])}
    assert tried >= {"x", "topk_ids", "router_weights", "input_scale", "scales", "row_scales", "rows", "out"}
    assert tried >= {f"out.{name}" for name in ("tokens", "scales", "row_scales", "row_map", "headers", "weights")}
    assert tried >= {f"batch.{name}" for name in ("row_map", "headers", "weights", "num_rows")}
