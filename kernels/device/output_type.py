"""The types that sums are written in (`OutputType`)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import round_vector
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.memory import vectors_at
from cute_ep.layouts.maps.routing import OutputType


@cute.jit
def store_sum(out: Int64, out_type: Int32, rSum: cute.Tensor, index: Int64) -> None:
    """Round eight float32 to the output's type and store them as its vector number `index`."""
    rX = cute.make_rmem_tensor((4, 2), Uint32)
    if out_type == int(OutputType.F32):
        rWords = cute.recast_tensor(rSum, Uint32)
        for word in cutlass.range_constexpr(8):
            rX[word] = rWords[word]
        move(plain, rX, vectors_at(out, 2 * index, 2))
    else:
        if out_type == int(OutputType.FP16):
            round_vector(rSum, rX[None, 0], Float16)
        else:
            round_vector(rSum, rX[None, 0], BFloat16)
        move(plain, rX, vectors_at(out, index))
