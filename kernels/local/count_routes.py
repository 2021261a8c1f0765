"""Count routes: how many of a rank's tokens go to each rank, and of their entries to each expert, before a dispatch.

What is read and written, as axes and shape : stride. T tokens, K entries of each, R ranks, E experts:

    ids, ids_out, last_ids  (token, k)                        (T, K)       : (K, 1)
    weights, weights_out    (token, k)                        (T, K)       : (K, 1)             bfloat16 to float32
    goes                    (token, rank)                     (T, R)       : (R, 1)             bytes
    counts                  by rank, by expert, T, zeros      (words)      : (1)                `count_words`

One CTA does it, a thread a token, and counts in shared memory; integer sums do not depend on the order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, Uint32

from cute_ep.kernels.device.block import launch_config, shared_array
from cute_ep.kernels.device.context import IDS_IN_FLIGHT, given_id, is_beyond
from cute_ep.kernels.device.divide import Divisor, round_up
from cute_ep.kernels.device.memory import array, element
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.local_arguments import CountArgs
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import MASKED_ENTRY, MAX_EXPERTS, MAX_RANKS

NO_EXPERT = 2**31 - 1
"""What `ids_out` has of an id that does not fit 32 bits: larger than any expert, so dispatch refuses it."""


class CountRoutes:
    """Counts, and for each token the ranks that it goes to."""

    def __init__(self) -> None:
        shared = RegionMap(alignment=16)
        self.by_rank = shared.add("by_rank", 4, MAX_RANKS)
        self.by_expert = shared.add("by_expert", 4, MAX_EXPERTS)
        self.shared_bytes = shared.nbytes

    @cute.jit
    def __call__(self, args: CountArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid, self.shared_bytes))

    @cute.kernel
    def kernel(self, args: CountArgs) -> None:
        tid = cute.arch.thread_idx()[0]
        sRank, sExpert = shared_array(self.by_rank, Int32), shared_array(self.by_expert, Int32)
        if tid < MAX_RANKS:
            sRank[tid] = 0
        for expert in cutlass.range(tid, args.experts, THREADS, unroll=1):
            sExpert[expert] = 0
        cute.arch.sync_threads()
        for token in cutlass.range(tid, args.tokens, THREADS, unroll=1):
            self._count_ranks(args, token, self._count_entries(args, token))
        if args.weights_out != 0:
            gWeight = array(args.weights, BFloat16, args.tokens * args.top_k)
            gWide = array(args.weights_out, Float32, args.tokens * args.top_k)
            for index in cutlass.range(tid, args.tokens * args.top_k, THREADS, unroll=1):
                gWide[index] = gWeight[index].to(Float32)
        cute.arch.sync_threads()
        self._write_counts(args, tid)

    @cute.jit
    def _count_entries(self, args: CountArgs, token: Int32) -> Uint32:
        """Count a token's entries and write its ids, the last entry first; the ranks that it goes to, a bit each."""
        sExpert = shared_array(self.by_expert, Int32)
        gId = array(args.ids_out, Int32, args.tokens, args.top_k)
        gLast = array(args.last_ids, Int32, args.tokens, args.top_k)
        by_local_experts = Divisor(args.local_experts, args.local_experts_magic)
        rId = cute.make_rmem_tensor(IDS_IN_FLIGHT, Int32)
        ranks = Uint32(0)
        entries = args.tokens * args.top_k
        end = round_up(args.top_k, IDS_IN_FLIGHT)
        while end > 0:
            end -= IDS_IN_FLIGHT
            for turn in cutlass.range_constexpr(IDS_IN_FLIGHT):
                if end + turn < args.top_k:
                    rId[turn] = given_id(args.ids, entries, token * args.top_k + end + turn)
            for turn in cutlass.range_constexpr(IDS_IN_FLIGHT - 1, -1, -1):
                if end + turn < args.top_k:
                    expert, last = rId[turn], Int32(MASKED_ENTRY)
                    if is_beyond(args.ids, entries, token * args.top_k + end + turn, expert):
                        expert = Int32(NO_EXPERT)
                    if (args.mask != 0) & (expert >= args.experts):
                        expert = Int32(MASKED_ENTRY)
                    if (args.mask != 0) & (expert < 0):
                        expert = Int32(MASKED_ENTRY)
                    if (expert >= 0) & (expert < args.experts):
                        cute.arch.atomic_add(element(sExpert, expert), Int32(1))
                        _, rank = by_local_experts.split(expert)
                        bit = Uint32(1) << Uint32(rank)
                        if (ranks & bit) == Uint32(0):
                            last = expert
                        ranks |= bit
                    gId[token, end + turn] = expert
                    gLast[token, end + turn] = last
        return ranks

    @cute.jit
    def _count_ranks(self, args: CountArgs, token: Int32, ranks: Uint32) -> None:
        sRank = shared_array(self.by_rank, Int32)
        gGoes = array(args.goes, Uint8, args.tokens, args.ranks)
        for rank in cutlass.range(args.ranks, unroll=1):
            goes = (ranks >> Uint32(rank)) & Uint32(1)
            gGoes[token, rank] = Uint8(goes)
            if goes != Uint32(0):
                cute.arch.atomic_add(element(sRank, rank), Int32(1))

    @cute.jit
    def _write_counts(self, args: CountArgs, tid: Int32) -> None:
        sRank, sExpert = shared_array(self.by_rank, Int32), shared_array(self.by_expert, Int32)
        used = args.ranks + args.experts
        gCount = array(args.counts, Int32, args.words)
        for index in cutlass.range(tid, args.words, THREADS, unroll=1):
            value = Int32(0)
            if index < args.ranks:
                value = sRank[index]
            elif index < used:
                value = sExpert[index - args.ranks]
            elif index == used:
                value = args.tokens
            gCount[index] = value
