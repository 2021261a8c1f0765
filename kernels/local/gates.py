"""What experts compute between their two matmuls, for one value vector; docs/numerics.md has the formulas.

`swiglu` has two of the gates, which a kernel has to itself, `gated` all of them, with a bias: it is told which one by
numbers, as sigmoid(z) gives them all but relu squared:

    z = g * (alpha + cubic * g^2)    silu: cubic 0; gelu with the tanh approximation: alpha 2 c, cubic 0.08943 c,
                                     c = sqrt(2 / pi), since (1 + tanh(z / 2)) / 2 = sigmoid(z)
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS, halves, round_vector
from cute_ep.layouts.maps.local_arguments import RowsArgs
from cute_ep.layouts.tiles.layout import Layout

GATE_UP = (Layout((VECTOR_ELEMENTS, 2), (1, VECTOR_ELEMENTS)), Layout((VECTOR_ELEMENTS, 2), (2, 1)))
"""(element, gate or up) of the numbers in two source vectors: one after the other, interleaved."""
LOG2_E = math.log2(math.e)
NO_BIAS = 0x80008000
"""Two bfloat16 -0, which added to a number leave it as it is."""
LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest finite float32."""


def sigmoid(value: Float32) -> Float32:
    """1 / (1 + exp(-value)) with the hardware's approximate exponential and reciprocal."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(value * Float32(-LOG2_E)))


def number(rX: cute.Tensor, element: int, half: int, interleaved: int) -> Float32:
    """Gate (half 0) or up (half 1) of one element."""
    index = GATE_UP[interleaved](element, half)
    return halves(rX[index // 2 % 4, index // VECTOR_ELEMENTS])[index % 2]


def limited(gate: Float32, up: Float32, limit: Float32) -> tuple[Float32, Float32]:
    """(min(gate, limit), up between -limit and limit); NaN stays."""
    up = cute.arch.fmin(up, limit, nan=True)
    return cute.arch.fmin(gate, limit, nan=True), cute.arch.fmax(up, -limit, nan=True)


def slope(args: RowsArgs, gate: Float32) -> Float32:
    """z / gate of `gated`; an infinite square would make NaN of a cubic of 0."""
    square = cute.arch.fmin(gate * gate, Float32(LARGEST))
    return cute.math.fma(args.cubic, square, args.alpha)


@cute.jit
def swiglu(args: RowsArgs, rX: cute.Tensor, rValue: cute.Tensor, interleaved: cutlass.Constexpr) -> None:
    """silu(gate) * up of two source vectors, or with a limit its clamped form with up + 1, rounded to bfloat16."""
    rGate, rUp, rY = (cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32) for _ in range(3))
    for element in cutlass.range_constexpr(VECTOR_ELEMENTS):
        rGate[element] = number(rX, element, 0, interleaved)
        rUp[element] = number(rX, element, 1, interleaved)
    if args.limit > Float32(0.0):
        for element in cutlass.range_constexpr(VECTOR_ELEMENTS):
            gate, up = limited(rGate[element], rUp[element], args.limit)
            rY[element] = gate * sigmoid(args.alpha * gate) * (up + Float32(1.0))
    else:
        for element in cutlass.range_constexpr(VECTOR_ELEMENTS):
            rY[element] = rGate[element] * sigmoid(rGate[element]) * rUp[element]
    round_vector(rY, rValue, BFloat16)


@cute.jit
def gated(args: RowsArgs, rX: cute.Tensor, rBias: cute.Tensor, rValue: cute.Tensor) -> None:
    """Any gate of two source vectors, each with a vector of the bias added, rounded to bfloat16; overwrites both."""
    if args.interleaved != 0:
        _separate(rX)
        _separate(rBias)
    rY = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
    if args.columns == 1:
        for element in cutlass.range_constexpr(VECTOR_ELEMENTS):
            positive = cute.arch.fmax(_biased(rX, rBias, element, 0), Float32(0.0), nan=True)
            rY[element] = positive * positive
        round_vector(rY, rValue, BFloat16)
    else:
        for element in cutlass.range_constexpr(VECTOR_ELEMENTS):
            gate, up = limited(_biased(rX, rBias, element, 0), _biased(rX, rBias, element, 1), args.limit)
            rY[element] = gate * sigmoid(gate * slope(args, gate)) * (up + args.offset)
        round_vector(rY, rValue, BFloat16)


def _biased(rX: cute.Tensor, rBias: cute.Tensor, element: int, half: int) -> Float32:
    return number(rX, element, half, 0) + number(rBias, element, half, 0)


def _separate(rX: cute.Tensor) -> None:
    """Move the gates of two interleaved source vectors into the first, the ups into the second."""
    words = [rX[word % 4, word // 4] for word in range(VECTOR_ELEMENTS)]
    for word in range(VECTOR_ELEMENTS // 2):
        first, second = words[2 * word], words[2 * word + 1]
        rX[word, 0] = (first & Uint32(0xFFFF)) | (second << 16)
        rX[word, 1] = (first >> 16) | (second & Uint32(0xFFFF0000))
