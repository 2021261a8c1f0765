"""bfloat16 and float32 arithmetic whose rounding is part of the contract."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

VECTOR_ELEMENTS = 8
"""bfloat16 elements in one 16-byte vector."""
PAIR_MAGNITUDE = 0x7FFF7FFF
"""All bits of two bfloat16 but their signs."""
LOST = 0x7FFF7FFF
"""Two bfloat16 NaN: what stands for a row that dispatch had no room for."""
LARGEST_BF16 = (2 - 2.0**-7) * 2.0**127
"""The largest finite bfloat16, 0x7F7F."""


def opaque(value: Int32 | Int64 | int) -> Int32 | Int64:
    """The same 32-bit or 64-bit integer, opaque to the compiler: what follows from it is computed where it stands,
    instead of being kept in registers from where it was computed before, and it is computed once."""
    dtype = Int64 if isinstance(value, Int64) else Int32
    ptx = f"mov.b{dtype.width} {{$w0}}, {{$r0}};"
    return cute.arch.inline_ptx(ptx, write_only_types=[dtype], read_only_args=[dtype(value)])


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


def unit_amax(rX: cute.Tensor, words: int, first: int = 0) -> Float32:
    """The largest |x| of the bfloat16 in `words` words of rX from `first` on, NaN left out; +0 if nothing is left."""
    pair = rX[first] & Uint32(PAIR_MAGNITUDE)
    for word in range(first + 1, first + words):
        pair = cute.arch.inline_ptx(
            "max.bf16x2 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint32],
            read_only_args=[pair, rX[word] & Uint32(PAIR_MAGNITUDE)],
        )
    low, high = halves(pair)
    return cute.arch.fmax(cute.arch.fmax(low, high), Float32(0.0))


def lanes_max(value: Float32, lanes: int) -> Float32:
    """The maximum over each aligned group of `lanes` (a power of two) lanes, in all of them. By all 32 lanes."""
    step = 1
    while step < lanes:
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, step))
        step *= 2
    return value


def corrected_reciprocal(value: Float32, approximate: Float32) -> Float32:
    """1 / value rounded to nearest even, from one of the two float32 around it (all mantissa bits set: the nearest)."""
    rest = cute.math.fma(-value, approximate, Float32(1.0))
    return cute.math.fma(approximate, rest, approximate)


def reciprocal(value: Float32) -> Float32:
    """1 / value by IEEE division, for 2**-126 <= value < 2**126: what `rcp.rn.f32` becomes for such numbers."""
    return corrected_reciprocal(value, cute.arch.rcp_approx(value))


@cute.jit
def accumulate(rSum: cute.Tensor, rX: cute.Tensor, weight: Float32 | None) -> None:
    """rSum[i] += weight * rX[i] for one vector, multiply and add each rounded; weight None: rSum[i] += rX[i]."""
    for word in cutlass.range_constexpr(VECTOR_ELEMENTS // 2):
        low, high = halves(rX[word])
        if cutlass.const_expr(weight is not None):
            low, high = multiply(weight, low), multiply(weight, high)
        rSum[2 * word] = add(rSum[2 * word], low)
        rSum[2 * word + 1] = add(rSum[2 * word + 1], high)


@cute.jit
def round_vector(rSum: cute.Tensor, rX: cute.Tensor, dtype: cutlass.Constexpr) -> None:
    """rX (4 words) = the eight float32 of rSum in a 16-bit type, rounded to nearest even."""
    rHalf = cute.make_rmem_tensor(VECTOR_ELEMENTS, dtype)
    rHalf.store(rSum.load().to(dtype))
    rWords = cute.recast_tensor(rHalf, Uint32)
    for word in cutlass.range_constexpr(VECTOR_ELEMENTS // 2):
        rX[word] = rWords[word]
