"""Route role: rank r tells every peer which of its tokens go to which expert, and at which position.

The position of entry (token, k) counts the earlier entries of the same rank with the same key: its expert, or in
rank-major order the rank that owns it. There only a token's last entry for a rank has a key, so that positions count
tokens. A route CTA takes neighbouring spans of entries, ROUTE_WARPS times what a warp ranks at once: 32, or in
rank-major order those of whole tokens. It counts all entries before its first span in shared memory (integer adds:
order does not matter), ranks the entries of a span by lane and by warp, and adds them to the counts. So there is no
exchange between CTAs, and the result does not depend on timing. All that it tells is LL words, which need no flag: a
table travels ahead of the rows on the links instead of waiting for a fence that follows them.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32

from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import IDS_IN_FLIGHT, DispatchContext, given_id, is_beyond
from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.memory import element, item_coord
from cute_ep.kernels.device.sync import store_ll, word_address
from cute_ep.kernels.device.twins import sync_twin
from cute_ep.kernels.hooks import WeightReader
from cute_ep.layouts.maps.arena import HeaderWord, pack_messages
from cute_ep.layouts.maps.launch import THREADS, WARPS
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import BEYOND, MASKED_ENTRY, MAX_EXPERTS, MAX_RANKS, Phase, pack_entry

ROUTE_WARPS = 8
"""A CTA's first warps, which rank the entries of a span, one a lane."""


def counts_all(cta: Int32, ctas: Int32) -> Boolean:
    """Whether a CTA tells peers the counts of all entries: the highest one, which has the least to send."""
    return cta == ctas - 1


