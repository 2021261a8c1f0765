"""The sending role: an expert rank returns its rows of each token of each source, or their weighted sum.

Each warp carries slices of returned rows; where rows are not Lamport rows, the warps of a CTA carry a span (`schedule`
says which come when), whose steps, `segments` segments of a token, they take in turn. What a warp needs to know of a
token are its entries: lane k holds the row and the weight of entry k. Those of a span come through shared memory:

    entries of spans      (stage, token, k)    (2, span tokens, top_k)    rows, and weights of a sum
    steps of a span       (warp, turn)         (warps, ...) : (1, warps)  token first, then segments

Before a span is carried, the entries of the next one are on their way (cp.async), and so is the ticket for the one
after that. One CTA barrier ends a span. It says that the span is stored, so flags of its chunks may be signaled; that
its entries are read, so the span after the next may overwrite them; and that those of the next one are there, since
each thread has waited for its own copies.

A token without rows here is passed over: its source knows that. A row that dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.schedule import CombineSchedule, Span, row_vectors, span_of
from cute_ep.kernels.device.arith import LOST, VECTOR_ELEMENTS, accumulate, opaque, round_vector
from cute_ep.kernels.device.atoms import fetch, has_sentinel, move, plain, send, streamed
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.divide import Divisor, division_magic, quotient
from cute_ep.kernels.device.lamport import is_lamport, region_of
from cute_ep.kernels.device.memory import WORDS, array, row_address, row_at, share, words_at
from cute_ep.kernels.device.slices import SEGMENT, from_lane, lowest, slice_of, without_lowest
from cute_ep.kernels.device.sync import signal
from cute_ep.layouts.maps.arena import CHUNK, COMBINE_ITEMSIZE, chunk_of
from cute_ep.layouts.maps.launch import WIDE_WARPS
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import MAX_TOP_K, NO_ROW
from cute_ep.layouts.maps.scales import WORD_BYTES

STAGES = 2
"""Spans whose entries are in shared memory: of the one that is carried, and of the next."""


class Fact(IntEnum):
    """What the steps of a span share: its tokens, steps of a token and their `magic`, bytes from token to token, first
    segment, and the first vector that is beyond."""

    TOKENS = 0
    STEPS = 1
    STEPS_MAGIC = 2
    PITCH = 3
    FIRST = 4
    END = 5


FACT_WORDS = 8
"""Room for the facts of a span, in whole vectors."""


def _fact(rFacts: cute.Tensor, fact: Fact) -> Int32:
    return Int32(rFacts[int(fact)])


@dataclass(frozen=True)
class Entries:
    """A token's entries of this rank: lane k holds row and weight of entry k, bit k of `wanted` is set where it has
    one. `once`: loaded rows are the first to leave the caches."""

    row: Int32
    weight: Float32
    wanted: Uint32
    once: Boolean


class CombineSend:
    """Pushes expert rows, or their weighted sums, to the source ranks.

    segments: neighbouring segments, 1 or 2, that a warp carries at a time.
    """

    def __init__(self, partial: bool, segments: int, epoch: Region, shared: RegionMap) -> None:
        self.partial, self.segments, self.epoch = partial, segments, epoch
        self.schedule = CombineSchedule(epoch, shared)
        self.facts = shared.add("return_facts", 4, STAGES, FACT_WORDS)
        self.homes = shared.add("return_homes", 8, STAGES)
        self.rows = shared.add("return_rows", 4, STAGES, WIDE_WARPS * MAX_TOP_K)
        if partial:
            self.weights = shared.add("return_weights", 4, STAGES, WIDE_WARPS * MAX_TOP_K)

    @cute.jit
    def prepare(self, ctx: CombineContext) -> tuple[Int32, Float32]:
        """Begin with what comes first: the entries of the CTA's span, on their way, or of the warp's slice: its row
        and weight, for `run`. A CTA barrier must follow before `run`."""
        spans, source, number, tokens, log2 = self.schedule.open(ctx)
        row, weight = Int32(NO_ROW), Float32(0.0)
        if spans:
            span = span_of(source, number, tokens, log2, row_vectors(ctx), ctx.warps)
            self._fetch_entries(ctx, span, Int32(0))
            cute.arch.cp_async_commit_group()
        else:
            row_slice = slice_of(number, log2, row_vectors(ctx))
            due = (row_slice.token < tokens) & (row_slice.first < row_slice.last)
            row, weight = self._load_entries(ctx, source, row_slice.token, due)
        return row, weight

    @cute.jit
    def run(self, ctx: CombineContext, row: Int32, weight: Float32) -> None:
        """By the warps of sending CTAs, after `prepare`, which returned row and weight, and the wait for
        `combine_consumed`."""
        if self.schedule.are_spans():
            self._carry_spans(ctx)
        else:
            self._carry_slices(ctx, row, weight)

    @cute.jit
    def _carry_slices(self, ctx: CombineContext, row: Int32, weight: Float32) -> None:
        """Lamport rows: a warp carries a slice. With few tokens this half waits for nothing but these instructions:
        256 tokens of 4 rows each took 12,000 of a scheduler's 18,000 cycles (H200, 2026-11-21). With more, CTAs take
        slices of their source from each other (4 x H200, 2026-11-22: 512 tokens 63.6 us, static 69.0)."""
        sEpoch = shared_array(self.epoch, Int64)
        region = ctx.arena.lamport_returns
        item = self.schedule.first(ctx, False)
        source, index = self.schedule.split(ctx, item)
        row_slice = self.schedule.row_slice(ctx, source, index)
        first, last = row_slice.first, row_slice.last
        home = ctx.there(source, region, sEpoch[0] & 1, row_slice.token)
        while item < self.schedule.count():
            number = self.schedule.ask(ctx)
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            collided = Boolean(False)
            if wanted != Uint32(0):
                # of a few tokens' rows loads take less time if they may stay; whole rows leave no register for it
                once = self.schedule.are_many(ctx) if self.partial else Boolean(True)
                entries = Entries(row, weight, wanted, once)
                collided = self._push(ctx, home, (first, last), entries)
            if cutlass.const_expr(not self.partial):
                self._signal_slice(ctx, source, index, collided)
            item = self.schedule.next(ctx, number)
            source, index = self.schedule.split(ctx, item)
            row_slice = self.schedule.row_slice(ctx, source, index)
            first, last = row_slice.first, row_slice.last
            due = self.schedule.is_due(item, source, row_slice)
            row, weight = self._load_entries(ctx, source, row_slice.token, due)
            home = ctx.there(source, region, sEpoch[0] & 1, row_slice.token)

    @cute.jit
    def _carry_spans(self, ctx: CombineContext) -> None:
        """Where some rows are not Lamport rows. No wait but the CTA barrier, which all its warps reach: each has the
        same spans."""
        item, turn = self.schedule.first(ctx, True), Int32(0)
        self.schedule.ask_span(ctx, turn)
        self._put_facts(ctx, self.schedule.span(ctx, item), turn)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # the first span's entries are there, and the ticket
        while item < self.schedule.count():
            span = self.schedule.span(ctx, self.schedule.next_span(ctx, turn))
            self._fetch_entries(ctx, span, turn ^ 1)
            cute.arch.cp_async_commit_group()
            self._put_facts(ctx, span, turn ^ 1)
            self.schedule.ask_span(ctx, turn ^ 1)
            self._carry_span(ctx, turn)
            following = self.schedule.next_span(ctx, opaque(turn))  # read again, not kept: registers are short above
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if ctx.warp == 0:
                self._signal_span(ctx, opaque(item))
            item, turn = following, turn ^ 1

    @cute.jit
    def _put_facts(self, ctx: CombineContext, span: Span, stage: Int32) -> None:
        """What each step of a span reads, into a stage, by thread 0."""
        sFacts, sHomes = shared_array(self.facts, Uint32), shared_array(self.homes, Int64)
        sEpoch = shared_array(self.epoch, Int64)
        if ctx.tid == 0:
            region = region_of(self._is_lamport(span.source), ctx.arena.lamport_returns, ctx.arena.returns)
            steps = cutlass.max(quotient(span.last - span.first + (self.segments - 1), self.segments), Int32(1))
            facts = {
                Fact.TOKENS: span.tokens,
                Fact.STEPS: steps,
                Fact.STEPS_MAGIC: division_magic(Uint32(steps)),
                Fact.PITCH: region.stride[1],
                Fact.FIRST: span.first,
                Fact.END: cutlass.min(row_vectors(ctx), span.last * SEGMENT),
            }
            for fact, value in facts.items():
                sFacts[stage, int(fact)] = Uint32(value)
            sHomes[stage] = ctx.there(span.source, region, sEpoch[0] & 1, span.token)

    @cute.jit
    def _carry_span(self, ctx: CombineContext, stage: Int32) -> None:
        """The warp's steps of a span."""
        sFacts, sHomes = shared_array(self.facts, Uint32), shared_array(self.homes, Int64)
        rFacts = cute.make_rmem_tensor(FACT_WORDS, Uint32)
        number = ctx.warp
        carries = Boolean(True)
        while carries:
            here = opaque(stage)  # or what is read would be kept, and registers are short
            parts = [
                [cute.local_tile(one, (WORDS,), (part,)) for part in range(2)] for one in (sFacts[here, None], rFacts)
            ]
            move(plain, *parts)
            step, token = Divisor(_fact(rFacts, Fact.STEPS), rFacts[int(Fact.STEPS_MAGIC)]).split(number)
            carries = token < _fact(rFacts, Fact.TOKENS)
            if carries:
                entries = self._staged_entries(ctx, token, stage)
                if entries.wanted != Uint32(0):
                    home = row_address(sHomes[here], token, _fact(rFacts, Fact.PITCH))
                    segment = _fact(rFacts, Fact.FIRST) + step * self.segments
                    self._push_segments(ctx, home, segment, _fact(rFacts, Fact.END), entries, self.segments)
            number += ctx.warps

    @cute.jit
    def _signal_span(self, ctx: CombineContext, item: Int32) -> None:
        """Signal the flags of a span's chunks, by one warp; those of its slices where Lamport rows may contain
        SENTINEL."""
        sEpoch = shared_array(self.epoch, Int64)
        span = self.schedule.span(ctx, item)
        slices, first = self.schedule.slices(span.source), span.index
        flag = chunk_of(first) + ctx.lane
        due = (first + ctx.lane * CHUNK < slices) & (ctx.lane < chunk_of(ctx.warps))
        if self._is_lamport(span.source):
            flag = first + ctx.lane
            due = Boolean(not self.partial) & (ctx.lane < ctx.warps) & (flag < slices)
        if due:
            signal(ctx.there(span.source, ctx.arena.return_ready, ctx.rank, flag), sEpoch[0])

    @cute.jit
    def _signal_slice(self, ctx: CombineContext, source: Int32, index: Int32, collided: Boolean) -> None:
        """The flag of a Lamport slice in which some lane stored a SENTINEL word."""
        sEpoch = shared_array(self.epoch, Int64)
        flagged = cute.arch.vote_any_sync(collided)
        cute.arch.sync_warp()
        if flagged & (ctx.lane == 0):
            signal(ctx.there(source, ctx.arena.return_ready, ctx.rank, index), sEpoch[0])

    @cute.jit
    def _load_entries(self, ctx: CombineContext, source: Int32, token: Int32, due: Boolean) -> tuple[Int32, Float32]:
        """(row, weight) of the token's entry number `lane`; NO_ROW where it has none here."""
        in_rank = ctx.group.max_tokens * ctx.top_k
        index = token * ctx.top_k + ctx.lane
        row = Int32(NO_ROW)
        weight = Float32(0.0)
        if due & (ctx.lane < ctx.top_k):
            row = array(ctx.batch.row_map, Int32, ctx.ranks, in_rank)[source, index]
            if cutlass.const_expr(self.partial):
                weight = Float32(array(ctx.batch.weights, Float32, ctx.ranks, in_rank)[source, index])
        return self._checked(ctx, row, weight)

    @cute.jit
    def _fetch_entries(self, ctx: CombineContext, span: Span, stage: Int32) -> None:
        """Begin to copy the entries of a span into a stage, a word of each array a thread: a span has at most a token a
        warp."""
        nbytes = ctx.group.max_tokens * ctx.top_k * WORD_BYTES
        first, end = span.token * ctx.top_k, (span.token + span.tokens) * ctx.top_k
        arrays = [(ctx.batch.row_map, self.rows)]
        if cutlass.const_expr(self.partial):
            arrays += [(ctx.batch.weights, self.weights)]
        for data, staged in arrays:
            sWords = cute.local_tile(shared_array(staged, Uint32)[stage, None], (1,), (ctx.tid,))
            gWords = words_at(row_address(data, span.source, nbytes), end)
            move(fetch, share(gWords, first + ctx.tid, 1), [sWords])

    @cute.jit
    def _staged_entries(self, ctx: CombineContext, token: Int32, stage: Int32) -> Entries:
        """The entries of a token of a span, by number in the span."""
        row, weight = Int32(NO_ROW), Float32(0.0)
        if ctx.lane < ctx.top_k:
            place = stage, token * ctx.top_k + ctx.lane
            row = shared_array(self.rows, Int32)[place]
            if cutlass.const_expr(self.partial):
                weight = shared_array(self.weights, Float32)[place]
        row, weight = self._checked(ctx, row, weight)
        return Entries(row, weight, Uint32(cute.arch.vote_ballot_sync(row >= 0)), Boolean(True))

    @cute.jit
    def _checked(self, ctx: CombineContext, row: Int32, weight: Float32) -> tuple[Int32, Float32]:
        """In a sum a row that dispatch had no room for is row 0 with weight NaN."""
        if cutlass.const_expr(self.partial):
            if row >= ctx.rows.capacity:
                row, weight = Int32(0), Float32(float("nan"))
        return row, weight

    def _is_lamport(self, source: Int32) -> Boolean:
        return is_lamport(self.schedule.tokens(source))

    @cute.jit
    def _push(self, ctx: CombineContext, home: Int64, span: tuple[Int32, Int32], entries: Entries) -> Boolean:
        """The segments first .. last - 1 of a slice, where `span` is (first, last). Returns whether this lane stored a
        SENTINEL word."""
        segment, last = span
        collided = Boolean(False)
        end = row_vectors(ctx)
        while segment < last:
            if cutlass.const_expr(self.segments == 2):
                if segment + 1 < last:
                    collided = collided | self._push_segments(ctx, home, segment, end, entries, 2)
                else:
                    collided = collided | self._push_segments(ctx, home, segment, end, entries, 1)
            else:
                collided = collided | self._push_segments(ctx, home, segment, end, entries, 1)
            segment += self.segments
        return collided

    @cute.jit
    def _push_segments(
        self,
        ctx: CombineContext,
        home: Int64,
        segment: Int32,
        end: Int32,
        entries: Entries,
        segments: cutlass.Constexpr,
    ) -> Boolean:
        """Neighbouring segments of the rows, but no vector from `end` on, each to its own slot, or of their weighted
        sum to the own rank's: its words are never SENTINEL, since a NaN is rounded to 0x7FFF. LOADS_IN_FLIGHT loads go
        before the first use. Returns whether this lane stored a SENTINEL word."""
        column = segment * SEGMENT + opaque(ctx.lane)
        rows = LOADS_IN_FLIGHT // self.segments
        rX = cute.make_rmem_tensor((WORDS, segments, rows), Uint32)
        rSum = cute.make_rmem_tensor((VECTOR_ELEMENTS, segments), Float32)
        rSum.fill(0.0)
        collided = Boolean(False)
        left = entries.wanted
        while left != Uint32(0):
            again = left
            for turn in cutlass.range_constexpr(rows):
                if left != Uint32(0):
                    found = from_lane(entries.row, lowest(left))
                    left = without_lowest(left)
                    address = row_address(ctx.rows.data, found, Int32(ctx.group.hidden * COMBINE_ITEMSIZE))
                    there, lost = end, None
                    if cutlass.const_expr(not self.partial):
                        there, lost = cutlass.select_(found < ctx.rows.capacity, end, Int32(0)), LOST
                    tRow = share(row_at(address, there), column, segments)
                    move(streamed(entries.once), tRow, rX[None, None, turn], outside=lost)
            for turn in cutlass.range_constexpr(rows):
                if again != Uint32(0):
                    k = lowest(again)
                    again = without_lowest(again)
                    if cutlass.const_expr(self.partial):
                        for part in cutlass.range_constexpr(segments):
                            accumulate(rSum[None, part], rX[None, part, turn], from_lane(entries.weight, k))
                    else:
                        collided = collided | self._store(ctx, home, k, column, end, rX[None, None, turn])
        if cutlass.const_expr(self.partial):
            for part in cutlass.range_constexpr(segments):
                round_vector(rSum[None, part], rX[None, part, 0], BFloat16)
            self._store(ctx, home, ctx.rank, column, end, rX[None, None, 0])
        return collided

    @cute.jit
    def _store(
        self, ctx: CombineContext, home: Int64, slot: Int32, column: Int32, end: Int32, rX: cute.Tensor
    ) -> Boolean:
        """What the lane has of a row, from a column on, to a slot, but nothing from `end` on; returns whether a word is
        SENTINEL."""
        slot_at = row_address(home, slot, ctx.arena.returns.stride[2])
        move(send, rX, share(row_at(slot_at, end), column, cute.size(rX, mode=[1])))
        collided = Boolean(False)
        if cutlass.const_expr(not self.partial):  # beyond the row there is LOST, which is not SENTINEL
            for part in cutlass.range_constexpr(cute.size(rX, mode=[1])):
                collided = collided | has_sentinel(rX[None, part])
        return collided
