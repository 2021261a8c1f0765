"""The codecs' device code, run on the CPU and compared with numpy, ml_dtypes and the formulas of docs/numerics.md.

The DSL compiles the very functions that kernels inline for the host, with stand-ins for the instructions that only a
GPU has (`host_instructions`): a whole `encode` runs, one unit after the other, its partner lanes' maxima given. What is
left to tests on a GPU are the instructions themselves. The oracle knows nothing of `cute_ep.reference`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.runtime import from_dlpack

from cute_ep.kernels.codec import codec_for, e2m1, e8m0, fp8, mx, nvfp4
from cute_ep.kernels.codec.base import block_lanes, source_vectors, unit_elements
from cute_ep.kernels.device import arith
from cute_ep.layouts.maps.formats import FORMATS, FP8, FP8_POW2, MXFP4, MXFP8, NVFP4, NVFP4_ROW, Format

f32 = np.float32
HOPPER, BLACKWELL = "sm_90a", "sm_100a"
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
INFINITY_BITS = 0x7F800000
MAX_BF16 = f32(2.0**128 - 2.0**120)
BATCH = 1 << 23


# ---- instructions of the GPU, for the host


def select(condition, yes, no):
    return type(yes)(cutlass.select_(condition, yes, no))


def positive_nan(value):
    """What multiplications and minima return on a GPU for any NaN; the host keeps the sign."""
    is_nan = (value.bitcast(Uint32) & Uint32(0x7FFFFFFF)) > Uint32(INFINITY_BITS)
    return select(is_nan, Float32(float("nan")), value)


def host_minmax(function):
    def run(a, b, *, abs=False):
        if not abs:
            return function(a, b)
        return cute.math.copysign(function(cute.math.abs(a), cute.math.abs(b)), positive_nan(a))

    return run


def join_halves(low, high):
    return (low.bitcast(Uint32) >> 16) | (high.bitcast(Uint32) & Uint32(0xFFFF0000))


def host_clamp(x):
    limited = cute.math.min(cute.math.abs(x), Float32(float(MAX_BF16)), propagate_nan=True)
    return positive_nan(cute.math.copysign(limited, x))


def host_ptx(code, *, write_only_types, read_only_args):
    pairs = [arith.halves(word) for word in read_only_args]
    if "max.bf16x2" in code:
        return join_halves(*[cute.math.max(a, b) for a, b in zip(*pairs, strict=True)])
    assert "min.NaN.xorsign.abs.bf16x2" in code
    return join_halves(*map(host_clamp, pairs[0]))


def host_e4m3(value):
    """The e4m3 code: a multiple of the step of its binade, whose number is the code's lower bits and carries."""
    size = cute.math.min(cute.math.abs(value), Float32(448.0))
    exponent = cutlass.max(size.bitcast(Uint32) >> 23, Uint32(121))
    steps = size * ((Uint32(257) - exponent) << 23).bitcast(Float32)  # 0..16, exact
    number = (steps + Float32(2.0**23)).bitcast(Uint32) & Uint32(0xFF)
    code = ((exponent - Uint32(121)) << 3) + number | ((value.bitcast(Uint32) >> 24) & Uint32(0x80))
    is_nan = (value.bitcast(Uint32) & Uint32(0x7FFFFFFF)) > Uint32(INFINITY_BITS)
    return select(is_nan, Uint32(0x7F), code)


def host_round_to_bf16(value):
    """Of a number that is not NaN; without AVX512_BF16 a host's own conversion needs a library function."""
    bits = value.bitcast(Uint32)
    even = (bits >> 16) & Uint32(1)
    return ((bits + Uint32(0x7FFF) + even) & Uint32(0xFFFF0000)).bitcast(Float32)


def host_pack_e4m3(*values):
    codes = [host_e4m3(value) for value in values]
    return codes[0] | (codes[1] << 8) | (codes[2] << 16) | (codes[3] << 24)


