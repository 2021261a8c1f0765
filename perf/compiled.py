"""The maths of `fused_silu` through torch.compile, in a process of its own: it needs Triton and a C compiler, and the
first run compiles for a minute.

python -m perf.compiled --memory BYTES_PER_SECOND --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch

from cute_ep.bench.timing import Runner
from perf.swiglu import WIDTHS, make_inputs, point, time_calls

ROWS = (65536,)
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the magnitudes of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def swiglu(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """silu(gate) * up, rounded to bfloat16."""
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()


def quantise(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows like NVFP4: two e2m1 in a byte, an e4m3 scale for 16, scales in the 128x4 layout. Ties round away from 0."""
    rows, width = y.shape
    blocks = y.float().view(rows, width // 16, 16)
    scales = (blocks.abs().amax(dim=2) / 6).to(torch.float8_e4m3fn)
    factor = scales.float()
    scaled = blocks * torch.where(factor > 0, 1 / factor, 0.0)[:, :, None]
    code = (scaled < 0).to(torch.uint8) * 8
    for threshold in THRESHOLDS:
        code = code + (scaled.abs() >= threshold).to(torch.uint8)
    pairs = code.view(rows, width // 2, 2)
    atoms = scales.view(rows // 128, 4, 32, width // 64, 4).permute(0, 3, 2, 1, 4)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4, atoms.contiguous()


FUNCTIONS: dict[str, Callable[[torch.Tensor, bool], object]] = {
    "bf16": swiglu,
    "nvfp4": lambda x, interleaved: quantise(swiglu(x, interleaved)),
}


def time_compiled(
    runner: Runner, function: Callable[[torch.Tensor, bool], object], inputs: Sequence[torch.Tensor], interleaved: bool
) -> dict[str, float]:
    """`summary` of a function compiled for these inputs; it is compiled and its kernels loaded before any gate."""
    torch.compiler.reset()
    compiled = torch.compile(function, dynamic=False)
    compiled(inputs[0], interleaved)
    return time_calls(runner, inputs, lambda index: compiled(inputs[index], interleaved))


def main() -> None:
    """Write the results as a list of JSON objects."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--memory", type=float, required=True, help="copy ceiling in bytes per second")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    results, failures = [], []
    with Runner([torch.cuda.Stream(args.device)]) as runner:
        for rows in ROWS:
            for width in WIDTHS:
                inputs = make_inputs(rows, width, args.device)
                for fmt, interleaved in product(FUNCTIONS, (False, True)):
                    try:
                        times = time_compiled(runner, FUNCTIONS[fmt], inputs, interleaved)
                    except Exception as error:  # a function that cannot be compiled costs the others nothing
                        traceback.print_exc()
                        failures.append(
                            f"{fmt} of {width}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
                        )
                        continue
                    results.append(point(fmt, interleaved, rows, width, times, args.memory))
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
                del inputs
    if failures:
        sys.exit(failures[0])


if __name__ == "__main__":
    main()
