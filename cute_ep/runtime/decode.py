"""Rows in a wire format to bfloat16, which experts multiply.

Plain torch of static shapes: it can be captured in a CUDA graph and compiled. In place but for the result, since rows
for the worst case take most of a layer's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_ep.layouts.maps.formats import Format

E2M1_UNIT = 2.0**14
"""Of an e2m1, when its exponent and mantissa are the lowest two and the highest bit of a float16's."""


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
    values = (_of_e2m1 if fmt.element == "e2m1" else _of_e4m3)(tokens)
    factors = scales[:, : values.shape[1] // fmt.block]
    if fmt.scale != "f32":
        factors = (_of_e8m0 if fmt.scale == "e8m0" else _of_e4m3)(factors)
    # torch computes these in float32; where two follow, bfloat16 holds the first product of e2m1 and e4m3 exactly
    values.unflatten(1, (-1, fmt.block)).mul_(factors[:, :, None])
    if fmt.row_scale:
        assert row_scales is not None
        values.mul_(row_scales[:, None])
    if fmt.global_scale and input_scale is not None:
        values.div_(input_scale)
    return values


def _of_e4m3(bits: Tensor) -> Tensor:
    """bfloat16 of one-byte numbers, exact."""
    return bits.view(torch.float8_e4m3fn).to(torch.bfloat16)


def _of_e2m1(pairs: Tensor) -> Tensor:
    """[rows, 2 * n] bfloat16 of [rows, n] uint8 with two numbers each, exact."""
    code = torch.arange(256, dtype=torch.int32, device=pairs.device)
    code = code | code << 12  # a number in each half
    halves = (code & 0x00070007) << 9 | (code & 0x00080008) << 12
    table = halves.view(torch.float16).to(torch.bfloat16).mul_(E2M1_UNIT).view(torch.int32)
    rows, columns = pairs.shape
    return table.index_select(0, pairs.flatten().int()).view(torch.bfloat16).view(rows, 2 * columns)


def _of_e8m0(bits: Tensor) -> Tensor:
    """float32 of exponents, exact: 0 is the subnormal 2**-127, 255 NaN."""
    exponents = bits.int()
    words = torch.where(exponents == 255, 0x7FC00000, exponents << 23)
    return torch.where(exponents == 0, 1 << 22, words).int().view(torch.float32)
