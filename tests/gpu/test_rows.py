"""Gates on the GPU: bfloat16 within its error bound, and every quantised form equal to `quantize` of those rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.api.gates import SWIGLU, Gate
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import ATOM, TRANSPOSED
from cute_ep.runtime.local_ops import SwigluRows, fused_silu
from cute_ep.testing.compare import assert_bits, assert_prefix_and_poison

from .conftest import LIBRARY
from .test_formats import every_bf16

POISON = 0xA5
FUSED = [name for name, fmt in FORMATS.items() if not fmt.row_scale]
WITH_SCALES = [(name, layout) for name in FUSED for layout in FORMATS[name].scale_layouts]
GATES = (
    SWIGLU,
    Gate(alpha=1.702, limit=7.0, offset=1),
    Gate(alpha=0.5, limit=1e30, offset=1),
    Gate(limit=7.0),
    Gate(alpha=1.702),
    Gate(offset=1),
    Gate("gelu_tanh"),
    Gate("gelu_tanh", limit=7.0, offset=1),
    Gate("relu2"),
)
EACH_KERNEL = (SWIGLU, Gate(alpha=1.702, limit=7.0, offset=1), Gate(limit=7.0), Gate("gelu_tanh"), Gate("relu2"))
COUNTS = (
    [0],
    [1],
    [127],
    [128],
    [129],
    [0, 1, 127, 128, 129, 0, 5],
    [300, 0, 0, 700],
    [index % 7 for index in range(333)],
)
UPS = (0.0, 1.0, -0.3710937, 448.0, 2.0**-126, 2.0**100, float("inf"), float("nan"))


def swiglu(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor | SwigluRows:
    return fused_silu(x, *args, library=str(LIBRARY), **options)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """[gate | up] columns as gate 0, up 0, gate 1, up 1, ..."""
    return torch.stack(x.chunk(2, dim=1), dim=2).flatten(1).contiguous()


def sources(rows: int, width: int, seed: int, gate: Gate = SWIGLU) -> torch.Tensor:
    """[rows, gate.columns * width] of many magnitudes, with some NaNs and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, gate.columns * width, generator=generator)
    x *= 2.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)
    for value in (float("nan"), float("inf"), -float("inf"), 3e38):
        x[torch.rand(x.shape, generator=generator) < 1e-4] = value
    return x.bfloat16().cuda()


