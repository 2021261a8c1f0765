"""SwiGLU and other gates in float64, and how far the kernels' bfloat16 results may be from them."""

from __future__ import annotations

import math

import torch

from cute_ep.api.errors import EPInputError
from cute_ep.api.gates import SWIGLU, Gate
from cute_ep.api.modes import no_modes
from cute_ep.api.tensors import check_tensor
from cute_ep.reference.bounds import TINY, UNIT, cast_error

EXPONENTIAL_ERROR = 2.0**-22
"""Largest relative error of `ex2.approx.ftz.f32` (PTX ISA)."""
RECIPROCAL_ERROR = 2.0**-23
"""Largest relative error of `rcp.approx.ftz.f32`: one unit in the last place (PTX ISA)."""
FLUSH_BELOW = -86.0
"""Below this z the approximate sigmoid may be flushed to 0: it is under 2**-124."""
FLUSH_ERROR = 2.0**-125
ZERO_BELOW = -128.0
"""Below this z the exponential has overflowed, and the approximate sigmoid is 0."""


def _split(
    x: torch.Tensor, interleaved: bool, gate: Gate, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(g, z, factor) in float64, such that y = g * sigmoid(z) * factor; relu squared: (max(g, 0), nothing, nothing)."""
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    if x.shape[1] % gate.columns:
        raise EPInputError(f"x.shape[1] = {x.shape[1]}: must be even, a gate and an up element for each output")
    rows = x.float()
    if bias is not None:
        check_tensor("bias", bias, shape=x.shape, dtype=torch.bfloat16, device=x.device)
        rows = rows + bias.float()
    rows = rows.double()
    if gate.columns == 1:
        return rows.clamp(min=0), rows, rows
    g, up = rows.unflatten(1, (-1, 2)).unbind(2) if interleaved else rows.chunk(2, dim=1)
    if gate.limit is not None:
        limit = _float32(gate.limit)
        g, up = g.clamp(max=limit), up.clamp(-limit, limit)
    if gate.kind == "gelu_tanh":
        z = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    else:
        z = g if gate.alpha is None else g * _float32(gate.alpha)
    return g, z, up + gate.offset


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _roundings(gate: Gate) -> tuple[int, int]:
    """Relative errors of 2**-24 in the exponent, and in the product of g, sigmoid and factor."""
    if gate.kind == "gelu_tanh":
        exponent = 7
    else:
        exponent = 2 if gate.alpha is None else 3
    return exponent, 2 + gate.offset


@no_modes()
def swiglu(
    x: torch.Tensor, interleaved: bool = False, gate: Gate = SWIGLU, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What `gate` says of each row; docs/numerics.md has the formulas.

    Infinities follow IEEE arithmetic (an infinite negative gate gives NaN: inf * 0), and clamp and minimum pass NaN on.

    Args:
        x: [T, 2 * H] bfloat16: g are the first H columns and u the last, or with `interleaved` the even columns and
            the odd ones; [T, H] for a gate with one column.
        gate: its alpha and limit are rounded to float32.
        bias: like x, added in one float32 addition, whose bits the kernels have too.

    Returns:
        [T, H] float64, exact but for float64's own rounding; of "relu2" the float32 square, as the kernels have it.

    Raises:
        EPInputError: `x` or `bias` has another shape or type.
    """
    g, z, factor = _split(x, interleaved, gate, bias)
    return g.float().square().double() if gate.columns == 1 else g * torch.sigmoid(z) * factor


@no_modes()
def swiglu_bound(
    x: torch.Tensor,
    interleaved: bool = False,
    gate: Gate = SWIGLU,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Most that a kernel's y, rounded to `dtype`, may be from `swiglu`; infinity makes no promise (`reference.within`).

    The kernel computes, in float32 with u = 2**-24:
        e = ex2.approx.ftz(-z * log2(e));  d = 1 + e;  s = rcp.approx.ftz(d);  y = (g * s) * factor.
    e: the exponent has n relative errors u, 2 for z = g (log2(e), the product), 3 for z = alpha * g, 7 for gelu, which
        exp amplifies by |z|:  r_e = expm1(|z| * n * u) * (1 + 2**-22) + 2**-22.
    d: e / (1 + e) = 1 - sigmoid(z), so  r_d = (1 + (1 - sigmoid(z)) * r_e) * (1 + u) - 1.
    s: one unit in the last place, r_s = (1 + 2**-23) / (1 - r_d) - 1; and where z < -86 it may be flushed to 0, which
        adds 2**-125. Below z = -128 the exponential has overflowed, s = 0 and the error is |y|.
    y: m products and sums (g * s, * factor, and u + offset), r = (1 + r_s) * (1 + u)**m - 1; an underflow of
        g * s adds 2**-150 * |factor|, one of y 2**-150. Together, widened by 1 + 2**-20 for flushed exponents:
        E = |g * factor| * (r * sigmoid(z) + 2**-125 if z < -86) + 2**-150 * (|factor| + 1).
    The cast adds `cast_error` of |y| + E, nothing for float32. Relu squared has the error of the cast only.

    Args, Raises: as `swiglu`.

    Returns:
        [T, H] float64. 0 where `swiglu` is NaN or infinite, which must be met exactly; infinity where |y| may exceed
        `dtype`, and for infinite u with z < -86 (infinity times a sigmoid that may have been flushed).
    """
    y = swiglu(x, interleaved, gate, bias)
    g, z, factor = _split(x, interleaved, gate, bias)
    if gate.columns == 1:
        return torch.where(y.isfinite(), cast_error(y, dtype), 0)
    in_exponent, in_product = _roundings(gate)
    sigmoid, complement = torch.sigmoid(z), torch.sigmoid(-z)
    amplified = torch.expm1(z.abs().clamp(max=-ZERO_BELOW) * in_exponent * UNIT)
    exponential = amplified * (1 + EXPONENTIAL_ERROR) + EXPONENTIAL_ERROR
    denominator = (1 + complement * exponential) * (1 + UNIT) - 1
    reciprocal = (1 + RECIPROCAL_ERROR) / (1 - denominator) - 1
    relative = (1 + reciprocal) * (1 + UNIT) ** in_product - 1
    off = relative * sigmoid + torch.where(z < FLUSH_BELOW, FLUSH_ERROR, 0)
    error = ((g * factor).abs() * off + TINY * (factor.abs() + 1)) * (1 + 2.0**-20)
    error = torch.where(z < ZERO_BELOW, y.abs(), error)
    error = error + cast_error(y.abs() + error, dtype)
    error = torch.where(y.isfinite(), error, 0)
    return torch.where(factor.isinf() & (z < FLUSH_BELOW), torch.inf, error)
