"""`dequantize` of what `quantize`, `fused_silu` and dispatch return, in every layout of scale factors."""

from __future__ import annotations

import pytest
import torch

from cute_ep import connect_local, dequantize, reference
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import QuantizedRows, SwigluRows
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.runtime.local_ops import fused_silu, quantize
from cute_ep.testing.compare import assert_bits

WITH_LAYOUTS = [(name, layout) for name, record in FORMATS.items() for layout in record.scale_layouts or (None,)]
OF_SILU = [(name, layout) for name, layout in WITH_LAYOUTS if layout and not FORMATS[name].row_scale]


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).bfloat16()


@pytest.mark.parametrize(("fmt", "layout"), WITH_LAYOUTS)
@pytest.mark.parametrize("alignment", [None, 128])
def test_a_decoded_batch_is_what_its_tokens_were_encoded_to_and_zeros(
    fmt: str, layout: str | None, alignment: int | None
) -> None:
    """Every row is what its token was encoded to, padding and rows behind the last are zeros, whatever lies there."""
    cfg = EPConfig(384, 6, 2, 200, 1, fmt, scale_layout=layout, row_alignment=alignment, fused_shared_expert=True)
    x, (ids, scale) = random(200, cfg.hidden), (torch.rand(200, 6).topk(2).indices, 0.7)
    given = scale if cfg.format.global_scale else None
    (ep,) = connect_local(cfg, ["cpu"])
    out = ep.allocate()
    for tensor in (out.tokens, out.scales, out.row_scales):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in all formats but the 4-bit ones
    batch = ep.dispatch(x, ids, input_scale=given, out=out)
    decoded = dequantize(batch, fmt, given or 1.0, scale_layout=layout)
    each = reference.dequantize(reference.quantize(x, fmt, given or 1.0), fmt, given or 1.0)
    token = batch.src_info[: int(batch.num_rows), 0].long()
    wanted = torch.where((token >= 0)[:, None], each[token.clamp(min=0)], 0)
    assert_bits(decoded[: token.shape[0]], wanted, "rows")
    assert decoded.shape == (cfg.max_rows, cfg.hidden) and not decoded[token.shape[0] :].any()
    exact = reference.dispatch(cfg, [x], [ids], None if given is None else [given])[0]  # no row or block too many
    assert_bits(dequantize(exact, fmt, given or 1.0, scale_layout=layout), wanted, "exact rows")


