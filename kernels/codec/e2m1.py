"""e2m1 (4-bit float): to nearest even on 0, 0.5, 1, 1.5, 2, 3, 4, 6, saturating at 6; bit 3 is the sign, kept also
for zero; NaN gives 0x7.

From sm_100 on there is an instruction. Hopper rounds v in float32 and takes the code from an e4m3 code. All of the
following have the sign of v, and are computed divided by 64:

    c  = v limited to 6; NaN gives +6
    p  = 2**e, the power of two at or below max(|c|, 1)
    r' = fma(p, 2**22, c)              the float32 from p * 2**22 on are 2**(e - 1) apart, as are the e2m1 numbers
                                       around c: this rounds c to nearest even among them
    r  = fma(p, -(2**22 - 1/4), r')    rounded c + p / 4, exact

p / 4 is half a step: it does not reach the next e2m1 number, and gives a rounded c of 0 its sign. r / 64 is an e4m3
number; bits 2..4 of its code are the e2m1 code (0.5 is subnormal in both), bits 0..1 remains of p / 4.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float32, Uint32

from cute_ep.kernels.codec.e4m3 import pack_e4m3
from cute_ep.kernels.device.arith import halves

WORD_ELEMENTS = 8
"""Elements of one payload word."""
UNIT = 2.0**-6
SIGN_AND_EXPONENT = 0xFF800000


def prescale(hardware: bool) -> float:
    """What elements are multiplied by, besides their block's inverse, before `pack_e2m1`."""
    return 1.0 if hardware else UNIT


def limit(value: Float32, largest: float) -> Float32:
    """`value` with a magnitude of at most `largest`; +NaN gives +largest. One instruction."""
    return cute.arch.fmin(value, Float32(largest), abs=True)


def raise_to(value: Float32, smallest: float) -> Float32:
    """`value` with a magnitude of at least `smallest`. One instruction."""
    return cute.arch.fmax(value, Float32(smallest), abs=True)


def rounded(value: Float32) -> Float32:
    """r / 64 of the formulas above for v = 64 * value."""
    c = limit(value, 6 * UNIT)
    p = (raise_to(c, UNIT).bitcast(Uint32) & Uint32(SIGN_AND_EXPONENT)).bitcast(Float32)
    r = cute.math.fma(p, Float32(2.0**22), c)
    return cute.math.fma(p, Float32(0.25 - 2.0**22), r)


def nibbles(even: Uint32, odd: Uint32) -> Uint32:
    """Eight e2m1 codes from the e4m3 codes of r / 64: elements 0, 2, 4, 6 in `even`, 1, 3, 5, 7 in `odd`."""
    low = ((even >> 2) & Uint32(0x07070707)) | ((even >> 4) & Uint32(0x08080808))
    high = ((odd << 2) & Uint32(0x70707070)) | (odd & Uint32(0x80808080))
    return low | high


@cute.jit
def pack_e2m1(rY: cute.Tensor, hardware: cutlass.Constexpr) -> Uint32:
    """Eight float32 of `rY`, already multiplied by `prescale`, as eight codes, element 0 in the lowest nibble."""
    packed = Uint32(0)
    if cutlass.const_expr(hardware):
        rQ = cute.make_rmem_tensor(WORD_ELEMENTS, Float4E2M1FN)
        rQ.store(rY.load().to(Float4E2M1FN))
        packed = cute.recast_tensor(rQ, Uint32)[0]
    else:
        even = pack_e4m3(*[rounded(rY[element]) for element in range(0, WORD_ELEMENTS, 2)])
        odd = pack_e4m3(*[rounded(rY[element]) for element in range(1, WORD_ELEMENTS, 2)])
        packed = nibbles(even, odd)
    return packed


@cute.jit
def encode_e2m1(rX: cute.Tensor, first: cutlass.Constexpr, inverse: Float32, hardware: cutlass.Constexpr) -> Uint32:
    """One payload word: e2m1(x * inverse / prescale) of the eight bfloat16 in words `first` .. `first` + 3 of rX."""
    rY = cute.make_rmem_tensor(WORD_ELEMENTS, Float32)
    for pair in cutlass.range_constexpr(WORD_ELEMENTS // 2):
        low, high = halves(rX[first + pair])
        rY[2 * pair] = low * inverse
        rY[2 * pair + 1] = high * inverse
    return pack_e2m1(rY, hardware)
