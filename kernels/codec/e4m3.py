"""e4m3 (8-bit float, largest 448): the hardware's conversions, to nearest even, saturating; NaN gives 0x7F."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Uint32


@cute.jit
def pack_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four float32 as four codes, `a` in the lowest byte."""
    rY = cute.make_rmem_tensor(4, Float32)
    rY[0], rY[1], rY[2], rY[3] = a, b, c, d
    rQ = cute.make_rmem_tensor(4, Float8E4M3FN)
    rQ.store(rY.load().to(Float8E4M3FN))
    return cute.recast_tensor(rQ, Uint32)[0]


@cute.jit
def unpack_e4m3(codes: Uint32) -> cute.Tensor:
    """Four codes as a register tensor of four float32."""
    rQ = cute.make_rmem_tensor(4, Float8E4M3FN)
    cute.recast_tensor(rQ, Uint32)[0] = codes
    rY = cute.make_rmem_tensor(4, Float32)
    rY.store(rQ.load().to(Float32))
    return rY
