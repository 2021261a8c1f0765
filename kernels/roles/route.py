"""Route role: rank r tells every peer which of its tokens go to which expert, and at which position.

The position of entry (token, k) inside its expert counts the earlier entries of the same rank. A route CTA takes
spans of ROUTE_ENTRIES entries; for each it histograms all entries before the span in shared memory (integer adds:
order does not matter) and ranks its own entries by lane and by warp. So there is no exchange between CTAs, and the
result does not depend on timing. All that it tells is LL words, which need no flag: a table travels ahead of the
rows on the links instead of waiting for a fence behind them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32

from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.group import given_id, is_beyond
from cute_ep.kernels.device.memory import item_coord
from cute_ep.kernels.device.sync import store_ll
from cute_ep.kernels.hooks import WeightReader
from cute_ep.layouts.maps.arena import LL_BYTES, HeaderWord, StateWord
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import BEYOND, MASKED_ENTRY, MAX_EXPERTS, Phase, pack_entry

IDS_IN_FLIGHT = 8
"""Expert ids that a thread loads before it counts the first."""
ROUTE_ENTRIES = 256
"""Entries of one route span: one a thread of its first warps."""
ROUTE_WARPS = ROUTE_ENTRIES // 32


class Route:
    """Builds this rank's routing table and pushes it to all peers."""

    def __init__(self, weights: WeightReader, shared: RegionMap) -> None:
        self.weights = weights
        self.histogram = shared.add("histogram", 4, MAX_EXPERTS)
        self.warp_words = shared.add("route_warp_counts", 4, ROUTE_WARPS * MAX_EXPERTS // 4)
        self.warp_counts = Region("", self.warp_words.offset, 1, (ROUTE_WARPS, MAX_EXPERTS), (MAX_EXPERTS, 1))

    @cute.jit
    def run(self, group, args, epoch: Int64, sent) -> Boolean:
        """Wait until the peers have read round epoch - 2, then push; False, in every thread, after a timeout or out of
        order: `sent` as of `GroupView.wait_all_ranks`.

        Called by all CTAs. Spans are taken from the highest CTA down: those have the least to send. The first span,
        and ids before it, are on their way from memory during the wait, whose barrier also stands behind the tables'
        zeros. Counts are what the peers wait for first. Behind several spans comes an empty one, whose CTA counts and
        has nothing to rank.
        """
        entries = args.tokens * group.top_k
        spans = quotient(entries + (ROUTE_ENTRIES - 1), ROUTE_ENTRIES)
        spans += Int32(spans != 1)
        span = group.ctas - 1 - group.cta
        rId = cute.make_rmem_tensor(IDS_IN_FLIGHT, Int32)
        given, weight = self._load_span(group, args, span)
        self._load_before(group, args, span, group.tid, rId)
        if span < spans:
            self._zero_counts(group)
        word = StateWord.DISPATCH_SEND_EPOCH
        alive = group.wait_all_ranks(group.arena.dispatch_consumed, epoch - 2, Phase.DISPATCH_CONSUMED, sent, word)
        while alive and span < spans:
            if span == spans - 1:
                self._push_header(group, args, epoch)
            expert, earlier = self._count_span(group, args, span, given, rId)
            if span == spans - 1:
                self._push_counts(group, epoch)
            self._push_entries(group, args, epoch, span, self._entry(group, expert, earlier), weight)
            span += group.ctas
            given, weight = self._load_span(group, args, span)
            self._load_before(group, args, span, group.tid, rId)
            if span < spans:
                cute.arch.sync_threads()
                self._zero_counts(group)
                cute.arch.sync_threads()
        return alive

    @cute.jit
    def _load_span(self, group, args, span: Int32):
        """(given expert id, bits of its weight) of the thread's entry of a span."""
        index = span * ROUTE_ENTRIES + group.tid
        given = Int32(MASKED_ENTRY)
        weight = Int32(0)
        if (group.tid < ROUTE_ENTRIES) & (index < args.tokens * group.top_k):
            given = given_id(args, index)
            if args.router_weights != Int64(0):
                weight = self.weights.read(args.router_weights, index, group).bitcast(Int32)
        return given, weight

    @cute.jit
    def _zero_counts(self, group) -> None:
        sCounts = shared_array(self.warp_words, Uint32)
        sHistogram = shared_array(self.histogram, Int32)
        for item in cutlass.range(group.tid, ROUTE_WARPS * MAX_EXPERTS // 4, THREADS, unroll_full=True):
            sCounts[item] = Uint32(0)
        for expert in cutlass.range(group.tid, group.experts, THREADS, unroll=1):
            sHistogram[expert] = 0

    def _before(self, group, args, span: Int32) -> Int32:
        """Entries before a span."""
        return cutlass.min(span * ROUTE_ENTRIES, args.tokens * group.top_k)

    @cute.jit
    def _load_before(self, group, args, span: Int32, index: Int32, rId) -> None:
        """Expert ids of entries index, index + THREADS, ... that come before a span."""
        entries = args.tokens * group.top_k
        before = self._before(group, args, span)
        rId.fill(MASKED_ENTRY)
        if (index < before) & ((span - 1) * ROUTE_ENTRIES < entries):
            for slot in cutlass.range_constexpr(IDS_IN_FLIGHT):
                if index + slot * THREADS < before:
                    rId[slot] = given_id(args, index + slot * THREADS)

    @cute.jit
    def _count_span(self, group, args, span: Int32, given: Int32, rId):
        """(expert of the thread's own entry of a span, entries of its warp before it that chose the same); rId holds
        the first ids before the span. Afterwards the histogram counts all of these, the table of counts the entries of
        the span's warps."""
        sHistogram = shared_array(self.histogram, Int32)
        sCounts = shared_array(self.warp_counts, Uint8)
        index = group.tid
        while index < self._before(group, args, span):
            for slot in cutlass.range_constexpr(IDS_IN_FLIGHT):
                before = group.expert_of(rId[slot])
                if before >= 0:
                    cute.arch.atomic_add(sHistogram.iterator + before, Int32(1))
            index += THREADS * IDS_IN_FLIGHT
            self._load_before(group, args, span, index, rId)
        own = span * ROUTE_ENTRIES + group.tid
        beyond = Boolean(False)
        if (group.tid < ROUTE_ENTRIES) & (own < args.tokens * group.top_k):
            beyond = is_beyond(args, own, given)
        if beyond:
            group.report_input(Phase.EXPERT_ID, own, group.all_experts, Int32(BEYOND))
        elif (given < Int32(MASKED_ENTRY)) | (given >= group.all_experts):
            group.report_input(Phase.EXPERT_ID, own, group.all_experts, given)
        expert = group.expert_of(given)
        same = cute.arch.match_sync(-1, expert)
        earlier = Int32(cute.arch.popc(same & Uint32(cute.arch.lanemask_lt())))
        if (expert >= 0) & (earlier == 0):
            sCounts[group.warp, expert] = Uint8(cute.arch.popc(same))
        cute.arch.sync_threads()
        return expert, earlier

    @cute.jit
    def _entry(self, group, expert: Int32, earlier: Int32) -> Int32:
        """Packed entry of the thread's own entry of the span that was counted.

        Entries of one expert are told apart by lane within a warp, by the table among the span's warps, and by the
        histogram among spans.
        """
        sHistogram = shared_array(self.histogram, Int32)
        sCounts = shared_array(self.warp_counts, Uint8)
        entry = Int32(MASKED_ENTRY)
        if expert >= 0:
            position = sHistogram[expert] + earlier
            for warp in cutlass.range_constexpr(ROUTE_WARPS - 1):
                if warp < group.warp:
                    position += Int32(sCounts[warp, expert])
            entry = pack_entry(expert, position)
        return entry

    @cute.jit
    def _push_header(self, group, args, epoch: Int64) -> None:
        """A thread a peer and word sends this rank's header: the last ones, which have no entries."""
        word, peer = item_coord(THREADS - 1 - group.tid, len(HeaderWord))
        if peer < group.ranks:
            value = args.tokens
            if word == int(HeaderWord.MESSAGE_SLICES):
                value = args.message_slices
            if word == int(HeaderWord.HAS_WEIGHTS):
                value = Int32(args.router_weights != Int64(0))
            if word == int(HeaderWord.RETURN_SLICES):
                value = args.return_slices
            store_ll(group.sPeers[peer] + group.arena.table.at(epoch & 1, group.rank, word), value, epoch)

    @cute.jit
    def _push_entries(self, group, args, epoch: Int64, span: Int32, entry: Int32, weight: Int32) -> None:
        index = span * ROUTE_ENTRIES + group.tid
        if (group.tid < ROUTE_ENTRIES) & (index < args.tokens * group.top_k):
            parity = epoch & 1
            for peer in cutlass.range(group.ranks, unroll=1):
                arena = group.sPeers[peer]
                offset = Int64(index) * LL_BYTES
                store_ll(arena + group.arena.entries.at(parity, group.rank) + offset, entry, epoch)
                if args.router_weights != Int64(0):
                    store_ll(arena + group.arena.weights.at(parity, group.rank) + offset, weight, epoch)

    @cute.jit
    def _push_counts(self, group, epoch: Int64) -> None:
        """By the CTA of the last span, after it was ranked: this rank's count of every expert."""
        sHistogram = shared_array(self.histogram, Int32)
        sCounts = shared_array(self.warp_counts, Uint8)
        for expert in cutlass.range(group.tid, group.experts, THREADS, unroll=1):
            total = sHistogram[expert]
            for warp in cutlass.range_constexpr(ROUTE_WARPS):
                total += Int32(sCounts[warp, expert])
            local, peer = group.by_local_experts.split(expert)
            count = group.sPeers[peer] + group.arena.table.at(epoch & 1, group.rank, len(HeaderWord) + local)
            store_ll(count, total, epoch)
