"""SwiGLU as the suite measures it: ragged groups, bytes, and the compiled function that it is compared with."""

from __future__ import annotations

from itertools import pairwise

import torch

from cute_ep.runtime.local_ops import fused_silu
from perf import compiled
from perf.swiglu import GROUPS, group_options, ragged_offsets, silu_bytes


def test_ragged_groups_are_what_dispatch_gives() -> None:
    """Offsets and first scale blocks of 64 experts as the reference computes them, some groups empty."""
    for rows in (64, 1024):
        offsets = ragged_offsets(rows)
        assert len(offsets) == GROUPS + 1 and offsets[0] == 0 and offsets[-1] == rows and offsets == sorted(offsets)
        assert offsets == ragged_offsets(rows) and len(set(offsets)) > 20
        for fmt in ("bf16", "fp8", "mxfp8", "nvfp4"):
            options = group_options(fmt, rows, "cpu")
            x = torch.randn(rows, 512).bfloat16()
            found = fused_silu(x, fmt=fmt, **options)
            assert ("scales_offsets" in options) == (fmt in ("mxfp8", "nvfp4"))
            if fmt == "bf16":
                assert torch.equal(found, fused_silu(x))
            else:
                assert torch.equal(found.payload.view(torch.uint8), fused_silu(x, fmt=fmt).payload.view(torch.uint8))
    starts = [
        first // 128 + offset
        for first, offset in zip(ragged_offsets(1024), options["scales_offsets"].tolist(), strict=False)
    ]
    sizes = [-(-(end - first) // 128) for first, end in pairwise(ragged_offsets(1024))]
    assert starts == [sum(sizes[:group]) for group in range(GROUPS)]


def test_bytes_of_swiglu_by_hand() -> None:
    assert silu_bytes("bf16", 10, 2048) == 10 * 3 * 4096
    assert silu_bytes("nvfp4", 10, 2048) == 10 * (2 * 4096 + 1024 + 128)


def test_the_compiled_function_quantises_as_nvfp4_does() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    codes, scales = compiled.quantise(values.repeat(128, 4).bfloat16())
    assert codes.shape == (128, 32) and scales.shape == (1, 1, 32, 4, 4)
    assert codes[5, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]
    assert (scales.view(torch.uint8) == 0x38).all()  # 1.0 in e4m3
    x = torch.randn(4, 64).bfloat16()
    pairs = torch.stack(x.chunk(2, dim=1), dim=2).flatten(1)
    assert torch.equal(compiled.swiglu(x, False), compiled.swiglu(pairs, True))