def host_unpack_e4m3(codes):
    values = []
    for element in range(4):
        code = (codes >> (8 * element)) & Uint32(0x7F)
        normal = (code + Uint32(120 << 3)) << 20
        subnormal = (Float32(code) * Float32(2.0**-9)).bitcast(Uint32)
        values.append(select(code < Uint32(8), subnormal, normal).bitcast(Float32))
    return values


def host_pack_e2m1(rY, hardware):
    """The e2m1 instruction: a code is the number of midpoints below; of a midpoint itself the even code wins."""
    packed = Uint32(0)
    for element in range(8):
        value = positive_nan(rY[element])
        size, code = cute.math.abs(value), Uint32(0)
        for index, midpoint in enumerate(MIDPOINTS):
            above = size < Float32(midpoint) if index % 2 else size <= Float32(midpoint)
            code += select(above, Uint32(0), Uint32(1))
        packed = packed | (code | ((value.bitcast(Uint32) >> 28) & Uint32(8))) << (4 * element)
    return packed


others = []
"""The maximum in a unit's partner lanes, while a function is traced."""


@pytest.fixture(autouse=True)
def host_instructions(monkeypatch):
    monkeypatch.setattr(cute.arch, "fmin", host_minmax(cute.math.min))
    monkeypatch.setattr(cute.arch, "fmax", host_minmax(cute.math.max))
    monkeypatch.setattr(cute.arch, "inline_ptx", host_ptx)
    monkeypatch.setattr(cute.arch, "rcp_approx", lambda value: Float32(1.0) / value)
    monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", lambda value, step: others[-1])
    for module in (e2m1, fp8, mx, nvfp4):
        monkeypatch.setattr(module, "pack_e4m3", host_pack_e4m3)
    monkeypatch.setattr(nvfp4, "unpack_e4m3", host_unpack_e4m3)
    monkeypatch.setattr(nvfp4, "round_to_bf16", host_round_to_bf16)


def run_map(function, *inputs: np.ndarray, outputs: int = 1) -> list[np.ndarray]:
    """`function` of scalars, compiled for the host, for every element; outputs are 32-bit patterns."""

    @cute.jit
    def loop(arguments: list, results: list):
        for index in range(cute.size(results[0])):
            values = function(*[argument[index] for argument in arguments])
            values = values if isinstance(values, tuple) else (values,)
            for result, value in zip(results, values, strict=True):
                result[index] = value.bitcast(Int32)

    tensors = [torch.from_numpy(np.ascontiguousarray(value)) for value in inputs]
    results = [torch.empty(tensors[0].shape, dtype=torch.int32) for _ in range(outputs)]
    loop([from_dlpack(tensor) for tensor in tensors], [from_dlpack(result) for result in results])
    return [result.numpy().view(np.uint32) for result in results]


