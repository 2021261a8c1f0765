"""The sending role: an expert rank returns its rows of each token of each source, or their weighted sum.

Each warp carries slices of returned rows; where rows are not Lamport rows, the warps of a CTA carry a span (`schedule`
says which come when), whose steps, `segments` segments of a token, they take in turn:

    steps of a span       (step, token)        (P, T) : (1, P)     P steps of a token; step n goes to warp n % warps

Before a span is carried, the entries of the next one are on their way (cp.async), and so is the ticket for the one
after that. One CTA barrier ends a span. It says that the span is stored, so flags of its chunks may be signaled; that
its entries are read, so the span after the next may overwrite them; and that those of the next one are there, since
each thread has waited for its own copies.

A token without rows here is passed over: its source knows that. A row that dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.entries import STEP_TURNS, Entries, EntryStages, load_entry
from cute_ep.kernels.combine.schedule import CombineSchedule, row_vectors, span_of
from cute_ep.kernels.device.arith import LOST, VECTOR_ELEMENTS, accumulate, opaque, round_vector
from cute_ep.kernels.device.atoms import has_sentinel, move, send, streamed
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.memory import WORDS, part_at, row_address, row_at, share
from cute_ep.kernels.device.slices import SEGMENT, from_lane, lowest, slice_of, without_lowest
from cute_ep.kernels.device.sync import signal
from cute_ep.layouts.maps.arena import CHUNK, RETURN_SLOT, chunk_of
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import NO_ROW


class CombineSend:
    """Pushes expert rows, or their weighted sums, to the source ranks.

    segments: neighbouring segments, 1 or 2, that a warp carries at a time.
    """

    def __init__(self, partial: bool, segments: int, epoch: Region, shared: RegionMap) -> None:
        self.partial, self.segments, self.epoch = partial, segments, epoch
        self.schedule = CombineSchedule(epoch, shared)
        self.entries = EntryStages(partial, segments, epoch, shared)

    @cute.jit
    def prepare(self, ctx: CombineContext, rHeader: cute.Tensor) -> tuple[Int32, Float32]:
        """Begin with what comes first: the entries of the CTA's span, on their way, or of the warp's slice: its row
        and weight, for `run`. A CTA barrier must follow before `run`."""
        item = self.schedule.open(ctx, rHeader)
        row, weight = Int32(NO_ROW), Float32(0.0)
        if item.is_span:
            span = span_of(item.source, item.number, item.tokens, item.slices_log2, row_vectors(ctx), ctx.warps)
            self.entries.fetch(ctx, span, Int32(0))
            cute.arch.cp_async_commit_group()
        else:
            row_slice = slice_of(item.number, item.slices_log2, row_vectors(ctx))
            due = (row_slice.token < item.tokens) & (row_slice.first < row_slice.last)
            row, weight = load_entry(ctx, item.source, row_slice.token, due, self.partial)
        return row, weight

    @cute.jit
    def run(self, ctx: CombineContext, row: Int32, weight: Float32) -> None:
        """By the warps of sending CTAs, after `prepare`, which returned row and weight, and the wait for
        `combine_consumed`."""
        if self.schedule.any_flagged():
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
            row, weight = load_entry(ctx, source, row_slice.token, due, self.partial)
            home = ctx.there(source, region, sEpoch[0] & 1, row_slice.token)

    @cute.jit
    def _carry_spans(self, ctx: CombineContext) -> None:
        """Where some rows are not Lamport rows. No wait but the CTA barrier, which all its warps reach: each has the
        same spans."""
        item, stage = self.schedule.first(ctx, True), Int32(0)
        self.schedule.ask_span(ctx, stage)
        span = self.schedule.span(ctx, item)
        self.entries.put_facts(ctx, span, self.schedule.are_lamport(span.source), stage)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # the first span's entries are there, and the ticket
        while item < self.schedule.count():
            span = self.schedule.span(ctx, self.schedule.next_span(ctx, stage))
            self.entries.fetch(ctx, span, stage ^ 1)
            cute.arch.cp_async_commit_group()
            self.entries.put_facts(ctx, span, self.schedule.are_lamport(span.source), stage ^ 1)
            self.schedule.ask_span(ctx, stage ^ 1)
            self._carry_span(ctx, stage)
            following = self.schedule.next_span(ctx, opaque(stage))  # read again, not kept: registers are short above
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if ctx.warp == 0:
                self._signal_span(ctx, opaque(item))
            item, stage = following, stage ^ 1

    @cute.jit
    def _carry_span(self, ctx: CombineContext, stage: Int32) -> None:
        """The warp's steps of a span."""
        number = ctx.warp
        carries = Boolean(True)
        while carries:
            # `opaque`: or what all steps share would be kept, and registers are short
            step = self.entries.step(number, opaque(stage))
            carries = step.exists
            if carries:
                entries = self.entries.staged(ctx, step.token, stage)
                if entries.wanted != Uint32(0):
                    for turn in cutlass.range(STEP_TURNS, unroll=1):
                        segment = step.segment + turn * self.segments
                        self._push_segments(ctx, step.home, segment, step.end, entries, self.segments)
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
        if self.schedule.are_lamport(span.source):
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
    def _push(self, ctx: CombineContext, home: Int64, segments: tuple[Int32, Int32], entries: Entries) -> Boolean:
        """Segments of a slice, from the first of `segments` up to the second, which is beyond it. Returns whether this
        lane stored a SENTINEL word."""
        segment, last = segments
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
        left = end - column
        data = opaque(part_at(ctx.rows.data, column * VECTOR_BYTES))
        if cutlass.const_expr(not self.partial):
            home = opaque(part_at(home, column * VECTOR_BYTES))
        rows = LOADS_IN_FLIGHT // self.segments
        rX = cute.make_rmem_tensor((WORDS, segments, rows), Uint32)
        rSum = cute.make_rmem_tensor((VECTOR_ELEMENTS, segments), Float32)
        rWeight = cute.make_rmem_tensor(rows, Float32)
        rSum.fill(0.0)
        collided = Boolean(False)
        wanted = entries.wanted
        while wanted != Uint32(0):
            again = wanted
            for turn in cutlass.range_constexpr(rows):
                if wanted != Uint32(0):
                    k = lowest(wanted)
                    wanted = without_lowest(wanted)
                    found = from_lane(entries.row, k)
                    address = opaque(row_address(data, found, ctx.row_bytes))
                    there, lost = left, None
                    if cutlass.const_expr(self.partial):
                        rWeight[turn] = from_lane(entries.weight, k)
                    else:
                        there, lost = cutlass.select_(found < ctx.rows.capacity, left, Int32(0)), LOST
                    tRow = share(row_at(address, there), 0, segments)
                    move(streamed(entries.once), tRow, rX[None, None, turn], outside=lost)
            for turn in cutlass.range_constexpr(rows):
                if again != Uint32(0):
                    k = lowest(again)
                    again = without_lowest(again)
                    if cutlass.const_expr(self.partial):
                        for part in cutlass.range_constexpr(segments):
                            accumulate(rSum[None, part], rX[None, part, turn], rWeight[turn])
                    else:
                        collided = collided | self._store(ctx, home, k, left, rX[None, None, turn])
        if cutlass.const_expr(self.partial):
            for part in cutlass.range_constexpr(segments):
                round_vector(rSum[None, part], rX[None, part, 0], BFloat16)
            column = segment * SEGMENT + opaque(ctx.lane)  # again, not kept: registers are short above
            self._store(ctx, part_at(home, column * VECTOR_BYTES), ctx.rank, left, rX[None, None, 0])
        return collided

    @cute.jit
    def _store(self, ctx: CombineContext, slots: Int64, slot: Int32, left: Int32, rX: cute.Tensor) -> Boolean:
        """What the lane has of a row to a slot, whose row has `left` vectors from there on; `slots`: that place in slot
        0. Returns whether a word is SENTINEL."""
        address = opaque(ctx.arena.returns.along(RETURN_SLOT, slots, slot))
        move(send, rX, share(row_at(address, left), 0, cute.size(rX, mode=[1])))
        collided = Boolean(False)
        if cutlass.const_expr(not self.partial):  # beyond the row there is LOST, which is not SENTINEL
            for part in cutlass.range_constexpr(cute.size(rX, mode=[1])):
                collided = collided | has_sentinel(rX[None, part])
        return collided
