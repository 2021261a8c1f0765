"""Bit-exact model of the token formats: what every byte of a quantised row is (docs/numerics.md), in plain torch.

Slow and obvious on purpose, for any torch device. Float32 arithmetic is IEEE round-to-nearest-even with
subnormals and without fused multiply-add: every multiplication and every addition is its own torch call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from cute_ep.api.errors import EPInputError
from cute_ep.api.modes import no_modes
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.api.tensors import check_tensor
from cute_ep.api.validate import check_global_scale
from cute_ep.layouts.maps.formats import (
    BF16,
    E2M3,
    E3M2,
    E4M3,
    FORMATS,
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

CHUNK_ELEMENTS = 1 << 22
"""Elements that one step of a row loop handles: bounds temporary memory, changes no result."""

BFLOAT16_MAX = float(torch.finfo(torch.bfloat16).max)
E4M3_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4
"""Smallest block maximum that an fp8 scale factor is made from, in float32."""
ROW_SCALE_DIVISOR = 2688.0
"""Largest element times largest scale factor of nvfp4_row: 6 * 448."""
ROW_SCALE_LIMITS = (2.0**-100, 2.0**100)


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover `rows` rows, at least one, each of about CHUNK_ELEMENTS elements."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step))


# ---- numbers


def encode_e2m1(value: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes 0..15 of e2m1, round to nearest even, saturating at 6; NaN gives 0x7 (+6).

    Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 have codes 0..7 and bit 3 is the sign, kept for zero. A magnitude's
    code is the number of midpoints below it; of a midpoint itself the even code wins.
    """
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32)
    goes_down = torch.tensor([True, False] * 3 + [True])  # the tie between codes i and i + 1 goes to even i
    above = midpoints.nextafter(torch.full_like(midpoints, torch.inf))
    first_above = torch.where(goes_down, above, midpoints).to(value.device)
    code = torch.bucketize(value.abs(), first_above, out_int32=True, right=True)  # NaN counts as above all
    negative = value.signbit() & ~value.isnan()
    return (code + 8 * negative).to(torch.uint8)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 -> float32, exact."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-value for value in magnitudes], dtype=torch.float32, device=code.device)
    return table[code.int()]


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """int32 exponents of normal numbers -> float32 powers, by bits: exact everywhere."""
    return ((exponent + 127) << 23).view(torch.float32)


def _encode_element(value: torch.Tensor, element: Element) -> torch.Tensor:
    """float32 -> uint8 codes, round to nearest even, saturating; the sign is kept, also of zero. NaN gives NaN's code,
    or the largest number, without the sign.

    Values of one binade are multiples of 2**(exponent - mantissa bits); numbers below the smallest normal one share its
    binade's step.
    """
    smallest, one = 1 - element.bias, 1 << element.mantissa
    magnitude = torch.where(value.isnan(), 0, value).abs().clamp(max=element.largest)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=smallest)
    exponent = torch.where(magnitude == 0, smallest, exponent)  # frexp gives zero the exponent 0
    steps = (magnitude * _power_of_two(element.mantissa - exponent)).round()  # exact scaling, then half to even
    code = one * (exponent - smallest) + steps.int() + (element.magnitude + 1) * value.signbit()
    return torch.where(value.isnan(), element.magnitude, code).to(torch.uint8)


def _decode_element(code: torch.Tensor, element: Element) -> torch.Tensor:
    """uint8 codes -> float32, exact."""
    bits, one = torch.arange(element.magnitude + 1, dtype=torch.int32), 1 << element.mantissa
    exponent, fraction = bits // one, bits % one
    steps = torch.where(exponent == 0, fraction, fraction + one).float()
    magnitude = steps * _power_of_two(exponent.clamp(min=1) - element.bias - element.mantissa)
    if element.nan is not None:
        magnitude[element.nan] = torch.nan
    return torch.cat([magnitude, -magnitude]).to(code.device)[code.int()]