def e4m3_oracle(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, f32(-448), f32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


def test_host_e4m3():
    values = (np.arange(1 << 17, dtype=np.uint32) << 15).view(f32)
    (codes,) = run_map(host_e4m3, values)
    np.testing.assert_array_equal(codes, e4m3_oracle(values))


# ---- conversions and scale factors, number by number


def e2m1_code(value):
    """Hopper's code of 64 * value, with the host's e4m3."""
    return e2m1.nibbles(host_e4m3(e2m1.rounded(value)), Uint32(0)) & Uint32(0xF)


def e2m1_oracle(values: np.ndarray) -> np.ndarray:
    """Codes of float32; NaN, for which ml_dtypes has no rule, is 7."""
    with np.errstate(all="ignore"):
        codes = np.clip(values, f32(-6), f32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(7), codes)


def test_e2m1_of_every_bfloat16_and_around_every_boundary():
    edges = np.array([*MIDPOINTS, 0.5, 1, 1.5, 2, 3, 4, 6, 7, 8, np.inf, 2.0**-120, 2.0**-126], f32).view(np.uint32)
    near = (edges[:, None] + np.arange(-3, 4, dtype=np.int64)).ravel().astype(np.uint32)
    random = np.random.default_rng(20).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    bits = np.concatenate([np.arange(1 << 16, dtype=np.uint32) << 16, near, near | np.uint32(1 << 31), random])
    values = bits.view(f32)
    with np.errstate(all="ignore"):
        (codes,) = run_map(e2m1_code, values * f32(2.0**-6))
    np.testing.assert_array_equal(codes, e2m1_oracle(values))


def test_e2m1_of_every_float32_around_the_grid():
    """Every pattern whose v is from 1/8 to 8, and every 509th (a prime) of all, against the step function between
    the midpoints; a tie goes to the even code: up to an even code, down from an odd one."""
    starts = [int(f32(midpoint / 64).view(np.uint32)) + index % 2 for index, midpoint in enumerate(MIDPOINTS, start=1)]
    for first in [*range(0x3B000000, 0x3E000000, BATCH), None]:
        bits = np.arange(0, 1 << 31, 509) if first is None else np.arange(first, first + BATCH)
        bits = bits.astype(np.uint32)
        want = np.searchsorted(starts, bits, side="right")
        (codes,) = run_map(e2m1_code, bits.view(f32))
        np.testing.assert_array_equal(codes, want)
        (codes,) = run_map(e2m1_code, (bits | np.uint32(1 << 31)).view(f32))
        np.testing.assert_array_equal(codes, np.where(bits > INFINITY_BITS, 7, want | 8))


def test_nibbles_put_element_0_lowest():
    """Any sign, code and remains (bits 0 and 1) in every byte."""
    random = np.random.default_rng(1).integers(0, 256, (1 << 16, 8)).astype(np.uint8) & np.uint8(0x9F)
    even, odd = (np.ascontiguousarray(random[:, part::2]).view(np.uint32)[:, 0] for part in (0, 1))
    (packed,) = run_map(
        lambda a, b: e2m1.nibbles(a.bitcast(Uint32), b.bitcast(Uint32)), even.view(np.int32), odd.view(np.int32)
    )
    codes = (random >> 2 & 7) | (random >> 4 & 8)
    np.testing.assert_array_equal(packed.view(np.uint8).reshape(-1, 4), codes[:, 0::2] | codes[:, 1::2] << 4)


MAGNITUDES = (np.arange(INFINITY_BITS >> 16, dtype=np.uint32) << 16).view(f32)
"""Every finite bfloat16 >= 0."""
AMAX = np.concatenate([MAGNITUDES, [f32(np.inf)]])


def test_e8m0_rounds_up():
    edges = np.arange(1, 255, dtype=np.int64) << 23
    near = (edges[:, None] + np.arange(-2, 3)).ravel()
    bits = np.concatenate([near, np.arange(0, 0x7F000001, 997)])
    values = bits[(bits > 0x400000) & (bits <= 0x7F000000)].astype(np.uint32).view(f32)
    (codes,) = run_map(e8m0.round_up, values)
    fraction, exponent = np.frexp(values.astype(np.float64))
    np.testing.assert_array_equal(codes, exponent - (fraction == 0.5) + 127)
    (inverse,) = run_map(lambda byte: e8m0.inverse_power(byte.bitcast(Uint32)), np.arange(254, dtype=np.int32))
    np.testing.assert_array_equal(inverse.view(f32), np.ldexp(1.0, 127 - np.arange(254)))


def mxfp8_scales(amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(byte, whether the block lives) by the definition."""
    product = amax * (f32(1) / f32(448))
    fraction, exponent = np.frexp(product.astype(np.float64))
    lives = (product > 2.0**-127) & np.isfinite(amax)
    return np.where(lives, exponent - (fraction == 0.5) + 127, 0), lives


def mxfp4_scales(amax: np.ndarray) -> np.ndarray:
    """Biased exponent of amax rounded to one mantissa bit (half up), less 2, in exact arithmetic. Subnormals give 0."""
    fraction, exponent = np.frexp(np.where(np.isinf(amax), 2.0**128, amax.astype(np.float64)))
    carry = np.floor(fraction * 4 + 0.5) == 4
    return np.clip(exponent + carry + 126 - 2, 0, 254) * (amax >= 2.0**-126)


def test_mx_scales_of_every_amax():
    byte, mask = run_map(mx.mxfp8_scale, AMAX, outputs=2)
    want, lives = mxfp8_scales(AMAX)
    np.testing.assert_array_equal(byte, want)
    np.testing.assert_array_equal(mask, np.where(lives, 0xFFFFFFFF, 0))
    (byte,) = run_map(mx.mxfp4_scale, AMAX)
    np.testing.assert_array_equal(byte, mxfp4_scales(AMAX))


def fp8_scales(amax: np.ndarray) -> np.ndarray:
    return np.maximum(np.minimum(amax, MAX_BF16), f32(1e-4)) / f32(448)


def powers_up(values: np.ndarray) -> np.ndarray:
    fraction, exponent = np.frexp(values)
    return np.ldexp(f32(1), exponent - (fraction == 0.5)).astype(f32)


def test_fp8_scales_of_every_amax():
    scale, power, inverse = run_map(fp8_scale_functions, AMAX, outputs=3)
    np.testing.assert_array_equal(scale.view(f32), fp8_scales(AMAX))
    np.testing.assert_array_equal(power.view(f32), powers_up(fp8_scales(AMAX)))
    np.testing.assert_array_equal(power.view(f32) * inverse.view(f32), 1)


def fp8_scale_functions(amax):
    scale = fp8.scale_of(amax)
    power = fp8.power_of_two_up(scale)
    return scale, power, fp8.inverse_of_power(power)


@pytest.mark.parametrize("steps", [-2, -1, 0, 1, 2])
def test_fp8_quotient_of_every_scale_and_element(steps):
    """Every s that occurs; every x of the 21 binades up to its amax, below which all codes are 0; an inverse that is
    off by `steps`. The other test of steps = 0 takes x from everywhere."""
    amax = np.unique(np.maximum(MAGNITUDES, f32(1e-4)))
    scale = fp8_scales(amax)
    last = amax.view(np.uint32) >> 16
    if steps:
        last, scale = last[steps % 7 :: 7], scale[steps % 7 :: 7]
    index = np.maximum(last[:, None].astype(np.int64) - np.arange(21 * 128), 0).astype(np.uint32)
    x = (index << 16).view(f32).ravel()
    s = np.repeat(scale, 21 * 128)

    def divide(x, s):
        approximate = ((Float32(1.0) / s).bitcast(Int32) + Int32(steps)).bitcast(Float32)
        parts = fp8.inverse_parts(s, approximate)
        return fp8.quotient(x, *parts), parts[1]

    quotient, rest = run_map(divide, x, s, outputs=2)
    assert (rest.view(f32) > 0).all()
    want = x / s
    differs = quotient != want.view(np.uint32)
    np.testing.assert_array_equal(e4m3_oracle(quotient.view(f32)[differs]), e4m3_oracle(want[differs]))
    assert differs.mean() < 0.01


@pytest.mark.parametrize("nearest", [True, False])
def test_corrected_reciprocal_of_every_mantissa(nearest):
    """From both float32 around the true value, in the first and the last binade that `reciprocal` allows and in one.
    The one mantissa with all bits set needs the nearest, which the hardware gives: see `rcp.rn.f32`."""
    for exponent in (1, 127, 252):
        values = (np.arange(1 << 23, dtype=np.uint32) + np.uint32(exponent << 23)).view(f32)
        want = f32(1) / values
        below = want.astype(np.float64) * values < 1
        other = (want.view(np.uint32) + np.where(below, 1, -1).astype(np.uint32)).view(f32)
        (result,) = run_map(arith.corrected_reciprocal, values, want if nearest else other)
        wrong = np.flatnonzero(result.view(f32) != want)
        assert wrong.tolist() == ([] if nearest else [(1 << 23) - 1])


# ---- whole units


def encode_units(codec, words: np.ndarray, partners: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(payload bytes [N, 16], scale bits [N]) of `codec.encode` for units [N, words], on the CPU."""

    @cute.jit
    def loop(gX: cute.Tensor, gPartners: cute.Tensor, gScale: cute.Tensor, gQ: cute.Tensor, gBits: cute.Tensor):
        for unit in range(cute.size(gBits)):
            others.append(gPartners[unit])
            rX = cute.make_rmem_tensor(words.shape[1], Uint32)
            rQ = cute.make_rmem_tensor(4, Uint32)
            for word in cutlass.range_constexpr(words.shape[1]):
                rX[word] = gX[unit, word].bitcast(Uint32)
            gBits[unit] = codec.encode(rX, rQ, codec.state(gScale[unit])).bitcast(Int32)
            for word in cutlass.range_constexpr(4):
                gQ[unit, word] = rQ[word].bitcast(Int32)

    tensors = [torch.from_numpy(np.ascontiguousarray(value)) for value in (words.view(np.int32), partners, scale)]
    payload = torch.empty(len(words), 4, dtype=torch.int32)
    bits = torch.empty(len(words), dtype=torch.int32)
    loop(*map(from_dlpack, (*tensors, payload, bits)))
    return payload.numpy().view(np.uint8), bits.numpy().view(np.uint32)


def sample_units(elements: int) -> np.ndarray:
    """[N, elements] bfloat16 patterns as uint16: all magnitudes, exact ratios (ties), NaN, infinities, zeros."""
    rng = np.random.default_rng(elements)
    exponents = np.repeat(np.arange(-136, 129), 64)[:, None]
    shape = (len(exponents), elements)
    normal = rng.standard_normal(shape)
    wide = rng.standard_normal(shape) * 2.0 ** -rng.integers(0, 24, shape)
    ratios = rng.integers(-64, 65, shape) / 64 * rng.integers(128, 256, (shape[0], 1)) / 256
    ties = rng.choice([*MIDPOINTS, 0.5, 3, 6, -6, *np.negative(MIDPOINTS)], shape) / 8
    ties *= rng.integers(16, 32, (shape[0], 1)) / 32
    with np.errstate(over="ignore"):
        finite = np.concatenate([np.ldexp(part, exponents) for part in (normal, wide, ratios, ties)])
        finite = finite.astype(f32).astype(ml_dtypes.bfloat16).view(np.uint16)
    rare = finite.copy()
    chance = rng.random(rare.shape)
    for value, (low, high) in {
        0x7FC0: (0, 0.02),
        0xFFC1: (0.02, 0.04),
        0x0000: (0.04, 0.1),
        0x8000: (0.1, 0.2),
    }.items():
        rare[(low <= chance) & (chance < high)] = value
    infinite = rare[::16].copy()
    chance = rng.random(infinite.shape)
    infinite[chance < 0.05], infinite[chance > 0.95] = 0x7F80, 0xFF80
    anything = rng.integers(0, 1 << 16, (1 << 13, elements)).astype(np.uint16)
    special = np.array([0x0000, 0x8000, 0x7FFF, 0xFFFF, 0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x8001], np.uint16)
    few = special[rng.integers(0, len(special), (1 << 12, elements))]
    same = np.repeat(special[:, None], elements, axis=1)
    return np.concatenate([finite, rare, infinite, anything, few, same])


def to_f32(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(f32)


def largest(values: np.ndarray) -> np.ndarray:
    """Largest magnitude of each row, without NaN."""
    return np.where(np.isnan(values), f32(0), np.abs(values)).max(axis=-1)


def oracle(fmt: Format, x: np.ndarray, amax: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes [N, elements], scale bits [N]) by docs/numerics.md; `amax` [N, blocks of a unit]."""
    one = f32(1)
    blocks = x.reshape(*amax.shape, -1)
    if fmt.scale == "f32":
        s = fp8_scales(amax)
        s = powers_up(s) if fmt.power_of_two else s
        codes = e4m3_oracle(np.where(np.isnan(blocks), blocks, np.clip(blocks, -MAX_BF16, MAX_BF16)) / s[..., None])
        bits = s.view(np.uint32)
    elif fmt == MXFP8:
        bits, lives = mxfp8_scales(amax)
        inverse = one / np.ldexp(one, bits - 127).astype(f32)
        codes = np.where(lives[..., None], e4m3_oracle(blocks * inverse[..., None]), 0)
    elif fmt == MXFP4:
        bits = mxfp4_scales(amax).astype(np.int64)
        codes = e2m1_oracle(blocks * np.ldexp(one, 127 - bits).astype(f32)[..., None])
    else:
        multiplier, divisor = (one / scale, scale) if fmt.row_scale else (scale, one / scale)
        bits = e4m3_oracle(multiplier[:, None] * (amax * (one / f32(6))))
        decoded = bits.view(ml_dtypes.float8_e4m3fn).astype(f32)
        inverse = np.where(decoded == 0, f32(0), one / (decoded * divisor[:, None]))
        assert inverse.dtype == f32
        codes = e2m1_oracle(blocks * inverse[..., None])
    weight = 1 << 8 * np.arange(amax.shape[1], dtype=np.int64)
    return codes.reshape(x.shape).astype(np.uint8), (bits.astype(np.int64) * weight).sum(axis=1).astype(np.uint32)


GLOBAL_SCALES = np.array([1, 2.0**100, 2.0**-100, 1 / 3, 527.3, 2.0**-20, 2688 / 1e33, 2.0**40 * 1.7], f32)


def scales_for(fmt: Format, amax: np.ndarray) -> np.ndarray:
    """The scale that each unit's `state` gets. Row scales: of a row whose maximum is 1 to 2**12 times the unit's, or
    the unit's 6th part divided by a power of two, which makes products hit ties."""
    index = np.arange(len(amax))
    if fmt != NVFP4_ROW:
        return GLOBAL_SCALES[index % len(GLOBAL_SCALES)]
    rows = np.where(index % 2, np.ldexp(amax, index % 13), np.ldexp(amax * 448, -(index // 2 % 9)))
    return row_scales(np.maximum(rows, amax).astype(f32))


def row_scales(amax: np.ndarray) -> np.ndarray:
    scale = np.clip(amax / f32(2688), f32(2.0**-100), f32(2.0**100)).astype(ml_dtypes.bfloat16).astype(f32)
    return np.where(amax == 0, f32(1), scale)


def test_row_scale_of_every_amax():
    (scale,) = run_map(nvfp4.row_scale, AMAX)
    np.testing.assert_array_equal(scale.view(f32), row_scales(AMAX))


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("fmt", [FP8, FP8_POW2, MXFP8, MXFP4, NVFP4, NVFP4_ROW], ids=lambda fmt: fmt.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_encode(fmt, arch, monkeypatch):
    """Every byte of every unit of a wide sample."""
    if arch == BLACKWELL:
        monkeypatch.setattr(e2m1, "pack_e2m1", host_pack_e2m1)
    elements = unit_elements(fmt)
    patterns = sample_units(elements)
    x = to_f32(patterns)
    assert np.isnan(x).any() and np.isinf(x).any()
    amax = largest(x.reshape(len(x), -1, min(fmt.block, elements)))
    partners = np.zeros(len(x), f32)
    if block_lanes(fmt) > 1:
        partners[1::2] = np.roll(amax[:, 0], 7)[1::2]
        amax = np.maximum(amax, partners[:, None])
    scale = scales_for(fmt, amax.max(axis=1))
    want, want_bits = oracle(fmt, x, amax, scale)
    if fmt.bits == 4:
        want = want[:, 0::2] | want[:, 1::2] << 4
    words = patterns.view(np.uint32)
    assert words.shape[1] == 4 * source_vectors(fmt)
    payload, bits = encode_units(codec_for(fmt, arch), words, partners, scale)
    np.testing.assert_array_equal(bits, want_bits)
    np.testing.assert_array_equal(payload, want)


def test_bf16_copies():
    patterns = sample_units(8)
    payload, bits = encode_units(
        codec_for(FORMATS["bf16"], HOPPER), patterns.view(np.uint32), *np.zeros((2, len(patterns)), f32)
    )
    np.testing.assert_array_equal(payload.view(np.uint16), patterns)
    assert not bits.any()
