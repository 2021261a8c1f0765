"""Every format's quantiser against two independent models (`oracle`): numpy with ml_dtypes' casts, and rationals."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.api.dispatched import QuantizedRows
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.formats import FORMATS, NVFP4
from cute_ep.reference import formats as reference_formats
from cute_ep.testing.compare import assert_bits

from . import oracle
from .oracle import ALL_BF16, assert_rows

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.scale]
NVFP4_SCALES = [2.0**100, 2.0**-100, 1 / 3, 527.3, 2.0**-20, 2688 / 1e33, 2.0**40 * 1.7]
FORMATS_AND_SCALES = [(fmt, 1.0) for fmt in QUANTIZED] + [("nvfp4", scale) for scale in NVFP4_SCALES]
INF, NAN, LARGEST = torch.inf, torch.nan, 3.3895313892515355e38


def check_against_oracle(x: torch.Tensor, fmt: str, scale: float = 1.0) -> None:
    want = oracle.packed(oracle.encode(x, fmt, scale), fmt)
    assert_rows(reference.quantize(x, fmt, scale), want, f"{fmt}, G = {scale},")


def test_every_format_has_a_model():
    assert set(FORMATS.values()) == set(reference_formats.MODELS)
    assert set(QUANTIZED) == set(oracle.ENCODERS)


# ---- whole blocks


@pytest.mark.parametrize("fmt, scale", FORMATS_AND_SCALES)
def test_every_bf16_as_element_and_as_block_maximum(fmt, scale):
    block = FORMATS[fmt].block
    check_against_oracle(oracle.rows_of_maxima(block), fmt, scale)
    for maximum in oracle.ELEMENT_MAXIMA:
        check_against_oracle(oracle.rows_of_elements(block, maximum), fmt, scale)
    # ordinary rows whose block scales use their whole range
    ordinary = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-40, 38, 64)[:, None]
    check_against_oracle(ordinary.clamp(-3e38, 3e38).bfloat16(), fmt, scale)


def sparse_rows(block: int) -> torch.Tensor:
    """[rows, 2 * block], all zero but for the special numbers."""

    def row(*values: float, at: int = 0) -> torch.Tensor:
        elements = torch.zeros(2 * block)
        elements[at : at + len(values)] = torch.tensor(values)
        return elements.bfloat16()

    return torch.stack([
        row(), row(-0.0), row(-0.0, at=2 * block - 1), row(NAN, at=3), row(-NAN, 1.0, at=3), row(INF, at=5),
        row(-INF, 1.0, -1.0, at=5), row(INF, NAN), row(NAN, INF), row(1e-40, -1e-40), row(2.0**-133, NAN, -(2.0**-133)),
        row(1.0, at=block - 1), row(1.0, at=block), row(LARGEST, -LARGEST), row(INF, LARGEST, -INF, -LARGEST),
        row(2.0**-126, 2.0**-133, at=block - 1), row(1e-4, 1e-5, -1e-6), row(2.0**-118 * 1.75, -(2.0**-119)),
        torch.full((2 * block,), NAN).bfloat16(), torch.full((2 * block,), -INF).bfloat16(),
        torch.full((2 * block,), -0.0).bfloat16(),
    ])  # fmt: skip


@pytest.mark.parametrize("fmt, scale", FORMATS_AND_SCALES)
def test_special_blocks(fmt, scale):
    check_against_oracle(sparse_rows(max(32, FORMATS[fmt].block)), fmt, scale)


def one_ulp_apart(values: np.ndarray) -> np.ndarray:
    return np.stack([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))])


def test_order_of_the_scale_operations():
    """Global scales that put G * amax / 6 on a tie of e4m3, where another order decides otherwise."""
    grid = np.arange(8, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    amax = np.arange(128, 256, dtype=np.float32)[:, None]
    scale = one_ulp_apart((grid[1:] + grid[:-1]) / 2 * np.float32(6) / amax)
    sixth = np.float32(1) / np.float32(6)
    want = oracle.e4m3(scale * (amax * sixth))
    for other in ((scale * amax) * sixth, scale * (amax / np.float32(6)), scale * amax / np.float32(6)):
        where = np.argwhere(oracle.e4m3(other) != want)[::50]
        assert len(where) >= 5
        for at in where:
            x = torch.zeros(1, 32)
            x[0, 5] = float(amax[at[1], 0])
            check_against_oracle(x.bfloat16(), "nvfp4", scale[tuple(at)].item())


def test_order_of_the_element_operations():
    """Global scales that put x * inv on a tie of e2m1, where another formula decides otherwise."""
    one = np.float32(1)
    ties = np.array([1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    factors = np.arange(0x38, 0x40, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    x = np.arange(128, 256, dtype=np.float32)[:, None, None]
    scale = one_ulp_apart(ties * factors / x)
    want = oracle.e2m1(x * (one / (factors * (one / scale))))
    for other in (
        x * (scale / factors),
        x * scale / factors,
        x / (factors / scale),
        x / (factors * (one / scale)),
    ):
        found = 0
        for at in np.argwhere(oracle.e2m1(other) != want):
            value, factor, g = x[at[1], 0, 0], factors[at[2], 0], scale[tuple(at)]
            block = torch.zeros(1, 32)
            block[0, 0] = float(factor * np.float32(6) / g)  # makes the block's scale `factor`
            block[0, 1] = float(value)
            scales = oracle.encode(block.bfloat16(), "nvfp4", g).scales
            if scales[0, 0] == factor.astype(ml_dtypes.float8_e4m3fn).view(np.uint8):
                check_against_oracle(block.bfloat16(), "nvfp4", g.item())
                found += 1
            if found == 20:
                break
        assert found >= 5


@pytest.mark.parametrize("fmt, other", [
    # a division by the scale and a product with its inverse differ where both are possible
    ("fp8", lambda x, s: x * (np.float32(1) / s)),
    ("nvfp4_row", lambda x, s: x / s),
])  # fmt: skip
def test_elements_divide_or_multiply(fmt, other):
    """Rows on which the other formula gives another element: the reference must take the documented one."""
    x = (torch.randn(3000, 256, generator=torch.Generator().manual_seed(3)) * 3).bfloat16()
    encoded = oracle.encode(x, fmt)
    step = encoded.scales
    if fmt == "nvfp4_row":
        step = oracle.from_e4m3(step) * encoded.row_scales.astype(np.float32)[:, None]
    blocks = x.float().numpy().reshape(x.shape[0], -1, FORMATS[fmt].block)
    convert = oracle.e4m3 if FORMATS[fmt].element == "e4m3" else oracle.e2m1
    differs = (convert(other(blocks, step[:, :, None])) != encoded.codes).any(axis=(1, 2))
    assert differs.sum() >= 5
    check_against_oracle(x[torch.from_numpy(differs)], fmt)


# ---- bytes by hand


def test_special_block_bytes():
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
    ("mxfp4", [6.0, -1.0, -0.0, NAN], [7, 10, 8, 7], 127),
    ("mxfp4", [4.0, 6.5], [6, 7], 127),
    ("mxfp4", [7.0, 2.5, 1.0], [6, 2, 1], 128),
    ("mxfp4", [-0.0, NAN], [8, 7], 0),
    ("mxfp4", [INF, -INF, LARGEST, 1.0, -1.0], [7, 15, 6, 0, 8], 253),
    ("nvfp4_row", [2688.0, -0.0, NAN], [7, 8, 7], 0x7E),
    ("nvfp4_row", [NAN, -0.0], [7, 8], 0),
    ("nvfp4_row", [INF, -INF, -1.0], [7, 15, 8], 0x7E),
]


@pytest.mark.parametrize("fmt, elements, codes, scale", BY_HAND)
def test_by_hand(fmt, elements, codes, scale):
    facts = FORMATS[fmt]
    x = torch.zeros(1, max(32, facts.block))
    x[0, : len(elements)] = torch.tensor(elements)
    payload, scales, row_scales = reference.quantize(x.bfloat16(), fmt)
    got = payload.view(torch.uint8)[0].tolist()
    if facts.element == "e2m1":
        got = [nibble for byte in got for nibble in (byte & 15, byte >> 4)]
    assert got[: len(codes)] == codes and not any(got[len(codes) :])
    assert scales[0, 0].item() == scale
    assert (row_scales is not None) == facts.row_scale


@pytest.mark.parametrize("largest, row_scale", [
    (0.0, 1.0), (NAN, 1.0), (2688.0, 1.0), (-5376.0, 2.0), (1.0, 1 / 2688), (2.0**-133, 2.0**-100),
    (INF, 2.0**100), (LARGEST, 2.0**100), (2688 * 2.0**-100, 2.0**-100), (2688 * 2.0**99, 2.0**99),
])  # fmt: skip
def test_row_scales(largest, row_scale):
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


# ---- NaN and infinities leave their neighbours alone


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
    if FORMATS[fmt].element == "e4m3":
        assert code.isnan().all()
    else:
        largest = reference.decode_e4m3(largest) if FORMATS[fmt].scale == "e4m3" else reference.decode_e8m0(largest)
        factor = want.row_scales.float() if FORMATS[fmt].row_scale else 1.0
        assert_bits(code, 6 * largest * factor, "NaN is +6")
    got_values[range(40), at] = 0.0
    assert_bits(got_values, want_values, "neighbours")


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_leaves_other_blocks_alone(fmt, sign):
    """Its own block: mxfp8 becomes zeros, the others saturate. Other blocks: as if it were the largest finite number,
    which only the scale of a whole row can notice."""
    block = FORMATS[fmt].block
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    infinite, finite = x.clone(), x.clone()
    infinite[:, 3], finite[:, 3] = sign * torch.inf, sign * LARGEST
    got, want = (reference.quantize(rows, fmt) for rows in (infinite, finite))
    values, finite_values = reference.dequantize(got, fmt), reference.dequantize(want, fmt)
    assert_bits(values[:, block:], finite_values[:, block:], "other blocks")
    assert_bits(got.scales[:, 1:], want.scales[:, 1:], "other scales")
    own = values[:, :block]
    if fmt == "mxfp8":
        assert not own.any() and not own.signbit().any() and not got.scales[:, 0].any()
        return
    assert not own.isnan().any() and (own[:, 3] * sign > 0).all()
    assert not own[:, :3].any() and not own[:, 4:].any()  # ordinary numbers vanish beside it
    if fmt.startswith("fp8"):
        assert_bits(own, finite_values[:, :block], "own block")


# ---- exact rational model


@pytest.mark.parametrize("fmt, scale", [
    (fmt, 1.0) for fmt in QUANTIZED] + [("nvfp4", 0.37), ("nvfp4", 812.5), ("nvfp4", 2.0**-9)],
)  # fmt: skip
def test_against_rational_arithmetic(fmt, scale):
    generator = torch.Generator().manual_seed(5)
    facts = FORMATS[fmt]
    rows, hidden = 20000 // max(64, facts.block), max(64, facts.block)
    x = torch.randn(rows, hidden // facts.block, facts.block, generator=generator)
    x *= torch.randint(-14, 14, x.shape[:2], generator=generator).exp2()[:, :, None]
    x[::7] *= 2.0 ** -torch.randint(100, 125, x[::7].shape[:1], generator=generator)[:, None, None]
    x[torch.rand(x.shape, generator=generator) < 0.02] = 0
    x = x.flatten(1).bfloat16()
    quantized = reference.quantize(x, fmt, scale)
    exact = Fraction(float(np.float32(scale)))
    if facts.element == "e2m1":
        codes = torch.stack([quantized.payload & 15, quantized.payload >> 4], dim=2).flatten(1)
        elements = reference.decode_e2m1(codes).tolist()
    else:
        elements = reference.decode_e4m3(quantized.payload.view(torch.uint8)).tolist()
    decode = {"f32": lambda scales: scales, "e4m3": reference.decode_e4m3, "e8m0": reference.decode_e8m0}
    scales = decode[facts.scale](quantized.scales).tolist()
    for index, row in enumerate(x.tolist()):
        numbers = [Fraction(value) for value in row]
        blocks = [numbers[at : at + facts.block] for at in range(0, hidden, facts.block)]
        want = oracle.rational_blocks(blocks, fmt, exact)
        assert scales[index] == [float(factor) for factor, _ in want], (fmt, scale, row)
        assert elements[index] == [float(value) for _, block in want for value in block], (fmt, scale, row)


# ---- round trip, arguments


@pytest.mark.parametrize("scale", [1.0, 4.0, 2.0**-7])
def test_representable_values_survive(scale):
    """Every e4m3 scale with every e2m1 value comes back exactly when a block holds a 6."""
    factors = reference.decode_e4m3(torch.arange(1, 127, dtype=torch.uint8)) / scale
    values = reference.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    x = (factors[:, None] * values).bfloat16().reshape(-1, 32)
    rows = reference.quantize(x, "nvfp4", scale)
    assert rows.scales.flatten().tolist() == list(range(1, 127))
    assert_bits(reference.dequantize(rows, "nvfp4", scale), x.float(), "round trip")


@pytest.mark.parametrize("fmt, factors", [
    ("fp8", [1.0, 2.0**-20, 2.0**100]), ("fp8_pow2", [1.0, 2.0**-20, 2.0**100]),
    ("mxfp8", [1.0, 2.0**-116, 2.0**118]), ("mxfp4", [1.0, 2.0**-124, 2.0**124]), ("nvfp4_row", [1.0, 2.0**-100]),
])  # fmt: skip
def test_representable_values_of_every_code_survive(fmt, factors):
    """Blocks of every finite element beside the largest one, which makes the scale `factor`."""
    facts = FORMATS[fmt]
    if facts.element == "e2m1":
        values = reference.decode_e2m1(torch.arange(16, dtype=torch.uint8)).repeat(2)
    else:
        values = reference.decode_e4m3(torch.arange(127, dtype=torch.uint8))
        values = torch.cat([torch.stack([values, -values], dim=1).flatten(), values[:2]]).reshape(-1, 32)
        values[:, 0] = 448.0
        values = torch.nn.functional.pad(values, (0, facts.block - 32)) if facts.block > 32 else values
    for factor in factors:
        x = values.reshape(-1, max(32, facts.block)) * factor * (448 if fmt == "nvfp4_row" else 1)
        rows = reference.quantize(x.bfloat16(), fmt)
        assert_bits(reference.dequantize(rows, fmt), x.bfloat16().float(), f"{fmt} {factor}")


def test_dequantize_by_hand():
    """The documented product, in the places where it is not representable."""
    codes = torch.full((1, 128), 0x7E, dtype=torch.uint8)
    rows = QuantizedRows(codes.view(torch.float8_e4m3fn), torch.tensor([[1 / 3]]))
    assert_bits(reference.dequantize(rows, "fp8"), torch.full((1, 128), 448.0) * torch.tensor(1 / 3), "fp8")
    rows = QuantizedRows(torch.full((1, 16), 0x77, dtype=torch.uint8), torch.full((1, 2), 0x7E, dtype=torch.uint8))
    assert_bits(reference.dequantize(rows, "nvfp4", 0.3), torch.full((1, 32), 2688.0) / torch.tensor(0.3), "nvfp4")
    rows = QuantizedRows(torch.full((1, 16), 0x77, dtype=torch.uint8), torch.full((1, 1), 253, dtype=torch.uint8))
    assert reference.dequantize(rows, "mxfp4").isposinf().all()  # 6 * 2**126


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_rows_are_independent_of_the_chunk(fmt, monkeypatch):
    x = torch.randn(37, 256).bfloat16()
    whole = reference.quantize(x, fmt)
    monkeypatch.setattr(reference_formats, "CHUNK_ELEMENTS", 1000)
    assert_rows(reference.quantize(x, fmt), whole, "chunked")


def test_bf16_is_the_identity():
    x = ALL_BF16.reshape(64, 1024)
    rows = reference.quantize(x, "bf16")
    assert rows.scales is None and rows.row_scales is None
    assert_bits(rows.payload, x, "payload")
    assert_bits(reference.dequantize(rows, "bf16"), x.float(), "dequantised")


def test_tensor_scale():
    x = torch.randn(3, 32).bfloat16()
    for scale in (torch.tensor(0.37), torch.tensor([0.37]), np.float32(0.37).item()):
        assert_rows(reference.quantize(x, "nvfp4", scale), reference.quantize(x, "nvfp4", 0.37), "scale")


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_batch(fmt):
    rows = reference.quantize(torch.zeros(0, 256).bfloat16(), fmt)
    assert rows.payload.shape[0] == 0 and reference.dequantize(rows, fmt).shape == (0, 256)
    assert FORMATS[fmt].scale is None or rows.scales.shape == (0, 256 // FORMATS[fmt].block)
    assert reference.quantization_bound(torch.zeros(0, 256).bfloat16(), fmt).shape == (0, 256)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf, 2.0**101, 2.0**-101, torch.tensor(0.0), "1"])
def test_bad_global_scale(scale):
    for function in (reference.quantize, reference.quantization_bound):
        with pytest.raises(EPInputError, match="global_scale"):
            function(torch.zeros(1, 32).bfloat16(), "nvfp4", scale)


@pytest.mark.parametrize("x, fmt, match", [
    (torch.zeros(2, 32), "nvfp4", "dtype"),
    (torch.zeros(32).bfloat16(), "nvfp4", "shape"),
    (torch.zeros(2, 24).bfloat16(), "nvfp4", r"x\.shape\[1\]"),
    (torch.zeros(2, 16).bfloat16(), "nvfp4", r"x\.shape\[1\]"),
    (torch.zeros(2, 4).bfloat16(), "bf16", r"x\.shape\[1\]"),
    (torch.zeros(2, 64).bfloat16(), "fp8", r"x\.shape\[1\]"),
    (torch.zeros(32, 32).bfloat16().t()[:, :16], "bf16", "contiguous"),
    (torch.zeros(2, 32).bfloat16(), "fp3", "format"),
])  # fmt: skip
def test_bad_arguments(x, fmt, match):
    for function in (reference.quantize, reference.quantization_bound):
        with pytest.raises(EPInputError, match=match):
            function(x, fmt)


@pytest.mark.parametrize("change, match", [
    (lambda rows: rows._replace(payload=rows.payload[:, :8].contiguous()), r"rows\.payload: hidden = 16"),
    (lambda rows: rows._replace(payload=rows.payload.float()), r"rows\.payload\.dtype"),
    (lambda rows: rows._replace(scales=rows.scales[:1]), r"rows\.scales\.shape"),
    (lambda rows: rows._replace(scales=rows.scales.float()), r"rows\.scales\.dtype"),
    (lambda rows: rows._replace(scales=None), r"rows\.scales = NoneType"),
    (lambda rows: rows._replace(row_scales=rows.scales), r"rows\.row_scales = Tensor: must be None"),
])  # fmt: skip
def test_bad_rows(change, match):
    rows = reference.quantize(torch.zeros(2, 32).bfloat16(), "nvfp4")
    with pytest.raises(EPInputError, match=match):
        reference.dequantize(change(rows), "nvfp4")
