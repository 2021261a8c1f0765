"""The quantiser against two independent models: numpy with ml_dtypes' casts, and exact rational numbers."""

from bisect import bisect_left
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.compare import assert_bits
from cute_ep.errors import EPInputError
from cute_ep.layouts.formats import NVFP4
from cute_ep.layouts.scales import ATOM_BYTES, atom_shape_stride, row_blocks

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
GLOBAL_SCALES = [1.0, 2.0**100, 2.0**-100, 1 / 3, 527.3, 2.0**-20, 2688 / 1e33, 2.0**40 * 1.7]


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def neighbours(values: np.ndarray) -> np.ndarray:
    """float32 values and the next ones on both sides."""
    values, inf = values.astype(np.float32), np.float32(np.inf)
    with np.errstate(over="ignore"):
        return np.concatenate([np.nextafter(values, -inf), values, np.nextafter(values, inf)])


def e2m1_oracle(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(values), 7, codes).astype(np.uint8)


def e4m3_oracle(values: np.ndarray) -> np.ndarray:
    return np.minimum(values, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def quantize_oracle(x: torch.Tensor, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(payload, scales) by numpy float32 operations and ml_dtypes casts."""
    one, scale = np.float32(1), np.float32(scale)
    with np.errstate(all="ignore"):
        blocks = x.float().numpy().reshape(x.shape[0], -1, 16)
        amax = np.fmax.reduce(np.abs(blocks), axis=2)
        amax = np.where(np.isnan(amax), np.float32(0), amax)
        scales = e4m3_oracle(scale * (amax * (one / np.float32(6))))
        decoded = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        inverse = np.where(decoded == 0, np.float32(0), one / (decoded * (one / scale)))
        product = blocks * inverse[:, :, None]
    assert product.dtype == np.float32
    codes = e2m1_oracle(product).reshape(x.shape[0], -1, 2)
    return codes[:, :, 0] + 16 * codes[:, :, 1], scales


def check_against_oracle(x: torch.Tensor, scale: float) -> None:
    payload, scales = reference.quantize(x, "nvfp4", scale)
    want_payload, want_scales = quantize_oracle(x, scale)
    assert_bits(scales, torch.from_numpy(want_scales), f"scales, G = {scale}")
    assert_bits(payload, torch.from_numpy(want_payload), f"payload, G = {scale}")


# ---- number formats


@pytest.mark.parametrize("code_count, decode, dtype", [
    (16, reference.decode_e2m1, ml_dtypes.float4_e2m1fn),
    (256, reference.decode_e4m3, ml_dtypes.float8_e4m3fn),
])  # fmt: skip
def test_decode_all_codes(code_count, decode, dtype):
    codes = np.arange(code_count, dtype=np.uint8)
    want = torch.from_numpy(codes.view(dtype).astype(np.float32))
    got = decode(torch.from_numpy(codes))
    assert torch.equal(got.isnan(), want.isnan())
    assert_bits(got.nan_to_num(), want.nan_to_num(), "decoded")


def test_e2m1_of_every_bf16_and_every_tie():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1, 1.5, 2, 3, 4, 6, 7, 0, 2.0**-149, 2.0**-126])
    noise = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).numpy() * 3
    values = np.concatenate([ALL_BF16.float().numpy(), neighbours(ties), neighbours(-ties), noise]).astype(np.float32)
    assert_bits(reference.encode_e2m1(torch.from_numpy(values)), torch.from_numpy(e2m1_oracle(values)), "e2m1")


@pytest.mark.parametrize("value, code", [
    (0.0, 0), (-0.0, 8), (-1e-30, 8), (0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6),
    (5.0, 6), (5.0001, 7), (-5.0, 14), (torch.inf, 7), (-torch.inf, 15), (torch.nan, 7), (-torch.nan, 7),
])  # fmt: skip
def test_e2m1_anchors(value, code):
    assert reference.encode_e2m1(torch.tensor([value])).item() == code


def test_e4m3_of_every_bf16_and_every_tie():
    grid = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (grid[1:] + grid[:-1]) / 2
    edges = np.array([448, 464, 480, 2.0**-9, 2.0**-10, 2.0**-6, 2.0**-149, np.finfo(np.float32).max], np.float32)
    noise = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)).numpy() ** 8 * 500
    values = [
        ALL_BF16[:0x7F81].float().numpy(),
        neighbours(ties),
        neighbours(grid[1:]),
        neighbours(edges),
        noise,
    ]
    values = np.concatenate(values).astype(np.float32)
    values = values[~np.isnan(values)]
    assert np.isinf(values).any() and (values == 0).any()
    assert_bits(reference.encode_e4m3(torch.from_numpy(values)), torch.from_numpy(e4m3_oracle(values)), "e4m3")


@pytest.mark.parametrize("value, code", [
    (0.0, 0), (2.0**-10, 0), (2.0**-9, 1), (1.5 * 2.0**-9, 2), (2.0**-6, 8), (1.0, 0x38), (1.0625, 0x38),
    (1.1875, 0x3A), (448.0, 0x7E), (464.0, 0x7E), (1e9, 0x7E), (torch.inf, 0x7E),
])  # fmt: skip
def test_e4m3_anchors(value, code):
    assert reference.encode_e4m3(torch.tensor([value])).item() == code


def test_to_bfloat16_every_tie_and_one_nan():
    high = torch.arange(65536, dtype=torch.int64) << 16
    bits = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = from_bits(torch.where(bits >= 1 << 31, bits - (1 << 32), bits))
    with np.errstate(invalid="ignore"):
        want = torch.from_numpy(values.numpy().astype(ml_dtypes.bfloat16).view(np.int16))
    want[values.isnan()] = 0x7FFF
    assert_bits(reference.to_bfloat16(values).view(torch.int16), want, "bfloat16")


# ---- whole blocks


@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_every_bf16_as_element_and_as_block_maximum(scale):
    generator = torch.Generator().manual_seed(1)
    # every value among random ones of its own magnitude: it is the maximum of many blocks
    near = ALL_BF16.float()[:, None] * torch.rand(65536, 15, generator=generator) * 1.2
    blocks = torch.cat([ALL_BF16[:, None], near.bfloat16()], dim=1)
    place = torch.rand(65536, 16, generator=generator).argsort(dim=1)
    blocks = blocks.gather(1, place).reshape(-1, 32)
    check_against_oracle(blocks, scale)
    # every value as an element below fixed maxima, 15 a block, all 65536 values a row
    for maximum in (1.0, -6.0, 0.4375, 2.0**-126, 3e38, 2688.0):
        values = torch.cat([ALL_BF16, ALL_BF16[:14]]).reshape(-1, 15)
        others = torch.where(values.abs() <= abs(maximum), values, values * 0)
        fixed = torch.full((values.shape[0], 1), maximum, dtype=torch.bfloat16)
        check_against_oracle(torch.cat([fixed, others], dim=1).reshape(1, -1), scale)
    # ordinary rows whose block scales use the whole e4m3 range
    ordinary = torch.randn(64, 96, generator=generator) * torch.logspace(-38, 38, 64)[:, None]
    check_against_oracle(ordinary.clamp(-3e38, 3e38).bfloat16(), scale)


@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-100])
def test_special_blocks(scale):
    def row(**at: float) -> torch.Tensor:
        block = torch.zeros(32)
        for position, value in at.items():
            block[int(position[1:])] = value
        return block.bfloat16()

    inf, nan = torch.inf, torch.nan
    rows = torch.stack([
        row(), row(_0=-0.0, _31=-0.0), row(_3=nan), row(_3=nan, _4=1.0), torch.full((32,), nan).bfloat16(),
        row(_5=inf), row(_5=-inf, _6=1.0, _7=-1.0), row(_5=inf, _6=nan), row(_0=1e-40, _1=-1e-40),
        row(_15=1.0), row(_16=1.0), row(_0=3.3895313892515355e38, _1=-3.3895313892515355e38),
    ])  # fmt: skip
    check_against_oracle(rows, scale)


def one_ulp_apart(values: np.ndarray) -> np.ndarray:
    return np.stack([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))])


def test_order_of_the_scale_operations():
    """Global scales that put G * amax / 6 on a tie of e4m3, where another order decides otherwise."""
    grid = np.arange(8, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    amax = np.arange(128, 256, dtype=np.float32)[:, None]
    scale = one_ulp_apart((grid[1:] + grid[:-1]) / 2 * np.float32(6) / amax)
    sixth = np.float32(1) / np.float32(6)
    want = e4m3_oracle(scale * (amax * sixth))
    for other in ((scale * amax) * sixth, scale * (amax / np.float32(6)), scale * amax / np.float32(6)):
        where = np.argwhere(e4m3_oracle(other) != want)[::50]
        assert len(where) >= 5
        for at in where:
            x = torch.zeros(1, 32)
            x[0, 5] = float(amax[at[1], 0])
            check_against_oracle(x.bfloat16(), scale[tuple(at)].item())


def test_order_of_the_element_operations():
    """Global scales that put x * inv on a tie of e2m1, where another formula decides otherwise."""
    one = np.float32(1)
    ties = np.array([1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    factors = np.arange(0x38, 0x40, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    x = np.arange(128, 256, dtype=np.float32)[:, None, None]
    scale = one_ulp_apart(ties * factors / x)
    want = e2m1_oracle(x * (one / (factors * (one / scale))))
    for other in (
        x * (scale / factors),
        x * scale / factors,
        x / (factors / scale),
        x / (factors * (one / scale)),
    ):
        found = 0
        for at in np.argwhere(e2m1_oracle(other) != want):
            value, factor, g = x[at[1], 0, 0], factors[at[2], 0], scale[tuple(at)]
            block = torch.zeros(1, 32)
            block[0, 0] = float(factor * np.float32(6) / g)  # makes the block's scale `factor`
            block[0, 1] = float(value)
            if quantize_oracle(block.bfloat16(), g)[1][0, 0] == factor.astype(ml_dtypes.float8_e4m3fn).view(np.uint8):
                check_against_oracle(block.bfloat16(), g.item())
                found += 1
            if found == 20:
                break
        assert found >= 5


def test_special_block_bytes():
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[1, 1] = -0.0
    x[2, 0] = torch.nan
    x[3, 2:5] = torch.tensor([torch.inf, -torch.inf, -1.0])
    x[4, :3] = torch.tensor([1.0, torch.nan, -(2.0**-20)])
    payload, scales = reference.quantize(x, NVFP4)
    assert scales[:, 0].tolist() == [0, 0, 0, 0x7E, 0x23] and not scales[:, 1].any()
    assert payload[:4, :3].tolist() == [[0, 0, 0], [0x80, 0, 0], [7, 0, 0], [0, 0xF7, 0x08]]
    assert payload[4, :2].tolist() == [0x77, 0x08]
    assert not payload[:, 3:].any()


def test_element_zero_is_the_low_nibble():
    x = torch.tensor([[6.0, 0.5] + [0.0] * 13 + [-4.0] + [0.0] * 16]).bfloat16()
    payload, scales = reference.quantize(x, "nvfp4")
    assert scales.tolist() == [[0x38, 0]]
    assert payload.tolist() == [[0x17] + [0] * 6 + [0xE0] + [0] * 8]


# ---- exact rational model


def round_binary(value: Fraction, precision: int, smallest: int) -> Fraction:
    """Nearest multiple of the last place of `precision` significant bits, >= 2**smallest; ties to even."""
    if value == 0:
        return value
    numerator, denominator = abs(value).numerator, value.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(value)
    step = Fraction(2) ** max(exponent - precision + 1, smallest)
    return round(value / step) * step  # Python rounds Fractions half to even


def float32(value: Fraction) -> Fraction:
    return round_binary(value, 24, -149)


MAGNITUDES = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def rational_block(block: list[Fraction], scale: Fraction) -> tuple[int, list[int]]:
    """(e4m3 value times 512, e2m1 codes) of 16 finite elements, all steps exact and then rounded."""
    amax = max(abs(value) for value in block)
    scale32 = float32(scale * float32(amax * float32(Fraction(1, 6))))
    scale8 = min(round_binary(min(scale32, Fraction(448)), 4, -9), Fraction(448))
    inverse = float32(1 / float32(scale8 * float32(1 / scale))) if scale8 else Fraction(0)
    codes = []
    for value in block:
        product = min(abs(float32(value * inverse)), Fraction(6))
        above = min(bisect_left(MAGNITUDES, product), 7)
        below = max(above - 1, 0)
        up, down = MAGNITUDES[above] - product, product - MAGNITUDES[below]
        code = above if up < down or (up == down and above % 2 == 0) else below
        codes.append(code + 8 * (value < 0))
    return int(scale8 * 512), codes


def test_against_rational_arithmetic():
    generator = torch.Generator().manual_seed(5)
    blocks = 2000
    x = torch.randn(blocks, 16, generator=generator) * torch.randint(-14, 14, (blocks, 1), generator=generator).exp2()
    x[torch.rand(x.shape, generator=generator) < 0.02] = 0
    x = x.bfloat16()
    for index, scale in enumerate((1.0, 0.37, 812.5, 2.0**-9)):
        part = x[index::4]
        payload, scales = reference.quantize(part.reshape(-1, 32), "nvfp4", scale)
        exact = Fraction(float(np.float32(scale)))
        codes = torch.stack([payload & 15, payload >> 4], dim=2).reshape(-1, 16).tolist()
        steps = (reference.decode_e4m3(scales) * 512).flatten().int().tolist()
        for row, got_codes, got_steps in zip(part.tolist(), codes, steps, strict=True):
            want_steps, want_codes = rational_block([Fraction(value) for value in row], exact)
            assert (got_steps, got_codes) == (want_steps, want_codes), (scale, row)


# ---- round trip, arguments


@pytest.mark.parametrize("scale", [1.0, 4.0, 2.0**-7])
def test_representable_values_survive(scale):
    """Every e4m3 scale with every e2m1 value comes back exactly when a block holds a 6."""
    factors = reference.decode_e4m3(torch.arange(1, 127, dtype=torch.uint8)) / scale
    values = reference.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    x = (factors[:, None] * values).bfloat16().reshape(-1, 32)
    payload, scales = reference.quantize(x, "nvfp4", scale)
    assert scales.flatten().tolist() == list(range(1, 127))
    assert_bits(reference.dequantize(payload, scales, "nvfp4", scale), x.float(), "round trip")


@pytest.mark.parametrize("scale", [1.0, 100.0, 0.3])
def test_dequantize_error(scale):
    """An element is off by at most half of the widest e2m1 gap (1 scale unit), or by saturation."""
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    payload, scales = reference.quantize(x, "nvfp4", scale)
    unit = (reference.decode_e4m3(scales) / scale).repeat_interleave(16, dim=1)
    error = (reference.dequantize(payload, scales, "nvfp4", scale) - x.float()).abs()
    # sf8 is at most 1/16 below amax / 6 relatively: saturation loses at most 6/15 of a unit
    assert (error <= unit * 1.0001).all() and (error > 0.4 * unit).any()


def test_rows_are_independent_of_the_chunk(monkeypatch):
    x = torch.randn(37, 96).bfloat16()
    whole = reference.quantize(x, "nvfp4", 3.0)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 500)
    for got, want in zip(reference.quantize(x, "nvfp4", 3.0), whole, strict=True):
        assert_bits(got, want, "chunked")


def test_bf16_is_the_identity():
    x = ALL_BF16.reshape(64, 1024)
    payload, scales = reference.quantize(x, "bf16")
    assert scales is None
    assert_bits(payload, x, "payload")


def test_tensor_scale_and_empty_batch():
    x = torch.randn(3, 32).bfloat16()
    for scale in (torch.tensor(0.37), torch.tensor([0.37]), np.float32(0.37).item()):
        assert_bits(reference.quantize(x, "nvfp4", scale)[0], reference.quantize(x, "nvfp4", 0.37)[0], "payload")
    payload, scales = reference.quantize(x[:0], "nvfp4")
    assert payload.shape == (0, 16) and scales.shape == (0, 2)
    assert reference.dequantize(payload, scales, "nvfp4").shape == (0, 32)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf, 2.0**101, 2.0**-101, torch.tensor(0.0), "1"])
def test_bad_global_scale(scale):
    with pytest.raises(EPInputError, match="global_scale"):
        reference.quantize(torch.zeros(1, 32).bfloat16(), "nvfp4", scale)


@pytest.mark.parametrize("x, fmt, match", [
    (torch.zeros(2, 32), "nvfp4", "dtype"),
    (torch.zeros(32).bfloat16(), "nvfp4", "shape"),
    (torch.zeros(2, 24).bfloat16(), "nvfp4", "hidden"),
    (torch.zeros(2, 16).bfloat16(), "nvfp4", "hidden"),
    (torch.zeros(2, 4).bfloat16(), "bf16", "hidden"),
    (torch.zeros(32, 32).bfloat16().t()[:, :16], "bf16", "contiguous"),
    (torch.zeros(2, 32).bfloat16(), "fp3", "format"),
])  # fmt: skip
def test_bad_arguments(x, fmt, match):
    with pytest.raises(EPInputError, match=match):
        reference.quantize(x, fmt)


# ---- scale-factor layout


@pytest.mark.parametrize("columns", [1, 2, 4, 6, 180])
@pytest.mark.parametrize("counts", [[0], [1], [128], [129, 0, 127, 128, 300], [0, 0, 5]])
def test_swizzle_is_the_atom_layout(counts, columns):
    rows = sum(counts)
    scales = torch.randint(1, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    atoms = reference.swizzle_scales(scales, counts)
    blocks, tiles = sum(map(row_blocks, counts)), (columns + 3) // 4
    assert atoms.shape == (blocks, tiles, 32, 4, 4) and atoms.dtype == torch.uint8

    (_, ((row_low, row_high, block_stride), (column_low, column_high))) = atom_shape_stride(blocks, tiles)
    flat, seen = atoms.flatten(), torch.zeros(blocks * tiles * ATOM_BYTES, dtype=torch.bool)
    block, row = 0, 0
    for count in counts:
        for local in range(count):
            at = local % 32 * row_low + local % 128 // 32 * row_high + (block + local // 128) * block_stride
            addresses = [at + c % 4 * column_low + c // 4 * column_high for c in range(columns)]
            assert_bits(flat[addresses], scales[row], f"row {row}")
            seen[addresses] = True
            row += 1
        block += -(-count // 128)
    assert not flat[~seen].any(), "padding must be zero"
    assert int(seen.sum()) == rows * columns
    assert_bits(reference.unswizzle_scales(atoms, counts, columns), scales, "unswizzled")


def test_swizzle_by_hand():
    """Row 33, column 5 of the second expert, whose block is 2: the first's 200 rows own blocks 0 and 1."""
    scales = torch.zeros(250, 6, dtype=torch.uint8)
    scales[200 + 33, 5] = 77
    atoms = reference.swizzle_scales(scales, [200, 50])
    assert atoms.shape == (3, 2, 32, 4, 4)
    assert atoms.flatten().nonzero().flatten().tolist() == [(2 * 2 + 1) * 512 + 1 * 16 + 1 * 4 + 1]
    assert atoms[2, 1, 1, 1, 1] == 77


def test_swizzle_arguments():
    with pytest.raises(EPInputError, match="shape"):
        reference.swizzle_scales(torch.zeros(3, 4, dtype=torch.uint8), [2])
    with pytest.raises(EPInputError, match="blocks"):
        reference.unswizzle_scales(torch.zeros(1, 1, 32, 4, 4, dtype=torch.uint8), [1, 1], 4)
