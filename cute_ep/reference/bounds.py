"""How far results may be from exact arithmetic: bounds derived in docs/numerics.md, computed in float64.

A bound of infinity makes no promise. Everything here is made from real-number formulas, not from the code that it
bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.layouts.maps.formats import (
    BF16,
    FP8,
    FP8_POW2,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    NVFP4,
    NVFP4_ROW,
    Element,
    Format,
)
from cute_ep.reference.combine import ExpertOutputs, check_combine, chosen_weights
from cute_ep.reference.formats import as_format, as_global_scale, check_x, row_chunks

UNIT = 2.0**-24
"""Unit roundoff of float32: |fl(a) - a| <= UNIT * |a| in the normal range."""
TINY = 2.0**-150
"""Half the step of float32 subnormals: the most that an underflow adds."""
CHAIN = 2.0**-21
"""Relative error of any chain of at most 7 float32 roundings: (1 + UNIT)^7 - 1 < 8 * UNIT."""
SIGNIFICANT_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
SMALLEST_STEP = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def within(actual: torch.Tensor, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Where `actual` keeps |actual - value| <= bound: bool. NaN for NaN and equal infinities do, whatever the bound;
    anything does where the bound is infinite."""
    actual = actual.double()
    same = (actual == value) | (actual.isnan() & value.isnan())
    return same | ((actual - value).abs() <= bound) | bound.isposinf()


