"""SwiGLU in float64, and how far the kernels' bfloat16 results may be from it."""

from __future__ import annotations

import torch

from cute_ep.api.errors import EPInputError
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
    x: torch.Tensor, interleaved: bool, alpha: float | None, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(gate, factor, alpha) in float64, such that y = gate * sigmoid(alpha * gate) * factor."""
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    if x.shape[1] % 2:
        raise EPInputError(f"x.shape[1] = {x.shape[1]}: must be even, a gate and an up projection side by side")
    if (alpha is None) != (limit is None):
        raise EPInputError(f"alpha = {alpha!r}, limit = {limit!r}: must be given together, or neither")
    gate, up = x.double().unflatten(1, (-1, 2)).unbind(2) if interleaved else x.double().chunk(2, dim=1)
    if alpha is None:
        return gate, up, 1.0
    alpha, limit = (torch.tensor(value, dtype=torch.float32).item() for value in (alpha, limit))
    return gate.clamp(max=limit), up.clamp(-limit, limit) + 1, alpha


@no_modes()
def swiglu(
    x: torch.Tensor, interleaved: bool = False, alpha: float | None = None, limit: float | None = None
) -> torch.Tensor:
    """y = g * sigmoid(g) * u, or with alpha and limit (clamp(u) + 1) * min(g, limit) * sigmoid(alpha * min(g, limit)).

    Infinities follow IEEE arithmetic (an infinite negative gate gives NaN: inf * 0), and clamp and minimum pass NaN on.

    Args:
        x: [T, 2 * H] bfloat16: g are the first H columns and u the last, or with `interleaved` the even columns and
            the odd ones.
        alpha, limit: both or neither; rounded to float32.

    Returns:
        [T, H] float64, exact but for float64's own rounding.

    Raises:
        EPInputError: `x` has another shape or type, or one of alpha and limit is missing.
    """
    gate, factor, alpha = _split(x, interleaved, alpha, limit)
    return gate * torch.sigmoid(alpha * gate) * factor


@no_modes()
def swiglu_bound(
    x: torch.Tensor,
    interleaved: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Most that a kernel's y, rounded to `dtype`, may be from `swiglu`; infinity makes no promise (`reference.within`).

    The kernel computes, in float32 with u = 2**-24, and n = 2 for plain, 3 for clamped (docs/numerics.md derives it):
        z = alpha * g;  e = ex2.approx.ftz(-z * log2(e));  d = 1 + e;  s = rcp.approx.ftz(d);  y = (g * s) * factor.
    e: the exponent has n relative errors u (log2(e), the product, alpha's product), which exp amplifies by |z|:
        r_e = expm1(|z| * n * u) * (1 + 2**-22) + 2**-22.
    d: e / (1 + e) = 1 - sigmoid(z), so  r_d = (1 + (1 - sigmoid(z)) * r_e) * (1 + u) - 1.
    s: one unit in the last place, r_s = (1 + 2**-23) / (1 - r_d) - 1; and where z < -86 it may be flushed to 0, which
        adds 2**-125. Below z = -128 the exponential has overflowed, s = 0 and the error is |y|.
    y: n products and sums (g * s, * factor, and u + 1 when clamped), r = (1 + r_s) * (1 + u)**n - 1; an underflow of
        g * s adds 2**-150 * |factor|, one of y 2**-150. Together, widened by 1 + 2**-20 for flushed exponents:
        E = |g * factor| * (r * sigmoid(z) + 2**-125 if z < -86) + 2**-150 * (|factor| + 1).
    The cast adds `cast_error` of |y| + E, nothing for float32.

    Args, Raises: as `swiglu`.

    Returns:
        [T, H] float64. 0 where `swiglu` is NaN or infinite, which must be met exactly; infinity where |y| may exceed
        `dtype`, and for infinite u with z < -86 (infinity times a sigmoid that may have been flushed).
    """
    y = swiglu(x, interleaved, alpha, limit)
    roundings = 2 if alpha is None else 3
    gate, factor, alpha = _split(x, interleaved, alpha, limit)
    z = alpha * gate
    sigmoid, complement = torch.sigmoid(z), torch.sigmoid(-z)
    amplified = torch.expm1(z.abs().clamp(max=-ZERO_BELOW) * roundings * UNIT)
    exponential = amplified * (1 + EXPONENTIAL_ERROR) + EXPONENTIAL_ERROR
    denominator = (1 + complement * exponential) * (1 + UNIT) - 1
    reciprocal = (1 + RECIPROCAL_ERROR) / (1 - denominator) - 1
    relative = (1 + reciprocal) * (1 + UNIT) ** roundings - 1
    off = relative * sigmoid + torch.where(z < FLUSH_BELOW, FLUSH_ERROR, 0)
    error = ((gate * factor).abs() * off + TINY * (factor.abs() + 1)) * (1 + 2.0**-20)
    error = torch.where(z < ZERO_BELOW, y.abs(), error)
    error = error + cast_error(y.abs() + error, dtype)
    error = torch.where(y.isfinite(), error, 0)
    return torch.where(factor.isinf() & (z < FLUSH_BELOW), torch.inf, error)
