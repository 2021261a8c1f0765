"""Kernels that involve one GPU only, as functions on tensors; tensors on the CPU go to the reference."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Literal, NamedTuple, overload

import torch

from cute_ep import reference
from cute_ep.api.config import MAX_HIDDEN
from cute_ep.api.errors import EPInputError
from cute_ep.api.gates import SWIGLU, Gate
from cute_ep.api.modes import no_modes
from cute_ep.api.row_tensors import QuantizedRows, SwigluRows, payload_columns, payload_dtype, scale_dtype
from cute_ep.api.tensors import check_tensor, check_written
from cute_ep.api.types import FormatName, ScaledFormat, ScaleLayout, SwigluFormat
from cute_ep.api.validate import check_global_scale, check_input_scale, check_row_offsets
from cute_ep.layouts.maps.formats import FORMATS, VECTOR_BYTES, Format
from cute_ep.layouts.maps.launch import TILE_ELEMENTS, WARPS
from cute_ep.layouts.maps.local_arguments import CopyArgs, RowsArgs
from cute_ep.layouts.maps.scales import ATOM, LINEAR, WORD_BYTES, scale_row_alignment, scale_shape
from cute_ep.layouts.maps.variants import COPY_KERNEL, GATED_KERNEL, QUANTIZE_KERNEL, SWIGLU_KERNELS
from cute_ep.reference.local import Groups, check_offsets, fill_groups, rows_of_groups
from cute_ep.runtime.arguments import address, scales_record
from cute_ep.runtime.driver import launch_on, resident_ctas
from cute_ep.runtime.local_kernels import local_kernel

MAX_ROWS = 1 << 30
GELU_ALPHA = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_ALPHA


def quantize(
    x: torch.Tensor, fmt: ScaledFormat, input_scale: torch.Tensor | None = None, *, library: str | None = None
) -> QuantizedRows:
    """Quantise rows as dispatch does, on the current stream. `cute_ep.dequantize` decodes them.

    Args:
        x: [T, hidden] bfloat16, contiguous; `hidden` as `EPConfig.hidden` of the format.
        fmt: name of a format with scales.
        input_scale: float32[1], the global scale G, for formats that have one; None: 1. Its value is checked on the
            CPU only.
        library: folder of compiled kernels to look in first; None: that of the last connection on this device.

    Returns:
        Payload, row-major scales and, where the format has them, row scales. Where a row has a number of one-byte
        scales that is no multiple of 4, `scales` is a view of rows padded to one (so not contiguous).

    Raises:
        EPInputError: an argument breaks its rule. Nothing was launched.
        VariantMissing: the kernel is not in the library.
    """
    record = _format(fmt, [known for known in FORMATS.values() if known.scale], ", formats with scales")
    rows, hidden = _check_rows(record, x, halves=1)
    if input_scale is not None and record.global_scale:
        check_tensor("input_scale", input_scale, dtype=torch.float32, device=x.device)
    check_input_scale(record, input_scale)
    if not _on_gpu("x", x):
        if input_scale is not None:
            check_global_scale(input_scale.item(), "input_scale")
        return reference.quantize(x, record, 1.0 if input_scale is None else input_scale)
    payload = torch.empty(rows, payload_columns(record, hidden), dtype=payload_dtype(record), device=x.device)
    padded = scale_shape(LINEAR, record.scale_bytes(hidden), record.scale_itemsize, rows, 1)
    scales = torch.empty(padded, dtype=scale_dtype(record), device=x.device)
    row_scales = torch.empty(rows, dtype=torch.bfloat16, device=x.device) if record.row_scale else None
    arguments = RowsArgs(
        scales=scales_record(LINEAR, record.scale_bytes(hidden), scales, rows, 1),
        x=x.data_ptr(),
        out=payload.data_ptr(),
        row_scales=address(row_scales),
        global_scales=address(input_scale),
        row_offsets=0,
        scales_offsets=0,
        per_group=0,
        groups=1,
        rows=rows,
        width=hidden,
        alpha=0,
        limit=0,
        cubic=0,
        offset=0,
        bias=0,
        columns=1,
        interleaved=0,
    )
    _launch_rows(QUANTIZE_KERNEL, record, x.device.index, arguments, library)
    return QuantizedRows(payload, scales[:, : hidden // record.block], row_scales)


@overload
def fused_silu(
    x: torch.Tensor,
    row_offsets: torch.Tensor | None = None,
    *,
    fmt: Literal["bf16"] = "bf16",
    gate: Gate = SWIGLU,
    bias: torch.Tensor | None = None,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    library: str | None = None,
) -> torch.Tensor: ...


@overload
def fused_silu(
    x: torch.Tensor,
    row_offsets: torch.Tensor | None = None,
    *,
    fmt: SwigluFormat,
    gate: Gate = SWIGLU,
    bias: torch.Tensor | None = None,
    interleaved: bool = False,
    scale_layout: ScaleLayout | None = None,
    scales_offsets: torch.Tensor | None = None,
    input_scales: torch.Tensor | None = None,
    out: SwigluRows | None = None,
    library: str | None = None,
) -> SwigluRows: ...


def fused_silu(
    x: torch.Tensor,
    row_offsets: torch.Tensor | None = None,
    *,
    fmt: FormatName = "bf16",
    gate: Gate = SWIGLU,
    bias: torch.Tensor | None = None,
    interleaved: bool = False,
    scale_layout: ScaleLayout | None = None,
    scales_offsets: torch.Tensor | None = None,
    input_scales: torch.Tensor | None = None,
    out: torch.Tensor | SwigluRows | None = None,
    library: str | None = None,
) -> torch.Tensor | SwigluRows:
    """SwiGLU or another gate of the rows between two grouped matmuls, quantised for the second, on the current stream.

    y = silu(gate) * up, or what `gate` says (docs/numerics.md), rounded to bfloat16 and then, for a format with scales,
    quantised as `quantize` does.

    Args:
        x: [rows, 2 * D] bfloat16, contiguous: gate columns and then up columns, or with `interleaved` gate 0, up 0,
            gate 1, up 1, ...; [rows, D] for a gate with one column. D as `EPConfig.hidden` of the format.
        row_offsets: [G + 1] int32 ascending from 0, as in `Dispatched`: only the first row_offsets[G] rows
            are read, and only theirs are written. None: all rows, one group. Their values are checked on the CPU only.
        fmt: name of a format without row scales.
        gate: what to compute.
        bias: [G, columns of x] bfloat16 in the order of x, of which row g is added to the rows of group g, in float32;
            with row_offsets only.
        scale_layout: one of the format's; None: its default.
        scales_offsets: [G] int32 as in `Dispatched`, with row_offsets and the 128x4 atom layout only. Scale
            rows that pad a group to a multiple of 128 are written as zeros.
        input_scales: float32 [1] or [G], the global scale of all rows or of each group's; None: 1. Their values are
            checked on the CPU only.
        out: what this function returned, or tensors like it, to be overwritten (CUDA graphs); None allocates them.
        library: folder of compiled kernels to look in first; None: that of the last connection on this device.

    Returns:
        [rows, D] bfloat16, or for a format with scales their payload and scales.

    Raises:
        EPInputError: an argument breaks its rule. Nothing was launched.
        VariantMissing: the kernel is not in the library.
    """
    record = _format(fmt, [known for known in FORMATS.values() if not known.row_scale], ", formats without row scales")
    if not isinstance(gate, Gate):
        raise EPInputError(f"gate = {gate!r}: must be a cute_ep.Gate")
    if interleaved and gate.columns == 1:
        raise EPInputError(f"interleaved = True: must be False, {gate.kind} has one column for each output")
    rows, width = _check_rows(record, x, halves=gate.columns)
    groups = 1
    if row_offsets is not None:
        groups = check_row_offsets(row_offsets, x.device)
    layout = _scale_layout(record, scale_layout)
    if (scales_offsets is not None) != (layout == ATOM and row_offsets is not None):
        rule = f"with row_offsets and scales in layout {ATOM}"
        if scales_offsets is not None:
            raise EPInputError(f"scales_offsets = tensor: must be given {rule} only")
        raise EPInputError(
            f"scales_offsets = None: must be given {rule}; give those of the batch, or pass scale_layout='linear'"
        )
    if scales_offsets is not None:
        check_tensor("scales_offsets", scales_offsets, shape=(groups,), dtype=torch.int32, device=x.device)
    if input_scales is not None:
        if not record.global_scale:
            raise EPInputError(f"input_scales = tensor: must be None, format {fmt} has no global scale")
        check_tensor("input_scales", input_scales, dtype=torch.float32, device=x.device)
        if input_scales.shape not in ((1,), (groups,)):
            rule = "(1,)" if groups == 1 else f"(1,) or ({groups},)"
            raise EPInputError(f"input_scales.shape = {tuple(input_scales.shape)}: must be {rule}")
    if bias is not None:
        if row_offsets is None:
            raise EPInputError("bias = tensor: must be given with row_offsets only")
        shape = (groups, x.shape[1])
        check_tensor("bias", bias, shape=shape, dtype=torch.bfloat16, device=x.device, alignment=VECTOR_BYTES)
    wanted = _OutputRows(record, layout, rows, width, groups)
    if out is not None:
        payload, scales = wanted.checked(out, x.device)
    on_gpu = _on_gpu("x", x)
    if out is None:
        payload, scales = wanted.empty(x.device)
    if not on_gpu:
        bounds = [0, rows] if row_offsets is None else check_offsets(row_offsets.tolist(), rows)
        with no_modes():
            each = None if bias is None else rows_of_groups(bias, bounds)
            activated = reference.swiglu(x[: bounds[-1]], interleaved, gate, each)
            values = reference.round_to(activated, torch.bfloat16)
        known = Groups.read(bounds, scales_offsets, input_scales)
        fill_groups(record, layout, values, (payload, scales), known)
    else:
        name, of_gate = _gate_arguments(gate, bias is not None, interleaved)
        arguments = RowsArgs(
            scales=scales_record(layout, record.scale_bytes(width), scales, rows, scale_row_alignment(layout, 1)),
            x=x.data_ptr(),
            out=payload.data_ptr(),
            row_scales=0,
            global_scales=address(input_scales),
            row_offsets=address(row_offsets),
            scales_offsets=address(scales_offsets),
            per_group=int(input_scales is not None and input_scales.shape[0] > 1),
            groups=groups,
            rows=rows,
            width=width,
            bias=address(bias),
            columns=gate.columns,
            interleaved=int(interleaved),
            **of_gate,
        )
        _launch_rows(name, record, x.device.index, arguments, library)
    return payload if scales is None else SwigluRows(payload, scales)


def _format(name: str, allowed: Iterable[Format] = FORMATS.values(), why: str = "") -> Format:
    """The format of that name; EPInputError unless it is one of those that are allowed."""
    names = [fmt.name for fmt in allowed]
    if not isinstance(name, str) or name not in names:
        raise EPInputError(f"fmt = {name!r}: must be one of {', '.join(names)}{why}")
    return FORMATS[name]


def _check_rows(record: Format, x: torch.Tensor, halves: int) -> tuple[int, int]:
    """(rows, elements of one output row) of a source tensor with `halves` elements for each."""
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16, alignment=VECTOR_BYTES)
    rows, columns = x.shape
    least, most = halves * record.multiple, halves * MAX_HIDDEN
    if not least <= columns <= most or columns % least:
        pairs = ", a gate and an up element for each output" if halves > 1 else ""
        rule = f"a multiple of {least} in [{least}, {most}] for {record.name}{pairs}"
        raise EPInputError(f"x.shape[1] = {columns}: must be {rule}")
    if rows > MAX_ROWS:
        raise EPInputError(f"x.shape[0] = {rows}: must not exceed {MAX_ROWS}")
    return rows, columns // halves


def _on_gpu(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is on an NVIDIA GPU, not on the CPU; EPInputError when it is elsewhere."""
    if tensor.device.type not in ("cuda", "cpu"):
        raise EPInputError(f"{name}.device = {tensor.device}: must be an NVIDIA GPU or the CPU")
    return tensor.device.type == "cuda"


