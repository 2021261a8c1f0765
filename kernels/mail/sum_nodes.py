"""Sum nodes: add the sums that the nodes have made for this rank's tokens, node 0 first, in float32 from +0.

As axes and shape : stride. N nodes, T tokens, V vectors of a row:

    own      (token, vector)         (T, V)     : (V, 1)               bfloat16
    landed   (node, token, vector)   (N, T, V)  : (pitch, V, 1)        bfloat16, of the round's parity
    out      (token, vector)         (T, V)     : (V, 1)               of out_type, rounded once

A warp takes slices of tokens.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS, accumulate
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, launch_config
from cute_ep.kernels.device.memory import WORDS, row_address, row_at, share
from cute_ep.kernels.device.output_type import store_sum
from cute_ep.kernels.device.slices import SEGMENT, first_item, item_stride, slice_of
from cute_ep.kernels.mail.place import open_channel
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.mail import RoundWord
from cute_ep.layouts.maps.mail_arguments import SumNodesArgs


class SumNodes:
    """Slices of tokens, strided over the warps of the grid."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: SumNodesArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: SumNodesArgs) -> None:
        place = open_channel(args.group)
        landed = row_address(args.landed, place.rounds(RoundWord.RECEIVED) & 1, args.turn)
        items, ctas = args.tokens << args.slices_log2, cute.arch.grid_dim()[0]
        first = first_item(cute.arch.block_idx()[0], ctas, place.warp)
        for item in cutlass.range(first, items, item_stride(ctas), unroll=1):
            row_slice = slice_of(item, args.slices_log2, args.vectors)
            segment = row_slice.first
            while segment < row_slice.last:
                self._sum(args, landed, row_slice.token, segment * SEGMENT + place.lane)
                segment += 1

    @cute.jit
    def _sum(self, args: SumNodesArgs, landed: Int64, token: Int32, column: Int32) -> None:
        """One vector of a token's sum. LOADS_IN_FLIGHT loads go before the first use."""
        row_bytes, nodes = args.vectors * VECTOR_BYTES, args.group.nodes
        rX = cute.make_rmem_tensor((WORDS, 1, LOADS_IN_FLIGHT), Uint32)
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        rSum.fill(0.0)
        if column < args.vectors:
            for first in cutlass.range(0, nodes, LOADS_IN_FLIGHT, unroll=1):
                for turn in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    node = first + turn
                    there = row_address(landed, node, args.pitch)
                    rows = cutlass.select_(node == args.group.node, args.own, there)
                    gRow = row_at(row_address(rows, token, row_bytes), args.vectors)
                    move(plain, share(gRow, column, 1, there=node < nodes), rX[None, None, turn])
                for turn in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    if first + turn < nodes:
                        accumulate(rSum, rX[None, 0, turn], None)
            store_sum(args.out, args.out_type, rSum, Int64(token) * args.vectors + column)
