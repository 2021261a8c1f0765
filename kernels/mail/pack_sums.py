"""Pack sums: what the own node has added up for tokens of other nodes becomes mail for their ranks.

As axes and shape : stride. N nodes, F rows of a frame, V vectors of a row:

    sums      (node, token, vector)   (N, F, V) : (F V, V, 1)       bfloat16, those of the own node are not packed
    out       (node, byte)            (N, ..)   : (pitch, 1)        of each a header, and 16 bytes on (token, vector)

The rules of `pack_frame` hold, for the mail of two rounds before.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_ep.kernels.device.block import copy_vectors, launch_config
from cute_ep.kernels.device.memory import LANES, part_at, row_address
from cute_ep.kernels.device.slices import first_item, item_stride
from cute_ep.kernels.mail.place import open_channel
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.mail import HEADER_BYTES, PARITIES, RoundWord
from cute_ep.layouts.maps.mail_arguments import PackSumsArgs
from cute_ep.layouts.maps.routing import Phase


class PackSums:
    """Tokens, strided over the warps of the grid, node by node."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: PackSumsArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: PackSumsArgs) -> None:
        place = open_channel(args.group)
        epoch = place.rounds(RoundWord.SENT) + 1
        alive = place.wait_free(epoch - PARITIES, Phase.SUMS_READ)
        out = row_address(args.out, epoch & 1, args.turn)
        ctas, row_bytes = cute.arch.grid_dim()[0], args.vectors * VECTOR_BYTES
        first = first_item(cute.arch.block_idx()[0], ctas, place.warp)
        for node in cutlass.range(args.group.nodes, unroll=1):
            if alive & (node != args.group.node):
                to = part_at(row_address(out, node, args.pitch), HEADER_BYTES)
                source = row_address(args.sums, node * args.frame, row_bytes)
                for token in cutlass.range(first, args.frame, item_stride(ctas), unroll=1):
                    at = row_address(to, token, row_bytes)
                    copy_vectors(at, row_address(source, token, row_bytes), args.vectors, place.lane, LANES)
        place.finish(alive, epoch, out, args.pitch, args.frame)
