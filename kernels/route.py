"""Route role: rank r tells every peer which of its tokens go to which expert, and at which position.

The position of entry (token, k) inside its expert counts the earlier entries of the same rank. A route CTA takes
chunks of ROUTE_ENTRIES entries; for each it histograms all entries before the chunk in shared memory (integer adds:
order does not matter) and ranks its own entries warp by warp in order. So there is no exchange between CTAs, and the
result does not depend on timing.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_ep.kernels.block import THREADS, shared_array
from cute_ep.kernels.hooks import WeightReader
from cute_ep.kernels.sync import arrive_last
from cute_ep.layouts.arena import HeaderWord, StateWord
from cute_ep.layouts.device import array, region_array
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import MASKED_ENTRY, MAX_EXPERTS, Phase, pack_entry

ROUTE_ENTRIES = 256
"""Entries of one route chunk: one a thread, ranked by one warp in 8 steps."""


class Route:
    """Builds this rank's routing table and pushes it to all peers."""

    def __init__(self, weights: WeightReader, shared: RegionMap) -> None:
        self.weights = weights
        self.histogram = shared.add("histogram", 4, MAX_EXPERTS)
        self.packed = shared.add("packed_entries", 4, ROUTE_ENTRIES)

    @cute.jit
    def run(self, group, args, epoch: Int64) -> None:
        """Chunks are taken from the highest CTA down: those have the least to send."""
        entries = args.tokens * group.top_k
        chunks = cutlass.max((entries + (ROUTE_ENTRIES - 1)) // ROUTE_ENTRIES, Int32(1))
        route_ctas = cutlass.min(chunks, group.ctas)
        first_chunk = group.ctas - 1 - group.cta
        if first_chunk < route_ctas:
            sHistogram = shared_array(self.histogram, Int32)
            sPacked = shared_array(self.packed, Int32)
            chunk = first_chunk
            while chunk < chunks:
                first = chunk * ROUTE_ENTRIES
                last = cutlass.min(first + ROUTE_ENTRIES, entries)
                weight = self._load_entry(group, args, first, last, sPacked)
                self._count_before(group, args, first, sHistogram)
                self._rank_chunk(group, first, last, sHistogram, sPacked)
                self._push_entries(group, args, epoch, first, last, weight, sPacked)
                if chunk == chunks - 1:
                    self._push_counts(group, args, epoch, sHistogram)
                chunk += group.ctas
            if route_ctas == 1:
                cute.arch.sync_threads()
                group.post_all_ranks(group.arena.route_ready, epoch)
            else:
                last = arrive_last(group.state_word(StateWord.ROUTE_DONE), route_ctas, group.tid)
                if last:
                    group.post_all_ranks(group.arena.route_ready, epoch)

    @cute.jit
    def _load_entry(self, group, args, first: Int32, last: Int32, sPacked) -> Int32:
        """One entry a thread: its checked expert into sPacked, its weight's bits as result."""
        index = first + group.tid
        weight = Int32(0)
        if index < last:
            entries = args.tokens * group.top_k
            if args.router_weights != Int64(0):
                weight = self.weights.read(args.router_weights, index, group).bitcast(Int32)
            given = array(args.topk_ids, Int32, entries)[index]
            if (given < Int32(MASKED_ENTRY)) | (given >= group.all_experts):
                group.report_input(Phase.EXPERT_ID, index, group.all_experts, given)
            sPacked[index - first] = group.expert_of(given)
        return weight

    @cute.jit
    def _count_before(self, group, args, first: Int32, sHistogram) -> None:
        """sHistogram[expert] = entries of this rank before `first` that chose it."""
        for expert in cutlass.range(group.tid, group.experts, THREADS, unroll=1):
            sHistogram[expert] = 0
        cute.arch.sync_threads()
        if first > 0:
            gIds = array(args.topk_ids, Int32, args.tokens * group.top_k)
            for index in cutlass.range(group.tid, first, THREADS, unroll=1):
                expert = group.expert_of(gIds[index])
                if expert >= 0:
                    cute.arch.atomic_add(sHistogram.iterator + expert, Int32(1))
            cute.arch.sync_threads()

    @cute.jit
    def _rank_chunk(self, group, first: Int32, last: Int32, sHistogram, sPacked) -> None:
        """Turn the experts of sPacked into packed entries and add them to the histogram, 32 at a time in order."""
        if group.tid < 32:
            for step in cutlass.range(0, last - first, 32, unroll=1):
                index = step + group.tid
                expert = Int32(MASKED_ENTRY)
                if index < last - first:
                    expert = sPacked[index]
                same = cute.arch.match_sync(-1, expert)
                earlier = cute.arch.popc(same & Uint32(cute.arch.lanemask_lt()))
                packed = Int32(MASKED_ENTRY)
                if expert >= 0:
                    packed = pack_entry(expert, sHistogram[expert] + Int32(earlier))
                cute.arch.sync_warp()
                if expert >= 0 and earlier == 0:
                    sHistogram[expert] = sHistogram[expert] + Int32(cute.arch.popc(same))
                cute.arch.sync_warp()
                if index < last - first:
                    sPacked[index] = packed
        cute.arch.sync_threads()

    @cute.jit
    def _push_entries(self, group, args, epoch: Int64, first: Int32, last: Int32, weight: Int32, sPacked) -> None:
        parity = epoch & 1
        entries = args.tokens * group.top_k
        index = first + group.tid
        if index < last:
            for peer in cutlass.range(group.ranks, unroll=1):
                arena = group.sPeers[peer]
                gEntries = array(arena + group.arena.entries.at(parity, group.rank), Int32, entries)
                gEntries[index] = sPacked[index - first]
                if args.router_weights != Int64(0):
                    gWeights = array(arena + group.arena.weights.at(parity, group.rank), Int32, entries)
                    gWeights[index] = weight
        cute.arch.sync_threads()

    @cute.jit
    def _push_counts(self, group, args, epoch: Int64, sHistogram) -> None:
        """After the last chunk the histogram holds this rank's count of every expert."""
        parity = epoch & 1
        for expert in cutlass.range(group.tid, group.experts, THREADS, unroll=1):
            local, peer = group.by_local_experts.split(expert)
            gCounts = region_array(group.sPeers[peer], group.arena.counts, Int32, parity, group.rank)
            gCounts[local] = sHistogram[expert]
        if group.tid < group.ranks:
            gHeader = region_array(group.sPeers[group.tid], group.arena.header, Int32, parity, group.rank)
            gHeader[int(HeaderWord.TOKENS)] = args.tokens
            gHeader[int(HeaderWord.CHUNK)] = args.chunk
            gHeader[int(HeaderWord.HAS_WEIGHTS)] = Int32(args.router_weights != Int64(0))
            gHeader[int(HeaderWord.CHUNKS)] = args.chunks