def encode_e4m3(value: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 bits of e4m3fn, round to nearest even, saturating at 448; the sign is kept, also of zero; NaN
    gives 0x7F."""
    return _encode_element(value, E4M3)


def decode_e4m3(code: torch.Tensor) -> torch.Tensor:
    """uint8 bits of e4m3fn -> float32, exact (0x7F and 0xFF are NaN)."""
    return _decode_element(code, E4M3)


def encode_e2m3(value: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes 0..63 of e2m3, round to nearest even, saturating at 7.5; NaN gives 0x1F (+7.5)."""
    return _encode_element(value, E2M3)


def decode_e2m3(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..63 -> float32, exact."""
    return _decode_element(code, E2M3)


def encode_e3m2(value: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes 0..63 of e3m2, round to nearest even, saturating at 28; NaN gives 0x1F (+28)."""
    return _encode_element(value, E3M2)


def decode_e3m2(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..63 -> float32, exact."""
    return _decode_element(code, E3M2)


def encode_e8m0(value: torch.Tensor) -> torch.Tensor:
    """float32 >= 0 -> uint8 bytes of e8m0, powers of two 2**(byte - 127), rounded up.

    A number up to 2**-127 gives 0, a finite one above 2**127 gives 254; infinity and NaN give 255.
    """
    bits = value.view(torch.int32) & 0x7FFFFFFF
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    code = torch.where(value <= 2.0**-127, 0, code.clamp(max=254))
    return torch.where(value.isfinite(), code, 255).to(torch.uint8)


def decode_e8m0(code: torch.Tensor) -> torch.Tensor:
    """uint8 bytes of e8m0 -> float32 2**(byte - 127), exact (byte 0 is the subnormal 2**-127, 0xFF is NaN)."""
    bits = code.int() << 23
    bits = torch.where(code == 0, 1 << 22, torch.where(code == 255, 0x7FC00000, bits)).int()
    return bits.view(torch.float32)


CANONICAL_NAN = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}
"""Bits of the one NaN of each output type: what the hardware's conversions and arithmetic give for every NaN."""


def _to_odd(value: torch.Tensor) -> torch.Tensor:
    """float64 -> float32, exact, or of the two neighbours the one with an odd mantissa. Rounded to 16 bits afterwards,
    which are fewer by more than two, it gives what rounding `value` once would; the nearest float32 may be a tie that
    `value` is not, and torch's own conversion goes through it."""
    nearest = value.float()
    off = value - nearest.double()  # NaN for infinities
    other = nearest.nextafter(torch.where(off > 0, torch.inf, -torch.inf).float())
    even = (nearest.view(torch.int32) & 1) == 0
    return torch.where(((off > 0) | (off < 0)) & even, other, nearest)


def round_to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 or float64 -> `dtype` (a key of CANONICAL_NAN), round to nearest even, once, infinity on overflow; every
    NaN becomes the type's CANONICAL_NAN."""
    if value.dtype == torch.float64 and dtype != torch.float32:
        value = _to_odd(value)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    nan = torch.tensor(CANONICAL_NAN[dtype], dtype=bits, device=value.device).view(dtype)
    return torch.where(value.isnan(), nan, value.to(dtype))


# ---- formats


def _blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, B, block] float32 elements, [T, B] their largest magnitudes without NaN) of bfloat16 rows."""
    values = x.float().unflatten(1, (-1, block))
    magnitude = values.abs()
    return values, torch.where(magnitude.isnan(), 0, magnitude).amax(dim=2)


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """The float32 nearest to `value`, so that arithmetic with it is float32 arithmetic."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _limit(value: torch.Tensor) -> torch.Tensor:
    """`value` within the largest finite bfloat16 on both sides; NaN stays."""
    return value.clamp(-BFLOAT16_MAX, BFLOAT16_MAX)


def _pack_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.flatten(1).view(torch.float8_e4m3fn)


def _elements_e4m3(payload: torch.Tensor, block: int) -> torch.Tensor:
    return decode_e4m3(payload.view(torch.uint8)).unflatten(1, (-1, block))


def _pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    codes = codes.flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _elements_e2m1(payload: torch.Tensor, block: int) -> torch.Tensor:
    codes = torch.stack([payload & 15, payload >> 4], dim=2).flatten(1)
    return decode_e2m1(codes).unflatten(1, (-1, block))


def _pack_six(codes: torch.Tensor) -> torch.Tensor:
    """Four codes in three bytes, the first one in the lowest bits."""
    quads = codes.flatten(1).int().unflatten(1, (-1, 4))
    word = quads[:, :, 0] | quads[:, :, 1] << 6 | quads[:, :, 2] << 12 | quads[:, :, 3] << 18
    return torch.stack([word, word >> 8, word >> 16], dim=2).to(torch.uint8).flatten(1)


def _codes_of_six(payload: torch.Tensor) -> torch.Tensor:
    """[T, hidden] codes 0..63."""
    parts = payload.int().unflatten(1, (-1, 3))
    word = parts[:, :, 0] | parts[:, :, 1] << 8 | parts[:, :, 2] << 16
    return torch.stack([word >> place & 63 for place in (0, 6, 12, 18)], dim=2).to(torch.uint8).flatten(1)


def _encode_bf16(x: torch.Tensor, _global: torch.Tensor) -> QuantizedRows:
    return QuantizedRows(x, None)


def _decode_bf16(rows: QuantizedRows, _global: torch.Tensor) -> torch.Tensor:
    return rows.payload.float()


def _encode_fp8(x: torch.Tensor, _global: torch.Tensor, *, power_of_two: bool) -> QuantizedRows:
    values, amax = _blocks(x, FP8.block)
    scale = torch.div(_limit(amax).clamp(min=FP8_AMAX_FLOOR), _constant(E4M3_MAX, x))
    if power_of_two:
        scale = decode_e8m0(encode_e8m0(scale))
    return QuantizedRows(_pack_e4m3(encode_e4m3(torch.div(_limit(values), scale[:, :, None]))), scale)


def _decode_fp8(rows: QuantizedRows, _global: torch.Tensor) -> torch.Tensor:
    return (_elements_e4m3(rows.payload, FP8.block) * rows.scales[:, :, None]).flatten(1)


def _encode_mxfp8(x: torch.Tensor, _global: torch.Tensor) -> QuantizedRows:
    values, amax = _blocks(x, MXFP8.block)
    one = _constant(1, x)
    scale = encode_e8m0(amax * (one / E4M3_MAX))
    dead = amax.isinf() | (scale == 0)
    codes = encode_e4m3(values * torch.div(one, decode_e8m0(scale))[:, :, None])
    return QuantizedRows(_pack_e4m3(torch.where(dead[:, :, None], 0, codes)), torch.where(dead, 0, scale))


def _decode_mxfp8(rows: QuantizedRows, _global: torch.Tensor) -> torch.Tensor:
    return (_elements_e4m3(rows.payload, MXFP8.block) * decode_e8m0(rows.scales)[:, :, None]).flatten(1)


def _even_scale(amax: torch.Tensor, element: Element) -> torch.Tensor:
    """Bytes of e8m0 that give amax the exponent of the largest element, once it is rounded to an element's mantissa
    bits, half up."""
    exponent = (amax.view(torch.int32) + (1 << (22 - element.mantissa))) >> 23
    return (exponent - element.largest_exponent).clamp(0, 254).to(torch.uint8)


def _encode_mxfp6(x: torch.Tensor, _global: torch.Tensor, *, fmt: Format) -> QuantizedRows:
    values, amax = _blocks(x, fmt.block)
    scale = _even_scale(amax, fmt.element)
    dead = amax.isinf() | (scale == 0)
    codes = _encode_element(values * decode_e8m0(254 - scale)[:, :, None], fmt.element)
    return QuantizedRows(_pack_six(torch.where(dead[:, :, None], 0, codes)), torch.where(dead, 0, scale))


def _decode_mxfp6(rows: QuantizedRows, _global: torch.Tensor, *, fmt: Format) -> torch.Tensor:
    elements = _decode_element(_codes_of_six(rows.payload), fmt.element).unflatten(1, (-1, fmt.block))
    return (elements * decode_e8m0(rows.scales)[:, :, None]).flatten(1)


def _encode_mxfp4(x: torch.Tensor, _global: torch.Tensor) -> QuantizedRows:
    values, amax = _blocks(x, MXFP4.block)
    scale = _even_scale(amax, MXFP4.element)
    return QuantizedRows(_pack_e2m1(encode_e2m1(values * decode_e8m0(254 - scale)[:, :, None])), scale)


def _decode_mxfp4(rows: QuantizedRows, _global: torch.Tensor) -> torch.Tensor:
    return (_elements_e2m1(rows.payload, MXFP4.block) * decode_e8m0(rows.scales)[:, :, None]).flatten(1)


def _encode_e4m3_scaled(
    values: torch.Tensor, amax: torch.Tensor, multiplier: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, scale factors s = e4m3(multiplier * amax / 6)) with elements e2m1(x / (s * step))."""
    one = _constant(1, values)
    scale = encode_e4m3(multiplier * (amax * (one / 6)))
    decoded = decode_e4m3(scale)
    inverse = torch.where(decoded == 0, 0, torch.div(one, decoded * step))
    return _pack_e2m1(encode_e2m1(values * inverse[:, :, None])), scale


def _encode_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> QuantizedRows:
    values, amax = _blocks(x, NVFP4.block)
    return QuantizedRows(*_encode_e4m3_scaled(values, amax, global_scale, torch.div(_constant(1, x), global_scale)))


def _decode_nvfp4(rows: QuantizedRows, global_scale: torch.Tensor) -> torch.Tensor:
    scaled = _elements_e2m1(rows.payload, NVFP4.block) * decode_e4m3(rows.scales)[:, :, None]
    return torch.div(scaled, global_scale).flatten(1)


def _encode_nvfp4_row(x: torch.Tensor, _global: torch.Tensor) -> QuantizedRows:
    values, amax = _blocks(x, NVFP4_ROW.block)
    largest = amax.amax(dim=1)
    scale = torch.div(largest, _constant(ROW_SCALE_DIVISOR, x)).clamp(*ROW_SCALE_LIMITS)
    row_scale = round_to(torch.where(largest == 0, 1, scale), torch.bfloat16)
    step = row_scale.float()[:, None]
    return QuantizedRows(
        *_encode_e4m3_scaled(values, amax, torch.div(_constant(1, x), step), step), row_scales=row_scale
    )


def _decode_nvfp4_row(rows: QuantizedRows, _global: torch.Tensor) -> torch.Tensor:
    assert rows.row_scales is not None
    scaled = _elements_e2m1(rows.payload, NVFP4_ROW.block) * decode_e4m3(rows.scales)[:, :, None]
    return scaled.flatten(1) * rows.row_scales.float()[:, None]


class Model(NamedTuple):
    """What one format computes.

    encode: (x [T, hidden] bfloat16, G []) -> QuantizedRows.    decode: (rows, G []) -> [T, hidden] float32.
    """

    encode: Callable[[torch.Tensor, torch.Tensor], QuantizedRows]
    decode: Callable[[QuantizedRows, torch.Tensor], torch.Tensor]


MODELS: dict[Format, Model] = {
    BF16: Model(_encode_bf16, _decode_bf16),
    FP8: Model(partial(_encode_fp8, power_of_two=False), _decode_fp8),
    FP8_POW2: Model(partial(_encode_fp8, power_of_two=True), _decode_fp8),
    MXFP8: Model(_encode_mxfp8, _decode_mxfp8),
    MXFP6_E2M3: Model(partial(_encode_mxfp6, fmt=MXFP6_E2M3), partial(_decode_mxfp6, fmt=MXFP6_E2M3)),
    MXFP6_E3M2: Model(partial(_encode_mxfp6, fmt=MXFP6_E3M2), partial(_decode_mxfp6, fmt=MXFP6_E3M2)),
    MXFP4: Model(_encode_mxfp4, _decode_mxfp4),
    NVFP4: Model(_encode_nvfp4, _decode_nvfp4),
    NVFP4_ROW: Model(_encode_nvfp4_row, _decode_nvfp4_row),
}


def as_format(fmt: Format | str) -> Format:
    """`fmt` or the format of that name; EPInputError lists the known ones."""
    if isinstance(fmt, Format):
        return fmt
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise EPInputError(f"fmt = {fmt!r}: must be one of {', '.join(FORMATS)}")
    return FORMATS[fmt]


def check_x(x: torch.Tensor, fmt: Format) -> None:
    """EPInputError unless x is [T, hidden] bfloat16 and `fmt` has rows of `hidden` elements."""
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    try:
        fmt.check_hidden(x.shape[1], "x.shape[1]")
    except ValueError as error:
        raise EPInputError(str(error)) from None


def as_global_scale(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """[] float32 on `device`; EPInputError unless `value` is one number in [2**-100, 2**100]."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise EPInputError(f"global_scale.shape = {tuple(value.shape)}: must have one element")
    check_global_scale(value.item() if isinstance(value, torch.Tensor) else value)
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())


