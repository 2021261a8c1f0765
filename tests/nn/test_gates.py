"""What experts compute between their matmuls, by the kernel's reference and by plain torch."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.gates import Gate
from cute_ep.nn.gates import GATES, add_bias, apply, plain
from cute_ep.runtime.local_ops import fused_silu

from . import oracle

ROWS, INNER = 9, 16


def rows_of(gate: Gate) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (6 * torch.randn(ROWS, gate.columns * INNER, generator=generator)).bfloat16()


@pytest.mark.parametrize("name", GATES)
def test_the_plain_functions_are_the_formulas_and_so_are_their_gradients(name: str) -> None:
    gate = GATES[name]
    rows = rows_of(gate).double().requires_grad_()
    other = rows.detach().clone().requires_grad_()
    columns, formula = oracle.GATES[name]
    assert columns == gate.columns
    got, want = apply(gate, rows), formula(*other.chunk(columns, dim=1))
    torch.testing.assert_close(got, want)
    direction = torch.randn(ROWS, INNER, generator=torch.Generator().manual_seed(2)).double()
    got.backward(direction)
    want.backward(direction)
    torch.testing.assert_close(rows.grad, other.grad)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("needed", [None, "rows", "bias"], ids=["without gradient", "of rows", "of the bias"])
def test_the_kernel_computes_where_no_gradient_is_wanted(name: str, needed: str | None) -> None:
    gate, offsets = GATES[name], torch.tensor([0, 2, 2, ROWS], dtype=torch.int32)
    rows, bias = rows_of(gate), rows_of(gate)[:3] / 4
    kernel = fused_silu(rows, offsets, gate=gate, bias=bias)
    torched = plain(gate, add_bias(rows, offsets, bias))
    assert not torch.equal(kernel, torched), "numbers that could tell nothing"
    rows.requires_grad_(needed == "rows")
    bias.requires_grad_(needed == "bias")
    assert torch.equal(apply(gate, rows, offsets, bias), torched if needed else kernel)
    with torch.no_grad():
        assert torch.equal(apply(gate, rows, offsets, bias), kernel)


def test_the_kernel_computes_no_rows_behind_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, offsets = GATES["swiglu"], torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    asked = []
    monkeypatch.setattr(
        "cute_ep.nn.gates.fused_silu", lambda rows, given, **named: asked.append(given) or fused_silu(rows, given)
    )
    assert torch.equal(apply(gate, rows_of(gate), offsets)[:5], apply(gate, rows_of(gate))[:5])
    assert asked[0] is offsets


@pytest.mark.parametrize("gate", [Gate(alpha=1.5, limit=3.0, offset=1), Gate(limit=3.0)], ids=str)
def test_numbers_of_a_gate_are_those_given(gate: Gate) -> None:
    rows = rows_of(gate)
    g, u = rows.double().chunk(2, dim=1)
    g, u = g.clamp(max=3), u.clamp(-3, 3)
    want = (u + gate.offset) * g / (1 + torch.exp(-(gate.alpha or 1) * g))
    torch.testing.assert_close(apply(gate, rows).double(), want, rtol=2**-8, atol=0)
    torch.testing.assert_close(apply(gate, rows.double()), want)
