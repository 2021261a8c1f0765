"""Tell counts: what a rank receives of all ranks, from the counts that all ranks have exchanged, for the host too.

What is read and written, as axes and shape : stride. R ranks, W words of each, L local experts:

    table    (row, word)       (R, W)     : (W, 1)     `CountRoutes.counts` of a rank; of n nodes and p ranks of each,
                                                       rank node * p + peer is row peer * n + node
    told     (word)            (L + 2)    : (1)        LL words of host memory: entries by local expert, most tokens of
                                                       a rank, tokens that come here
    ends     (source, rank)    (R, R)     : (R, 1)     tokens that sources 0 .. s send to a rank

Each word of `told` is stored at once with its epoch, so the host needs to see them in no order. After a failed exchange
`num_rows` is not R. Then nothing is written: the host finds a status record.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.memory import array
from cute_ep.kernels.device.sync import store_ll, word_address
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.local_arguments import TOLD_BESIDE_ENTRIES, TellArgs


class TellCounts:
    """One CTA, a thread a word."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: TellArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: TellArgs) -> None:
        tid = cute.arch.thread_idx()[0]
        gRows = array(args.num_rows, Int32, 1)
        if gRows[0] == args.ranks:
            if args.told != 0:
                for index in cutlass.range(tid, args.local_experts + TOLD_BESIDE_ENTRIES, THREADS, unroll=1):
                    self._tell(args, index)
            if args.ends != 0:
                for rank in cutlass.range(tid, args.ranks, THREADS, unroll=1):
                    self._add_up(args, rank)

    @cute.jit
    def _tell(self, args: TellArgs, index: Int32) -> None:
        gTable = array(args.table, Int32, args.ranks, args.words)
        column = args.ranks + args.rank * args.local_experts + index
        if index == args.local_experts:
            column = args.tokens
        elif index > args.local_experts:
            column = args.rank
        total, most = Int32(0), Int32(0)
        for row in cutlass.range(args.ranks, unroll=1):
            value = gTable[row, column]
            total += value
            most = cutlass.max(most, value)
        if index == args.local_experts:
            total = most
        store_ll(word_address(args.told, index), total, Int64(args.epoch))

    @cute.jit
    def _add_up(self, args: TellArgs, rank: Int32) -> None:
        gTable = array(args.table, Int32, args.ranks, args.words)
        gEnd = array(args.ends, Int32, args.ranks, args.ranks)
        end, source = Int32(0), Int32(0)
        for node in cutlass.range(args.nodes, unroll=1):
            for row in cutlass.range(node, args.ranks, args.nodes, unroll=1):
                end += gTable[row, rank]
                gEnd[source, rank] = end
                source += 1