@cute.jit
def spans_of(cta: Int32, ctas: Int32, senders: Int32, spans: Int32) -> tuple[Int32, Int32]:
    """(first, end) of a CTA's part of `spans` spans: neighbours, so that it counts each id once.

    Spans are dealt out from the highest CTA but one down, since those have the least to send; where CTAs have several,
    to those that do not send, if these are at least half. The one that `counts_all`, for which peers wait first, has an
    empty span behind the others, unless there is one span, or one CTA.
    """
    routers = ctas - 1
    share = Int32(spans > 1)
    if (spans > routers) & (routers > 0):
        if 2 * senders <= ctas:
            routers = cutlass.max(routers - senders, Int32(1))
        share = Int32(Uint32(spans + routers - 1) // Uint32(routers))
    first = (ctas - 2 - cta) * share
    end = cutlass.min(first + share, spans)
    if counts_all(cta, ctas):
        first, end = spans, spans + 1
        if (spans <= 1) | (ctas == 1):
            first, end = Int32(0), cutlass.max(spans, Int32(1))
    return first, end


class Route:
    """Builds this rank's routing table and pushes it to all peers."""

    def __init__(self, weights: WeightReader, rank_major: bool, shared: RegionMap) -> None:
        self.weights, self.rank_major = weights, rank_major
        self.histogram = shared.add("histogram", 4, MAX_EXPERTS)
        self.warp_words = shared.add("route_warp_counts", 4, ROUTE_WARPS * MAX_EXPERTS // 4)
        self.warp_counts = replace(
            self.warp_words, itemsize=1, shape=(ROUTE_WARPS, MAX_EXPERTS), stride=(MAX_EXPERTS, 1)
        )

    @cute.jit
    def run(self, ctx: DispatchContext, sent: Int64 | None) -> Boolean:
        """Wait until the peers have read round epoch - 2, then push; False, in every thread, after a timeout or out of
        order; `sent` as in `Context.wait_all_ranks`.

        Called by all CTAs. The first span, and ids before it, are on their way from memory during the wait, whose
        barrier also follows the zeroing of the tables.
        """
        span, end = self._spans(ctx)
        counts = counts_all(ctx.cta, ctx.ctas)
        rId = cute.make_rmem_tensor(IDS_IN_FLIGHT, Int32)
        given, weight = Int32(MASKED_ENTRY), Int32(0)
        if span < end:
            given, weight = self._load_span(ctx, span)
            self._load_before(ctx, span, self._place(ctx), rId)
            self._zero_counts(ctx)
        alive = ctx.wait_all_ranks(sent)
        if alive and span < end:
            if counts:
                self._push_header(ctx)
            self._count_before(ctx, span, rId)
        while alive and span < end:
            next_given, next_weight = Int32(MASKED_ENTRY), Int32(0)
            if span + 1 < end:
                next_given, next_weight = self._load_span(ctx, span + 1)
            key, earlier = self._rank_span(ctx, span, given)
            if counts & (span + 1 == end):
                self._push_counts(ctx)
            self._push_entries(ctx, span, self._entry(ctx, given, key, earlier), weight)
            span += 1
            given, weight = next_given, next_weight
            if span < end:
                sync_twin()
                self._add_counts(ctx)
                sync_twin()
        return alive

    @cute.jit
    def _spans(self, ctx: DispatchContext) -> tuple[Int32, Int32]:
        """(first, end) of the CTA's spans."""
        entries = ctx.input.tokens * ctx.top_k
        if cutlass.const_expr(self.rank_major):
            spans = Int32(Uint32(entries + self._in_span(ctx) - 1) // Uint32(self._in_span(ctx)))
        else:
            spans = quotient(entries + (self._in_span(ctx) - 1), self._in_span(ctx))
        return spans_of(ctx.cta, ctx.ctas, ctx.grid.send_ctas, spans)

    def _lanes(self, ctx: DispatchContext) -> Int32 | int:
        """Lanes of a warp that have an entry."""
        if self.rank_major:
            beyond, _ = ctx.by_top_k.split(Int32(32))
            return 32 - beyond
        return 32

    def _in_span(self, ctx: DispatchContext) -> Int32 | int:
        """Entries of one span."""
        return self._lanes(ctx) * ROUTE_WARPS

    def _step(self, ctx: DispatchContext) -> Int32 | int:
        """Entries that the warps of a CTA have at a time."""
        return self._lanes(ctx) * WARPS

    def _place(self, ctx: DispatchContext) -> Int32:
        """Number of the thread's entry among those of the CTA's warps."""
        return ctx.warp * self._lanes(ctx) + ctx.lane if self.rank_major else ctx.tid

    def _has_place(self, ctx: DispatchContext, index: Int32) -> Boolean:
        """Whether the thread ranks an entry of a span, of which this is the number."""
        ranks = (ctx.tid < 32 * ROUTE_WARPS) & (index < ctx.input.tokens * ctx.top_k)
        return ranks & (ctx.lane < self._lanes(ctx)) if self.rank_major else ranks

    @cute.jit
    def _load_span(self, ctx: DispatchContext, span: Int32) -> tuple[Int32, Int32]:
        """(given expert id, bits of its weight) of the thread's entry of a span."""
        index = span * self._in_span(ctx) + self._place(ctx)
        given = Int32(MASKED_ENTRY)
        weight = Int32(0)
        if self._has_place(ctx, index):
            given = given_id(ctx.ids, ctx.entries, index)
            if ctx.input.router_weights != Int64(0):
                weight = self.weights.read(ctx.input.router_weights, index, ctx).bitcast(Int32)
        return given, weight

    @cute.jit
    def _zero_counts(self, ctx: DispatchContext) -> None:
        sCounts = shared_array(self.warp_words, Uint32)
        sHistogram = shared_array(self.histogram, Int32)
        for item in cutlass.range(ctx.tid, ROUTE_WARPS * MAX_EXPERTS // 4, THREADS, unroll_full=True):
            sCounts[item] = Uint32(0)
        for key in cutlass.range(ctx.tid, self._keys(ctx), THREADS, unroll=1):
            sHistogram[key] = 0

    def _keys(self, ctx: DispatchContext) -> Int32:
        """How many keys there are."""
        return ctx.ranks if self.rank_major else ctx.experts

    def _before(self, ctx: DispatchContext, span: Int32) -> Int32:
        """Entries before a span."""
        return cutlass.min(span * self._in_span(ctx), ctx.input.tokens * ctx.top_k)

    @cute.jit
    def _load_before(self, ctx: DispatchContext, span: Int32, index: Int32, rId: cute.Tensor) -> None:
        """Expert ids of entries index, index + `_step`, ... that come before a span."""
        before = self._before(ctx, span)
        rId.fill(MASKED_ENTRY)
        due = index < before
        if cutlass.const_expr(self.rank_major):
            due = due & (ctx.lane < self._lanes(ctx))
        if due:
            for turn in cutlass.range_constexpr(IDS_IN_FLIGHT):
                if index + turn * self._step(ctx) < before:
                    rId[turn] = given_id(ctx.ids, ctx.entries, index + turn * self._step(ctx))

    @cute.jit
    def _count_before(self, ctx: DispatchContext, span: Int32, rId: cute.Tensor) -> None:
        """Add the entries before a span to the histogram; rId holds the first ids. No barrier follows."""
        sHistogram = shared_array(self.histogram, Int32)
        index = self._place(ctx)
        while self._first_of_warp(ctx, index) < self._before(ctx, span):
            for turn in cutlass.range_constexpr(IDS_IN_FLIGHT):
                before = self._key(ctx, rId[turn])
                if before >= 0:
                    cute.arch.atomic_add(element(sHistogram, before), Int32(1))
            index += self._step(ctx) * IDS_IN_FLIGHT
            self._load_before(ctx, span, index, rId)

    @cute.jit
    def _rank_span(self, ctx: DispatchContext, span: Int32, given: Int32) -> tuple[Int32, Int32]:
        """(key of the thread's own entry of a span, entries of its warp before it with the same key). Afterwards the
        table of counts has the entries of the span's warps, and the histogram those before the span."""
        sCounts = shared_array(self.warp_counts, Uint8)
        own = span * self._in_span(ctx) + self._place(ctx)
        beyond = Boolean(False)
        if self._has_place(ctx, own):
            beyond = is_beyond(ctx.ids, ctx.entries, own, given)
        if beyond:
            ctx.report_input(Phase.EXPERT_ID, own, ctx.group.all_experts, Int32(BEYOND))
        elif (given < Int32(MASKED_ENTRY)) | (given >= ctx.group.all_experts):
            ctx.report_input(Phase.EXPERT_ID, own, ctx.group.all_experts, given)
        key = self._key(ctx, given)
        same = cute.arch.match_sync(-1, key)
        earlier = Int32(cute.arch.popc(same & Uint32(cute.arch.lanemask_lt())))
        if (key >= 0) & (earlier == 0):
            sCounts[ctx.warp, key] = Uint8(cute.arch.popc(same))
        sync_twin()
        return key, earlier

    def _first_of_warp(self, ctx: DispatchContext, index: Int32) -> Int32:
        """The entry of the warp's first lane where all lanes must go together."""
        return index - ctx.lane if self.rank_major else index

    @cute.jit
    def _key(self, ctx: DispatchContext, given: Int32) -> Int32:
        """What an id that the caller gave is counted by, MASKED_ENTRY for nothing. In rank-major order by whole warps,
        whose lanes hold whole tokens: of those with the same token and rank the last counts."""
        key = ctx.expert_of(given)
        if cutlass.const_expr(self.rank_major):
            _, token = ctx.by_top_k.split(ctx.lane)
            if key >= 0:
                _, key = ctx.by_local_experts.split(key)
            same = cute.arch.match_sync(-1, token * (2 * MAX_RANKS) + key)
            if (same & Uint32(cute.arch.lanemask_gt())) != Uint32(0):
                key = Int32(MASKED_ENTRY)
        return key

    @cute.jit
    def _entry(self, ctx: DispatchContext, given: Int32, key: Int32, earlier: Int32) -> Int32:
        """Packed entry of the thread's own entry of the span that was counted, at position 0 where it has no key.

        Entries of one key are told apart by lane within a warp, by the table among the span's warps, and by the
        histogram among spans.
        """
        sHistogram = shared_array(self.histogram, Int32)
        sCounts = shared_array(self.warp_counts, Uint8)
        entry = Int32(MASKED_ENTRY)
        if cutlass.const_expr(self.rank_major):
            entry = ctx.expert_of(given)
        if key >= 0:
            position = sHistogram[key] + earlier
            for warp in cutlass.range_constexpr(ROUTE_WARPS - 1):
                if warp < ctx.warp:
                    position += Int32(sCounts[warp, key])
            entry = pack_entry(entry if self.rank_major else key, position)
        return entry

    @cute.jit
    def _push_header(self, ctx: DispatchContext) -> None:
        """A thread a peer and word sends this rank's header: the last ones, which have no entries."""
        word, peer = item_coord(THREADS - 1 - ctx.tid, len(HeaderWord))
        if peer < ctx.ranks:
            value = ctx.input.tokens
            if word == int(HeaderWord.MESSAGES):
                value = pack_messages(ctx.input.message_slices_log2, Int32(ctx.input.router_weights != Int64(0)))
            if word == int(HeaderWord.ROUND):
                value = Int32(ctx.epoch)
            if word == int(HeaderWord.RETURNS):
                value = ctx.input.returns
            store_ll(ctx.there(peer, ctx.arena.table, ctx.epoch & 1, ctx.rank, word), value, ctx.epoch)

    @cute.jit
    def _push_entries(self, ctx: DispatchContext, span: Int32, entry: Int32, weight: Int32) -> None:
        index = span * self._in_span(ctx) + self._place(ctx)
        if self._has_place(ctx, index):
            parity = ctx.epoch & 1
            for peer in cutlass.range(ctx.ranks, unroll=1):
                entries = ctx.there(peer, ctx.arena.entries, parity, ctx.rank)
                store_ll(word_address(entries, index), entry, ctx.epoch)
                if ctx.input.router_weights != Int64(0):
                    weights = ctx.there(peer, ctx.arena.weights, parity, ctx.rank)
                    store_ll(word_address(weights, index), weight, ctx.epoch)

    @cute.jit
    def _add_counts(self, ctx: DispatchContext) -> None:
        """Move a span's entries from the table of counts to the histogram; between two barriers."""
        sHistogram = shared_array(self.histogram, Int32)
        sCounts = shared_array(self.warp_counts, Uint8)
        for key in cutlass.range(ctx.tid, self._keys(ctx), THREADS, unroll=1):
            sHistogram[key] = self._count_of(key)
            for warp in cutlass.range_constexpr(ROUTE_WARPS):
                sCounts[warp, key] = Uint8(0)

    def _count_of(self, key: Int32) -> Int32:
        """Entries with a key up to the end of the span that was ranked last."""
        total = shared_array(self.histogram, Int32)[key]
        for warp in range(ROUTE_WARPS):
            total += Int32(shared_array(self.warp_counts, Uint8)[warp, key])
        return total

    @cute.jit
    def _push_counts(self, ctx: DispatchContext) -> None:
        """By the CTA that counts all, after its last span was ranked: this rank's count of every key."""
        for key in cutlass.range(ctx.tid, self._keys(ctx), THREADS, unroll=1):
            column, peer = (Int32(0), key) if self.rank_major else ctx.by_local_experts.split(key)
            count = ctx.there(peer, ctx.arena.table, ctx.epoch & 1, ctx.rank, len(HeaderWord) + column)
            store_ll(count, self._count_of(key), ctx.epoch)
