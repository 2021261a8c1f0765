"""Conversions and scale factors of the codecs, number by number, against the formulas of docs/numerics.md: device code,
run on the CPU."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, Uint32

from cute_ep.kernels.codec import e2m1, e8m0, fp6, fp8, mx, nvfp4
from cute_ep.kernels.device import arith
from cute_ep.layouts.maps.formats import E2M1, E2M3, E3M2

from .codec_oracle import (
    AMAX,
    INFINITY_BITS,
    MAGNITUDES,
    MIDPOINTS,
    e2m1_oracle,
    e4m3_oracle,
    even_scales,
    f32,
    fp8_scales,
    mxfp6_scales,
    mxfp8_scales,
    powers_up,
    row_scales,
    six_bit_oracle,
)
from .host import host_e4m3, host_e5m2, run_map

pytestmark = pytest.mark.usefixtures("host_instructions")

BATCH = 1 << 23
TYPES = {E2M3: ml_dtypes.float6_e2m3fn, E3M2: ml_dtypes.float6_e3m2fn}


# ---- elements


def test_the_stand_in_for_the_e4m3_instruction_is_right():
    values = (np.arange(1 << 17, dtype=np.uint32) << 15).view(f32)
    (codes,) = run_map(host_e4m3, values)
    np.testing.assert_array_equal(codes, e4m3_oracle(values))


def e2m1_code(value):
    """Hopper's code of 64 * value, with the host's e4m3."""
    return e2m1.nibbles(host_e4m3(e2m1.rounded(value)), Uint32(0)) & Uint32(0xF)


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


WIDE = {E2M3: host_e4m3, E3M2: host_e5m2}
"""What a number of 6 bits is converted to first."""


def test_the_stand_in_for_the_e5m2_instruction_is_right():
    values = (np.arange(1 << 17, dtype=np.uint32) << 15).view(f32)
    with np.errstate(all="ignore"):
        want = np.clip(values, f32(-57344), f32(57344)).astype(ml_dtypes.float8_e5m2).view(np.uint8)
    (codes,) = run_map(host_e5m2, values)
    np.testing.assert_array_equal(codes, np.where(np.isnan(values), np.uint8(0x7F), want))


@pytest.mark.parametrize("element", WIDE, ids=lambda element: element.name)
def test_six_bits_of_every_float32_that_a_block_may_hold(element):
    """Every 127th pattern (a prime) of both signs below what rounds to more than the largest number, and NaN: the code
    of v times `prescale` is that of v. Between two boundaries are far more than 127 patterns."""
    limit = int(f32({E2M3: 7.75, E3M2: 30}[element]).view(np.uint32))
    edges = (np.arange(1, 32)[:, None] + np.array([0, 0.5])).ravel()
    numbers = np.interp(edges, np.arange(32), np.arange(32, dtype=np.uint8).view(TYPES[element]).astype(f32))
    near = (numbers.astype(f32).view(np.uint32)[:, None] + np.arange(-3, 4)).ravel()
    bits = np.concatenate([np.arange(0, limit, 127), near[near < limit], [0x7FC00000, 0x7FFFFFFF]]).astype(np.uint32)
    for sign in (0, 1 << 31):
        values = (bits | np.uint32(sign)).view(f32)
        scaled = values * f32(fp6.prescale(element))
        (packed,) = run_map(lambda value: fp6.join_codes(WIDE[element](value)), scaled)
        np.testing.assert_array_equal(packed, six_bit_oracle(values, element))


def test_four_codes_of_six_bits_are_joined_to_24():
    """Any bits in the four bytes."""
    random = np.random.default_rng(2).integers(0, 256, (1 << 16, 4)).astype(np.uint8)
    (packed,) = run_map(lambda word: fp6.join_codes(word.bitcast(Uint32)), random.view(np.int32)[:, 0])
    codes = (random & 0x1F | random >> 2 & 0x20).astype(np.uint32)
    want = codes[:, 0] | codes[:, 1] << 6 | codes[:, 2] << 12 | codes[:, 3] << 18
    np.testing.assert_array_equal(packed, want)


@pytest.mark.parametrize("element", WIDE, ids=lambda element: element.name)
def test_no_element_of_a_living_block_is_beyond_what_rounds_to_the_largest_number(element):
    """For every amax, so that codes above 0x1F never come but from NaN."""
    byte, lives = mxfp6_scales(AMAX, element)
    with np.errstate(all="ignore"):
        scaled = (AMAX * np.ldexp(f32(1), 127 - byte.astype(np.int64)))[lives]
    assert scaled.max() < {E2M3: 7.75, E3M2: 30}[element] and scaled.min() >= {E2M3: 3.875, E3M2: 15}[element]


# ---- scale factors


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


def test_mx_scales_of_every_amax():
    byte, mask = run_map(mx.mxfp8_scale, AMAX, outputs=2)
    want, lives = mxfp8_scales(AMAX)
    np.testing.assert_array_equal(byte, want)
    np.testing.assert_array_equal(mask, np.where(lives, 0xFFFFFFFF, 0))
    (byte,) = run_map(partial(mx.even_scale, element=E2M1), AMAX)
    np.testing.assert_array_equal(byte, even_scales(AMAX, E2M1))
    for element in (E2M3, E3M2):
        byte, mask = run_map(lambda amax, element=element: mx.mxfp6_scale(amax, element), AMAX, outputs=2)
        want, lives = mxfp6_scales(AMAX, element)
        np.testing.assert_array_equal(byte, want)
        np.testing.assert_array_equal(mask, np.where(lives, 0xFFFFFFFF, 0))


def test_fp8_scales_of_every_amax():
    scale, power, inverse = run_map(fp8_scale_functions, AMAX, outputs=3)
    np.testing.assert_array_equal(scale.view(f32), fp8_scales(AMAX))
    np.testing.assert_array_equal(power.view(f32), powers_up(fp8_scales(AMAX)))
    np.testing.assert_array_equal(power.view(f32) * inverse.view(f32), 1)


def fp8_scale_functions(amax):
    scale = fp8.scale_of(amax)
    power = fp8.power_of_two_up(scale)
    return scale, power, fp8.inverse_of_power(power)


def test_row_scale_of_every_amax():
    (scale,) = run_map(nvfp4.row_scale, AMAX)
    np.testing.assert_array_equal(scale.view(f32), row_scales(AMAX))


# ---- divisions


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
