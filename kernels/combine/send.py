"""The sending role: an expert rank returns its rows of each token of each source, or their weighted sum.

Each warp carries slices of returned rows; where rows are not Lamport rows, the warps of a CTA carry a chunk, which has
one flag (`schedule` says which come when). They carry its tokens one after the other, each token together:
tokens have different numbers of rows. Lane k holds the row and the weight of entry k. A token without rows here is
passed over: its source knows that. A row that dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.schedule import CombineSchedule, row_vectors
from cute_ep.kernels.device.arith import LOST, VECTOR_ELEMENTS, accumulate, opaque, round_vector
from cute_ep.kernels.device.atoms import has_sentinel, move, send, streamed
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.lamport import home_of, is_lamport
from cute_ep.kernels.device.memory import WORDS, array, row_address, row_at, share
from cute_ep.kernels.device.slices import SEGMENT, from_lane, lowest, without_lowest
from cute_ep.kernels.device.sync import signal
from cute_ep.layouts.maps.arena import CHUNK, COMBINE_ITEMSIZE, chunk_of
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import NO_ROW


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

    def prepare(self, ctx: CombineContext) -> tuple[Int32, Float32]:
        """Begin with the warp's first item: its row and weight, for `run`. A CTA barrier must follow before `run`."""
        return self._load_entries(ctx, *self.schedule.open(ctx))

    @cute.jit
    def run(self, ctx: CombineContext, row: Int32, weight: Float32) -> None:
        """By the warps of sending CTAs, after `prepare`, which returned row and weight, and the wait for
        `combine_consumed`."""
        if self.schedule.are_chunks():
            self._carry_chunks(ctx, row, weight)
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
        home = ctx.sPeers[source] + region.at(sEpoch[0] & 1, row_slice.token)
        while item < self.schedule.count():
            number = self.schedule.ask(ctx)
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            collided = Boolean(False)
            if wanted != Uint32(0):
                # of a few tokens' rows loads take less time if they may stay; whole rows leave no register for it
                once = self.schedule.are_many(ctx) if self.partial else Boolean(True)
                span, entries = (first, last, Int32(self.segments)), Entries(row, weight, wanted, once)
                collided = self._push(ctx, home, span, entries)
            if cutlass.const_expr(not self.partial):
                self._signal_slice(ctx, source, index, collided)
            item = self.schedule.next(ctx, number)
            source, index = self.schedule.split(ctx, item)
            row_slice = self.schedule.row_slice(ctx, source, index)
            first, last = row_slice.first, row_slice.last
            due = self.schedule.is_due(item, source, row_slice)
            row, weight = self._load_entries(ctx, source, row_slice.token, due)
            home = ctx.sPeers[source] + region.at(sEpoch[0] & 1, row_slice.token)

    @cute.jit
    def _carry_chunks(self, ctx: CombineContext, row: Int32, weight: Float32) -> None:
        """Where some rows are not Lamport rows: the warps of a chunk carry its tokens one after the other. Meanwhile
        the ticket for the CTA's next chunk is drawn, before the chunk's barrier; it is read after the barrier."""
        sEpoch = shared_array(self.epoch, Int64)
        item = self.schedule.first(ctx, True)
        turn = Int32(0)
        while item < self.schedule.count():
            if (remainder(item, CHUNK) == 0) & (ctx.tid == 0):
                self.schedule.ask_chunk(ctx, turn)
            source, row_slice = self.schedule.chunk_slice(ctx, item)
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            if wanted != Uint32(0):
                regions = ctx.arena.lamport_returns, ctx.arena.returns
                home = ctx.sPeers[source] + home_of(self._is_lamport(source), *regions, sEpoch[0] & 1, row_slice.token)
                # where in the token each warp begins: a step after the last one of the token before
                steps = quotient(row_slice.last - row_slice.first + (self.segments - 1), self.segments)
                first = row_slice.first + remainder(ctx.warp - row_slice.token * steps, CHUNK) * self.segments
                step = Int32(self.segments * CHUNK)
                self._push(ctx, home, (first, row_slice.last, step), Entries(row, weight, wanted, Boolean(True)))
            # computed again, not kept: registers are short above
            source, row_slice = self.schedule.chunk_slice(ctx, opaque(item))
            item += self.schedule.together(source)
            if remainder(item, CHUNK) == 0:
                cute.arch.sync_threads()  # all of the chunk is stored
                if ctx.warp == 0:
                    self._signal_chunk(ctx, source, chunk_of(row_slice.index))
                item = self.schedule.next_chunk(ctx, turn)
                turn = turn ^ 1
            source, row_slice = self.schedule.chunk_slice(ctx, item)
            due = self.schedule.is_due(item, source, row_slice)
            row, weight = self._load_entries(ctx, source, row_slice.token, due)

    @cute.jit
    def _signal_chunk(self, ctx: CombineContext, source: Int32, chunk: Int32) -> None:
        """Signal the flag of a chunk, by one warp; those of its slices where Lamport rows may contain SENTINEL."""
        sEpoch = shared_array(self.epoch, Int64)
        slices, first = self.schedule.slices(source), chunk * CHUNK
        flag, due = chunk, (ctx.lane == 0) & (first < slices)
        if self._is_lamport(source):
            flag = first + ctx.lane
            due = Boolean(not self.partial) & (ctx.lane < CHUNK) & (flag < slices)
        if due:
            signal(ctx.there(source, ctx.arena.return_ready, ctx.rank, flag), sEpoch[0])

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
        """(row, weight) of the token's entry number `lane`; NO_ROW where it has none here. In a sum a row that dispatch
        had no room for is row 0 with weight NaN."""
        in_rank = ctx.group.max_tokens * ctx.top_k
        index = token * ctx.top_k + ctx.lane
        row = Int32(NO_ROW)
        weight = Float32(0.0)
        if due & (ctx.lane < ctx.top_k):
            row = array(ctx.batch.row_map, Int32, ctx.ranks, in_rank)[source, index]
            if cutlass.const_expr(self.partial):
                weight = Float32(array(ctx.batch.weights, Float32, ctx.ranks, in_rank)[source, index])
                if row >= ctx.rows.capacity:
                    row, weight = Int32(0), Float32(float("nan"))
        return row, weight

    def _is_lamport(self, source: Int32) -> Boolean:
        return is_lamport(self.schedule.tokens(source))

    @cute.jit
    def _push(self, ctx: CombineContext, home: Int64, span: tuple[Int32, Int32, Int32], entries: Entries) -> Boolean:
        """`segments` segments of every `step`, in first .. last - 1, where `span` is (first, last, step). Returns
        whether this lane stored a SENTINEL word."""
        first, last, step = span
        collided = Boolean(False)
        segment = first
        while segment < last:
            if cutlass.const_expr(self.segments == 2):
                if segment + 1 < last:
                    collided = collided | self._push_segments(ctx, home, segment, entries, 2)
                else:
                    collided = collided | self._push_segments(ctx, home, segment, entries, 1)
            else:
                collided = collided | self._push_segments(ctx, home, segment, entries, 1)
            segment += step
        return collided

    @cute.jit
    def _push_segments(
        self, ctx: CombineContext, home: Int64, segment: Int32, entries: Entries, segments: cutlass.Constexpr
    ) -> Boolean:
        """Neighbouring segments of the rows, each to its own slot, or of their weighted sum to the own rank's: its
        words are never SENTINEL, since a NaN is rounded to 0x7FFF. LOADS_IN_FLIGHT loads go before the first use.
        Returns whether this lane stored a SENTINEL word."""
        columns = row_vectors(ctx)
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
                    there, lost = opaque(columns), None  # `opaque`: or what is left is kept in a register, and spilled
                    if cutlass.const_expr(not self.partial):
                        there, lost = cutlass.select_(found < ctx.rows.capacity, columns, Int32(0)), LOST
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
                        collided = collided | self._store(ctx, home, k, column, rX[None, None, turn])
        if cutlass.const_expr(self.partial):
            for part in cutlass.range_constexpr(segments):
                round_vector(rSum[None, part], rX[None, part, 0], BFloat16)
            self._store(ctx, home, ctx.rank, column, rX[None, None, 0])
        return collided

    @cute.jit
    def _store(self, ctx: CombineContext, home: Int64, slot: Int32, column: Int32, rX: cute.Tensor) -> Boolean:
        """What the lane has of a row, from a column on, to a slot; returns whether a word is SENTINEL."""
        slot_at = row_address(home, slot, ctx.arena.returns.stride[2])
        move(send, rX, share(row_at(slot_at, row_vectors(ctx)), column, cute.size(rX, mode=[1])))
        collided = Boolean(False)
        if cutlass.const_expr(not self.partial):
            for part in cutlass.range_constexpr(cute.size(rX, mode=[1])):
                collided = collided | has_sentinel(rX[None, part])
        return collided
