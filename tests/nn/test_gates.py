"""What experts compute between their matmuls, by the kernel's reference and by plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from cute_ep.api.errors import EPConfigError
from cute_ep.nn import Gate, clamped_swiglu
from cute_ep.nn.gates import GATES
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
    got, want = gate(rows), formula(*other.chunk(columns, dim=1))
    torch.testing.assert_close(got, want)
    direction = torch.randn(ROWS, INNER, generator=torch.Generator().manual_seed(2)).double()
    got.backward(direction)
    want.backward(direction)
    torch.testing.assert_close(rows.grad, other.grad)


@pytest.mark.parametrize("name", ["swiglu", "swiglu_clamped"])
@pytest.mark.parametrize("needed", [False, True], ids=["without gradient", "with gradient"])
def test_the_kernel_computes_where_no_gradient_is_wanted(name: str, needed: bool) -> None:
    gate = GATES[name]
    rows = rows_of(gate).requires_grad_(needed)
    kernel = fused_silu(rows.detach(), alpha=gate.alpha, limit=gate.limit)
    plain = gate.function(rows.detach(), gate.alpha, gate.limit)
    assert not torch.equal(kernel, plain), "numbers that could tell nothing"
    assert torch.equal(gate(rows), plain if needed else kernel)
    with torch.no_grad():
        assert torch.equal(gate(rows), kernel)


def test_the_kernel_computes_no_rows_behind_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, offsets = GATES["swiglu"], torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    asked = []
    monkeypatch.setattr(
        "cute_ep.nn.gates.fused_silu", lambda rows, given, **named: asked.append(given) or fused_silu(rows, given)
    )
    assert torch.equal(gate(rows_of(gate), offsets)[:5], gate(rows_of(gate))[:5])
    assert asked[0] is offsets


@pytest.mark.parametrize("name", ["swiglu", "swiglu_clamped"])
def test_the_op_obeys_the_rules_of_torch(name: str) -> None:
    gate = GATES[name]
    for offsets in (None, torch.tensor([0, ROWS], dtype=torch.int32)):
        arguments = rows_of(gate), offsets, gate.alpha, gate.limit
        torch.library.opcheck(torch.ops.cute_ep.swiglu.default, arguments)


def test_numbers_of_the_clamped_form_are_those_given() -> None:
    gate = clamped_swiglu(1.5, 3.0)
    rows = rows_of(gate)
    g, u = rows.double().chunk(2, dim=1)
    g, u = g.clamp(max=3), u.clamp(-3, 3)
    want = (u + 1) * g / (1 + torch.exp(-1.5 * g))
    torch.testing.assert_close(gate(rows).double(), want, rtol=2**-8, atol=0)
    torch.testing.assert_close(gate(rows.double()), want)


@pytest.mark.parametrize(
    ("alpha", "limit", "said"),
    [
        (math.inf, 7.0, "alpha = inf: must be a finite float32 number"),
        (1.7, "7", "limit = '7': must be a finite float32 number"),
        (1.7, 0.0, r"limit = 0\.0: must be positive"),
    ],
    ids=["alpha", "text", "limit"],
)
def test_numbers_that_no_kernel_takes_are_refused(alpha: float, limit: float, said: str) -> None:
    with pytest.raises(EPConfigError, match=said):
        clamped_swiglu(alpha, limit)
