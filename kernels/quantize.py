"""Local quantise: [tokens, hidden] bfloat16 to payload and row-major scales, with the codec that dispatch uses."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32

from cute_ep.kernels.block import THREADS, launch_config
from cute_ep.kernels.codec import Codec
from cute_ep.kernels.codec.base import source_vectors, unit_scale_bytes
from cute_ep.layouts.device import array, item_coord, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES


@dataclass(frozen=True)
class QuantizeArgs:
    """x [tokens, hidden] bf16; out [tokens, payload bytes]; scales [tokens, scale bytes]; global_scale f32[1] or 0."""

    x: Int64
    out: Int64
    scales: Int64
    global_scale: Int64
    tokens: Int32
    hidden: Int32


class Quantize:
    """One thread encodes one unit; the grid strides over all units of all rows."""

    args_type = QuantizeArgs
    shared_bytes = 0

    def __init__(self, codec: Codec, *, hidden: int | None) -> None:
        self.codec, self.hidden = codec, hidden
        self.source_vectors = source_vectors(codec.fmt)
        self.scale_bytes = unit_scale_bytes(codec.fmt)

    @cute.jit
    def __call__(self, args: QuantizeArgs, grid: Int32):
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: QuantizeArgs):
        hidden = args.hidden
        if cutlass.const_expr(self.hidden is not None):
            hidden = Int32(self.hidden)
        fmt = self.codec.fmt
        state = self.codec.prepare(args.global_scale)
        units = fmt.payload_bytes(hidden) // VECTOR_BYTES
        gX = vector_tensor(args.x, units * self.source_vectors, args.tokens, Int64(hidden) * 2)
        gOut = vector_tensor(args.out, units, args.tokens, fmt.payload_bytes(Int64(hidden)))
        rX = cute.make_rmem_tensor(4 * self.source_vectors, Uint32)
        rQ = cute.make_rmem_tensor(4, Uint32)
        first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        for item in cutlass.range(first, units * args.tokens, cute.arch.grid_dim()[0] * THREADS):
            unit, token = item_coord(item, units)
            for part in cutlass.range_constexpr(self.source_vectors):
                rPart = cute.local_tile(rX, (4,), (part,))
                cute.copy(vector_atom(), gX[None, unit * self.source_vectors + part, token], rPart)
            scale = self.codec.encode(rX, rQ, state)
            cute.copy(vector_atom(), rQ, gOut[None, unit, token])
            if cutlass.const_expr(self.scale_bytes > 0):
                gScale = array(args.scales, Uint16, args.tokens, units)
                gScale[token, unit] = scale
