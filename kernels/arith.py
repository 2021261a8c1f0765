"""bfloat16 and float32 arithmetic whose rounding is part of the contract."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

VECTOR_ELEMENTS = 8
"""bfloat16 elements in one 16-byte vector."""


def halves(word: Uint32) -> tuple[Float32, Float32]:
    """The two bfloat16 of a word as float32, lower half first."""
    bits = Uint32(word)
    return (bits << 16).bitcast(Float32), (bits & Uint32(0xFFFF0000)).bitcast(Float32)


def magnitude(value: Float32) -> Float32:
    """|value|, by clearing the sign bit."""
    return (value.bitcast(Uint32) & Uint32(0x7FFFFFFF)).bitcast(Float32)


def multiply(a: Float32, b: Float32) -> Float32:
    """a * b rounded to nearest even on its own: `.rn` keeps the compiler from fusing it into an fma."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def add(a: Float32, b: Float32) -> Float32:
    """a + b rounded to nearest even on its own."""
    return cute.arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def accumulate(rSum, rX, weight) -> None:
    """rSum[i] += weight * rX[i] for one vector, multiply and add each rounded; weight None: rSum[i] += rX[i]."""
    for word in cutlass.range_constexpr(VECTOR_ELEMENTS // 2):
        low, high = halves(rX[word])
        if cutlass.const_expr(weight is not None):
            low, high = multiply(weight, low), multiply(weight, high)
        rSum[2 * word] = add(rSum[2 * word], low)
        rSum[2 * word + 1] = add(rSum[2 * word + 1], high)


@cute.jit
def round_to_bf16(rSum, rX) -> None:
    """rX (4 words) = the eight float32 of rSum in bfloat16, rounded to nearest even."""
    rHalf = cute.make_rmem_tensor(VECTOR_ELEMENTS, BFloat16)
    rHalf.store(rSum.load().to(BFloat16))
    rWords = cute.recast_tensor(rHalf, Uint32)
    for word in cutlass.range_constexpr(VECTOR_ELEMENTS // 2):
        rX[word] = rWords[word]
