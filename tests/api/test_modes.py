"""Computing without the caller's modes of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from cute_ep.api.modes import no_modes, writing_modes


@contextmanager
def default_device() -> Iterator[None]:
    """New tensors are made on another device than the CPU, until the end."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "another device": lambda: torch.device("meta"),
    "another default device": default_device,
}


def test_inside_no_modes_nothing_requires_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    with no_modes():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_inside_no_modes_the_callers_mode_does_not_count(mode: str) -> None:
    with MODES[mode](), no_modes():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert (product.dtype, product.device.type) == (torch.float32, "cpu")


def test_operations_are_not_intercepted_where_no_device_is_to_be_hidden() -> None:
    with no_modes():
        assert torch._C._len_torch_function_stack() == 0


def test_tensors_of_inference_mode_are_written_from_outside_and_others_stay_ordinary() -> None:
    """Tensors of inference mode from outside of it, and ordinary ones, which stay ordinary."""
    with torch.inference_mode():
        inference = torch.zeros(2)
    ordinary = torch.zeros(2)
    with writing_modes():
        for tensor in (inference, ordinary):
            tensor[:1] = torch.ones(1)
    assert inference.tolist() == ordinary.tolist() == [1, 0]
    assert not ordinary.is_inference()
