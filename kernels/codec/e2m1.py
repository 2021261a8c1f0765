"""float32 -> e2m1 (4-bit float), round to nearest even, saturating at 6.

Codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign, kept also for zero. NaN gives 0x7. The hardware
instruction (sm_100 and later) does the same; the integer form below also runs on the CPU, where it is compared with
the reference for every case that rounds differently.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float32, Uint32

ONE = 0x3F800000
INFINITY = 0x7F800000
LARGEST_CODE = 7


@cute.jit
def e2m1_code(value: Float32) -> Uint32:
    """The 4-bit code of `value`, in integer arithmetic."""
    bits = value.bitcast(Uint32)
    magnitude = bits & Uint32(0x7FFFFFFF)
    # From 1 up the code counts half-octaves: round the float's mantissa to one bit, ties to even.
    rounded = (magnitude + Uint32(0x1FFFFF) + ((magnitude >> 22) & Uint32(1))) >> 22
    code = cutlass.min(rounded - Uint32((ONE >> 22) - 2), Uint32(LARGEST_CODE))
    if magnitude < Uint32(ONE):  # grid 0, 0.5, 1: ties at 0.25 and 0.75 go to the even code
        code = Uint32(magnitude > Uint32(0x3E800000)) + Uint32(magnitude >= Uint32(0x3F400000))
    sign = (bits >> 28) & Uint32(8)
    if magnitude > Uint32(INFINITY):
        sign = Uint32(0)
    return code | sign


@cute.jit
def pack_e2m1(rY, hardware: cutlass.Constexpr) -> Uint32:
    """Eight float32 of `rY` as eight codes, element 0 in the lowest nibble."""
    packed = Uint32(0)
    if cutlass.const_expr(hardware):
        rQ = cute.make_rmem_tensor(8, Float4E2M1FN)
        rQ.store(rY.load().to(Float4E2M1FN))
        packed = cute.recast_tensor(rQ, Uint32)[0]
    else:
        for element in cutlass.range_constexpr(8):
            packed = packed | (e2m1_code(rY[element]) << (4 * element))
    return packed
