"""Quantisers that share nothing with `cute_ep.reference`: numpy with ml_dtypes' casts, and exact rational numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch

from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.testing.compare import assert_bits

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE_BF16 = ALL_BF16[ALL_BF16.isfinite()]
FLOAT = np.float32
ONE = FLOAT(1)
BF16_MAX = FLOAT(3.3895313892515355e38)
POWERS = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
"""What the finite bytes of e8m0 mean."""


class Encoded(NamedTuple):
    """codes [T, B, block] uint8, one element each; scales [T, B]; row_scales [T] bfloat16 or None."""

    codes: np.ndarray
    scales: np.ndarray
    row_scales: np.ndarray | None = None


ELEMENT_MAXIMA = (1.0, -6.0, 0.4375, 1.75, 448.0, 2.0**-126, 3e38, 2688.0)


def rows_of_maxima(fmt: str) -> torch.Tensor:
    """[rows, at least 32] for a format: every bfloat16 among random ones of its own magnitude, one or more a block."""
    generator, block = torch.Generator().manual_seed(1), FORMATS[fmt].block
    near = torch.rand(65536, block - 1, generator=generator) * 1.2 * (16 / block)
    blocks = torch.cat([ALL_BF16[:, None], (ALL_BF16.float()[:, None] * near).bfloat16()], dim=1)
    place = torch.randint(block, (65536, 1), generator=generator)
    swapped = blocks.gather(1, place)
    blocks.scatter_(1, place, blocks[:, :1]).scatter_(1, torch.zeros_like(place), swapped)
    return blocks.reshape(-1, max(32, FORMATS[fmt].multiple))


def rows_of_elements(block: int, maximum: float) -> torch.Tensor:
    """[2, about 33,000]: every bfloat16 up to `maximum` as an element of a block with that maximum."""
    count = -(-65536 // (block - 1))
    count += -count % 4
    values = torch.cat([ALL_BF16, ALL_BF16[: count * (block - 1) - 65536]]).reshape(count, block - 1)
    others = torch.where(values.abs() <= abs(maximum), values, values * 0)
    fixed = torch.full((count, 1), maximum, dtype=torch.bfloat16)
    return torch.cat([fixed, others], dim=1).reshape(2, -1)


def random_rows(rows: int, hidden: int, binades: int = 12, seed: int = 0) -> torch.Tensor:
    """bfloat16 of both signs, log-uniform over `binades` binades below a number in [1, 2) of the row's own; made from
    integers, so the same anywhere."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.randint(127 << 7, 128 << 7, (rows, 1), generator=generator)
    bits = top - torch.randint(binades << 7, (rows, hidden), generator=generator)
    sign = torch.randint(2, (rows, hidden), generator=generator) << 15
    return (bits + sign - (sign << 1)).to(torch.int16).view(torch.bfloat16)


def neighbours(values: np.ndarray) -> np.ndarray:
    """float32 values and the next ones on both sides."""
    values, inf = values.astype(np.float32), np.float32(np.inf)
    with np.errstate(over="ignore"):
        return np.concatenate([np.nextafter(values, -inf), values, np.nextafter(values, inf)])


def nearest(values: np.ndarray, bits: int, lowest: int) -> np.ndarray:
    """float64 values rounded once, to even, to so many significant bits, and to multiples of 2**lowest."""
    with np.errstate(all="ignore"):
        exponent = np.frexp(values)[1] - bits
        step = np.ldexp(1.0, np.maximum(exponent, lowest))
        return np.where(np.isfinite(values), np.rint(values / step) * step, values)


def e2m1(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(values), 7, codes).astype(np.uint8)


def e2m3(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, -7.5, 7.5).astype(ml_dtypes.float6_e2m3fn).view(np.uint8)
    return np.where(np.isnan(values), 31, codes).astype(np.uint8)


def e3m2(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, -28, 28).astype(ml_dtypes.float6_e3m2fn).view(np.uint8)
    return np.where(np.isnan(values), 31, codes).astype(np.uint8)


