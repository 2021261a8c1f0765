"""mxfp8 and mxfp4: e4m3 or e2m1 payload, one e8m0 scale for 32 elements, so elements are scaled exactly.

mxfp8: s = e8m0(amax * (1/448)), code = e4m3(x * 2**(127 - s)); a dead block has s = 0 and zeros
mxfp4: s = max(E - 2, 0), E the biased exponent of amax rounded to one mantissa bit, half up;
       code = e2m1(x * 2**(127 - s))
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_ep.kernels.codec.base import UnscaledCodec, block_lanes
from cute_ep.kernels.codec.e2m1 import encode_e2m1, prescale
from cute_ep.kernels.codec.e4m3 import pack_e4m3
from cute_ep.kernels.codec.e8m0 import MANTISSA_BITS, SMALLEST, inverse_power, round_up
from cute_ep.kernels.device.arith import halves, lanes_max, unit_amax

INFINITY = 0x7F800000
HALF_MANTISSA_BIT = 0x200000
"""Half of the highest mantissa bit but one: added to float32 bits it rounds to one mantissa bit, half up."""
LARGEST_EXPONENT = 2
"""Exponent of the largest e2m1 number, 6 = 1.5 * 2**2."""


@cute.jit
def mxfp8_scale(amax: Float32) -> tuple[Uint32, Uint32]:
    """(s, mask of the payload): all ones, or zero for a dead block: amax infinite or amax * (1/448) <= 2**-127."""
    scale = amax * Float32(1 / 448)
    byte, mask = round_up(scale), Uint32(0xFFFFFFFF)
    if scale.bitcast(Uint32) - Uint32(SMALLEST + 1) >= Uint32(INFINITY - SMALLEST - 1):
        byte, mask = Uint32(0), Uint32(0)
    return byte, mask


def mxfp4_scale(amax: Float32) -> Uint32:
    """s: at most 253, which is that of an infinite amax."""
    exponent = (amax.bitcast(Uint32) + Uint32(HALF_MANTISSA_BIT)) >> MANTISSA_BITS
    return cutlass.max(exponent, Uint32(LARGEST_EXPONENT)) - Uint32(LARGEST_EXPONENT)


class Mxfp8Codec(UnscaledCodec):
    """Encodes 16 elements, half a block."""

    @cute.jit
    def encode(self, rX: cute.Tensor, rQ: cute.Tensor, state: None) -> Uint32:
        byte, mask = mxfp8_scale(lanes_max(unit_amax(rX, 8), block_lanes(self.fmt)))
        inverse = inverse_power(byte)
        for word in cutlass.range_constexpr(4):
            values = [value for pair in range(2) for value in halves(rX[2 * word + pair])]
            rQ[word] = pack_e4m3(*[value * inverse for value in values]) & mask
        return byte


class Mxfp4Codec(UnscaledCodec):
    """Encodes 32 elements, one block."""

    @cute.jit
    def encode(self, rX: cute.Tensor, rQ: cute.Tensor, state: None) -> Uint32:
        byte = mxfp4_scale(unit_amax(rX, 16))
        inverse = inverse_power(byte) * Float32(prescale(self.hardware))  # 2**-132 at least: subnormal, exact
        for word in cutlass.range_constexpr(4):
            rQ[word] = encode_e2m1(rX, 4 * word, inverse, self.hardware)
        return byte
