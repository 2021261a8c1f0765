"""fp8 and fp8_pow2: e4m3 payload, one float32 scale for 128 elements.

    s    = max(min(amax, 0x7F7F), 1e-4) / 448, or the smallest power of two >= that
    code = e4m3(clamp(x) / s)

Both are IEEE divisions, done by multiplications: with h near 1 / s and l = (1 - s * h) * h, which is what h lacks,

    x / s = x * h + x * l,    computed as fma(x, h, x * l)

is off by less than 2**-40 of itself before its one rounding. There are only 18095 numbers s and 7 bits of x, so
`tests/kernels/test_codec.py` compares e4m3 of this with e4m3 of the division for all of them; the same for amax / 448,
where (h, l) are constants. One multiplication by 1 / s is not enough: 26 of 128 mantissas of s give wrong ties.
An infinite x, whose block has s = 0x7F7F / 448, must give 448: h is taken too small, so l > 0 and nothing cancels.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_ep.kernels.codec.base import UnscaledCodec, block_lanes
from cute_ep.kernels.codec.e4m3 import pack_e4m3
from cute_ep.kernels.codec.e8m0 import MANTISSA
from cute_ep.kernels.device.arith import LARGEST_BF16, halves, lanes_max, unit_amax

UNIT_WORDS = 8
POWER_TIMES_INVERSE = 0x7F000000
"""Sum of the float32 bits of a power of two and of its inverse."""
LARGEST_PAIR = 0x7F7F7F7F
"""LARGEST_BF16 twice."""
FLOOR = 1e-4
INVERSE_448 = 9586981 * 2.0**-32
"""The float32 nearest to 1 / 448."""
INVERSE_448_REST = 1 / 448 - INVERSE_448
BELOW = 4
"""Float32 steps from the approximate inverse (within 2 of the true one) down to h."""


def scale_of(amax: Float32) -> Float32:
    """max(min(amax, 0x7F7F), 1e-4) / 448 of a bfloat16 value, as if by division."""
    limited = cute.math.max(cute.math.min(amax, Float32(LARGEST_BF16)), Float32(FLOOR))
    return quotient(limited, Float32(INVERSE_448), Float32(INVERSE_448_REST))


def inverse_parts(scale: Float32, approximate: Float32) -> tuple[Float32, Float32]:
    """(h, l) of a scale, given its inverse within 2 float32 steps."""
    inverse = (approximate.bitcast(Uint32) - Uint32(BELOW)).bitcast(Float32)
    rest = cute.math.fma(-scale, inverse, Float32(1.0))
    return inverse, rest * inverse


def quotient(x: Float32, inverse: Float32, rest: Float32) -> Float32:
    """x divided by the number whose inverse is inverse + rest."""
    return cute.math.fma(x, inverse, x * rest)


def power_of_two_up(scale: Float32) -> Float32:
    """The smallest power of two >= scale, for normal numbers up to 2**127."""
    return ((scale.bitcast(Uint32) + Uint32(MANTISSA)) & Uint32(~MANTISSA & 0xFFFFFFFF)).bitcast(Float32)


def inverse_of_power(power: Float32) -> Float32:
    """1 / power, for powers of two from 2**-126 to 2**126."""
    return (Uint32(POWER_TIMES_INVERSE) - power.bitcast(Uint32)).bitcast(Float32)


def clamp_pair(word: Uint32) -> Uint32:
    """Both bfloat16 of a word limited to the largest finite magnitude; NaN stays."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 limit; mov.b32 limit, {LARGEST_PAIR:#x}; min.NaN.xorsign.abs.bf16x2 {{$w0}}, {{$r0}}, limit; }}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


class Fp8Codec(UnscaledCodec):
    """Encodes 16 elements, an eighth of a block; scale bits are those of the float32."""

    @cute.jit
    def encode(self, rX: cute.Tensor, rQ: cute.Tensor, state: None) -> Uint32:
        amax = lanes_max(unit_amax(rX, UNIT_WORDS), block_lanes(self.fmt))
        scale = scale_of(amax)
        if cutlass.const_expr(self.fmt.power_of_two):
            if amax > Float32(LARGEST_BF16):  # rare, and an infinite quotient would saturate too high
                for word in cutlass.range_constexpr(UNIT_WORDS):
                    rX[word] = clamp_pair(rX[word])
            scale = power_of_two_up(scale)
            inverse, rest = inverse_of_power(scale), None
        else:
            inverse, rest = inverse_parts(scale, cute.arch.rcp_approx(scale))
        for word in cutlass.range_constexpr(4):
            values = [value for pair in range(2) for value in halves(rX[2 * word + pair])]
            rQ[word] = pack_e4m3(*[self.scaled(value, inverse, rest) for value in values])
        return scale.bitcast(Uint32)

    def scaled(self, x: Float32, inverse: Float32, rest: Float32 | None) -> Float32:
        return x * inverse if self.fmt.power_of_two else quotient(x, inverse, rest)