def e4m3(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, FLOAT(-448), FLOAT(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e8m0(values: np.ndarray) -> np.ndarray:
    """The first power of two that is no smaller; above the last one 254, infinity 255."""
    codes = np.searchsorted(POWERS, values.astype(np.float64), side="left").clip(max=254)
    return np.where(np.isinf(values), 255, codes).astype(np.uint8)


def from_e8m0(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def _fp8(x: np.ndarray, amax: np.ndarray, _g: np.float32) -> Encoded:
    scales = np.maximum(np.minimum(amax, BF16_MAX), FLOAT(1e-4)) / FLOAT(448)
    return Encoded(e4m3(np.clip(x, -BF16_MAX, BF16_MAX) / scales[:, :, None]), scales)


def _fp8_pow2(x: np.ndarray, amax: np.ndarray, g: np.float32) -> Encoded:
    mantissa, exponent = np.frexp(_fp8(x, amax, g).scales)
    scales = np.ldexp(ONE, exponent - (mantissa == 0.5)).astype(np.float32)
    return Encoded(e4m3(np.clip(x, -BF16_MAX, BF16_MAX) / scales[:, :, None]), scales)


def _mxfp8(x: np.ndarray, amax: np.ndarray, _g: np.float32) -> Encoded:
    scales = e8m0(amax * (ONE / FLOAT(448)))
    dead = np.isinf(amax) | (scales == 0)
    codes = e4m3(x * (ONE / from_e8m0(scales))[:, :, None])
    return Encoded(np.where(dead[:, :, None], 0, codes).astype(np.uint8), np.where(dead, 0, scales).astype(np.uint8))


def _even_scales(amax: np.ndarray, rounds_up: float, largest_exponent: int) -> np.ndarray:
    """Bytes of the power of two of amax, the next one from `rounds_up` of it on, less the largest exponent."""
    mantissa, exponent = np.frexp(np.minimum(amax.astype(np.float64), 2.0**128))
    biased = exponent - 1 + 127 + (mantissa >= rounds_up / 2)
    return np.where(amax == 0, 0, np.clip(biased - largest_exponent, 0, 254)).astype(np.uint8)


def _mxfp6(
    x: np.ndarray, amax: np.ndarray, convert: Callable[[np.ndarray], np.ndarray], rounds_up: float, exponent: int
) -> Encoded:
    scales = _even_scales(amax, rounds_up, exponent)
    dead = np.isinf(amax) | (scales == 0)
    codes = convert(x * np.ldexp(ONE, 127 - scales.astype(np.int32))[:, :, None])
    return Encoded(np.where(dead[:, :, None], 0, codes).astype(np.uint8), np.where(dead, 0, scales).astype(np.uint8))


def _mxfp6_e2m3(x: np.ndarray, amax: np.ndarray, _g: np.float32) -> Encoded:
    return _mxfp6(x, amax, e2m3, 1.9375, 2)


def _mxfp6_e3m2(x: np.ndarray, amax: np.ndarray, _g: np.float32) -> Encoded:
    return _mxfp6(x, amax, e3m2, 1.875, 4)


def _mxfp4(x: np.ndarray, amax: np.ndarray, _g: np.float32) -> Encoded:
    scales = _even_scales(amax, 1.75, 2)
    return Encoded(e2m1(x * np.ldexp(ONE, 127 - scales.astype(np.int32))[:, :, None]), scales)


def _nvfp4(x: np.ndarray, amax: np.ndarray, g: np.float32) -> Encoded:
    scales = e4m3(g * (amax * (ONE / FLOAT(6))))
    decoded = from_e4m3(scales)
    inverse = np.where(decoded == 0, FLOAT(0), ONE / (decoded * (ONE / g)))
    return Encoded(e2m1(x * inverse[:, :, None]), scales)


def _nvfp4_row(x: np.ndarray, amax: np.ndarray, _g: np.float32) -> Encoded:
    largest = amax.max(axis=1)
    rows = np.clip(largest / FLOAT(2688), FLOAT(2.0**-100), FLOAT(2.0**100)).astype(ml_dtypes.bfloat16)
    rows = np.where(largest == 0, ml_dtypes.bfloat16(1), rows)
    step = rows.astype(np.float32)[:, None]
    scales = e4m3((ONE / step) * (amax * (ONE / FLOAT(6))))
    decoded = from_e4m3(scales)
    inverse = np.where(decoded == 0, FLOAT(0), ONE / (decoded * step))
    return Encoded(e2m1(x * inverse[:, :, None]), scales, rows)


ENCODERS: dict[str, Callable[[np.ndarray, np.ndarray, np.float32], Encoded]] = {
    "fp8": _fp8,
    "fp8_pow2": _fp8_pow2,
    "mxfp8": _mxfp8,
    "mxfp6_e2m3": _mxfp6_e2m3,
    "mxfp6_e3m2": _mxfp6_e3m2,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "nvfp4_row": _nvfp4_row,
}


def encode(x: torch.Tensor, fmt: str, scale: float = 1.0) -> Encoded:
    """Rows by numpy float32 operations and ml_dtypes casts."""
    with np.errstate(all="ignore"):
        blocks = x.float().numpy().reshape(x.shape[0], -1, FORMATS[fmt].block)
        amax = np.fmax.reduce(np.abs(blocks), axis=2)
        amax = np.where(np.isnan(amax), FLOAT(0), amax)
        encoded = ENCODERS[fmt](blocks, amax, FLOAT(scale))
    return encoded


def bytes_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """[T, n * bits / 8] uint8: codes of so many bits one after the other, from the lowest bit of byte 0 on."""
    separate = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    return np.packbits(separate.reshape(len(codes), -1), axis=1, bitorder="little")


def codes_of(payload: torch.Tensor, bits: int) -> np.ndarray:
    """[T, n] uint8: what `bytes_of` made bytes of."""
    separate = np.unpackbits(payload.view(torch.uint8).numpy(), axis=1, bitorder="little")
    return np.packbits(separate.reshape(len(payload), -1, bits), axis=2, bitorder="little")[:, :, 0]


def packed(encoded: Encoded, fmt: str) -> QuantizedRows:
    """The tensors that `quantize` must return."""
    codes = encoded.codes.reshape(encoded.codes.shape[0], -1)
    payload = torch.from_numpy(bytes_of(codes, FORMATS[fmt].bits))
    payload = payload.view(torch.float8_e4m3fn) if FORMATS[fmt].bits == 8 else payload
    rows = encoded.row_scales
    row_scales = None if rows is None else torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return QuantizedRows(payload, torch.from_numpy(encoded.scales), row_scales)


def assert_rows(got: QuantizedRows, want: QuantizedRows, name: str) -> None:
    """Fail unless every tensor of both agrees bit for bit, or both have none."""
    __tracebackhide__ = True
    for part, a, b in zip(QuantizedRows._fields, got, want, strict=True):
        assert (a is None) == (b is None), f"{name} {part}"
        if b is not None:
            assert_bits(a, b, f"{name} {part}")


# ---- exact rational numbers


def round_binary(value: Fraction, precision: int, smallest: int) -> Fraction:
    """Nearest multiple of the last place of `precision` significant bits, >= 2**smallest; ties to even."""
    if value == 0:
        return value
    numerator, denominator = abs(value).numerator, value.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(value)
    step = Fraction(2) ** max(exponent - precision + 1, smallest)
    return round(value / step) * step  # Python rounds Fractions half to even


def float32(value: Fraction) -> Fraction:
    return round_binary(value, 24, -149)


def _rational_e4m3(value: Fraction) -> Fraction:
    limit = Fraction(448)
    return min(max(round_binary(min(max(value, -limit), limit), 4, -9), -limit), limit)


def _rational_six(value: Fraction, precision: int, smallest: int, largest: str) -> Fraction:
    limit = Fraction(largest)
    return min(max(round_binary(min(max(value, -limit), limit), precision, smallest), -limit), limit)


MAGNITUDES = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def _rational_e2m1(value: Fraction) -> Fraction:
    magnitude = min(abs(value), Fraction(6))
    above = min(bisect_left(MAGNITUDES, magnitude), 7)
    below = max(above - 1, 0)
    up, down = MAGNITUDES[above] - magnitude, magnitude - MAGNITUDES[below]
    code = above if up < down or (up == down and above % 2 == 0) else below
    return MAGNITUDES[code] * (-1 if value < 0 else 1)


def _power_above(value: Fraction) -> Fraction:
    power = Fraction(1)
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power


def _carried(amax: Fraction, rounds_up: Fraction) -> Fraction:
    """The power of two below a number, or the next one if the number is at least `rounds_up` of it; 0 for 0."""
    below = _power_above(amax) if amax else Fraction(0)
    below = below if below == amax else below / 2
    return 2 * below if amax >= below * rounds_up else below


def rational_blocks(blocks: list[list[Fraction]], fmt: str, g: Fraction) -> list[tuple[Fraction, list[Fraction]]]:
    """(scale factor, elements) of the blocks of one row of finite numbers: every step exact, then rounded."""
    row_max = max(abs(value) for block in blocks for value in block)
    row = Fraction(1)
    if row_max:
        limited = min(max(float32(row_max / 2688), Fraction(2) ** -100), Fraction(2) ** 100)
        row = round_binary(limited, 8, -133)
    results = []
    for block in blocks:
        amax = max(abs(value) for value in block)
        if fmt in ("fp8", "fp8_pow2"):
            scale = float32(max(amax, Fraction(float(FLOAT(1e-4)))) / 448)
            scale = _power_above(scale) if fmt == "fp8_pow2" else scale
            elements = [_rational_e4m3(float32(value / scale)) for value in block]
        elif fmt == "mxfp8":
            product = float32(amax * float32(Fraction(1, 448)))
            dead = product <= Fraction(2) ** -127
            scale = Fraction(1, 2**127) if dead else _power_above(product)
            elements = [Fraction(0) if dead else _rational_e4m3(float32(value / scale)) for value in block]
        elif fmt.startswith("mxfp6"):
            precision, smallest, largest, divisor = (4, -3, "7.5", 4) if fmt == "mxfp6_e2m3" else (3, -4, "28", 16)
            # to the mantissa of an element, half up: 1.9375 or 1.875 rounds to 2
            scale = _carried(amax, 2 - Fraction(1, 2**precision)) / divisor
            dead = scale <= Fraction(1, 2**127)
            scale = Fraction(1, 2**127) if dead else scale
            rounded = [_rational_six(float32(value / scale), precision, smallest, largest) for value in block]
            elements = [Fraction(0) if dead else value for value in rounded]
        elif fmt == "mxfp4":
            # one mantissa bit, half up: 1.25 rounds to 1.5, and 1.75 to 2
            carried = _carried(amax, Fraction(7, 4))
            scale = max(carried / 4, Fraction(1, 2**127))
            elements = [_rational_e2m1(float32(value / scale)) for value in block]
        else:
            multiplier, step = (g, float32(1 / g)) if fmt == "nvfp4" else (float32(1 / row), row)
            scale = _rational_e4m3(float32(multiplier * float32(amax * float32(Fraction(1, 6)))))
            inverse = float32(1 / float32(scale * step)) if scale else Fraction(0)
            if inverse >= 2**128:  # infinite, and its product with 0 is NaN, which gives +6
                elements = [Fraction(-6 if value < 0 else 6) for value in block]
            else:
                elements = [_rational_e2m1(float32(value * inverse)) for value in block]
        results.append((scale, elements))
    return results
