"""Quantisers on bytes made by hand, values that must survive, and what a NaN or an infinity does to its neighbours."""

import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.formats import E4M3, FORMATS, NVFP4
from cute_ep.testing.compare import assert_bits

from . import oracle

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.scale]
INF, NAN, LARGEST = torch.inf, torch.nan, 3.3895313892515355e38


# ---- bytes


def test_bytes_of_blocks_of_special_numbers():
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[1, 1] = -0.0
    x[2, 0] = torch.nan
    x[3, 2:5] = torch.tensor([torch.inf, -torch.inf, -1.0])
    x[4, :3] = torch.tensor([1.0, torch.nan, -(2.0**-20)])
    payload, scales, _ = reference.quantize(x, NVFP4)
    assert scales[:, 0].tolist() == [0, 0, 0, 0x7E, 0x23] and not scales[:, 1].any()
    assert payload[:4, :3].tolist() == [[0, 0, 0], [0x80, 0, 0], [7, 0, 0], [0, 0xF7, 0x08]]
    assert payload[4, :2].tolist() == [0x77, 0x08]
    assert not payload[:, 3:].any()


def test_four_six_bit_elements_fill_three_bytes_from_the_lowest_bit_on():
    """Codes 31, 1, 8 and 42 of a block, and 0: 101010 001000 000001 011111."""
    x = torch.zeros(1, 64).bfloat16()
    x[0, :4] = torch.tensor([7.5, 0.125, 1.0, -1.25])
    payload, scales, _ = reference.quantize(x, "mxfp6_e2m3")
    assert scales.tolist() == [[127, 0]]
    assert payload.tolist() == [[0b01_011111, 0b1000_0000, 0b101010_00] + [0] * 45]


def test_element_zero_is_the_low_nibble():
    x = torch.tensor([[6.0, 0.5] + [0.0] * 13 + [-4.0] + [0.0] * 16]).bfloat16()
    payload, scales, _ = reference.quantize(x, "nvfp4")
    assert scales.tolist() == [[0x38, 0]]
    assert payload.tolist() == [[0x17] + [0] * 6 + [0xE0] + [0] * 8]


BY_HAND = [
    # format, first elements of a block of zeros, their codes, the block's scale factor
    ("fp8", [448.0, -1.0, -0.0, NAN], [0x7E, 0xB8, 0x80, 0x7F], 1.0),
    ("fp8", [0.0], [0], float(np.float32(1e-4) / np.float32(448))),
    ("fp8", [NAN], [0x7F], float(np.float32(1e-4) / np.float32(448))),
    ("fp8", [INF, -INF, LARGEST, 1.0], [0x7E, 0xFE, 0x7E, 0], float(np.float32(LARGEST) / np.float32(448))),
    ("fp8_pow2", [448.0, -1.0, NAN], [0x7E, 0xB8, 0x7F], 1.0),
    ("fp8_pow2", [450.0, 2.0], [0x76, 0x38], 2.0),
    ("fp8_pow2", [1e-4], [0x7D], 2.0**-22),
    ("fp8_pow2", [INF, -INF], [0x78, 0xF8], 2.0**120),
    ("mxfp8", [448.0, -1.0, -0.0, NAN], [0x7E, 0xB8, 0x80, 0x7F], 127),
    ("mxfp8", [450.0, 2.0], [0x76, 0x38], 128),
    ("mxfp8", [INF, 1.0, NAN, -0.0], [0, 0, 0, 0], 0),
    ("mxfp8", [-0.0, NAN], [0, 0], 0),
    ("mxfp8", [-(2.0**-119)], [0], 0),
    ("mxfp8", [-(2.0**-118) * 1.75], [0xFE], 1),
    ("mxfp6_e2m3", [7.5, -1.0, -0.0, NAN], [31, 40, 32, 31], 127),
    ("mxfp6_e2m3", [4.0, 7.6875, 0.0625, -0.1875], [24, 31, 0, 34], 127),
    ("mxfp6_e2m3", [7.75, 2.5, 1.0], [24, 10, 4], 128),
    ("mxfp6_e2m3", [INF, 1.0, NAN, -0.0], [0, 0, 0, 0], 0),
    ("mxfp6_e2m3", [-0.0, NAN], [0, 0], 0),
    ("mxfp6_e2m3", [-(2.0**-125) * 1.875], [0], 0),
    ("mxfp6_e2m3", [-(2.0**-125) * 1.9375], [56], 1),
    ("mxfp6_e2m3", [-(2.0**-124)], [56], 1),
    ("mxfp6_e2m3", [LARGEST, 1.0, -1.0], [24, 0, 32], 253),
    ("mxfp6_e3m2", [28.0, -1.0, -0.0, NAN], [31, 44, 32, 31], 127),
    ("mxfp6_e3m2", [16.0, 29.5, 0.03125, -0.09375], [28, 31, 0, 34], 127),
    ("mxfp6_e3m2", [30.0, 2.0], [28, 12], 128),
    ("mxfp6_e3m2", [-INF, 1.0, NAN, -0.0], [0, 0, 0, 0], 0),
    ("mxfp6_e3m2", [-(2.0**-123) * 1.75], [0], 0),
    ("mxfp6_e3m2", [-(2.0**-122)], [60], 1),
    ("mxfp6_e3m2", [LARGEST, 1.0, -1.0], [28, 0, 32], 251),
    ("mxfp4", [6.0, -1.0, -0.0, NAN], [7, 10, 8, 7], 127),
    ("mxfp4", [4.0, 6.5], [6, 7], 127),
    ("mxfp4", [7.0, 2.5, 1.0], [6, 2, 1], 128),
    ("mxfp4", [-0.0, NAN], [8, 7], 0),
    ("mxfp4", [INF, -INF, LARGEST, 1.0, -1.0], [7, 15, 6, 0, 8], 253),
    ("nvfp4_row", [2688.0, -0.0, NAN], [7, 8, 7], 0x7E),
    ("nvfp4_row", [NAN, -0.0], [7, 8], 0),
    ("nvfp4_row", [INF, -INF, -1.0], [7, 15, 8], 0x7E),
]


