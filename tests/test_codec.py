"""The integer e2m1 conversion that Hopper kernels inline, run on the CPU against two independent oracles.

`e2m1_code` is the same source that the kernels compile; here the DSL compiles it for the host, which makes all 2**32
float32 patterns affordable. A NaN must give 0x7, as the hardware instruction does; ml_dtypes has no rule for NaN.
"""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.compare import assert_bits

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Uint8, cute
from cutlass.cute.runtime import from_dlpack

from cute_ep.kernels.codec.e2m1 import e2m1_code, pack_e2m1

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_CODE = 0x7
INFINITY_BITS = 0x7F800000
BATCH = 1 << 22


@cute.jit
def _encode(gBits: cute.Tensor, gCode: cute.Tensor):
    for index in range(cute.size(gBits)):
        gCode[index] = e2m1_code(gBits[index].bitcast(Float32)).to(Uint8)


@cute.jit
def _pack(gX: cute.Tensor, gPacked: cute.Tensor):
    rY = cute.make_rmem_tensor(8, Float32)
    for word in range(cute.size(gPacked)):
        for element in cutlass.range_constexpr(8):
            rY[element] = gX[8 * word + element]
        gPacked[word] = pack_e2m1(rY, False)


def integer_codes(bits: torch.Tensor) -> torch.Tensor:
    """`e2m1_code` of float32 bit patterns (int32), as uint8."""
    codes = torch.empty(bits.shape, dtype=torch.uint8)
    _encode(from_dlpack(bits), from_dlpack(codes))
    return codes


def check(bits: torch.Tensor) -> None:
    """Compare with the reference everywhere and with ml_dtypes where it has a rule."""
    codes = integer_codes(bits)
    values = bits.view(torch.float32)
    assert_bits(codes, reference.encode_e2m1(values), "e2m1 against the reference")
    number = ~values.isnan()
    with np.errstate(invalid="ignore"):
        other = torch.from_numpy(values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    assert_bits(codes[number], other[number], "e2m1 against ml_dtypes")
    assert bool((codes[~number] == NAN_CODE).all())


def test_every_bfloat16() -> None:
    check((torch.arange(1 << 16, dtype=torch.int64) << 16).to(torch.int32))


def test_around_every_rounding_boundary() -> None:
    """All midpoints and values, both signs, and the two float32 on either side of each."""
    centre = torch.tensor(MIDPOINTS + VALUES + (float("inf"), 2.0**-126, 2.0**-149)).view(torch.int32)
    steps = torch.arange(-2, 3, dtype=torch.int32)
    positive = (centre[:, None] + steps[None, :]).flatten()
    positive = positive[positive >= 0]
    check(torch.cat([positive, positive | torch.tensor(-(1 << 31), dtype=torch.int32)]))


def test_random_patterns() -> None:
    generator = torch.Generator().manual_seed(20)
    check(torch.randint(-(1 << 31), 1 << 31, (1_000_000,), generator=generator).to(torch.int32))


@pytest.mark.slow
def test_spread_over_all_patterns() -> None:
    """Every 1021st pattern (a prime: all low bits occur) against both oracles."""
    patterns = torch.arange(0, 1 << 32, 1021, dtype=torch.int64)
    for batch in patterns.split(1 << 20):
        check(batch.to(torch.int32))


@pytest.mark.slow
def test_every_float32() -> None:
    """All 2**32 patterns against the step function between the midpoints, its ends placed by exact arithmetic."""
    starts = [0]
    for code, midpoint in enumerate(MIDPOINTS, start=1):
        bits = int(np.float32(midpoint).view(np.uint32))
        starts.append(bits + (code % 2))  # a tie goes to the even code: up to an even code, down from an odd one
    starts.append(1 << 31)
    bits = torch.arange(BATCH, dtype=torch.int32)
    codes, expected = torch.empty(2, BATCH, dtype=torch.uint8)
    encode = cute.compile(_encode, from_dlpack(bits), from_dlpack(codes))
    for first in range(0, 1 << 32, BATCH):
        magnitude = first & 0x7FFFFFFF
        for code, (low, high) in enumerate(pairwise(starts)):
            expected[max(low - magnitude, 0) : max(high - magnitude, 0)] = code
        if first >> 31:
            expected |= 8
            expected[max(INFINITY_BITS + 1 - magnitude, 0) :] = NAN_CODE
        encode(from_dlpack(bits), from_dlpack(codes))
        assert torch.equal(codes, expected), f"patterns from {first:#x}"
        bits += BATCH  # wraps to the negative patterns half-way


def test_pack_puts_element_0_in_the_lowest_nibble() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(512, 8, generator=generator) * 3
    values[0] = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values[1] = -values[0]
    packed = torch.zeros(512, dtype=torch.int32)
    _pack(from_dlpack(values.flatten()), from_dlpack(packed))
    codes = reference.encode_e2m1(values)
    assert_bits(packed.view(torch.uint8).reshape(512, 4), codes[:, 0::2] | (codes[:, 1::2] << 4), "packed")
    assert packed[:2].tolist() == [0x76543210, 0xFEDCBA98 - (1 << 32)]
