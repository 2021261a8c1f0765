"""`fused_silu` on one GPU: time, bytes, and the share of the copy ceiling that it reaches.

A graph goes through several inputs and outputs, together larger than the L2 cache, wherever they can be. Rows are one
group, or the ragged ones of GROUPS experts with `row_offsets`, and where the format has them `scales_offsets`, zeros in
the scale rows that pad a group, and an input scale for each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import torch

from cute_ep.bench.timing import Runner, summary
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import ATOM, ATOM_ROWS
from cute_ep.runtime.local_ops import fused_silu

ROWS = (64, 1024, 65536)
WIDTHS = (2048, 7168)
"""D: columns of gate, and of up."""
QUICK_ROWS, QUICK_WIDTHS, QUICK_FORMATS = (1024, 65536), (2048,), ("bf16", "fp8", "nvfp4")
SAMPLES = 50
MAX_SETS = 8
GROUPS = 64
"""Experts of a rank: the main shape's on 4 ranks."""
L2_TIMES = 3
"""Inputs of a graph are this many times the L2 cache, if MAX_SETS of them are."""


def silu_bytes(fmt: str, rows: int, width: int) -> int:
    """Bytes that are read and written: bfloat16 gate and up, payload and scale factors."""
    record = FORMATS[fmt]
    return rows * (4 * width + record.payload_bytes(width) + record.scale_bytes(width))


def ragged_offsets(rows: int, groups: int = GROUPS) -> list[int]:
    """`groups` + 1 ascending offsets that cut `rows` rows into groups of unlike sizes, the same ones each time; with
    few rows some are empty."""
    cuts = torch.randint(rows + 1, (groups - 1,), generator=torch.Generator().manual_seed(groups)).tolist()
    return [0, *sorted(cuts), rows]


def group_options(fmt: str, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Arguments of `fused_silu` for the groups of `ragged_offsets`."""
    record, offsets = FORMATS[fmt], ragged_offsets(rows)
    options = {"row_offsets": torch.tensor(offsets, dtype=torch.int32, device=device)}
    if record.scale and record.scale_layout(None) == ATOM:
        atoms, found = 0, []
        for first, end in pairwise(offsets):
            found.append(atoms - first // ATOM_ROWS)
            atoms += -(-(end - first) // ATOM_ROWS)
        options["scales_offsets"] = torch.tensor(found, dtype=torch.int32, device=device)
    if record.global_scale:
        options["input_scales"] = torch.ones(len(offsets) - 1, device=device)
    return options


def make_inputs(rows: int, width: int, device: str) -> list[torch.Tensor]:
    """Gates and ups [rows, 2 * width] to rotate through."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MAX_SETS, max(2, math.ceil(L2_TIMES * cache / (4 * rows * width))))
    return [torch.randn(rows, 2 * width, dtype=torch.bfloat16, device=device) for _ in range(count)]


def time_calls(runner: Runner, inputs: Sequence[torch.Tensor], call: Callable[[int], object]) -> dict[str, float]:
    """`summary` of `call(index)`, index into the inputs, in graphs of one round for each input."""
    for index in range(len(inputs)):
        runner.on_all(lambda lane, index=index: call(index))
    return summary(runner.time_graphs(SAMPLES, lambda lane, index: call(index), len(inputs)))


def point(
    fmt: str, interleaved: bool, rows: int, width: int, times: dict[str, float], memory: float, groups: int = 1
) -> dict:
    """One result; `memory` is the copy ceiling in bytes per second."""
    moved = silu_bytes(fmt, rows, width)
    about = {"format": fmt, "interleaved": interleaved, "rows": rows, "width": width, "groups": groups}
    return about | times | {"bytes": moved, "share": moved / (1e-6 * times["p50_us"] * memory)}


def measure_swiglu(
    device: str, memory: float, library: str | None, quick: bool, say: Callable[[str], None]
) -> list[dict]:
    """Every format, row count and width, plain and interleaved, one group and GROUPS.

    Args:
        device: a GPU.
        memory: copy ceiling of the same run in bytes per second, read plus written.
        library: folder of compiled kernels to look in first.
        quick: fewer of each.
        say: is told what has been measured.
    """
    formats = QUICK_FORMATS if quick else tuple(name for name, fmt in FORMATS.items() if not fmt.row_scale)
    results = []
    with Runner([torch.cuda.Stream(device)]) as runner:
        for rows in QUICK_ROWS if quick else ROWS:
            for width in QUICK_WIDTHS if quick else WIDTHS:
                inputs = make_inputs(rows, width, device)
                for fmt, interleaved, groups in product(formats, (False, True), (1, GROUPS)):
                    options = {"fmt": fmt, "interleaved": interleaved, "library": library}
                    if groups > 1:
                        options |= group_options(fmt, rows, device)
                    outs = [fused_silu(x, **options) for x in inputs]

                    def call(index: int, options=options, outs=outs, inputs=inputs) -> None:
                        fused_silu(inputs[index], out=outs[index], **options)

                    times = time_calls(runner, inputs, call)
                    results.append(point(fmt, interleaved, rows, width, times, memory, groups))
                    del outs, call
                say(f"swiglu, {rows} rows of {width}")
    return results
