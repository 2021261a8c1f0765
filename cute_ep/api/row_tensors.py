"""Rows in a token format as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep.layouts.maps.formats import FLOAT32, Element, Format

ID_TYPES = (torch.int32, torch.int64)
"""Element types of `topk_ids`."""


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, whatever its strides. A view of another size needs a stride of 1 in
    the last dimension, which a contiguous tensor may not have where that has one element."""
    return tensor.view(BITS[tensor.element_size()])


def with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory of a contiguous tensor, with the strides of a new one, also in dimensions of one element."""
    if min(tensor.shape, default=1) > 1:  # torch leaves no stride open
        return tensor
    strides, step = [], 1
    for extent in reversed(tensor.shape):
        strides.append(step)
        step *= max(1, extent)
    plain = tuple(strides[::-1])
    return tensor if tensor.stride() == plain else tensor.as_strided(tensor.shape, plain)


class QuantizedRows(NamedTuple):
    """Rows in a token format, scale factors row-major.

    What takes them takes torch's own types as well, the same bits: float4_e2m1fn_x2 (where torch has it) as payload of
    4-bit formats, float8_e8m0fnu and float8_e4m3fn as scales.

    Attributes:
        payload: [rows, hidden] float8_e4m3fn, or [rows, hidden * bits / 8] uint8 (formats of fewer than 8 bits:
            element 0 in the lowest bits of byte 0).
        scales: [rows, hidden / block] uint8 bits or float32.
        row_scales: [rows] bfloat16, in formats whose rows have a scale of their own.
    """

    payload: torch.Tensor
    scales: torch.Tensor
    row_scales: torch.Tensor | None = None


class SwigluRows(NamedTuple):
    """Rows after SwiGLU in a format with scales.

    Attributes:
        payload: [rows, D] float8_e4m3fn, or [rows, D * bits / 8] uint8 (formats of fewer than 8 bits: element 0
            in the lowest bits of byte 0).
        scales: uint8 bits or float32, in one of the layouts of `cute_ep.layouts.maps.scales`.
    """

    payload: torch.Tensor
    scales: torch.Tensor


def payload_dtype(fmt: Format) -> torch.dtype:
    """Element type of a tensor of payload rows; elements of fewer than 8 bits share the bytes of a uint8."""
    return getattr(torch, fmt.element.container)


def payload_types(fmt: Format) -> tuple[torch.dtype, ...]:
    """Element types of payload rows that callers may give; `payload_dtype` is the first."""
    return _with_torch_type(payload_dtype(fmt), fmt.element)


def scale_types(fmt: Format) -> tuple[torch.dtype, ...]:
    """Element types of scale factors that callers may give; `scale_dtype` is the first."""
    return (scale_dtype(fmt),) if fmt.scale is None else _with_torch_type(scale_dtype(fmt), fmt.scale)


def _with_torch_type(own: torch.dtype, element: Element) -> tuple[torch.dtype, ...]:
    """`own` and torch's type for the element, where torch has another one."""
    named = getattr(torch, element.torch_name or "", own)
    return (own,) if named == own else (own, named)


def as_own_types(rows: QuantizedRows, fmt: Format) -> QuantizedRows:
    """The same memory in the types that this library gives rows of `fmt`."""
    payload, scales, row_scales = rows
    return QuantizedRows(
        payload.view(payload_dtype(fmt)), None if scales is None else scales.view(scale_dtype(fmt)), row_scales
    )


def payload_columns(fmt: Format, hidden: int) -> int:
    """Elements of one row of a tensor of payload rows."""
    return fmt.payload_bytes(hidden) // payload_dtype(fmt).itemsize


def scale_dtype(fmt: Format) -> torch.dtype:
    """Element type of a tensor of scale factors; one-byte numbers are kept as bits."""
    return torch.float32 if fmt.scale is FLOAT32 else torch.uint8