def join_rows(parts: list[QuantizedRows]) -> QuantizedRows:
    """Rows of one format one after the other; `parts` is not empty."""
    return QuantizedRows(*(None if field[0] is None else torch.cat(field) for field in zip(*parts, strict=True)))


@no_modes()
def quantize(x: torch.Tensor, fmt: Format | str, global_scale: float | torch.Tensor = 1.0) -> QuantizedRows:
    """Encode rows of tokens as docs/numerics.md defines.

    Args:
        x: [T, hidden] bfloat16.
        fmt: a format or its name.
        global_scale: G, a number or a float32 tensor of one element; used by formats with a global scale.

    Returns:
        Payload [T, hidden] (bf16: x itself; float8_e4m3fn) or [T, hidden * bits / 8] uint8, scales [T, hidden / block]
        float32 or uint8 or None, row_scales [T] bfloat16 or None.

    Raises:
        EPInputError: shape, type or format is wrong, or G is outside [2**-100, 2**100].
    """
    fmt = as_format(fmt)
    check_x(x, fmt)
    scale = as_global_scale(global_scale, x.device)
    if fmt.scale is None:
        return MODELS[fmt].encode(x, scale)
    return join_rows([MODELS[fmt].encode(x[part], scale) for part in row_chunks(*x.shape)])
