"""nvfp4 and nvfp4_row: e2m1 payload, one e4m3 scale for 16 elements, a global scale for the tensor or for the row.

    scale   = e4m3(G * (amax * (1/6)))
    inverse = 1 / (scale * R), 0 if scale is 0      IEEE division
    code    = e2m1(x * inverse)

nvfp4:     G is the caller's and R = 1 / G.
nvfp4_row: R = r is the row's and G = 1 / r.

Both are in [2**-100, 2**100], so every inverse is a normal number, also times `prescale`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from cute_ep.kernels.codec.e2m1 import encode_e2m1, prescale
from cute_ep.kernels.codec.e4m3 import pack_e4m3, unpack_e4m3
from cute_ep.kernels.device.arith import reciprocal, unit_amax
from cute_ep.layouts.maps.formats import Format

BLOCKS = 2
"""Blocks in one unit of 32 elements."""
BLOCK_WORDS = 8
LARGEST_CODES = 6.0 * 448.0
SMALLEST_ROW_SCALE, LARGEST_ROW_SCALE = 2.0**-100, 2.0**100


def round_to_bf16(value: Float32) -> Float32:
    """The nearest bfloat16."""
    return value.to(BFloat16).to(Float32)


@cute.jit
def row_scale(amax: Float32) -> Float32:
    """bfloat16(min(max(amax / 2688, 2**-100), 2**100)), 1 for amax = 0."""
    scale = cute.math.min(amax / Float32(LARGEST_CODES), Float32(LARGEST_ROW_SCALE))
    scale = round_to_bf16(cute.math.max(scale, Float32(SMALLEST_ROW_SCALE)))
    if amax == Float32(0.0):
        scale = Float32(1.0)
    return scale


class Nvfp4Codec:
    """Encodes 32 elements, two blocks.

    Args:
        hardware_fp4: the target has the e2m1 conversion (sm_100 and later).
    """

    def __init__(self, fmt: Format, hardware_fp4: bool) -> None:
        self.fmt, self.hardware = fmt, hardware_fp4

    @cute.jit
    def state(self, scale: Float32) -> tuple[Float32, Float32]:
        """(G, R / `prescale`)."""
        inverse = reciprocal(scale)
        multiplier, divisor = scale, inverse
        if cutlass.const_expr(self.fmt.row_scale):
            multiplier, divisor = inverse, scale
        return multiplier, divisor * Float32(1 / prescale(self.hardware))

    def row_scale(self, amax: Float32) -> Float32:
        return row_scale(amax)

    @cute.jit
    def encode(self, rX: cute.Tensor, rQ: cute.Tensor, state: tuple[Float32, Float32]) -> Uint32:
        multiplier, divisor = state
        targets = [
            multiplier * (unit_amax(rX, BLOCK_WORDS, block * BLOCK_WORDS) * Float32(1 / 6)) for block in range(BLOCKS)
        ]
        bits = pack_e4m3(*targets, Float32(0.0), Float32(0.0))
        rScale = unpack_e4m3(bits)
        for block in cutlass.range_constexpr(BLOCKS):
            inverse = reciprocal(rScale[block] * divisor)
            if rScale[block] == Float32(0.0):
                inverse = Float32(0.0)
            for half in cutlass.range_constexpr(2):
                first = block * BLOCK_WORDS + half * BLOCK_WORDS // 2
                rQ[2 * block + half] = encode_e2m1(rX, first, inverse, self.hardware)
        return bits
