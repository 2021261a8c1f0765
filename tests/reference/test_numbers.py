"""Conversions to and from e2m1, e4m3, e8m0 and the output types: every code, every bfloat16, every tie."""

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.testing.compare import assert_bits

from . import oracle
from .oracle import ALL_BF16, neighbours


@pytest.mark.parametrize("code_count, decode, dtype", [
    (16, reference.decode_e2m1, ml_dtypes.float4_e2m1fn),
    (256, reference.decode_e4m3, ml_dtypes.float8_e4m3fn),
    (256, reference.decode_e8m0, ml_dtypes.float8_e8m0fnu),
])  # fmt: skip
def test_every_code_is_decoded_as_ml_dtypes_does(code_count, decode, dtype):
    codes = np.arange(code_count, dtype=np.uint8)
    want = torch.from_numpy(codes.view(dtype).astype(np.float32))
    got = decode(torch.from_numpy(codes))
    assert torch.equal(got.isnan(), want.isnan())
    assert_bits(got.nan_to_num(), want.nan_to_num(), "decoded")


def test_e2m1_of_every_bf16_and_every_tie():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1, 1.5, 2, 3, 4, 6, 7, 0, 2.0**-149, 2.0**-126])
    noise = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).numpy() * 3
    values = np.concatenate([ALL_BF16.float().numpy(), neighbours(ties), neighbours(-ties), noise]).astype(np.float32)
    assert_bits(reference.encode_e2m1(torch.from_numpy(values)), torch.from_numpy(oracle.e2m1(values)), "e2m1")


@pytest.mark.parametrize("value, code", [
    (0.0, 0), (-0.0, 8), (-1e-30, 8), (0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6),
    (5.0, 6), (5.0001, 7), (-5.0, 14), (torch.inf, 7), (-torch.inf, 15), (torch.nan, 7), (-torch.nan, 7),
])  # fmt: skip
def test_e2m1_of_a_few_numbers_by_hand(value, code):
    assert reference.encode_e2m1(torch.tensor([value])).item() == code


def test_e4m3_of_every_bf16_and_every_tie():
    grid = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (grid[1:] + grid[:-1]) / 2
    edges = np.array([448, 464, 480, 2.0**-9, 2.0**-10, 2.0**-6, 2.0**-149, np.finfo(np.float32).max], np.float32)
    noise = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)).numpy() ** 8 * 500
    values = np.concatenate([neighbours(ties), neighbours(grid), neighbours(edges), noise]).astype(np.float32)
    values = np.concatenate([ALL_BF16.float().numpy(), values, -values]).astype(np.float32)
    assert np.isinf(values).any() and np.isnan(values).any() and np.signbit(values[values == 0]).any()
    assert_bits(reference.encode_e4m3(torch.from_numpy(values)), torch.from_numpy(oracle.e4m3(values)), "e4m3")


@pytest.mark.parametrize("value, code", [
    (0.0, 0), (-0.0, 0x80), (2.0**-10, 0), (-(2.0**-10), 0x80), (2.0**-9, 1), (1.5 * 2.0**-9, 2), (2.0**-6, 8),
    (1.0, 0x38), (1.0625, 0x38), (1.1875, 0x3A), (-1.1875, 0xBA), (448.0, 0x7E), (464.0, 0x7E), (1e9, 0x7E),
    (torch.inf, 0x7E), (-torch.inf, 0xFE), (torch.nan, 0x7F), (-torch.nan, 0x7F),
])  # fmt: skip
def test_e4m3_of_a_few_numbers_by_hand(value, code):
    assert reference.encode_e4m3(torch.tensor([value])).item() == code


def test_e8m0_of_every_bf16_and_around_every_power():
    powers = neighbours(oracle.POWERS)
    values = np.concatenate([ALL_BF16[:0x7F81].float().numpy(), powers, powers * 1.5, [2.0**-149, 1.5 * 2.0**127]])
    values = values[values >= 0].astype(np.float32)
    assert np.isinf(values).any() and (values == 0).any()
    assert_bits(reference.encode_e8m0(torch.from_numpy(values)), torch.from_numpy(oracle.e8m0(values)), "e8m0")


@pytest.mark.parametrize("value, code", [
    (0.0, 0), (2.0**-149, 0), (2.0**-127, 0), (2.0**-127 * (1 + 2.0**-20), 1), (2.0**-126, 1), (1.0, 127),
    (1.0 + 2.0**-23, 128), (1.999, 128), (2.0**127, 254), (2.0**127 * 1.5, 254), (3.4028234663852886e38, 254),
    (torch.inf, 255), (torch.nan, 255),
])  # fmt: skip
def test_e8m0_of_a_few_numbers_by_hand(value, code):
    assert reference.encode_e8m0(torch.tensor([value])).item() == code


@pytest.mark.parametrize("dtype, numpy_dtype, nan", [
    (torch.bfloat16, ml_dtypes.bfloat16, 0x7FFF), (torch.float16, np.float16, 0x7FFF),
])  # fmt: skip
def test_rounding_to_16_bits_ties_to_even_and_has_one_nan(dtype, numpy_dtype, nan):
    """Every bfloat16 and float16 with the float32 numbers at and around the ties above it."""
    high = torch.arange(65536, dtype=torch.int64) << 16
    bits = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = neighbours(np.append((halves[1:] + halves[:-1]) / 2, [65519, 65520, 65536, 2.0**-25]))
    values = torch.cat([values, torch.from_numpy(ties), torch.from_numpy(-ties)])
    with np.errstate(all="ignore"):
        want = torch.from_numpy(values.numpy().astype(numpy_dtype).view(np.int16))
    want[values.isnan()] = nan
    assert_bits(reference.round_to(values, dtype).view(torch.int16), want, str(dtype))


@pytest.mark.parametrize("dtype, bits, lowest", [(torch.bfloat16, 8, -133), (torch.float16, 11, -24)], ids=str)
def test_float64_is_rounded_once(dtype, bits, lowest):
    """At every tie, and so near it that the nearest float32 is the tie; torch's conversion rounds these twice."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).double()
    codes = codes[codes.isfinite() & (codes > 0)].unique()
    ties = torch.cat([(codes[1:] + codes[:-1]) / 2, codes[:1] / 2, codes[-1:] * (1 + 2.0 ** -(bits + 1))])
    values = torch.cat([codes, *(ties * (1 + off) for off in (-0.3, -(2.0**-20), -(2.0**-40), 0, 2.0**-40, 2.0**-20))])
    values = torch.cat(
        [values, -values, torch.tensor([0.0, -0.0, 1e39, -1e39, 1e-300, -1e-300, torch.inf, -torch.inf])]
    )
    want = torch.from_numpy(oracle.nearest(values.double().numpy(), bits, lowest))
    want = torch.where(want.abs() > codes[-1], torch.inf * want.sign(), want)
    got = reference.round_to(values, dtype)
    assert got.dtype == dtype
    assert torch.equal(got.double(), want)
    assert torch.equal(got.signbit(), values.signbit())
    assert (values.to(dtype).double() != want).any(), "numbers that could tell nothing"
    assert reference.round_to(torch.tensor([torch.nan], dtype=torch.float64), dtype).view(torch.int16).item() == 0x7FFF


def test_rounding_to_float32_changes_only_nans():
    values = torch.tensor([1.0, -0.0, torch.inf, -torch.inf, 2.0**-149, torch.nan, -torch.nan])
    got = reference.round_to(values, torch.float32).view(torch.int32)
    assert_bits(got[:5], values[:5].view(torch.int32), "numbers")
    assert got[5:].tolist() == [0x7FFFFFFF] * 2
