"""Unpack frames: ids, weights and row scales of all nodes' frames, as the node's dispatch takes them.

As axes and shape : stride. N nodes, F rows of a frame, K entries:

    routes       (node, byte)        (N, ..)    : (pitch, 1)       the last pieces of the frames
    ids          (node, token, k)    (N, F, K)  : (F K, K, 1)      int32, of the own node's experts, else -1
    weights      (node, token, k)    (N, F, K)  : (F K, K, 1)      float32
    row_scales   (node, token)       (N, F)     : (F, 1)           bfloat16

The copies are the batch's: combine reads ids and weights again when the frames may be those of a later round.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16

from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.memory import array, part_at, row_address
from cute_ep.kernels.mail.place import open_channel
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.mail import HEADER_BYTES
from cute_ep.layouts.maps.mail_arguments import UnpackFramesArgs
from cute_ep.layouts.maps.routing import MASKED_ENTRY


class UnpackFrames:
    """Entries, strided over the threads of the grid, node by node."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: UnpackFramesArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: UnpackFramesArgs) -> None:
        place = open_channel(args.group)
        entries = args.frame * args.top_k
        gId, gWeight = array(args.ids, Int32, entries), array(args.weights, Float32, entries)
        start, step = cute.arch.block_idx()[0] * THREADS + place.tid, cute.arch.grid_dim()[0] * THREADS
        for node in cutlass.range(args.group.nodes, unroll=1):
            routes = row_address(args.routes, node, args.pitch)
            gGiven = array(part_at(routes, HEADER_BYTES), Int32, entries)
            gOf = array(part_at(routes, args.weights_at), Float32, entries)
            for index in cutlass.range(start, entries, step, unroll=1):
                expert = gGiven[index] - args.first_expert
                inside = (expert >= 0) & (expert < args.experts)
                gId[node * entries + index] = cutlass.select_(inside, expert, Int32(MASKED_ENTRY))
                gWeight[node * entries + index] = gOf[index]
            if args.row_scales != 0:
                gScale, gFrom = (
                    array(data, Uint16, args.frame) for data in (args.row_scales, part_at(routes, args.row_scales_at))
                )
                for token in cutlass.range(start, args.frame, step, unroll=1):
                    gScale[node * args.frame + token] = gFrom[token]
