"""e2m3 and e3m2 (6-bit floats): to nearest even, saturating; bit 5 is the sign, kept also for zero; NaN gives 0x1F.

Every target has the conversions to e4m3 and e5m2, whose mantissas are as long. They make 6-bit codes of v divided by a
power of two that puts the smallest normal numbers on each other, and with them subnormals, steps and codes:

    e2m3:  1 = 2**0   at e4m3's 2**-6:    magnitude = e4m3(v / 2**6) & 0x1F
    e3m2:  1/4 = 2**-2 at e5m2's 2**-14:  magnitude = e5m2(v / 2**12) & 0x1F

Codes above 0x1F do not occur: a block's factor keeps |v| below what rounds to more than 7.5 or 28. Of NaN, e4m3 makes
0x7F without a sign; for e3m2, NaN becomes the largest number before it is converted. sm_100 has conversions to 6 bits,
one in a byte, which would only spare moving the sign; so all targets compute alike.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E5M2, Float32, Uint32

from cute_ep.kernels.codec.e2m1 import limit
from cute_ep.kernels.codec.e4m3 import pack_e4m3
from cute_ep.kernels.device.arith import halves
from cute_ep.layouts.maps.formats import E2M3, E4M3, Element

E5M2_BIAS = 15
"""What the exponent field of an e5m2 is above the exponent."""


@cute.jit
def pack_e5m2(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four float32 as four e5m2 codes, `a` in the lowest byte."""
    rY = cute.make_rmem_tensor(4, Float32)
    rY[0], rY[1], rY[2], rY[3] = a, b, c, d
    rQ = cute.make_rmem_tensor(4, Float8E5M2)
    rQ.store(rY.load().to(Float8E5M2))
    return cute.recast_tensor(rQ, Uint32)[0]


def prescale(element: Element) -> float:
    """What elements are multiplied by, besides their block's inverse, before `encode_fp6` converts them."""
    wide = E4M3.bias if element == E2M3 else E5M2_BIAS
    return 2.0 ** (element.bias - wide)


def join_codes(codes: Uint32) -> Uint32:
    """24 bits of four 6-bit codes, the first one lowest, from four 8-bit codes: their signs and lowest five bits."""
    six = (codes & Uint32(0x1F1F1F1F)) | ((codes >> 2) & Uint32(0x20202020))
    pairs = (six & Uint32(0x003F003F)) | ((six >> 2) & Uint32(0x0FC00FC0))
    return (pairs & Uint32(0xFFF)) | ((pairs >> 4) & Uint32(0xFFF000))


@cute.jit
def encode_fp6(
    rX: cute.Tensor, first: cutlass.Constexpr, inverse: Float32, element: cutlass.Constexpr
) -> tuple[Uint32, Uint32, Uint32]:
    """Three payload words: 6-bit codes of x * inverse / prescale of the 16 bfloat16 in words `first` .. `first` + 7."""
    parts = []
    for group in cutlass.range_constexpr(4):
        values = [value * inverse for pair in range(2) for value in halves(rX[first + 2 * group + pair])]
        if cutlass.const_expr(element == E2M3):
            parts.append(join_codes(pack_e4m3(*values)))
        else:
            largest = element.largest * prescale(element)
            parts.append(join_codes(pack_e5m2(*[limit(value, largest) for value in values])))
    a, b, c, d = parts
    return a | (b << 24), (b >> 8) | (c << 16), (c >> 16) | (d << 8)
