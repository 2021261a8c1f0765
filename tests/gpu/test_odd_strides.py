"""Dimensions of one element may have any stride, on a GPU as on the CPU: each tensor of each call, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.runtime.connection import connect_local
from cute_ep.testing.compare import assert_bits
from tests.odd_strides import odd_ones, with_stride
from tests.size_one_calls import Made, calls

from .conftest import LIBRARY

GPU = torch.device("cuda", 0)
NAMES = tuple(calls(lambda cfg: None, GPU))  # type: ignore[arg-type,return-value]


class Opened:
    """The communicators of a test, one for each configuration."""

    def __init__(self) -> None:
        self._made: dict[EPConfig, EPCommunicator] = {}

    def __call__(self, cfg: EPConfig) -> EPCommunicator:
        if cfg not in self._made:
            (self._made[cfg],) = connect_local(cfg, [GPU], library=LIBRARY)
        return self._made[cfg]

    def close(self) -> None:
        for one in self._made.values():
            one.close()


@contextmanager
def opened() -> Iterator[Opened]:
    made = Opened()
    try:
        yield made
    finally:
        made.close()


def results(made: Opened, name: str, odd: tuple[str, int, int] | None = None) -> tuple[Made, Made]:
    """(what a call returns, its tensors), one of which may have an odd stride."""
    call, tensors = calls(made, GPU)[name]()
    if odd is not None:
        tensor = tensors[odd[0]]
        assert tensor is not None
        tensors = {**tensors, odd[0]: with_stride(tensor, *odd[1:])}
    found = {key: None if one is None else one.clone() for key, one in call(tensors).items()}
    if found.get("headers") is not None:
        found["headers"][:, HeaderWord.ROUND] = 0  # another one in each call
    torch.cuda.synchronize()
    return found, tensors


@pytest.mark.parametrize("name", NAMES)
def test_odd_strides_of_dimensions_of_one_element_change_nothing(name: str) -> None:
    with opened() as made:
        want, plain = results(made, name)
        for odd in odd_ones(plain):
            got, _ = results(made, name, odd)
            for key, one in want.items():
                if one is not None:
                    assert_bits(got[key], one, f"{name}, {odd}: {key}")