@pytest.mark.parametrize(("fmt", "layout"), OF_SILU)
@pytest.mark.parametrize("groups", [[0, 130, 0, 256, 3], [1], [0], None], ids=str)
def test_decoded_rows_of_silu_are_those_of_bfloat16_quantised(fmt: str, layout: str, groups: list[int] | None) -> None:
    """With one input scale per group; without offsets all rows are one group."""
    rows = 97 if groups is None else sum(groups)
    x = random(rows if groups is None else rows + 37, 768)
    places: dict = {"scale_layout": layout}
    sizes = [rows] if groups is None else groups
    if groups is not None:
        starts = [sum(groups[:group]) for group in range(len(groups) + 1)]
        places["row_offsets"] = torch.tensor(starts, dtype=torch.int32)
        if layout == "atom128x4":
            blocks = [-(-count // 128) for count in groups]
            shifts = [sum(blocks[:group]) - starts[group] // 128 for group in range(len(groups))]
            places["scales_offsets"] = torch.tensor(shifts, dtype=torch.int32)
    factors = torch.tensor([0.5 + group for group in range(len(sizes))]) if FORMATS[fmt].global_scale else None
    made = fused_silu(x, fmt=fmt, input_scales=factors, **places)
    decoded = dequantize(made, fmt, 1.0 if factors is None else factors, **places)
    parts = fused_silu(x, places.get("row_offsets"))[:rows].split(sizes)
    given = [1.0] * len(sizes) if factors is None else factors.tolist()
    each = [
        reference.dequantize(reference.quantize(part, fmt, g), fmt, g) for part, g in zip(parts, given, strict=True)
    ]
    assert_bits(decoded[:rows], torch.cat(each), "rows")
    assert not decoded[rows:].any()


def test_types_of_torch_and_views_are_decoded() -> None:
    for fmt, named in (
        ("nvfp4", torch.float8_e4m3fn),
        ("mxfp4", torch.float8_e8m0fnu),
        ("mxfp8", torch.float8_e8m0fnu),
    ):
        rows = quantize(random(5, 160), fmt)
        wide = torch.nn.functional.pad(rows.scales, (0, 3))[:, :-3]  # as quantize returns them on a GPU
        assert not wide.is_contiguous()
        wanted = dequantize(rows, fmt)
        payload = rows.payload
        if payload.dtype == torch.uint8 and hasattr(torch, "float4_e2m1fn_x2"):
            payload = payload.view(torch.float4_e2m1fn_x2)
        assert_bits(dequantize(QuantizedRows(payload, rows.scales.view(named)), fmt), wanted, "types")
        assert_bits(dequantize(QuantizedRows(payload, wide), fmt), wanted, "views")


ROWS = quantize(random(4, 128), "nvfp4")
SILU = fused_silu(random(4, 256), fmt="mxfp4")
OFFSETS = torch.tensor([0, 2, 4], dtype=torch.int32)
BUFFERS = DispatchBuffers.allocate(EPConfig(128, 2, 1, 4, 1, "mxfp4"), "cpu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dequantize(ROWS, "fp4"), r"fmt = 'fp4': must be one of"),
        (lambda: dequantize(ROWS, ["nvfp4"]), r"fmt = \['nvfp4'\]: must be one of"),
        (
            lambda: dequantize(ROWS.payload, "nvfp4"),
            r"rows = Tensor: must be QuantizedRows",
        ),
        (lambda: dequantize(ROWS, "nvfp4", scale_layout="linear"), r"scale_layout = 'linear': must be None"),
        (lambda: dequantize(SILU, "mxfp4", scale_layout="transposed"), r"scale_layout = 'transposed': must be"),
        (lambda: dequantize(SILU, "mxfp4", scale_layout="linear"), r"scale_layout = 'linear': must be 'atom128x4' for"),
        (lambda: dequantize(SILU, "mxfp4", row_offsets=OFFSETS), r"scales_offsets = None: must be given"),
        (lambda: dequantize(SILU, "mxfp4", row_offsets=OFFSETS[:1]), r"row_offsets\.shape = \(1,\)"),
        (lambda: dequantize(BUFFERS, "mxfp4", row_offsets=OFFSETS), r"row_offsets = tensor: must be None"),
        (lambda: dequantize(BUFFERS, "nvfp4"), r"rows\.scales\.shape"),
        (
            lambda: dequantize(SwigluRows(SILU.payload, SILU.scales[:0]), "mxfp4"),
            r"rows\.scales\.shape\[0\] = 0",
        ),
        (lambda: dequantize(ROWS, "nvfp4", torch.ones(2)), r"global_scale = .*one float32 element$"),
        (lambda: dequantize(ROWS, "nvfp4", torch.zeros(1)), r"global_scale = 0\.0: must be a number"),
        (lambda: dequantize(ROWS, "nvfp4", 0.0), r"global_scale = 0\.0: must be a number"),
    ],
    ids=[
        *("format that is none", "list of formats", "payload alone", "layout of quantised rows", "layout of fp8"),
        *("layout of other scales", "no scales_offsets", "too few row_offsets", "offsets of buffers"),
        *("buffers of another format", "too few scales", "two global scales", "global scale 0 in a tensor"),
        "global scale 0",
    ],
)
def test_rows_that_do_not_fit_the_format_are_refused(call, message: str) -> None:
    with pytest.raises(EPInputError, match=message):
        call()
