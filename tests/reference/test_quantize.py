"""Every format's quantiser against two independent models (`oracle`): numpy with ml_dtypes' casts, and rationals."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.formats import E4M3, FORMATS
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
    check_against_oracle(oracle.rows_of_maxima(fmt), fmt, scale)
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
def test_blocks_of_special_numbers_are_those_of_the_model(fmt, scale):
    check_against_oracle(sparse_rows(max(32, FORMATS[fmt].block)), fmt, scale)


@pytest.mark.parametrize("fmt, scale", [
    (fmt, 1.0) for fmt in QUANTIZED] + [("nvfp4", 0.37), ("nvfp4", 812.5), ("nvfp4", 2.0**-9)],
)  # fmt: skip
def test_scales_and_elements_are_those_of_rational_arithmetic(fmt, scale):
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
    codes = torch.from_numpy(oracle.codes_of(quantized.payload, facts.bits))
    elements = getattr(reference, f"decode_{facts.element.name}")(codes).tolist()
    decode = {"f32": lambda scales: scales, "e4m3": reference.decode_e4m3, "e8m0": reference.decode_e8m0}
    scales = decode[facts.scale.name](quantized.scales).tolist()
    for index, row in enumerate(x.tolist()):
        numbers = [Fraction(value) for value in row]
        blocks = [numbers[at : at + facts.block] for at in range(0, hidden, facts.block)]
        want = oracle.rational_blocks(blocks, fmt, exact)
        assert scales[index] == [float(factor) for factor, _ in want], (fmt, scale, row)
        assert elements[index] == [float(value) for _, block in want for value in block], (fmt, scale, row)


# ---- the order of operations


def one_ulp_apart(values: np.ndarray) -> np.ndarray:
    return np.stack([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))])


def test_a_scale_factor_is_the_global_scale_times_a_sixth_of_amax():
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


def test_an_element_is_multiplied_by_the_inverse_of_its_scale():
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
def test_fp8_divides_by_its_scale_and_nvfp4_row_multiplies_by_the_inverse(fmt, other):
    """Rows on which the other formula gives another element: the reference must take the documented one."""
    x = (torch.randn(3000, 256, generator=torch.Generator().manual_seed(3)) * 3).bfloat16()
    encoded = oracle.encode(x, fmt)
    step = encoded.scales
    if fmt == "nvfp4_row":
        step = oracle.from_e4m3(step) * encoded.row_scales.astype(np.float32)[:, None]
    blocks = x.float().numpy().reshape(x.shape[0], -1, FORMATS[fmt].block)
    convert = oracle.e4m3 if FORMATS[fmt].element is E4M3 else oracle.e2m1
    differs = (convert(other(blocks, step[:, :, None])) != encoded.codes).any(axis=(1, 2))
    assert differs.sum() >= 5
    check_against_oracle(x[torch.from_numpy(differs)], fmt)


# ---- batches


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


def test_a_global_scale_may_be_a_tensor_or_a_number():
    x = torch.randn(3, 32).bfloat16()
    for scale in (torch.tensor(0.37), torch.tensor([0.37]), np.float32(0.37).item()):
        assert_rows(reference.quantize(x, "nvfp4", scale), reference.quantize(x, "nvfp4", 0.37), "scale")


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_rows_are_quantised_to_no_rows(fmt):
    rows = reference.quantize(torch.zeros(0, 256).bfloat16(), fmt)
    assert rows.payload.shape[0] == 0 and reference.dequantize(rows, fmt).shape == (0, 256)
    assert FORMATS[fmt].scale is None or rows.scales.shape == (0, 256 // FORMATS[fmt].block)
    assert reference.quantization_bound(torch.zeros(0, 256).bfloat16(), fmt).shape == (0, 256)


# ---- arguments


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf, 2.0**101, 2.0**-101, torch.tensor(0.0), "1"])
def test_a_global_scale_is_a_positive_number_within_bounds(scale):
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
    (torch.zeros(2, 32).bfloat16(), "fp3", "fmt = 'fp3': must be one of bf16, fp8, "),
], ids=[
    "float32", "one row", "part of a block", "half a vector of nvfp4", "half a vector of bf16", "half a block of fp8",
    "a slice", "a format that is none",
])  # fmt: skip
def test_rows_that_no_format_takes_are_refused(x, fmt, match):
    for function in (reference.quantize, reference.quantization_bound):
        with pytest.raises(EPInputError, match=match):
            function(x, fmt)


@pytest.mark.parametrize("change, match", [
    (lambda rows: rows._replace(payload=rows.payload[:, :8].contiguous()), r"payload\.shape\[1\] = 8: .* of 16"),
    (lambda rows: rows._replace(payload=rows.payload.float()), r"rows\.payload\.dtype"),
    (lambda rows: rows._replace(scales=rows.scales[:1]), r"rows\.scales\.shape"),
    (lambda rows: rows._replace(scales=rows.scales.float()), r"rows\.scales\.dtype"),
    (lambda rows: rows._replace(scales=None), r"rows\.scales = NoneType"),
    (lambda rows: rows._replace(row_scales=rows.scales), r"rows\.row_scales = Tensor: must be None"),
], ids=["narrow", "float32", "too few scales", "scales in float32", "no scales", "row scales"])  # fmt: skip
def test_quantised_rows_that_break_a_rule_are_not_decoded(change, match):
    rows = reference.quantize(torch.zeros(2, 32).bfloat16(), "nvfp4")
    with pytest.raises(EPInputError, match=match):
        reference.dequantize(change(rows), "nvfp4")