def cast_error(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Most that rounding a float32 number of at most `magnitude` to `dtype` changes it; infinity on overflow.

    With p significant bits |cast(a) - a| <= 2**-p * |a| + half a subnormal step; float32 itself changes nothing.
    """
    roundoff = 2.0 ** -SIGNIFICANT_BITS[dtype]
    overflows = magnitude >= torch.finfo(dtype).max * (1 + roundoff / 2)
    error = torch.zeros_like(magnitude)
    if dtype != torch.float32:
        error = roundoff * magnitude + SMALLEST_STEP[dtype] / 2
    return torch.where(overflows, torch.inf, error)


# ---- quantisation


def _power_below(value: torch.Tensor) -> torch.Tensor:
    """The largest power of two <= value, for float64 > 0; 0 for 0."""
    return torch.where(value > 0, value / (2 * torch.frexp(value).mantissa), 0)


def _power_above(value: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= value; 0 for 0."""
    below = _power_below(value)
    return torch.where(below == value, below, 2 * below)


def _nearest(value: torch.Tensor, bits: int, smallest_normal: float) -> torch.Tensor:
    """The nearest number with `bits` significant bits, ties to even, for float64 >= 0."""
    step = _power_below(value).clamp(min=smallest_normal) * 2.0 ** (1 - bits)
    return (value / step).round() * step


def _around(value: torch.Tensor, absolute: float | torch.Tensor = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends of what float32 arithmetic may have made of `value` >= 0."""
    return (value * (1 - CHAIN) - absolute).clamp(min=0), value * (1 + CHAIN) + absolute


Steps = list[torch.Tensor]
"""Step sizes [T, B] float64 that a block may have got: what a payload element 1 is worth; 0: all elements are 0."""


def _fp8_steps(amax: torch.Tensor, _global: torch.Tensor) -> Steps:
    return [amax.clamp(1e-4, torch.finfo(torch.bfloat16).max) / 448]


def _fp8_pow2_steps(amax: torch.Tensor, unused: torch.Tensor) -> Steps:
    return [_power_above(value) for value in _around(_fp8_steps(amax, unused)[0])]


def _mxfp8_steps(amax: torch.Tensor, _global: torch.Tensor) -> Steps:
    scales = [_power_above(value) for value in _around(amax / 448, TINY)]
    return [torch.where(amax.isinf() | (scale <= 2.0**-127), 0, scale) for scale in scales]


def _mxfp6_steps(amax: torch.Tensor, _global: torch.Tensor, *, rounds_up: float, largest_power: float) -> Steps:
    scale = 2 * _power_below(amax.clamp(max=2.0**128) / rounds_up) / largest_power
    return [torch.where(amax.isinf() | (scale <= 2.0**-127), 0, scale)]


def _mxfp4_steps(amax: torch.Tensor, _global: torch.Tensor) -> Steps:
    return [(_power_below(amax.clamp(max=2.0**128) / 1.75) / 2).clamp(min=2.0**-127)]


def _e4m3_factors(target: torch.Tensor, absolute: float | torch.Tensor) -> Steps:
    return [_nearest(value.clamp(max=448), 4, 2.0**-6) for value in _around(target, absolute)]


def _nvfp4_steps(amax: torch.Tensor, global_scale: torch.Tensor) -> Steps:
    return [factor / global_scale for factor in _e4m3_factors(global_scale * amax / 6, 2 * TINY * global_scale)]


def _nvfp4_row_steps(amax: torch.Tensor, _global: torch.Tensor) -> Steps:
    largest = amax.amax(dim=1, keepdim=True)
    steps = []
    for scale in _around(largest.clamp(max=torch.finfo(torch.bfloat16).max) / 2688):
        row = torch.where(largest == 0, 1, _nearest(scale.clamp(2.0**-100, 2.0**100), 8, 2.0**-126))
        steps += [factor * row for factor in _e4m3_factors(amax / (6 * row), 2 * TINY / row)]
    return steps


def _element_error(value: torch.Tensor, element: Element) -> torch.Tensor:
    """Half the gap around a number >= 0, or its distance from the largest element; never decreasing."""
    half_gap = _power_below(value.clamp(element.smallest_normal, element.largest)) * element.roundoff
    return torch.maximum(half_gap, value - element.largest)


STEPS: dict[Format, Callable[[torch.Tensor, torch.Tensor], Steps]] = {
    FP8: _fp8_steps,
    FP8_POW2: _fp8_pow2_steps,
    MXFP8: _mxfp8_steps,
    MXFP6_E2M3: partial(_mxfp6_steps, rounds_up=1.9375, largest_power=4),
    MXFP6_E3M2: partial(_mxfp6_steps, rounds_up=1.875, largest_power=16),
    MXFP4: _mxfp4_steps,
    NVFP4: _nvfp4_steps,
    NVFP4_ROW: _nvfp4_row_steps,
}


def quantization_bound(x: torch.Tensor, fmt: Format | str, global_scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Most that an element of `dequantize(quantize(x))` may be from x; derived in docs/numerics.md.

    Args:
        x, fmt, global_scale: as `quantize` takes them.

    Returns:
        [T, hidden] float64. Infinity where x is not finite, and where the dequantised number may exceed float32
        (block maxima above 1.9 * 2**127).

    Raises:
        EPInputError: as `quantize`.
    """
    fmt = as_format(fmt)
    check_x(x, fmt)
    scale = as_global_scale(global_scale, x.device).double()
    if fmt == BF16:
        return torch.where(x.isfinite(), 0.0, torch.inf).double()
    bounds = []
    for part in row_chunks(*x.shape):
        values = x[part].double().abs().unflatten(1, (-1, fmt.block))
        amax = torch.where(values.isnan(), 0, values).amax(dim=2)
        bound = torch.zeros_like(values)
        for step in STEPS[fmt](amax, scale):
            step = step[:, :, None]
            error = (
                step * (1 + CHAIN) * (_element_error(values * (1 + CHAIN) / step, fmt.element) + TINY) + CHAIN * values
            )
            bound = torch.maximum(bound, torch.where(step == 0, values, error))
        bound = bound + UNIT * (values + bound) + TINY  # the dequantised product
        bound = bound + torch.where(values + bound >= 2.0**128 * (1 - 2.0**-25), torch.inf, 0)
        bounds.append(torch.where(values.isfinite(), bound, torch.inf).flatten(1))
    return torch.cat(bounds)


# ---- combine


def combine_error_bound(
    cfg: EPConfig,
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    router_weights: Sequence[torch.Tensor | None] | None = None,
    mode: str = "partial",
    dtype: torch.dtype = torch.bfloat16,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per rank (value, bound), both [T_r, hidden] float64, such that |combine's output - value| <= bound.

    `value` is S = sum_k w_k * row_k, plus the shared expert's row, in float64. With M = sum_k |w_k * row_k|,
    K = top_k; u = 2**-24 and v = 2**-8 the unit roundoffs of float32 and bfloat16 (24 and 8 significant bits);
    gamma_n = n*u / (1 - n*u); nothing overflows before the last cast:

    Float32 sum: a product is w*x*(1 + d) + h, |d| <= u, |h| <= 2**-150 (half a subnormal step); an addition
    multiplies by (1 + d), and is exact where it underflows. A term passes one product and at most K - 1
    additions (0 + first is exact), so |acc - sum_k w_k * row_k| <= F(M) = gamma_K * M + K * 2**-150 * (1 + gamma_K).
        exact:  E = F(M).
    Partial: P = min(R, K) of R ranks at most take part, with sums S_p and M_p; sum M_p = M and |S_p| <= M_p.
    A partial is off by F(M_p) + v * (M_p + F(M_p)) + 2**-134, and their sum by
    B = F(M) + v * (M + F(M)) + P * 2**-134 (the ranks' terms are K together). Adding P values in float32 adds
    D = gamma_(P-1) * (M + B) at most.
        partial:  E = B + D.
    Over nodes that is the error of one node's sum, and the nodes' terms are K and P together. It is rounded to bfloat16
    and added over at most Q = min(nodes, K) nodes as the ranks' sums are: E' = E + v * (M + E) + Q * 2**-134, and then
    gamma_(Q-1) * (M + E') more.
    Shared expert: its row s has weight 1 and no product; adding it rounds a number of at most M + E + |s| once more,
    E + u * (M + E + |s|).
    Cast to `dtype`: at most `cast_error` of |S| + E. Infinite where that may overflow.
    Products of float32 and bfloat16 are exact in float64; (K + 1) * 2**-52 * (M + |s|) covers its sums and the
    bound's own.
    Unweighted: value and bound are [T_r, top_k, hidden], S = row_k, and only the cast remains; 0 for bfloat16.

    Args and Raises: as `combine`.
    """
    check_combine(cfg, rows, dispatched, mode, dtype)
    chosen = chosen_weights(cfg, dispatched, router_weights, mode)
    outputs, results = ExpertOutputs(cfg, rows, dispatched), []
    for source, weights in enumerate(chosen):
        if mode == "unweighted":
            value = outputs.routed(source, slice(None))[1].double()
            exact = dtype in (torch.bfloat16, torch.float32)
            results.append((value, torch.zeros_like(value) if exact else cast_error(value.abs(), dtype)))
        else:
            results.append(_sum_and_bound(outputs, source, weights, mode, dtype))
    return results


def _gamma(count: int) -> float:
    return count * UNIT / (1 - count * UNIT)


def _sum_and_bound(
    outputs: ExpertOutputs, source: int, weights: torch.Tensor, mode: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`combine_error_bound` of one rank's sums."""
    cfg, tokens = outputs.cfg, weights.shape[0]
    terms, parts, nodes = cfg.top_k, min(cfg.nodes * cfg.peers, cfg.top_k), min(cfg.nodes, cfg.top_k)
    shared = torch.zeros(tokens, cfg.hidden, dtype=torch.float64, device=weights.device)
    served, rows = outputs.shared(source)
    shared[served] = rows.double()
    value, bound = shared.clone(), torch.zeros_like(shared)
    for part in row_chunks(tokens, cfg.top_k * cfg.hidden):
        server, returned = outputs.routed(source, part)
        products = weights[part][:, :, None].double() * returned.double()
        products = torch.where(server[:, :, None] < cfg.world_size, products, 0)
        value[part] += products.sum(dim=1)
        magnitude = products.abs().sum(dim=1)
        error = _gamma(terms) * magnitude + terms * TINY * (1 + _gamma(terms))
        if mode == "partial":
            error = error + 2.0**-8 * (magnitude + error) + parts * 2.0**-134
            error = error + _gamma(parts - 1) * (magnitude + error)
            if cfg.nodes > 1:
                error = error + 2.0**-8 * (magnitude + error) + nodes * 2.0**-134
                error = error + _gamma(nodes - 1) * (magnitude + error)
        if cfg.fused_shared_expert:
            magnitude = magnitude + shared[part].abs()
            error = error + UNIT * (magnitude + error)
        error = error + cast_error(value[part].abs() + error, dtype)
        bound[part] = error + (terms + 1) * 2.0**-52 * magnitude
    return value, bound


def identity_error_bound(
    cfg: EPConfig,
    xs: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    mode: str = "partial",
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per rank (value, bound) of a whole round with experts that return what they get, [T_r, hidden] float64.

    `rows` are the dequantised rows rounded to bfloat16, `value` is sum_k w_k * x, plus x for tokens of the shared
    expert. A row is off by at most q = quantization_bound, then b = q + cast_error(|x| + q, bfloat16), so with
    S = sum_k w_k * row_k
        |output - value| <= |output - S| + sum_k |w_k| * |row_k - x| <= combine_error_bound + sum_k |w_k| * b,
    and one more b for the shared expert's row.

    Args:
        xs: what `dispatch` was given, with a global scale of 1 and the router weights.
        The others, and Raises: as `combine` to bfloat16, not in unweighted mode.
    """
    combined = combine_error_bound(cfg, rows, dispatched, mode=mode)
    chosen = chosen_weights(cfg, dispatched, None, mode)
    outputs, results = ExpertOutputs(cfg, rows, dispatched), []
    for rank, (x, weights, (_, bound)) in enumerate(zip(xs, chosen, combined, strict=True)):
        ids = dispatched[rank].topk_ids
        counted = ids >= 0
        if cfg.skip_a2a:
            counted &= ids // cfg.local_experts == rank
        factors = torch.where(counted, weights, 0).double()
        served, _ = outputs.shared(rank)
        shared = torch.zeros(x.shape[0], 1, dtype=torch.float64, device=x.device)
        shared[served] = 1
        quantized = quantization_bound(x, cfg.format)
        off = quantized + cast_error(x.double().abs() + quantized, torch.bfloat16)
        value = (factors.sum(dim=1, keepdim=True) + shared) * x.double()
        total = factors.abs().sum(dim=1, keepdim=True) + shared
        noise = (cfg.top_k + 2) * 2.0**-52 * total * x.double().abs()
        results.append((value, bound + torch.where(total == 0, 0, total * off) + noise))
    return results
