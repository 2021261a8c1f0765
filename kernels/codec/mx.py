"""mxfp8, mxfp6 and mxfp4: e4m3, e2m3, e3m2 or e2m1 payload, one e8m0 scale for 32 elements, so elements are scaled
exactly.

mxfp8:       s = e8m0(amax * (1/448)), code = e4m3(x * 2**(127 - s)); a dead block has s = 0 and zeros
mxfp6, mxfp4: s = max(E - e, 0), E the biased exponent of amax rounded to the mantissa bits of an element, half up,
              e the exponent of the largest element; code = e2m1(x * 2**(127 - s)) and so on
mxfp6:       a block with s = 0 or an infinite amax is dead, too
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_ep.kernels.codec import fp6
from cute_ep.kernels.codec.base import UnscaledCodec, block_lanes
from cute_ep.kernels.codec.e2m1 import encode_e2m1, prescale
from cute_ep.kernels.codec.e4m3 import pack_e4m3
from cute_ep.kernels.codec.e8m0 import MANTISSA_BITS, SMALLEST, inverse_power, round_up
from cute_ep.kernels.device.arith import halves, lanes_max, unit_amax
from cute_ep.layouts.maps.formats import Element

INFINITY = 0x7F800000


@cute.jit
def mxfp8_scale(amax: Float32) -> tuple[Uint32, Uint32]:
    """(s, mask of the payload): all ones, or zero for a dead block: amax infinite or amax * (1/448) <= 2**-127."""
    scale = amax * Float32(1 / 448)
    byte, mask = round_up(scale), Uint32(0xFFFFFFFF)
    if scale.bitcast(Uint32) - Uint32(SMALLEST + 1) >= Uint32(INFINITY - SMALLEST - 1):
        byte, mask = Uint32(0), Uint32(0)
    return byte, mask


def even_scale(amax: Float32, element: Element) -> Uint32:
    """s of mxfp6 and mxfp4: at most 255 - e, which is that of an infinite amax."""
    half = 1 << (MANTISSA_BITS - element.mantissa - 1)  # of the lowest bit that stays
    exponent = (amax.bitcast(Uint32) + Uint32(half)) >> MANTISSA_BITS
    return cutlass.max(exponent, Uint32(element.largest_exponent)) - Uint32(element.largest_exponent)


@cute.jit
def mxfp6_scale(amax: Float32, element: cutlass.Constexpr) -> tuple[Uint32, Uint32]:
    """(s, mask of the payload): all ones, or zero for a dead block."""
    byte, mask = even_scale(amax, element), Uint32(0xFFFFFFFF)
    if (byte == Uint32(0)) | (amax.bitcast(Uint32) == Uint32(INFINITY)):
        byte, mask = Uint32(0), Uint32(0)
    return byte, mask


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


class Mxfp6Codec(UnscaledCodec):
    """Encodes 32 elements, one block, into six words."""

    @cute.jit
    def encode(self, rX: cute.Tensor, rQ: cute.Tensor, state: None) -> Uint32:
        byte, mask = mxfp6_scale(unit_amax(rX, 16), self.fmt.element)
        inverse = inverse_power(byte) * Float32(fp6.prescale(self.fmt.element))  # 2**-136 at least: subnormal, exact
        for group in cutlass.range_constexpr(2):
            words = fp6.encode_fp6(rX, 8 * group, inverse, self.fmt.element)
            for word in cutlass.range_constexpr(3):
                rQ[3 * group + word] = words[word] & mask
        return byte


class Mxfp4Codec(UnscaledCodec):
    """Encodes 32 elements, one block."""

    @cute.jit
    def encode(self, rX: cute.Tensor, rQ: cute.Tensor, state: None) -> Uint32:
        byte = even_scale(unit_amax(rX, 16), self.fmt.element)
        inverse = inverse_power(byte) * Float32(prescale(self.hardware))  # 2**-132 at least: subnormal, exact
        for word in cutlass.range_constexpr(4):
            rQ[word] = encode_e2m1(rX, 4 * word, inverse, self.hardware)
        return byte