def width_of(fmt: str, wanted: int) -> int:
    """The width next to `wanted` that the format can hold in whole 16-byte vectors."""
    step = FORMATS[fmt].multiple
    return -(-wanted // step) * step


def poisoned(out: torch.Tensor | SwigluRows) -> torch.Tensor | SwigluRows:
    for tensor in out if isinstance(out, tuple) else (out,):
        tensor.view(torch.uint8).fill_(POISON)
    return out


def offsets_of(counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_offsets, scales_offsets) as dispatch gives them for groups of these sizes."""
    rows = [0, *accumulate(counts)]
    blocks = [0, *accumulate(-(-count // 128) for count in counts)]
    shifts = [block - row // 128 for block, row in zip(blocks, rows, strict=True)][:-1]
    return tuple(torch.tensor(values, dtype=torch.int32, device="cuda") for values in (rows, shifts))


def quantized(values: torch.Tensor, fmt: str, counts: Sequence[int], scales: Sequence[float]) -> list[torch.Tensor]:
    """[payload, scales] of bfloat16 rows, row-major, each group with a global scale of its own."""
    starts = [0, *accumulate(counts)]
    parts = [
        reference.quantize(values[start : start + count], fmt, scale)[:2]
        for start, count, scale in zip(starts, counts, scales, strict=False)
        if count
    ] or [reference.quantize(values[:0], fmt)[:2]]
    return [torch.cat([part.view(torch.uint8) for part in field]) for field in zip(*parts, strict=True)]


def check(out: SwigluRows, values: torch.Tensor, fmt: str, layout: str, counts: Sequence[int], scales=None) -> None:
    """Payload and scales are those of `values`, padding is zero, and all else still is poison."""
    payload, factors = quantized(values, fmt, counts, scales or [1.0] * len(counts))
    assert_prefix_and_poison(out.payload.view(torch.uint8), payload, POISON, "payload")
    arranged = reference.arrange_scales(factors.view(out.scales.dtype), layout, counts)
    is_a, should_be = out.scales, arranged
    if layout == TRANSPOSED:
        is_a, should_be = (one.t().clone(memory_format=torch.contiguous_format) for one in (is_a, should_be))
    assert_prefix_and_poison(is_a, should_be, POISON, "scales")


def layouts_of(gate: Gate) -> tuple[bool, ...]:
    """Values of `interleaved` that a gate has."""
    return (False, True) if gate.columns == 2 else (False,)


@pytest.mark.parametrize("gate", GATES, ids=str)
class TestActivation:
    def test_every_gate_with_every_kind_of_up(self, gate: Gate) -> None:
        every = every_bf16().view(-1, 2048)
        if gate.columns == 1:
            self._check(every.cuda(), gate)
            return
        for value in UPS:
            self._check(torch.cat([every, torch.full_like(every, value)], dim=1).cuda(), gate)

    def test_every_up(self, gate: Gate) -> None:
        up = every_bf16().view(-1, 2048)
        for value in (-80.0, -1.0, 0.5, 20.0)[: 4 * (gate.columns - 1)]:
            self._check(torch.cat([torch.full_like(up, value), up], dim=1).cuda(), gate)

    def test_many_sizes(self, gate: Gate) -> None:
        for rows, width in ((1, 8), (3, 88), (17, 1032), (1000, 2880), (129, 7168), (12345, 1536)):
            self._check(sources(rows, width, rows, gate), gate)

    @pytest.mark.parametrize("counts", COUNTS, ids=str)
    def test_biases(self, gate: Gate, counts: list[int]) -> None:
        """Of each group its own, for widths that end within a tile."""
        for width in (8, 1032, 2880):
            rows = sum(counts)
            x, row_offsets = sources(rows + 3, width, rows, gate), offsets_of(counts)[0]
            bias = sources(len(counts), width, 77, gate)
            each = bias.repeat_interleave(torch.tensor(counts, device="cuda"), dim=0)
            self._check(x, gate, row_offsets, bias, each)

    def _check(
        self,
        x: torch.Tensor,
        gate: Gate,
        row_offsets: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        each: torch.Tensor | None = None,
    ) -> None:
        """`each`: the bias of each valid row."""
        valid = x if each is None else x[: len(each)]
        value, bound = (f(valid, gate=gate, bias=each) for f in (reference.swiglu, reference.swiglu_bound))
        if gate.columns == 1:  # exact
            value, bound = reference.round_to(value.float(), torch.bfloat16).double(), torch.zeros_like(bound)
        for interleaved in layouts_of(gate):
            source, added = (interleave(one) if interleaved and one is not None else one for one in (x, bias))
            out = swiglu(source, row_offsets, gate=gate, bias=added, interleaved=interleaved)[: len(valid)]
            good = reference.within(out, value, bound)
            if not good.all():
                row, column = (~good).nonzero()[0].tolist()
                numbers = [valid[row, place].item() for place in range(column, valid.shape[1], out.shape[1])]
                got, wanted = out[row, column].item(), value[row, column].item()
                raise AssertionError(f"{numbers} at {row}, {column}, interleaved {interleaved}: {got}, not {wanted}")


@pytest.mark.parametrize("fmt", FUSED)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_gate_in_every_format(fmt: str, gate: Gate, has_bias: bool) -> None:
    """The bytes of `quantize` of its bfloat16 rows, interleaved too; a group without rows has a bias."""
    counts = [300, 0, 1, 699]
    width = width_of(fmt, 1500)
    x = sources(1000, width, 3, gate)
    bias = sources(4, width, 4, gate) if has_bias else None
    (row_offsets, shifts), layout = offsets_of(counts), FORMATS[fmt].scale_layout(None)
    values = swiglu(x, row_offsets, gate=gate, bias=bias)
    for interleaved in layouts_of(gate):
        source, added = (interleave(one) if interleaved and one is not None else one for one in (x, bias))
        options = {"fmt": fmt, "gate": gate, "bias": added, "interleaved": interleaved}
        options["scales_offsets"] = shifts if layout == ATOM else None
        out = poisoned(swiglu(source, row_offsets, **options))
        swiglu(source, row_offsets, out=out, **options)
        if layout is None:
            assert_bits(out, values, f"interleaved {interleaved}")
        else:
            check(out, values, fmt, layout, counts)


@pytest.mark.parametrize(("fmt", "layout"), WITH_SCALES)
class TestQuantised:
    @pytest.mark.parametrize("wanted", [32, 1056, 2048, 2880, 7168])
    def test_groups(self, fmt: str, layout: str, wanted: int) -> None:
        width = width_of(fmt, wanted)
        for turn, counts in enumerate(COUNTS):
            rows = sum(counts)
            gate = EACH_KERNEL[turn % len(EACH_KERNEL)]
            x = sources(rows + 37, width, turn, gate)  # 37 rows that no group has
            bias = sources(len(counts), width, 77, gate) if turn % 2 else None
            row_offsets, shifts = offsets_of(counts)
            places = {"scale_layout": layout, "scales_offsets": shifts if layout == ATOM else None}
            values = swiglu(x, row_offsets, gate=gate, bias=bias)
            for interleaved in layouts_of(gate):
                source, added = (interleave(one) if interleaved and one is not None else one for one in (x, bias))
                options = {"fmt": fmt, "gate": gate, "bias": added, "interleaved": interleaved, **places}
                out = poisoned(swiglu(source, row_offsets, **options))
                returned = swiglu(source, row_offsets, out=out, **options)
                assert [tensor.data_ptr() for tensor in returned] == [tensor.data_ptr() for tensor in out]
                check(out, values, fmt, layout, counts)

    def test_without_groups(self, fmt: str, layout: str) -> None:
        width = width_of(fmt, 2048)
        for rows in (0, 1, 127, 128, 129, 1000):
            x = sources(rows, width, rows)
            out = poisoned(swiglu(x, fmt=fmt, scale_layout=layout))
            swiglu(x, fmt=fmt, scale_layout=layout, out=out)
            check(out, swiglu(x), fmt, layout, [rows])

    def test_group_scales(self, fmt: str, layout: str) -> None:
        x = sources(1000, width_of(fmt, 1536), 5)
        if not FORMATS[fmt].global_scale:
            with pytest.raises(EPInputError, match="input_scales"):
                swiglu(x, fmt=fmt, input_scales=torch.ones(1, device="cuda"))
            return
        for counts, count in product(([1000], [0, 300, 1, 0, 690], [3] * 300), (1, None)):
            row_offsets, shifts = offsets_of(counts)
            scales = [0.5 + index % 5 for index in range(len(counts))]
            scales = [scales[0]] * len(counts) if count == 1 else scales
            places = {"scale_layout": layout, "scales_offsets": shifts if layout == ATOM else None}
            given = torch.tensor(scales[:count], device="cuda")
            out = poisoned(swiglu(x, row_offsets, fmt=fmt, **places))
            swiglu(x, row_offsets, fmt=fmt, input_scales=given, out=out, **places)
            check(out, swiglu(x, row_offsets), fmt, layout, counts, scales)

    def test_nothing_is_written_outside_the_buffers(self, fmt: str, layout: str) -> None:
        """Offsets that lead beyond the capacity: its rows are converted, and the memory behind them is untouched."""
        x = sources(100, width_of(fmt, 2048), 9)
        row_offsets, shifts = offsets_of([64, 500])
        places = {"scale_layout": layout, "scales_offsets": shifts if layout == ATOM else None}
        like = swiglu(x, row_offsets, fmt=fmt, **places)
        memory = [torch.full((2 * tensor.nbytes,), POISON, dtype=torch.uint8, device="cuda") for tensor in like]
        out = SwigluRows(
            *(
                part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for part, tensor in zip(memory, like, strict=True)
            )
        )
        swiglu(x, row_offsets, fmt=fmt, out=out, **places)
        check(out, swiglu(x), fmt, layout, [64, 36])
        assert all(bool((part[part.numel() // 2 :] == POISON).all()) for part in memory)


def test_bf16_writes_only_valid_rows() -> None:
    x = sources(1000, 1536, 3)
    for rows in (0, 1, 129, 999, 1000):
        out = poisoned(torch.empty(1000, 1536, dtype=torch.bfloat16, device="cuda"))
        row_offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device="cuda")
        assert swiglu(x, row_offsets, out=out) is out
        assert_prefix_and_poison(out, swiglu(x)[:rows], POISON, f"{rows} rows")


def test_replayed_in_a_cuda_graph() -> None:
    """New sources and new offsets in the same memory: the grid does not depend on the number of rows."""
    x, (row_offsets, shifts) = sources(600, 2048, 1), offsets_of([100, 200, 300])
    options = {"fmt": "nvfp4", "scales_offsets": shifts}
    out = swiglu(x, row_offsets, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swiglu(x, row_offsets, out=out, **options)
    for counts in ([0, 0, 0], [1, 0, 500], [100, 200, 300]):
        x.copy_(sources(600, 2048, sum(counts)))
        for old, new in zip((row_offsets, shifts), offsets_of(counts), strict=True):
            old.copy_(new)
        poisoned(out)
        graph.replay()
        check(out, swiglu(x), "nvfp4", ATOM, counts)