@pytest.mark.parametrize("fmt, elements, codes, scale", BY_HAND, ids=[f"{fmt} {x}" for fmt, x, *_ in BY_HAND])
def test_codes_and_scale_of_a_block_made_by_hand(fmt, elements, codes, scale):
    facts = FORMATS[fmt]
    x = torch.zeros(1, max(32, facts.multiple))
    x[0, : len(elements)] = torch.tensor(elements)
    payload, scales, row_scales = reference.quantize(x.bfloat16(), fmt)
    got = oracle.codes_of(payload, facts.bits)[0].tolist()
    assert got[: len(codes)] == codes and not any(got[len(codes) :])
    assert scales[0, 0].item() == scale
    assert (row_scales is not None) == facts.row_scale


@pytest.mark.parametrize("largest, row_scale", [
    (0.0, 1.0), (NAN, 1.0), (2688.0, 1.0), (-5376.0, 2.0), (1.0, 1 / 2688), (2.0**-133, 2.0**-100),
    (INF, 2.0**100), (LARGEST, 2.0**100), (2688 * 2.0**-100, 2.0**-100), (2688 * 2.0**99, 2.0**99),
])  # fmt: skip
def test_the_row_scale_of_a_largest_element(largest, row_scale):
    x = torch.zeros(1, 64).bfloat16()
    x[0, 40] = largest
    got = reference.quantize(x, "nvfp4_row").row_scales
    assert_bits(got, torch.tensor([row_scale]).bfloat16(), "row scale")


def test_tiny_rows_keep_their_zeros():
    """At the smallest row scale every inverse is a number: tiny elements become zeros, zeros stay."""
    x = torch.zeros(1, 32).bfloat16()
    x[0, 0], x[0, 16], x[0, 17], x[0, 18] = 2.0**-90, 2.0**-133, -(2.0**-133), -0.0
    rows = reference.quantize(x, "nvfp4_row")
    assert rows.row_scales.item() == 2.0**-100 and rows.scales[0, 1].item() == 0
    assert rows.payload[0].tolist() == [0x07] + [0x00] * 7 + [0x80, 0x08] + [0x00] * 6


def test_dequantize_is_the_documented_product():
    """The documented product, in the places where it is not representable."""
    codes = torch.full((1, 128), 0x7E, dtype=torch.uint8)
    rows = QuantizedRows(codes.view(torch.float8_e4m3fn), torch.tensor([[1 / 3]]))
    assert_bits(reference.dequantize(rows, "fp8"), torch.full((1, 128), 448.0) * torch.tensor(1 / 3), "fp8")
    rows = QuantizedRows(torch.full((1, 16), 0x77, dtype=torch.uint8), torch.full((1, 2), 0x7E, dtype=torch.uint8))
    assert_bits(reference.dequantize(rows, "nvfp4", 0.3), torch.full((1, 32), 2688.0) / torch.tensor(0.3), "nvfp4")
    rows = QuantizedRows(torch.full((1, 16), 0x77, dtype=torch.uint8), torch.full((1, 1), 253, dtype=torch.uint8))
    assert reference.dequantize(rows, "mxfp4").isposinf().all()  # 6 * 2**126


# ---- round trips


