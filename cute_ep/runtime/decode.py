"""Rows in a wire format to bfloat16, which experts multiply.

Plain torch of static shapes: it can be captured in a CUDA graph and compiled. In place but for the result, since rows
for the worst case take most of a layer's memory.
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from cute_ep.layouts.maps.formats import E8M0, FLOAT32, Element, Format

FLOAT16_MANTISSA, FLOAT16_BIAS = 10, 15
"""Of a float16: bits of its mantissa, what its exponent field is above the exponent."""


def decode_rows(
    fmt: Format, tokens: Tensor, scales: Tensor | None, row_scales: Tensor | None, input_scale: Tensor | None
) -> Tensor:
    """What rows stand for, as `cute_ep.dequantize` has it, rounded to bfloat16. Runs on the current stream. Compiled
    by inductor, a division by `input_scale` may be off by a last bit of float32 before that rounding.

    Args:
        tokens, scales, row_scales: of a batch, scale factors in layout linear; those that the format has not are
            ignored.
        input_scale: [1] float32, G of a format with a global scale; None: 1.

    Returns:
        [rows, hidden] bfloat16; of bfloat16 rows the same memory.
    """
    if fmt.scale is None:
        return tokens
    assert scales is not None
    values = _packed(tokens, fmt.element) if fmt.bits < 8 else _converted(tokens, fmt.element)
    factors = scales[:, : values.shape[1] // fmt.block]
    if fmt.scale is E8M0:
        factors = _of_e8m0(factors)
    elif fmt.scale is not FLOAT32:
        factors = _converted(factors, fmt.scale)
    # torch computes these in float32; where two follow, bfloat16 holds the first product of e2m1 and e4m3 exactly
    values.unflatten(1, (-1, fmt.block)).mul_(factors[:, :, None])
    if fmt.row_scale:
        assert row_scales is not None
        values.mul_(row_scales[:, None])
    if fmt.global_scale and input_scale is not None:
        values.div_(input_scale)
    return values


def _converted(bits: Tensor, element: Element) -> Tensor:
    """bfloat16 of one-byte numbers that torch has a type of, exact."""
    return bits.view(getattr(torch, element.container)).to(torch.bfloat16)


def _packed(rows: Tensor, element: Element) -> Tensor:
    """[rows, n * 8 / bits] bfloat16 of [rows, n] uint8 with numbers of fewer than 8 bits, exact: pairs of numbers are
    looked up. Exponents have at most 5 bits, mantissas at most 7."""
    code = torch.arange(1 << 2 * element.bits, dtype=torch.int32, device=rows.device)
    code = (code | code << 16 - element.bits) & _in_both_halves((1 << element.bits) - 1)  # a number in each half
    halves = (code & _in_both_halves(element.magnitude)) << FLOAT16_MANTISSA - element.mantissa
    halves = halves | (code & _in_both_halves(element.magnitude + 1)) << 16 - element.bits  # the sign
    # as a float16 it has the exponent field and the subnormals of the number, but float16's bias
    table = halves.view(torch.float16).to(torch.bfloat16).mul_(2.0 ** (FLOAT16_BIAS - element.bias))
    places = _pairs(rows, 2 * element.bits)
    values = table.view(torch.int32).index_select(0, places.flatten()).view(torch.bfloat16)
    return values.view(rows.shape[0], rows.shape[1] * 8 // element.bits)


def _pairs(rows: Tensor, bits: int) -> Tensor:
    """int32 numbers of `bits` bits, 8 or more, that fill the bytes of the rows without gaps."""
    size = lcm(bits, 8) // 8  # bytes after which one begins at a byte again
    if size == 1:
        return rows.int()
    each = rows.int().unflatten(1, (-1, size))
    whole = sum((each[:, :, byte] << 8 * byte for byte in range(1, size)), each[:, :, 0])
    parts = [whole >> place & (1 << bits) - 1 for place in range(0, 8 * size, bits)]
    return torch.stack(parts, dim=2)


def _in_both_halves(bits: int) -> int:
    """The same 16 bits in both halves of an int32."""
    word = bits | bits << 16
    return word - (word >> 31 << 32)


def _of_e8m0(bits: Tensor) -> Tensor:
    """float32 of exponents, exact: 0 is the subnormal 2**-127, 255 NaN."""
    exponents = bits.int()
    words = torch.where(exponents == 255, 0x7FC00000, exponents << 23)
    return torch.where(exponents == 0, 1 << 22, words).int().view(torch.float32)
