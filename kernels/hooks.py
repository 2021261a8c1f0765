"""Functions that users compile into the kernels: `cute-ep build --epilogue module:function`, and two to start from.

| hook           | called as                     | by                                      | returns       |
| -------------- | ----------------------------- | --------------------------------------- | ------------- |
| epilogue       | (coords, value, context)      | combine, before it rounds a sum         | the new value |
| router_weights | (address, token, k, top_k)    | dispatch (weights travel), exact combine| Float32       |
| input_scale    | (address, expert)             | dispatch, with expert 0                 | Float32       |

Each is a `@cute.jit` function, of type `Epilogue`, `RouterWeights` or `InputScale`. `coords` is (token, column) of the
first of eight neighbouring elements, `value` holds those eight in float32. `address` is that of the tensor which the
caller gave as `router_weights` or `input_scale`, of any type. A hook that reads other memory finds its address in
`context.data`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.context import Context
from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.memory import WORDS, array, pointer, row_address, row_at, share
from cute_ep.layouts.maps.formats import VECTOR_BYTES

MINUS_ZEROS = 0x80008000
"""Two numbers that, added to any number, leave it as it is."""


@dataclass(frozen=True)
class EpilogueContext:
    """data: address of the tensor that combine was given as `epilogue_data` (0: none); its output is
    [tokens, hidden]."""

    data: Int64
    tokens: Int32
    hidden: Int32


Epilogue: TypeAlias = Callable[[tuple[Int32, Int32], cute.TensorSSA, EpilogueContext], cute.TensorSSA]
RouterWeights: TypeAlias = Callable[[Int64, Int32, Int32, Int32], Float32]
InputScale: TypeAlias = Callable[[Int64, Int32], Float32]


class HookFunctions(NamedTuple):
    """What `Hooks` names, as functions."""

    epilogue: Epilogue | None = None
    router_weights: RouterWeights | None = None
    input_scale: InputScale | None = None


@cute.jit
def residual_add(coords: tuple[Int32, Int32], value: cute.TensorSSA, context: EpilogueContext) -> cute.TensorSSA:
    """Add a residual; context.data: [tokens, hidden] bfloat16, or 0: nothing is added."""
    token, column = coords
    vectors = quotient(context.hidden, VECTOR_ELEMENTS)
    there = cutlass.select_(context.data != Int64(0), vectors, Int32(0))
    gResidual = row_at(row_address(context.data, token, vectors * VECTOR_BYTES), there)
    rResidual = cute.make_rmem_tensor((WORDS, 1), Uint32)
    move(plain, share(gResidual, quotient(column, VECTOR_ELEMENTS), 1), rResidual, outside=MINUS_ZEROS)
    return value + cute.recast_tensor(rResidual[None, 0], BFloat16).load().to(Float32)


@cute.jit
def scale(coords: tuple[Int32, Int32], value: cute.TensorSSA, context: EpilogueContext) -> cute.TensorSSA:
    """Multiply by one number; context.data: float32[1], or 0: by one."""
    factor = Float32(1.0)
    if context.data != Int64(0):
        factor = cute.arch.load(pointer(context.data, Float32), Float32)
    return value * factor


class WeightReader:
    """Reads router weights, with the user's function if there is one."""

    def __init__(self, hook: RouterWeights | None) -> None:
        self.hook = hook

    @cute.jit
    def read(self, address: Int64, index: Int32, ctx: Context) -> Float32:
        """Weight of entry `index` = token * top_k + k."""
        if cutlass.const_expr(self.hook is None):
            return Float32(array(address, Float32, index + 1)[index])
        k, token = ctx.by_top_k.split(index)
        return Float32(self.hook(address, token, k, ctx.top_k))
