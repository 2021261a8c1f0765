"""Cases of the tests of Modular MAX's `ep_comm` that no other file has."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.gates import Gate
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.formats import E2M1, FORMATS
from cute_ep.layouts.maps.scales import LINEAR
from cute_ep.runtime.local_ops import fused_silu
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs

from .conftest import LIBRARY, connected

CLAMPED = Gate(alpha=1.702, limit=7.0, offset=1)


def test_unweighted_rows_of_a_large_model(devices: list[str]) -> None:
    """128 tokens of 7168 elements, top-8, returned as they are."""
    cfg = EPConfig(7168, 32 * len(devices), 8, 128, len(devices), "bf16", 20)
    with connected(cfg, devices) as communicators:
        for seed, split in enumerate((False, True)):
            inputs = make_inputs(cfg, [128] * len(devices), "uniform", seed)
            check_round(communicators, inputs, RoundOptions(split, ("unweighted",), seed=seed))


def activations(rows: int, width: int) -> torch.Tensor:
    """[rows, 2 * width] in [-12, 12], and one gate far below."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.rand(rows, 2 * width, generator=generator).mul_(24).sub_(12)
    x[rows // 2, 3] = -3e38
    return x.bfloat16()


def check_swiglu(fmt: str, counts: list[int], device: str) -> None:
    """Bytes are those of quantised bfloat16 rows; 4-bit elements are at most 1.10 of their scale off."""
    x = activations(sum(counts), 512).to(device)
    ends = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    options = {"gate": CLAMPED, "library": str(LIBRARY) if device != "cpu" else None}
    plain = fused_silu(x, ends, **options)
    exact = reference.swiglu(x, gate=CLAMPED)
    assert reference.within(plain, exact, reference.swiglu_bound(x, gate=CLAMPED)).all()
    got = fused_silu(x, ends, fmt=fmt, scale_layout=LINEAR, **options)
    want = reference.quantize(plain, fmt)
    columns = want.scales.shape[1]
    assert_bits(got.payload, want.payload, "payload")
    assert_bits(got.scales[:, :columns].contiguous(), want.scales, "scales")
    record = FORMATS[fmt]
    if record.element is E2M1:
        ones = torch.full_like(want.payload, 0x22)  # the code of 1.0, twice
        size = reference.dequantize(QuantizedRows(ones, want.scales), fmt)
        off = (reference.dequantize(QuantizedRows(got.payload, want.scales), fmt) - exact).abs()
        assert (off <= 1.10 * size).all()


@pytest.mark.parametrize("counts", [[1], [1, 2, 0, 4], [3, 33, 0, 17, 64], [128, 33, 96]], ids=str)
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"])
def test_clamped_swiglu_of_ragged_groups(fmt: str, counts: list[int]) -> None:
    check_swiglu(fmt, counts, "cuda")
