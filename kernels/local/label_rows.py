"""Label rows: the expert of each row of a batch, by group, for experts that are told it row by row.

What is read and written, as axes and shape : stride. G groups, N rows:

    row_offsets    (group + 1)    (G + 1) : (1)    group g owns rows [row_offsets[g], row_offsets[g + 1])
    row_counts     (group)        (G)     : (1)    its rows that a token has, the first ones
    experts        (row, word)    (N, W)  : (W, 1) first + g where a token has the row, elsewhere another number; W
                                                   words each, the lower one first
    ones           (row)          (N)     : (1)    1.0

A thread takes every (grid * THREADS)-th row, and finds its group by halving.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.memory import array
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.local_arguments import LabelArgs


class LabelRows:
    """Any number of CTAs, which wait for nothing."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: LabelArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: LabelArgs) -> None:
        tid, cta, ctas = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for row in cutlass.range(cta * THREADS + tid, args.rows, ctas * THREADS, unroll=1):
            self._label(args, row)

    @cute.jit
    def _label(self, args: LabelArgs, row: Int32) -> None:
        gExpert = array(args.experts, Int32, args.rows << args.wide)
        gOne = array(args.ones, Float32, args.rows)
        gExpert[row << args.wide] = self._expert_of(args, row)
        if args.wide != 0:
            gExpert[(row << 1) + 1] = Int32(0)
        if args.ones != 0:
            gOne[row] = Float32(1.0)

    @cute.jit
    def _expert_of(self, args: LabelArgs, row: Int32) -> Int32:
        gOffset = array(args.row_offsets, Int32, args.groups + 1)
        gCount = array(args.row_counts, Int32, args.groups)
        group, end = Int32(0), args.groups
        while group < end:
            middle = (group + end) >> 1
            if gOffset[middle + 1] <= row:
                group = middle + 1
            else:
                end = middle
        expert = args.elsewhere
        if group < args.groups:
            if row - gOffset[group] < gCount[group]:
                expert = args.first + group
        return expert
