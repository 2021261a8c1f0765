"""Copy: bytes between two addresses, own or a peer's. Measures the ceilings that the other kernels are held to."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ep.kernels.device.block import block_memcpy, launch_config
from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.memory import row_address
from cute_ep.layouts.maps.launch import PIECE_BYTES
from cute_ep.layouts.maps.local_arguments import CopyArgs


class Copy:
    """Pieces of PIECE_BYTES, strided over the grid."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: CopyArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: CopyArgs) -> None:
        tid = cute.arch.thread_idx()[0]
        pieces = Int32(quotient(args.num_bytes + PIECE_BYTES - 1, PIECE_BYTES))
        for index in cutlass.range(cute.arch.block_idx()[0], pieces, cute.arch.grid_dim()[0]):
            count = cutlass.min(args.num_bytes - Int64(index) * PIECE_BYTES, Int64(PIECE_BYTES))
            to, source = (row_address(data, index, PIECE_BYTES) for data in (args.destination, args.source))
            block_memcpy(to, source, count, tid)
