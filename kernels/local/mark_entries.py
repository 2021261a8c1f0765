"""Mark entries: which entries of rank-major rows are a rank's own, by the numbers of experts in the whole model.

What is read and written, as axes and shape : stride. N rows, K entries of each:

    row_expert_ids    (row, k)    (N, K) : (K, 1)    local experts, negative where an entry is not of this rank
    row_weights       (row, k)    (N, K) : (K, 1)    float32, anything in rows that no token has
    experts           (row, k)    (N, K) : (K, 1)    first + the local expert, elsewhere another number
    weights           (row, k)    (N, K) : (K, 1)    the weights, 0 elsewhere

A thread takes every (grid * THREADS)-th entry.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.memory import array
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.local_arguments import MarkArgs


class MarkEntries:
    """Any number of CTAs, which wait for nothing."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: MarkArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: MarkArgs) -> None:
        tid, cta, ctas = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for entry in cutlass.range(cta * THREADS + tid, args.entries, ctas * THREADS, unroll=1):
            self._mark(args, entry)

    @cute.jit
    def _mark(self, args: MarkArgs, entry: Int32) -> None:
        gLocal = array(args.row_expert_ids, Int32, args.entries)
        gGiven = array(args.row_weights, Float32, args.entries)
        gExpert = array(args.experts, Int32, args.entries)
        gWeight = array(args.weights, Float32, args.entries)
        local = gLocal[entry]
        own = local >= 0
        gExpert[entry] = cutlass.select_(own, local + args.first, args.elsewhere)
        if args.weights != 0:
            weight = Float32(0.0)
            if own:
                weight = gGiven[entry]
            gWeight[entry] = weight