def _scale_layout(record: Format, layout: str | None) -> str | None:
    try:
        return record.scale_layout(layout)
    except ValueError as error:
        raise EPInputError(str(error)) from None


def _gate_arguments(gate: Gate, has_bias: bool, interleaved: bool) -> tuple[str, dict[str, int]]:
    """The kernel for a gate, and the gate's numbers among its parameters."""
    alpha, limit, cubic = gate.alpha, gate.limit, 0.0
    name = GATED_KERNEL
    if gate.kind == "silu" and not has_bias and (gate == SWIGLU or (limit is not None and gate.offset == 1)):
        name = SWIGLU_KERNELS[interleaved]
    if gate.kind == "gelu_tanh":
        alpha, cubic = GELU_ALPHA, GELU_CUBIC
    unlimited = 0.0 if name != GATED_KERNEL else math.inf
    values = {
        "alpha": 1.0 if alpha is None else alpha,
        "limit": unlimited if limit is None else limit,
        "cubic": cubic,
        "offset": float(gate.offset),
    }
    return name, {key: struct.unpack("<I", struct.pack("<f", value))[0] for key, value in values.items()}


class _OutputRows(NamedTuple):
    """What rows `fused_silu` writes: [rows, width] elements of a format, and in which layout, of how many groups, their
    scale factors lie (None: there are none)."""

    fmt: Format
    layout: str | None
    rows: int
    width: int
    groups: int

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Shapes of payload and scales (None without)."""
        fmt, layout, rows, width, groups = self
        payload = (rows, payload_columns(fmt, width))
        if layout is None:
            return payload, None
        return payload, scale_shape(layout, fmt.scale_bytes(width), fmt.scale_itemsize, rows, groups)

    def empty(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Uninitialised payload and scales."""
        payload, scales = self.shapes()
        return (
            torch.empty(payload, dtype=payload_dtype(self.fmt), device=device),
            None if scales is None else torch.empty(scales, dtype=scale_dtype(self.fmt), device=device),
        )

    def checked(self, out: torch.Tensor | SwigluRows, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The caller's payload and scales; EPInputError unless they are such rows."""
        shape, scales_shape = self.shapes()
        payload, scales, name = out, None, "out"
        if scales_shape is not None:
            if not isinstance(out, tuple) or len(out) != len(SwigluRows._fields):
                raise EPInputError(f"out = {type(out).__name__}: must be a SwigluRows")
            (payload, scales), name = out, "out.payload"
            dtype, alignment = scale_dtype(self.fmt), VECTOR_BYTES if self.layout == ATOM else WORD_BYTES
            check_written("out.scales", scales)
            check_tensor("out.scales", scales, shape=scales_shape, dtype=dtype, device=device, alignment=alignment)
        check_written(name, payload)
        dtype = payload_dtype(self.fmt)
        check_tensor(name, payload, shape=shape, dtype=dtype, device=device, alignment=VECTOR_BYTES)
        return payload, scales


def empty_rows(
    fmt: FormatName, layout: ScaleLayout | None, x: torch.Tensor, width: int, groups: int
) -> list[torch.Tensor]:
    """Uninitialised tensors of what `fused_silu` returns for [rows, columns] `x`: [rows, width] of a format, scales."""
    record = _format(fmt)
    made = _OutputRows(record, _scale_layout(record, layout), x.shape[0], width, groups).empty(x.device)
    return [one for one in made if one is not None]


def _launch_rows(name: str, record: Format, device: int, arguments: RowsArgs, library: str | None) -> None:
    """Launch a kernel of `cute_ep.kernels.local.swiglu` on the current stream.

    A tile a warp, by CTAs that come one after the other, keeps the memory's pages together: BF16, 65,536 rows of 2048,
    205 -> 188 us (H200, 2026-11-22). Where rows are encoded a CTA stays, or NVFP4 takes 187 us instead of 152.
    """
    kernel = local_kernel(device, name, record.name, library)
    if not arguments.rows:
        return
    tiles = 1 if record.row_scale else -(-arguments.width // TILE_ELEMENTS)
    grid = -(-arguments.rows * tiles // WARPS)
    if record.bits < 16:  # what is not encoded needs no preparation
        grid = min(resident_ctas(device), grid)
    launch_on(device, kernel, grid, arguments)


def copy_bytes(
    destination: torch.Tensor, source: torch.Tensor, *, ctas: int | None = None, library: str | None = None
) -> None:
    """Copy `source` over `destination` with SM loads and stores, on the current stream of the source's device.

    Args:
        destination, source: contiguous, same number of bytes (a multiple of 16), 16-byte aligned. The destination
            may be on a peer whose access `driver.enable_peer_access` has enabled.
        ctas: CTAs to use; default all that are resident together.

    Raises:
        EPInputError: a tensor is not on a GPU, sizes differ or are no multiple of 16 bytes.
    """
    for name, tensor in (("source", source), ("destination", destination)):
        if tensor.device.type != "cuda":
            raise EPInputError(f"{name}.device = {tensor.device}: must be an NVIDIA GPU")
    if source.nbytes != destination.nbytes or source.nbytes % VECTOR_BYTES:
        raise EPInputError(
            f"source.nbytes = {source.nbytes}, destination.nbytes = {destination.nbytes}: must be equal and a "
            f"multiple of {VECTOR_BYTES}"
        )
    for name, tensor in (("source", source), ("destination", destination)):
        if not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
            raise EPInputError(f"{name}: must be contiguous and aligned to {VECTOR_BYTES} bytes")
    device = source.device.index or 0
    arguments = CopyArgs(source.data_ptr(), destination.data_ptr(), source.nbytes)
    kernel = local_kernel(device, COPY_KERNEL, None, library)
    launch_on(device, kernel, ctas or resident_ctas(device), arguments)
