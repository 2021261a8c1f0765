"""Memory that nobody wrote changes nothing: outputs and gradients have the bits of a run over cleared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.interface import EPCommunicator
from cute_ep.nn import MoELayer
from cute_ep.testing.compare import assert_bits

from .layer import Given, given, gradients
from .ranks import ALONE


@contextmanager
def poisoned(*, warn_only: bool = True) -> Iterator[None]:
    """New memory holds NaN, or the largest integer. warn_only: of `torch.use_deterministic_algorithms`, without which
    there is no such memory."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def layer(comm: str, x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, mode: str, *, clear: bool) -> Tensor:
    batch = cute_ep.ops.dispatch(x, ids, weights, comm, clear=clear)
    rows = grouped_mm(batch.tokens, experts, offs=batch.row_offsets[1:]).relu()
    return cute_ep.ops.combine(rows, batch, mode)  # type: ignore[arg-type]


def check_poisoned(ep: EPCommunicator, one: Given) -> None:
    """Of a layer over grouped_mm: output, gradients of tokens, router weights and experts."""
    comm = cute_ep.ops.register(ep)
    for mode in ("exact", "partial"):
        want = gradients(one, 0, comm, mode, call=partial(layer, clear=True))
        with poisoned():
            made = gradients(one, 0, comm, mode, call=partial(layer, clear=False))
        for got, wanted in zip(made, want, strict=True):
            assert wanted.isfinite().all()
            assert_bits(got, wanted, f"{mode}, output or gradient")


def check_poisoned_layer(ep: EPCommunicator, tokens: int) -> None:
    """Of a `MoELayer`, also of its biases."""
    torch.manual_seed(0)
    module = MoELayer(ep.cfg, 16, bias=True, device=ep.device)
    module.attach(ep)
    x = torch.randn(tokens, ep.cfg.hidden, device=ep.device).bfloat16()

    def trained() -> list[Tensor]:
        module.zero_grad()
        sent = x.clone().requires_grad_()
        out = module(sent)
        out.backward(x)
        made = [out.detach(), sent.grad, *(parameter.grad for parameter in module.parameters())]
        return [part.clone() for part in made if part is not None]

    want = trained()
    with poisoned():
        made = trained()
    assert len(made) == len(want) == 2 + len(list(module.parameters()))
    for number, (got, wanted) in enumerate(zip(made, want, strict=True)):
        assert wanted.isfinite().all()
        assert_bits(got, wanted, f"part {number}")


@pytest.mark.parametrize("tokens", [7, 1, 0])
def test_poisoned_memory_changes_no_output_and_no_gradient(tokens: int) -> None:
    (ep,) = connect_local(ALONE, ["cpu"])
    check_poisoned(ep, given(ALONE, (tokens,), "masked"))
    check_poisoned_layer(ep, tokens)
