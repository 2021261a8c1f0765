"""Codes and scale factors by the formulas of docs/numerics.md, in numpy with the casts of ml_dtypes. Nothing here is of
`cute_ep.reference`."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cute_ep.layouts.maps.formats import E2M1, E2M3, E3M2, FLOAT32, MXFP4, MXFP8, Element, Format

f32 = np.float32
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
INFINITY_BITS = 0x7F800000
MAX_BF16 = f32(2.0**128 - 2.0**120)


def e4m3_oracle(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, f32(-448), f32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


def e2m1_oracle(values: np.ndarray) -> np.ndarray:
    """Codes of float32; NaN, for which ml_dtypes has no rule, is 7."""
    with np.errstate(all="ignore"):
        codes = np.clip(values, f32(-6), f32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(7), codes)


def six_bit_oracle(values: np.ndarray, element: Element) -> np.ndarray:
    """Codes of float32, of e2m3 or e3m2; NaN, for which ml_dtypes has no rule, is 31."""
    dtype, largest = {E2M3: (ml_dtypes.float6_e2m3fn, 7.5), E3M2: (ml_dtypes.float6_e3m2fn, 28)}[element]
    with np.errstate(all="ignore"):
        codes = np.clip(values, f32(-largest), f32(largest)).astype(dtype).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(31), codes)


MAGNITUDES = (np.arange(INFINITY_BITS >> 16, dtype=np.uint32) << 16).view(f32)
"""Every finite bfloat16 >= 0."""
AMAX = np.concatenate([MAGNITUDES, [f32(np.inf)]])


def mxfp8_scales(amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(byte, whether the block lives) by the definition."""
    product = amax * (f32(1) / f32(448))
    fraction, exponent = np.frexp(product.astype(np.float64))
    lives = (product > 2.0**-127) & np.isfinite(amax)
    return np.where(lives, exponent - (fraction == 0.5) + 127, 0), lives


def even_scales(amax: np.ndarray, element: Element) -> np.ndarray:
    """Biased exponent of amax rounded to the mantissa bits of an element (half up), less the exponent of the largest
    element, in exact arithmetic. Subnormals give 0."""
    mantissa, largest_exponent = {E2M1: (1, 2), E2M3: (3, 2), E3M2: (2, 4)}[element]
    fraction, exponent = np.frexp(np.where(np.isinf(amax), 2.0**128, amax.astype(np.float64)))
    carry = np.floor(fraction * 2 ** (mantissa + 1) + 0.5) == 2 ** (mantissa + 1)
    return np.clip(exponent + carry + 126 - largest_exponent, 0, 254) * (amax >= 2.0**-126)


def mxfp6_scales(amax: np.ndarray, element: Element) -> tuple[np.ndarray, np.ndarray]:
    """(byte, whether the block lives)."""
    byte = even_scales(amax, element)
    lives = (byte > 0) & np.isfinite(amax)
    return np.where(lives, byte, 0), lives


def fp8_scales(amax: np.ndarray) -> np.ndarray:
    return np.maximum(np.minimum(amax, MAX_BF16), f32(1e-4)) / f32(448)


def powers_up(values: np.ndarray) -> np.ndarray:
    fraction, exponent = np.frexp(values)
    return np.ldexp(f32(1), exponent - (fraction == 0.5)).astype(f32)


def row_scales(amax: np.ndarray) -> np.ndarray:
    scale = np.clip(amax / f32(2688), f32(2.0**-100), f32(2.0**100)).astype(ml_dtypes.bfloat16).astype(f32)
    return np.where(amax == 0, f32(1), scale)


def oracle(fmt: Format, x: np.ndarray, amax: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes [N, elements], scale bits [N]) by docs/numerics.md; `amax` [N, blocks of a unit]."""
    one = f32(1)
    blocks = x.reshape(*amax.shape, -1)
    if fmt.scale is FLOAT32:
        s = fp8_scales(amax)
        s = powers_up(s) if fmt.power_of_two else s
        codes = e4m3_oracle(np.where(np.isnan(blocks), blocks, np.clip(blocks, -MAX_BF16, MAX_BF16)) / s[..., None])
        bits = s.view(np.uint32)
    elif fmt == MXFP8:
        bits, lives = mxfp8_scales(amax)
        inverse = one / np.ldexp(one, bits - 127).astype(f32)
        codes = np.where(lives[..., None], e4m3_oracle(blocks * inverse[..., None]), 0)
    elif fmt.bits == 6:
        bits, lives = mxfp6_scales(amax, fmt.element)
        bits = bits.astype(np.int64)
        scaled = blocks * np.ldexp(one, 127 - bits).astype(f32)[..., None]
        codes = np.where(lives[..., None], six_bit_oracle(scaled, fmt.element), 0)
    elif fmt == MXFP4:
        bits = even_scales(amax, fmt.element).astype(np.int64)
        codes = e2m1_oracle(blocks * np.ldexp(one, 127 - bits).astype(f32)[..., None])
    else:
        multiplier, divisor = (one / scale, scale) if fmt.row_scale else (scale, one / scale)
        bits = e4m3_oracle(multiplier[:, None] * (amax * (one / f32(6))))
        decoded = bits.view(ml_dtypes.float8_e4m3fn).astype(f32)
        inverse = np.where(decoded == 0, f32(0), one / (decoded * divisor[:, None]))
        assert inverse.dtype == f32
        codes = e2m1_oracle(blocks * inverse[..., None])
    weight = 1 << 8 * np.arange(amax.shape[1], dtype=np.int64)
    return codes.reshape(x.shape).astype(np.uint8), (bits.astype(np.int64) * weight).sum(axis=1).astype(np.uint32)
