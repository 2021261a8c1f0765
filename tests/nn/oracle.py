"""A dense Mixture-of-Experts layer in float64 and plain torch, token by token, with gradients by autograd; and how far
a layer that rounds to bfloat16 may be from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 2.0**-8
"""Largest relative error of a rounding to bfloat16."""


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    return g / (1 + torch.exp(-g)) * u


def swiglu_clamped(g: Tensor, u: Tensor) -> Tensor:
    g, u = torch.minimum(g, torch.tensor(7.0)), u.clamp(-7, 7)
    return (u + 1) * g / (1 + torch.exp(-1.702 * g))


def geglu_tanh(g: Tensor, u: Tensor) -> Tensor:
    return 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u


def relu2(g: Tensor) -> Tensor:
    return torch.where(g > 0, g * g, 0)


GATES: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "swiglu": (2, swiglu),
    "swiglu_clamped": (2, swiglu_clamped),
    "geglu_tanh": (2, geglu_tanh),
    "relu2": (1, relu2),
}
"""Name -> (columns of the first matmul for each of the second, formula)."""


@dataclass
class Experts:
    """All experts of all ranks, by the names of a layer's parameters, float64."""

    gate: str
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def parameters(self) -> dict[str, Tensor]:
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def between(self, x: Tensor, expert: int) -> Tensor:
        """What the gate gets of one token."""
        product = self.gate_up[expert] @ x
        return product if self.gate_up_bias is None else product + self.gate_up_bias[expert]

    def gated(self, between: Tensor) -> Tensor:
        columns, formula = GATES[self.gate]
        return formula(*between.chunk(columns))

    def row(self, x: Tensor, expert: int) -> Tensor:
        """One expert's output for one token."""
        product = self.down[expert] @ self.gated(self.between(x, expert))
        return product if self.down_bias is None else product + self.down_bias[expert]


def dense(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """[T, hidden]: of each token the weighted sum of its experts' outputs, masked entries left out."""
    out = []
    for token in range(len(x)):
        row = torch.zeros(x.shape[1], dtype=torch.float64)
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                row = row + weights[token, slot] * experts.row(x[token], expert)
        out.append(row)
    return torch.stack(out) if out else x * 0


def output_bound(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """[T, hidden]: most that a layer's output may be from `dense`.

    The gate's arguments are rounded (twice with a bias), which its derivative carries on. The gate rounds up to five
    times, once per step: three values that its result is a product of, and two arguments of factors, which count as
    other roundings of its arguments. Rows are rounded (twice with a bias), and so is their sum, in partial mode once
    more before. Sums in float32 and products of two errors add less than a tenth of all that.
    """
    bound = torch.zeros_like(x)
    for token in range(len(x)):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert < 0:
                continue
            arguments = experts.between(x[token], expert).detach().requires_grad_()
            inner = experts.gated(arguments)
            (slope,) = torch.autograd.grad(inner.sum(), arguments)
            carried = (slope * arguments).abs().unflatten(0, (-1, len(inner))).sum(0)
            off = experts.down[expert].abs() @ (4 * carried + 3 * inner.abs())
            bias = 0 if experts.down_bias is None else experts.down_bias[expert].abs()
            bound[token] += weights[token, slot] * (off + 4 * experts.row(x[token], expert).abs() + bias).detach()
    return 1.1 * UNIT * bound


def assert_within(got: Tensor, want: Tensor, bound: Tensor, name: str) -> None:
    assert got.shape == want.shape and got.isfinite().all(), name
    off = (got.double() - want.detach()).abs()
    assert (off <= bound).all(), f"{name}: off by {(off / bound).max():.3f} of what is allowed"


ROUNDINGS = 20
"""Roundings that a gradient has behind it: of the rows before the gate 2, in the gate and its derivative up to 10, of
the output's gradient 1 and times the weight 1, of the products of three matmuls, of the sum of rows 1, of biases 2."""


def assert_close(got: Tensor, want: Tensor, name: str) -> None:
    """In the Euclidean norm: each of ROUNDINGS changes at most UNIT of it, passes through matrices that change the
    norms of all vectors alike, as random ones do, and is independent of the others."""
    assert got.shape == want.shape and got.isfinite().all(), name
    off, size = (got.double() - want.detach()).norm(), want.detach().norm()
    assert off <= ROUNDINGS**0.5 * UNIT * size, f"{name}: off by {off / size:.5f} of its norm"
