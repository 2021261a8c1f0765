"""The local operations without a GPU: which arguments they refuse, what they launch, and what they do on the CPU.

Every argument is checked before the device is touched, so tensors on the CPU get as far as the rule that they break.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.api.gates import Gate
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import scale_map
from cute_ep.runtime.local_ops import SwigluRows, copy_bytes, fused_silu, quantize
from cute_ep.testing.compare import assert_prefix_and_poison
from cute_ep.testing.verify import POISON, poison
from tests.fake_gpu import LOCAL_CTAS, Launches
from tests.reference import oracle

ROWS, WIDTH, GROUPS = 6, 256, 3


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def offsets(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


X = bf16(ROWS, 2 * WIDTH)
ROW_OFFSETS, SCALES_OFFSETS = offsets(GROUPS + 1), offsets(GROUPS)
FP8_OUT = SwigluRows(torch.zeros(ROWS, WIDTH).to(torch.float8_e4m3fn), torch.zeros(2, ROWS))

RELU2, BIAS = Gate("relu2"), bf16(GROUPS, 2 * WIDTH)

BAD_QUANTIZE: tuple[tuple[str, Callable[[], Any]], ...] = (
    (r"fmt = 'fp7': must be one of", lambda: quantize(X, "fp7")),
    (r"fmt = 'bf16': must be one of fp8, .*, formats with scales", lambda: quantize(X, "bf16")),
    (r"x = list: must be", lambda: quantize([1.0], "nvfp4")),
    (r"x\.shape = \(512,\)", lambda: quantize(X[0], "nvfp4")),
    (r"x\.dtype = torch.float32: must be torch.bfloat16", lambda: quantize(X.float(), "nvfp4")),
    (r"x\.stride\(\) = ", lambda: quantize(X.t(), "nvfp4")),
    (r"x\.data_ptr\(\) = .*: must be a multiple of 16", lambda: quantize(bf16(33)[1:].view(1, 32), "nvfp4")),
    (
        r"x\.shape\[1\] = 24: must be a multiple of 32 in \[32, 65536\] for nvfp4",
        lambda: quantize(bf16(2, 24), "nvfp4"),
    ),
    (r"x\.shape\[1\] = 16: must be a multiple of 32 in", lambda: quantize(bf16(2, 16), "nvfp4")),
    (r"x\.shape\[1\] = 64: must be a multiple of 128 in", lambda: quantize(bf16(2, 64), "fp8")),
    (r"x\.shape = \(2, 3, 64\): .*flatten.*x\.flatten\(0, 1\)", lambda: quantize(bf16(2, 3, 64), "nvfp4")),
    (r"fmt = \['fp8'\]: must be one of", lambda: quantize(X, ["fp8"])),
    (r"^input_scale = nan: must be a number", lambda: quantize(X, "nvfp4", torch.tensor([torch.nan]))),
    (r"x\.shape\[1\] = 65568: must be a multiple of 32 in", lambda: quantize(bf16(1, 65568), "nvfp4")),
    (r"input_scale = .*mxfp8 has no global scale", lambda: quantize(X, "mxfp8", torch.ones(1))),
    (r"input_scale.*float32", lambda: quantize(X, "nvfp4", torch.ones(1).double())),
    (r"input_scale", lambda: quantize(X, "nvfp4", torch.ones(2))),
    (r"x\.device = meta: must be an NVIDIA GPU or the CPU", lambda: quantize(X.to("meta"), "nvfp4")),
)
BAD_SILU: tuple[tuple[str, tuple, dict[str, Any]], ...] = (
    (r"fmt = 'fp7': must be one of", (X,), {"fmt": "fp7"}),
    (r"fmt = 'nvfp4_row': must be one of bf16, .*, formats without row scales", (X,), {"fmt": "nvfp4_row"}),
    (r"x\.shape\[1\] = 33: must be a multiple of 16 in \[16, 131072\] for bf16, a gate and an up", (bf16(2, 33),), {}),
    (r"x\.shape\[1\] = 24: must be a multiple of 16 in", (bf16(2, 24),), {}),
    (r"x\.shape\[1\] = 128: must be a multiple of 256 in", (bf16(2, 128),), {"fmt": "fp8"}),
    (r"x\.stride\(\) = \(1, 64\): must be row-major contiguous; use x\.contiguous\(\)", (bf16(6, 64).t(),), {}),
    (r"row_offsets\.shape = \(2, 2\)", (X, offsets(4).view(2, 2)), {}),
    (r"row_offsets\.shape = \(1,\): must be \(G \+ 1,\), of at least 2", (X, offsets(1)), {}),
    (r"row_offsets = \[0, 4, 2, 6\]: must ascend", (X, torch.tensor([0, 4, 2, 6]).int()), {"fmt": "fp8"}),
    (r"row_offsets = \[1, 4, 5, 6\]: must ascend from 0", (X, torch.tensor([1, 4, 5, 6]).int()), {}),
    (r"row_offsets\[3\] = 7: must not exceed the 6 rows of x", (X, torch.tensor([0, 4, 5, 7]).int()), {}),
    (r"row_offsets\.dtype = torch.int64", (X, torch.zeros(4, dtype=torch.int64)), {}),
    (r"scale_layout = 'linear': must be None, bf16", (X,), {"scale_layout": "linear"}),
    (
        r"scale_layout = 'transposed': must be None or one of atom128x4",
        (X,),
        {"fmt": "nvfp4", "scale_layout": "transposed"},
    ),
    (
        r"scale_layout = 'atom128x4': must be None or one of transposed",
        (X,),
        {"fmt": "fp8", "scale_layout": "atom128x4"},
    ),
    (r"scales_offsets = None: must be given .*, or pass scale_layout='linear'", (X, ROW_OFFSETS), {"fmt": "nvfp4"}),
    (r"scales_offsets = tensor: must be given", (X,), {"fmt": "nvfp4", "scales_offsets": SCALES_OFFSETS}),
    (r"scales_offsets = tensor: must be given", (X, ROW_OFFSETS), {"fmt": "fp8", "scales_offsets": SCALES_OFFSETS}),
    (r"scales_offsets\.shape = \(4,\)", (X, ROW_OFFSETS), {"fmt": "nvfp4", "scales_offsets": ROW_OFFSETS}),
    (r"input_scales = tensor: must be None", (X,), {"fmt": "fp8", "input_scales": torch.ones(1)}),
    (r"input_scales\.shape = \(3,\): must be \(1,\)$", (X,), {"fmt": "nvfp4", "input_scales": torch.ones(3)}),
    (r"input_scales\.dtype", (X,), {"fmt": "nvfp4", "input_scales": torch.ones(1).half()}),
    (r"input_scales\[0\] = 0.0: must be a number", (X,), {"fmt": "nvfp4", "input_scales": torch.zeros(1)}),
    (r"gate = 'silu': must be a cute_ep\.Gate", (X,), {"gate": "silu"}),
    (r"interleaved = True: must be False, relu2 has one column", (X,), {"gate": RELU2, "interleaved": True}),
    (r"x\.shape\[1\] = 12: must be a multiple of 8 in", (bf16(2, 12),), {"gate": RELU2}),
    (r"bias = tensor: must be given with row_offsets only", (X,), {"bias": BIAS}),
    (r"bias\.shape = \(2, 512\): must be \(3, 512\)", (X, ROW_OFFSETS), {"bias": BIAS[:2]}),
    (r"bias\.dtype = torch.float32", (X, ROW_OFFSETS), {"bias": BIAS.float()}),
    (r"bias\.stride\(\)", (X, ROW_OFFSETS), {"bias": bf16(2 * WIDTH, GROUPS).t()}),
    (r"out\.shape = \(6, 128\)", (X,), {"out": bf16(ROWS, 128)}),
    (r"out = Tensor: must be a SwigluRows", (X,), {"fmt": "fp8", "out": bf16(ROWS, WIDTH)}),
    (r"out\.scales\.shape = \(2, 6\)", (X,), {"fmt": "fp8", "scale_layout": "linear", "out": FP8_OUT}),
    (r"out\.payload\.dtype", (X,), {"fmt": "fp8", "out": FP8_OUT._replace(payload=bf16(ROWS, WIDTH))}),
    (r"x\.device = meta: must be an NVIDIA GPU or the CPU", (X.to("meta"),), {}),
)


@pytest.mark.parametrize(("message", "call"), BAD_QUANTIZE, ids=[message for message, _ in BAD_QUANTIZE])
def test_quantize_refuses(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(EPInputError, match=message):
        call()


@pytest.mark.parametrize(("message", "args", "options"), BAD_SILU, ids=[message for message, *_ in BAD_SILU])
def test_fused_silu_refuses(message: str, args: tuple, options: dict[str, Any]) -> None:
    with pytest.raises(EPInputError, match=message):
        fused_silu(*args, **options)


@pytest.mark.parametrize("fmt", [name for name, record in FORMATS.items() if record.scale])
def test_quantize_launches_one_kernel_with_a_warp_per_row_or_tile(local_launches: Launches, fmt: str) -> None:
    record = FORMATS[fmt]
    scale = torch.ones(1) if record.global_scale else None
    rows = quantize(bf16(40, 1152), fmt, scale)
    assert rows.payload.nbytes == 40 * record.payload_bytes(1152)
    assert rows.scales.shape == (40, 1152 // record.block)
    assert (rows.row_scales is not None) == record.row_scale
    launch = local_launches.only()
    assert (launch.kernel, launch.variant.format) == ("quantize", fmt)
    assert launch.grid == (3 if record.row_scale else 5)  # 40 rows, or 80 tiles, of 16 warps a CTA
    assert launch.arguments["scales.data"] == rows.scales.data_ptr()
    assert launch.arguments["scales.alignment"] == 1


WITH_SCALES = [
    (name, layout) for name, record in FORMATS.items() if not record.row_scale for layout in record.scale_layouts
]


def in_torch(x: torch.Tensor, gate: Gate, interleaved: bool) -> torch.Tensor:
    if gate.kind == "relu2":
        return torch.relu(x).square()
    g, up = x.unflatten(1, (-1, 2)).unbind(2) if interleaved else x.chunk(2, dim=1)
    if gate.limit:
        g, up = g.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    if gate.kind == "gelu_tanh":
        return torch.nn.functional.gelu(g, approximate="tanh") * (up + gate.offset)
    return g * torch.sigmoid((gate.alpha or 1) * g) * (up + gate.offset)


GELU = (8 / math.pi) ** 0.5
GATES = (
    Gate(), Gate(alpha=1.702, limit=7.0, offset=1), Gate(limit=2.5), Gate(alpha=1.5), Gate("gelu_tanh"), RELU2,
)  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True], ids=["apart", "interleaved"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_fused_silu_on_the_cpu_is_what_torch_computes(gate: Gate, has_bias: bool, interleaved: bool) -> None:
    """Within the rounding to bfloat16 of what torch computes; rows behind the last group stay as they are."""
    if interleaved and gate.columns == 1:
        return
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 512, generator=generator).bfloat16()
    bias = torch.randn(3, 512, generator=generator).bfloat16() if has_bias else None
    counts = torch.tensor([13, 0, 17])
    biased = x[:30].double() if bias is None else x[:30].double() + bias.double().repeat_interleave(counts, dim=0)
    wanted = in_torch(biased, gate, interleaved)
    out = poison(bf16(40, 512 // gate.columns))
    given = torch.tensor([0, 13, 13, 30], dtype=torch.int32)
    assert fused_silu(x, given, gate=gate, bias=bias, interleaved=interleaved, out=out) is out
    torch.testing.assert_close(out[:30].double(), wanted, rtol=2**-8, atol=1e-6)
    assert (out[30:].view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_fused_silu_on_the_cpu_is_rounded_once(gate: Gate) -> None:
    """Every bfloat16 as gate beside a few up projections. Some products are so near a tie of bfloat16 that the nearest
    float32 is the tie."""
    told = 0
    for up in (1.0078125, 0.388671875, -1.0234375, 1.9921875):
        g = oracle.ALL_BF16.reshape(64, 1024)
        x = torch.cat([g, torch.full_like(g, up)][: gate.columns], dim=1)
        exact = reference.swiglu(x, gate=gate)
        want = torch.from_numpy(oracle.nearest(exact.numpy(), 8, -133))
        want = torch.where(want.abs() > torch.finfo(torch.bfloat16).max, torch.inf * want.sign(), want)
        assert torch.equal(fused_silu(x, gate=gate).double().nan_to_num(7), want.nan_to_num(7)), up
        told += int((exact.float().bfloat16().double() != want)[exact.isfinite()].sum())
    assert told or gate.columns == 1, "numbers that could tell nothing"


@pytest.mark.parametrize(
    ("g", "up", "gate", "want"),
    [
        (-0.7578125, 0.388671875, Gate(), -0.09423828125),
        (24.0, 1.0078125, Gate(), 24.125),
        (12.0, 1.0078125, Gate(alpha=1.5), 12.0625),
        (6.0, 1.0078125, Gate("gelu_tanh"), 6.03125),
    ],
    ids=str,
)
def test_products_next_to_a_tie(g: float, up: float, gate: Gate, want: float) -> None:
    """Just below it or above; the float32 is the tie, and its even neighbour lies on the other side."""
    x = torch.tensor([[g] * 8 + [up] * 8]).bfloat16()
    assert fused_silu(x, gate=gate).tolist() == [[want] * 8]


@pytest.mark.parametrize(("fmt", "layout"), WITH_SCALES)
@pytest.mark.parametrize("groups", [[0, 130, 0, 256, 3], [1], [0]], ids=str)
def test_quantised_silu_on_the_cpu_is_quantize_of_silu(fmt: str, layout: str, groups: list[int]) -> None:
    """The rows of bfloat16, quantised group by group, and their scale factors in place; nothing else is written."""
    rows, record = sum(groups), FORMATS[fmt]
    x = torch.randn(rows + 37, 512, generator=torch.Generator().manual_seed(rows)).bfloat16()
    row_offsets = torch.tensor([sum(groups[:group]) for group in range(len(groups) + 1)], dtype=torch.int32)
    blocks = [-(-count // 128) for count in groups]
    shifts = [sum(blocks[:group]) - int(row_offsets[group]) // 128 for group in range(len(groups))]
    places = {"fmt": fmt, "scale_layout": layout}
    if layout == "atom128x4":
        places["scales_offsets"] = torch.tensor(shifts, dtype=torch.int32)
    factors = [0.5 + group for group in range(len(groups))] if record.global_scale else None
    options = {"input_scales": torch.tensor(factors)} if factors else {}
    out = SwigluRows(*map(poison, fused_silu(x, row_offsets, **places)))
    assert fused_silu(x, row_offsets, out=out, **places, **options) == out
    values = fused_silu(x, row_offsets).split([*groups, 37])[:-1]
    given = [torch.tensor([factor]) for factor in factors] if factors else [None] * len(groups)
    each = [quantize(part, fmt, factor) for part, factor in zip(values, given, strict=True)]
    payload, scales = (torch.cat([one[field].view(torch.uint8) for one in each]) for field in range(2))
    assert_prefix_and_poison(out.payload.view(torch.uint8), payload, POISON, "payload")
    wanted = reference.arrange_scales(scales.view(out.scales.dtype), layout, groups)
    if layout == "transposed":
        assert_prefix_and_poison(out.scales.t().contiguous(), wanted.t().contiguous(), POISON, "scales")
    else:
        assert_prefix_and_poison(out.scales, wanted, POISON, "scales")


def test_rows_of_scales_are_padded_to_words(local_launches: Launches) -> None:
    rows = quantize(bf16(3, 32 * 5), "mxfp4")
    assert rows.scales.shape == (3, 5) and rows.scales.stride() == (8, 1)
    assert local_launches.only().arguments["scales.words"] == 2


def test_fused_silu_launches_one_kernel_with_these_arguments(local_launches: Launches) -> None:
    scales = torch.ones(GROUPS)
    out = fused_silu(
        X,
        ROW_OFFSETS,
        fmt="nvfp4",
        interleaved=True,
        scales_offsets=SCALES_OFFSETS,
        input_scales=scales,
        gate=Gate(alpha=1.5, limit=7, offset=1),
    )
    assert out.payload.shape == (ROWS, WIDTH // 2) and out.scales.shape == (3, 4, 32, 4, 4)
    launch = local_launches.only()
    assert (launch.kernel, launch.variant.format, launch.grid) == ("swiglu_interleaved", "nvfp4", 1)
    places = scale_map("atom128x4", WIDTH // 16, ROWS)
    assert launch.arguments == {
        "x": X.data_ptr(),
        "out": out.payload.data_ptr(),
        "rows": ROWS,
        "width": WIDTH,
        "scales.data": out.scales.data_ptr(),
        **{f"scales.{name}": getattr(places, name) for name in ("inner", "middle", "outer", "step", "words")},
        "scales.alignment": 128,
        "row_scales": 0,
        "global_scales": scales.data_ptr(),
        "per_group": 1,
        "row_offsets": ROW_OFFSETS.data_ptr(),
        "scales_offsets": SCALES_OFFSETS.data_ptr(),
        "groups": GROUPS,
        **real(alpha=1.5, limit=7.0, cubic=0.0, offset=1.0),
        "bias": 0,
        "columns": 2,
        "interleaved": 1,
    }


def real(**values: float) -> dict[str, int]:
    """The bits of float32 arguments."""
    return {name: struct.unpack("<I", struct.pack("<f", value))[0] for name, value in values.items()}


@pytest.mark.parametrize(
    ("gate", "options", "kernel", "wanted"),
    [
        (Gate(), {}, "swiglu", {"limit": 0.0}),
        (Gate(), {"bias": BIAS}, "gated", {"alpha": 1.0, "limit": math.inf, "cubic": 0.0, "offset": 0.0}),
        (Gate(limit=7), {}, "gated", {"alpha": 1.0, "limit": 7.0, "cubic": 0.0, "offset": 0.0}),
        (Gate(alpha=1.5, offset=1), {}, "gated", {"alpha": 1.5, "limit": math.inf, "cubic": 0.0, "offset": 1.0}),
        (Gate(limit=7, offset=1), {}, "swiglu", {"alpha": 1.0, "limit": 7.0}),
        (Gate(limit=7, offset=1), {"bias": BIAS, "interleaved": True}, "gated", {"limit": 7.0, "offset": 1.0}),
        (Gate("gelu_tanh"), {}, "gated", {"alpha": GELU, "limit": math.inf, "cubic": 0.044715 * GELU}),
        (RELU2, {"bias": BIAS}, "gated", {}),
    ],
    ids=["plain", "bias", "limit", "alpha and offset", "clamped", "clamped with bias", "gelu", "relu2"],
)
def test_a_gate_is_told_to_its_kernel_by_numbers(
    local_launches: Launches, gate: Gate, options: dict[str, Any], kernel: str, wanted: dict[str, float]
) -> None:
    fused_silu(X, ROW_OFFSETS, gate=gate, **options)
    launch = local_launches.only()
    assert launch.kernel == kernel and real(**wanted).items() <= launch.arguments.items()
    assert launch.arguments["bias"] == (BIAS.data_ptr() if "bias" in options else 0)
    assert launch.arguments["columns"] == gate.columns
    assert launch.arguments["interleaved"] == ("interleaved" in options)


def test_fused_silu_writes_and_returns_the_output_that_it_is_given(local_launches: Launches) -> None:
    values = bf16(ROWS, WIDTH)
    assert fused_silu(X, out=values) is values
    assert fused_silu(X, fmt="fp8", out=FP8_OUT) == FP8_OUT
    assert local_launches.values("out") == [values.data_ptr(), FP8_OUT.payload.data_ptr()]


def test_a_grid_that_encodes_is_resident_together_and_one_that_does_not_has_a_warp_per_row(
    local_launches: Launches,
) -> None:
    fused_silu(bf16(10000, 64), fmt="nvfp4")
    assert local_launches.last().grid == LOCAL_CTAS
    fused_silu(bf16(10000, 64))
    assert local_launches.last().grid == 10000 // 16


def test_without_rows_nothing_is_launched(local_launches: Launches) -> None:
    assert fused_silu(bf16(0, 64)).shape == (0, 32)
    assert quantize(bf16(0, 64), "nvfp4").scales.shape == (0, 4)
    assert local_launches.kernels == []


@pytest.mark.parametrize("name", ["source", "destination"])
def test_copy_bytes_is_between_gpus(name: str) -> None:
    tensors = {"source": SimpleNamespace(device=torch.device("cuda:0")), "destination": bf16(8), name: bf16(8)}
    with pytest.raises(EPInputError, match=rf"{name}\.device = cpu: must be an NVIDIA GPU"):
        copy_bytes(**tensors)


def test_a_launch_gives_every_parameter_of_its_kernel(local_launches: Launches) -> None:
    quantize(X, "nvfp4_row")
    fused_silu(X, fmt="mxfp8")
    fused_silu(X)
    fused_silu(X, gate=RELU2)
    for launch in local_launches:
        assert set(launch.arguments) == launch.parameters, launch.kernel
