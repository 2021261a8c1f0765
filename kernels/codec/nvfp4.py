"""NVFP4: e2m1 payload, one e4m3 scale for 16 elements, one float32 global scale G for the tensor.

    scale   = e4m3(G * (amax * (1/6)))              round to nearest even, saturating at 448
    inverse = 1 / (scale * (1/G)), 0 if scale is 0  IEEE divisions, where others use the approximate reciprocal
    code    = e2m1(x * inverse)

amax ignores NaN elements. A consumer dequantises as  code * scale / G.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int64, Uint8, Uint16, Uint32

from cute_ep.kernels.arith import halves, magnitude
from cute_ep.kernels.codec.e2m1 import pack_e2m1
from cute_ep.layouts.device import pointer
from cute_ep.layouts.formats import NVFP4

BLOCK_WORDS = NVFP4.block // 2
BLOCKS = 2
"""Blocks in one unit of 32 elements."""


class Nvfp4Codec:
    """Encodes 32 elements into 16 payload bytes and 2 scale bytes.

    Args:
        hardware: use the e2m1 conversion instruction (sm_100 and later) instead of integer code.
    """

    fmt = NVFP4

    def __init__(self, hardware: bool) -> None:
        self.hardware = hardware

    @cute.jit
    def prepare(self, global_scale: Int64):
        scale = Float32(1.0)
        if global_scale != Int64(0):
            scale = cute.arch.load(pointer(global_scale, Float32), Float32)
        return scale, Float32(1.0) / scale

    @cute.jit
    def encode(self, rX, rQ, state):
        global_scale, inverse_global = state
        rScale = cute.make_rmem_tensor(4, Float32)
        rScale.fill(0.0)
        for block in cutlass.range_constexpr(BLOCKS):
            amax = Float32(0.0)
            for word in cutlass.range_constexpr(BLOCK_WORDS):
                low, high = halves(rX[block * BLOCK_WORDS + word])
                amax = cute.arch.fmax(cute.arch.fmax(magnitude(low), magnitude(high)), amax)
            rScale[block] = global_scale * (amax * Float32(1.0 / 6.0))
        rScale8 = cute.make_rmem_tensor(4, Float8E4M3FN)
        rScale8.store(rScale.load().to(Float8E4M3FN))
        rScale.store(rScale8.load().to(Float32))
        rY = cute.make_rmem_tensor(8, Float32)
        for block in cutlass.range_constexpr(BLOCKS):
            inverse = Float32(0.0)
            if rScale[block] != Float32(0.0):
                inverse = Float32(1.0) / (rScale[block] * inverse_global)
            for half in cutlass.range_constexpr(2):
                for pair in cutlass.range_constexpr(4):
                    low, high = halves(rX[block * BLOCK_WORDS + half * 4 + pair])
                    rY[2 * pair] = low * inverse
                    rY[2 * pair + 1] = high * inverse
                rQ[2 * block + half] = pack_e2m1(rY, self.hardware)
        rBytes = cute.recast_tensor(rScale8, Uint8)
        return Uint16(Uint32(rBytes[0]) | (Uint32(rBytes[1]) << 8))
