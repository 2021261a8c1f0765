"""Rows that need no encoding, where the caller has them: BF16, or quantised with scale factors.

    x                       (token, byte)                     (T, B)       : (16 x_stride, 1)  rows of B payload bytes
    scales                  (token, byte)                     (T, S)       : (S, 1)            scale factors
    row_scales              (token)                           (T)          : (1)               bfloat16

A sender reads all of them. In a fused launch the receiver reads those of its own rank, which nobody sends.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, Uint32

from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.memory import array, row_address
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.scales import WORD_BYTES


def given_row(ctx: DispatchContext, token: Int32) -> Int64:
    """Address of a token's payload."""
    return row_address(ctx.input.x, Int64(token) * ctx.input.x_stride, VECTOR_BYTES)


@cute.jit
def given_scale_word(ctx: DispatchContext, token: Int32, word: Int32) -> Uint32:
    """Four of a token's scale factors, or fewer at the end of them: rows of any number of bytes follow one another."""
    gScale = array(ctx.input.scales, Uint8, ctx.input.tokens, ctx.wire.scale_bytes)
    bits = Uint32(0)
    for byte in cutlass.range_constexpr(WORD_BYTES):
        place = word * WORD_BYTES + byte
        if place < ctx.wire.scale_bytes:
            bits = bits | (Uint32(gScale[token, place]) << (8 * byte))
    return bits


def given_row_scale(ctx: DispatchContext, token: Int32) -> Uint32:
    """A token's own scale, in the lower half of a word."""
    return Uint32(array(ctx.input.row_scales, Uint16, ctx.input.tokens)[token])
