"""What quantised rows stand for: `dequantize` for every format and every layout of scale factors, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.modes import no_modes
from cute_ep.api.row_tensors import QuantizedRows, SwigluRows, as_own_types, payload_columns, payload_types, scale_types
from cute_ep.api.tensors import check_tensor
from cute_ep.api.types import FormatName, ScaleLayout
from cute_ep.api.validate import check_global_scale, check_row_offsets
from cute_ep.layouts.maps.formats import Format
from cute_ep.layouts.maps.scales import ATOM, ATOM_BYTES, ATOM_ROWS, LINEAR, WORD_BYTES, scale_words
from cute_ep.reference.formats import MODELS, as_format, row_chunks


class _Groups(NamedTuple):
    """Where the groups' rows and scale blocks begin, as in `DispatchBuffers`; without offsets all rows are one."""

    row_offsets: torch.Tensor | None
    scales_offsets: torch.Tensor | None

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """[n] int64 groups of [n] rows; those behind the last one count to it."""
        assert self.row_offsets is not None
        return torch.searchsorted(self.row_offsets[1:].long(), row, right=True).clamp(max=self.row_offsets.shape[0] - 2)


def dequantize(
    rows: QuantizedRows | SwigluRows | DispatchBuffers | Dispatched,
    fmt: FormatName | Format,
    global_scale: float | torch.Tensor = 1.0,
    *,
    scale_layout: ScaleLayout | None = None,
    row_offsets: torch.Tensor | None = None,
    scales_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode rows, by the last column of the table in docs/numerics.md: for tests, and to see what a row holds.

    The product is rounded once, in formats where it does not fit float32 (fp8, nvfp4), and infinite where it exceeds
    float32. Runs on the current stream of the tensors' device and reads nothing on the host.

    Args:
        rows: what `quantize` or, in a format with scales, `fused_silu` returned, or a batch (or its buffers).
        fmt: a format or its name.
        global_scale: the input scale G of the rows: a number, a float32 tensor of one element, or one for each group,
            [G]. The values of tensors are checked on the CPU only.
        scale_layout: how the scale factors lie; None: as the batch's configuration says, where it is known, else the
            format's default. Rows of `quantize` have only one.
        row_offsets, scales_offsets: as `fused_silu` was given them. A batch has its own.

    Returns:
        [rows, hidden] float32. Rows behind the last group are zeros.

    Raises:
        EPInputError: unknown format or layout, a tensor does not fit it, or G is outside [2**-100, 2**100].
    """
    fmt = as_format(fmt)
    name = "rows.payload"
    if isinstance(rows, Dispatched):
        rows = rows.buffers
    if isinstance(rows, DispatchBuffers):
        given = {"row_offsets": row_offsets, "scales_offsets": scales_offsets}
        if present := [argument for argument, tensor in given.items() if tensor is not None]:
            raise EPInputError(f"{present[0]} = tensor: must be None, a batch has its own")
        row_offsets, scales_offsets, name = rows.row_offsets, rows.scales_offsets, "rows.tokens"
        payload, scales, row_scales = rows.tokens, rows.scales, rows.row_scales
        if scales is not None and scales.dim() == 3:  # transposed blocks
            scales = scales.transpose(0, 1).flatten(1)
    elif isinstance(rows, SwigluRows):
        (payload, scales), row_scales = rows, None
    elif isinstance(rows, QuantizedRows):
        payload, scales, row_scales = rows
        if scale_layout is not None:
            raise EPInputError(f"scale_layout = {scale_layout!r}: must be None, scales of QuantizedRows are row-major")
    else:
        raise EPInputError(f"rows = {type(rows).__name__}: must be QuantizedRows, SwigluRows or a batch")
    _check_payload(name, payload, fmt)
    held = QuantizedRows(payload, scales, row_scales)
    layout = _check_scales(rows, held, fmt, scale_layout)
    count, device = payload.shape[0], payload.device
    if fmt.row_scale:
        check_tensor("rows.row_scales", row_scales, shape=(count,), dtype=torch.bfloat16, device=device)
    elif row_scales is not None:
        raise EPInputError(f"rows.row_scales = {type(row_scales).__name__}: must be None, {fmt.name} has none")
    groups = 1 if row_offsets is None else check_row_offsets(row_offsets, device)
    if (scales_offsets is not None) != (layout == ATOM and row_offsets is not None):
        given_offsets = "None" if scales_offsets is None else "tensor"
        raise EPInputError(
            f"scales_offsets = {given_offsets}: must be given with row_offsets and scales in layout {ATOM}"
        )
    if scales_offsets is not None:
        check_tensor("scales_offsets", scales_offsets, shape=(groups,), dtype=torch.int32, device=device)
    _check_global(global_scale, groups, device)
    with no_modes():
        return _decode(fmt, as_own_types(held, fmt), global_scale, layout, _Groups(row_offsets, scales_offsets))


def _check_payload(name: str, payload: torch.Tensor, fmt: Format) -> None:
    """EPInputError unless payload has rows of `fmt`."""
    types = payload_types(fmt)
    check_tensor(name, payload, shape=(None, None), dtype=types)
    columns, least = payload.shape[1], payload_columns(fmt, fmt.multiple)
    if columns <= 0 or columns % least:
        raise EPInputError(f"{name}.shape[1] = {columns}: must be a positive multiple of {least} for {fmt.name}")


def _hidden(payload: torch.Tensor, fmt: Format) -> int:
    """Elements of a row of payload that was checked."""
    return payload.shape[1] // payload_columns(fmt, fmt.multiple) * fmt.multiple


def _check_scales(
    rows: QuantizedRows | SwigluRows | DispatchBuffers,
    held: QuantizedRows,
    fmt: Format,
    scale_layout: ScaleLayout | None,
) -> str | None:
    """The layout of the scale factors that `rows` hold, None for none and for row-major ones without padding;
    EPInputError unless they fit the payload."""
    try:
        layout = fmt.scale_layout(scale_layout)
    except ValueError as error:
        raise EPInputError(str(error)) from None
    if isinstance(rows, DispatchBuffers) and rows.memory.cfg is not None and scale_layout is None:
        layout = rows.memory.cfg.scales_as if rows.memory.cfg.format is fmt else layout
    scales = held.scales
    if fmt.scale is None:
        if scales is not None:
            raise EPInputError(f"rows.scales = {type(scales).__name__}: must be None, {fmt.name} has none")
        return None
    count, hidden = held.payload.shape[0], _hidden(held.payload, fmt)
    shape: tuple[int | None, ...]
    if isinstance(rows, QuantizedRows):  # which may be a view of padded rows
        layout, shape = None, (count, hidden // fmt.block)
        scales = scales.contiguous() if isinstance(scales, torch.Tensor) else scales
    else:
        shapes = {one: _scale_shape(fmt, one, count, hidden) for one in fmt.scale_layouts}
        shape = shapes[str(layout)]
        if isinstance(scales, torch.Tensor) and not _fits(scales, shape):
            for other in (one for one in shapes if _fits(scales, shapes[one])):
                chosen = f"scale_layout = {layout!r}{'' if scale_layout else ', the default'}"
                raise EPInputError(f"{chosen}: must be {other!r} for rows.scales.shape = {tuple(scales.shape)}")
    check_tensor("rows.scales", scales, shape=shape, dtype=scale_types(fmt), device=held.payload.device)
    if layout == ATOM and scales is not None and scales.shape[0] * ATOM_ROWS < count:
        raise EPInputError(
            f"rows.scales.shape[0] = {scales.shape[0]}: must be at least {-(-count // ATOM_ROWS)}, a block for "
            f"{ATOM_ROWS} rows each"
        )
    return layout


def _scale_shape(fmt: Format, layout: str, rows: int, hidden: int) -> tuple[int | None, ...]:
    """Shape of the scale factors of rows in a layout; None for any extent."""
    words = scale_words(fmt.scale_bytes(hidden))
    if layout == ATOM:
        return (None, words, 32, ATOM_ROWS // 32, WORD_BYTES)
    return (rows, words * WORD_BYTES // fmt.scale_itemsize) if layout == LINEAR else (words, rows)


def _fits(tensor: torch.Tensor, shape: tuple[int | None, ...]) -> bool:
    return tensor.dim() == len(shape) and all(
        want in (None, got) for got, want in zip(tensor.shape, shape, strict=True)
    )


def _check_global(global_scale: float | torch.Tensor, groups: int, device: torch.device) -> None:
    if not isinstance(global_scale, torch.Tensor):
        check_global_scale(global_scale)
        return
    if global_scale.numel() not in (1, groups) or global_scale.dtype != torch.float32:
        wanted = "one float32 element" if groups == 1 else f"one float32 element, or {groups}"
        raise EPInputError(
            f"global_scale = {global_scale.dtype} tensor of shape {tuple(global_scale.shape)}: must have {wanted}"
        )
    check_tensor("global_scale", global_scale)
    if global_scale.device.type == "cpu":
        for value in global_scale.flatten().tolist():
            check_global_scale(value)


def _decode(
    fmt: Format,
    rows: QuantizedRows,
    global_scale: float | torch.Tensor,
    layout: str | None,
    groups: _Groups,
) -> torch.Tensor:
    """`dequantize` of arguments that were checked."""
    count, hidden, device = rows.payload.shape[0], _hidden(rows.payload, fmt), rows.payload.device
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=device).flatten()
    out = torch.empty(count, hidden, dtype=torch.float32, device=device)
    for part in row_chunks(count, hidden):
        row = torch.arange(part.start, part.stop, device=device)
        own = scale if scale.numel() == 1 else scale[groups.of(row)]
        scales = None if rows.scales is None else _row_major(rows.scales, hidden // fmt.block, layout, groups, row)
        row_scales = None if rows.row_scales is None else rows.row_scales[part]
        values = MODELS[fmt].decode(QuantizedRows(rows.payload[part], scales, row_scales), own[:, None, None])
        if groups.row_offsets is not None:
            values = torch.where((row < groups.row_offsets[-1])[:, None], values, 0)
        out[part] = values
    return out


def _row_major(
    scales: torch.Tensor, columns: int, layout: str | None, groups: _Groups, row: torch.Tensor
) -> torch.Tensor:
    """[n, columns] scale factors of [n] rows that follow each other."""
    if layout is None or layout == LINEAR:
        return scales[row, :columns]
    if layout != ATOM:
        return scales[:, row].t()
    start, block = torch.zeros_like(row), torch.zeros_like(row)
    if groups.row_offsets is not None and groups.scales_offsets is not None:
        group = groups.of(row)
        start = groups.row_offsets[group].long()
        block = start // ATOM_ROWS + groups.scales_offsets[group]
    inside, column = row - start, torch.arange(columns, device=row.device)
    block = (block + inside // ATOM_ROWS).clamp(0, max(0, scales.shape[0] - 1))  # rows behind the last have none
    inside = inside % ATOM_ROWS
    at_row = block * scales.shape[1] * ATOM_BYTES + inside % 32 * 16 + inside // 32 * WORD_BYTES
    at_column = column // WORD_BYTES * ATOM_BYTES + column % WORD_BYTES
    return scales.flatten()[at_row[:, None] + at_column]
