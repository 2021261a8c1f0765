"""Copy: bytes between two addresses, own or a peer's. Measures the ceilings that the other kernels are held to."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ep.kernels.device.block import block_memcpy, launch_config
from cute_ep.kernels.device.divide import quotient
from cute_ep.layouts.maps.launch import SLICE_BYTES
from cute_ep.layouts.maps.local_arguments import CopyArgs


class Copy:
    """Slices of SLICE_BYTES, strided over the grid."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: CopyArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: CopyArgs) -> None:
        tid = cute.arch.thread_idx()[0]
        slices = Int32(quotient(args.num_bytes + SLICE_BYTES - 1, SLICE_BYTES))
        for index in cutlass.range(cute.arch.block_idx()[0], slices, cute.arch.grid_dim()[0]):
            offset = Int64(index) * SLICE_BYTES
            count = cutlass.min(args.num_bytes - offset, Int64(SLICE_BYTES))
            block_memcpy(args.destination + offset, args.source + offset, count, tid)