@pytest.mark.parametrize("scale", [1.0, 4.0, 2.0**-7])
def test_every_e2m1_value_at_every_e4m3_scale_survives(scale):
    """Every e4m3 scale with every e2m1 value comes back exactly when a block holds a 6."""
    factors = reference.decode_e4m3(torch.arange(1, 127, dtype=torch.uint8)) / scale
    values = reference.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    x = (factors[:, None] * values).bfloat16().reshape(-1, 32)
    rows = reference.quantize(x, "nvfp4", scale)
    assert rows.scales.flatten().tolist() == list(range(1, 127))
    assert_bits(reference.dequantize(rows, "nvfp4", scale), x.float(), "round trip")


@pytest.mark.parametrize("fmt, factors", [
    ("fp8", [1.0, 2.0**-20, 2.0**100]), ("fp8_pow2", [1.0, 2.0**-20, 2.0**100]),
    ("mxfp8", [1.0, 2.0**-116, 2.0**118]), ("mxfp6_e2m3", [1.0, 2.0**-126, 2.0**124]),
    ("mxfp6_e3m2", [1.0, 2.0**-126, 2.0**122]),
    ("mxfp4", [1.0, 2.0**-124, 2.0**124]), ("nvfp4_row", [1.0, 2.0**-100]),
])  # fmt: skip
def test_blocks_of_every_finite_element_survive(fmt, factors):
    """Blocks of every finite element beside the largest one, which makes the scale `factor`."""
    facts = FORMATS[fmt]
    if facts.bits < 8:
        decode = getattr(reference, f"decode_{facts.element.name}")
        values = decode(torch.arange(1 << facts.bits, dtype=torch.uint8)).repeat(2)
    else:
        values = reference.decode_e4m3(torch.arange(127, dtype=torch.uint8))
        values = torch.cat([torch.stack([values, -values], dim=1).flatten(), values[:2]]).reshape(-1, 32)
        values[:, 0] = 448.0
        values = torch.nn.functional.pad(values, (0, facts.block - 32)) if facts.block > 32 else values
    for factor in factors:
        x = values.reshape(-1, max(32, facts.multiple)) * factor * (448 if fmt == "nvfp4_row" else 1)
        rows = reference.quantize(x.bfloat16(), fmt)
        assert_bits(reference.dequantize(rows, fmt), x.bfloat16().float(), f"{fmt} {factor}")


# ---- NaN and infinities


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_a_nan_changes_only_itself(fmt):
    """A NaN is not the block's maximum: everything else has the bytes of the row with 0 in its place."""
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    broken, at = x.clone(), torch.arange(40) * 6 + 3
    x[range(40), at], broken[range(40), at] = 0.0, torch.nan
    want, got = reference.quantize(x, fmt), reference.quantize(broken, fmt)
    assert_bits(got.scales, want.scales, "scales")
    got_values, want_values = (reference.dequantize(rows, fmt) for rows in (got, want))
    code = got_values[range(40), at]
    largest = want.scales.repeat_interleave(FORMATS[fmt].block, 1)[range(40), at]
    if FORMATS[fmt].element is E4M3:
        assert code.isnan().all()
    else:
        largest = reference.decode_e4m3(largest) if FORMATS[fmt].scale is E4M3 else reference.decode_e8m0(largest)
        factor = want.row_scales.float() if FORMATS[fmt].row_scale else 1.0
        assert_bits(code, FORMATS[fmt].element.largest * largest * factor, "NaN is the largest element")
    got_values[range(40), at] = 0.0
    assert_bits(got_values, want_values, "neighbours")


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_leaves_other_blocks_alone(fmt, sign):
    """Its own block: mxfp8's and mxfp6's become zeros, the others saturate. Other blocks: as if it were the largest
    finite number, which only the scale of a whole row can notice."""
    block = FORMATS[fmt].block
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    infinite, finite = x.clone(), x.clone()
    infinite[:, 3], finite[:, 3] = sign * torch.inf, sign * LARGEST
    got, want = (reference.quantize(rows, fmt) for rows in (infinite, finite))
    values, finite_values = reference.dequantize(got, fmt), reference.dequantize(want, fmt)
    assert_bits(values[:, block:], finite_values[:, block:], "other blocks")
    assert_bits(got.scales[:, 1:], want.scales[:, 1:], "other scales")
    own = values[:, :block]
    if fmt.startswith(("mxfp8", "mxfp6")):
        assert not own.any() and not own.signbit().any() and not got.scales[:, 0].any()
        return
    assert not own.isnan().any() and (own[:, 3] * sign > 0).all()
    assert not own[:, :3].any() and not own[:, 4:].any()  # ordinary numbers vanish beside it
    if fmt.startswith("fp8"):
        assert_bits(own, finite_values[:, :block], "own block")
