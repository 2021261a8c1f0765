"""A consumer warp of a pipeline: it takes the same segments of every row that comes through the ring.

    a consumer's part   (lane, (word, segment))     (32, (4, CONSUMER_SEGMENTS)) : (4, (1, 128))    words of 4 bytes

It adds the rows of a token up, or sends each on. Behind a span it counts that it has stored its part. The count is an
atomic that releases what the warp has stored, and acquires what the others have, so that the last one to count signals
the flags behind all of it. Each stage has a count of its own: one consumer may be at the next span's end before another
is at this one's.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.ring import Header, Mark, PipelineParams, PipelineState, Ring, header_of
from cute_ep.kernels.device.arith import LOST, VECTOR_ELEMENTS, accumulate, opaque, round_vector
from cute_ep.kernels.device.atoms import move, plain, send
from cute_ep.kernels.device.block import shared_array, shared_share
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.memory import WORDS, Share, element, part_at, row_address, row_at, share
from cute_ep.kernels.device.slices import SEGMENT, from_lane
from cute_ep.kernels.device.sync import signal, word_address
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import CONSUMER_SEGMENTS, CONSUMERS, MOST_STAGES, PIPELINES
from cute_ep.layouts.maps.record import RegionMap


@dataclass(frozen=True)
class Part:
    """What a lane has of the row in a stage: the byte of shared memory at which it begins, the stage, and the row's
    vector there, from which on there are `left`; `aside`: its byte of the row that is put aside."""

    place: Int32
    stage: Int32
    column: Int32
    left: Int32
    aside: Int32

    def is_whole(self, ctx: CombineContext) -> Boolean:
        """Whether the row has all segments of the consumer; the same in all lanes."""
        return self.left + ctx.lane >= CONSUMER_SEGMENTS * SEGMENT


class Consumer:
    """params, ring: of its `CombinePipelines`."""

    def __init__(self, params: PipelineParams, ring: Ring, shared: RegionMap) -> None:
        self.params, self.ring = params, ring
        self.stored = shared.add("ring_stored", 4, PIPELINES * MOST_STAGES)

    @cute.jit
    def prepare(self, ctx: CombineContext) -> None:
        """A CTA barrier must follow."""
        sStored = shared_array(self.stored, Int32)
        if ctx.tid < PIPELINES * MOST_STAGES:
            sStored[ctx.tid] = Int32(0)

    @cute.jit
    def run(self, ctx: CombineContext, pipeline: Int32, number: Int32) -> None:
        """By consumer `number` of a pipeline."""
        rHeader = cute.make_rmem_tensor(WORDS, Uint32)
        rSum = cute.make_rmem_tensor((VECTOR_ELEMENTS, CONSUMER_SEGMENTS), Float32)
        rSum.fill(0.0)
        column = number * (CONSUMER_SEGMENTS * SEGMENT) + ctx.lane
        stages, row_bytes = self.ring.stages(ctx, pipeline), self.ring.row_bytes(ctx)
        part = opaque(part_at(stages.begin, column * VECTOR_BYTES))
        place, state, marks = part, PipelineState(stages.first, Int32(0)), Int32(0)
        aside = part_at(part, stages.count * row_bytes)
        while marks & int(Mark.STOP) == 0:
            self.ring.take(state, rHeader)
            header = header_of(rHeader)
            marks = header.marks
            if header.has(Mark.ROW | Mark.LAST):
                self._take(ctx, Part(place, state.stage, column, header.number - column, aside), header, rSum)
            else:
                self._end_span(ctx, state.stage, header)
                self.ring.leave(ctx, state.stage)
            place, state = part_at(place, row_bytes), PipelineState(state.stage + 1, state.phase)
            if state.stage == stages.first + stages.count:
                place, state = part, PipelineState(stages.first, state.phase ^ 1)

    @cute.jit
    def _take(self, ctx: CombineContext, tPart: Part, header: Header, rSum: cute.Tensor) -> None:
        """Add a row to the token's sum, or send it on; after the last row send the sum home, or finish it."""
        if header.has(Mark.OUT):
            if cutlass.const_expr(self.params.adds):
                if header.has(Mark.ROW):
                    self._add(ctx, tPart, None if self.params.partial else header.weight, rSum)
                else:
                    self.ring.leave(ctx, tPart.stage)
                if cutlass.const_expr(self.params.partial):
                    if header.has(Mark.JOIN):
                        self._join(tPart, rSum)
                if header.has(Mark.LAST):
                    self._finish(ctx, tPart, Int32(header.target), rSum)
        elif cutlass.const_expr(self.params.partial):
            self._add(ctx, tPart, header.weight, rSum)
            if header.has(Mark.LAST):
                self._round(ctx, send, tPart, header.target, rSum)
            if cutlass.const_expr(self.params.adds):
                if header.has(Mark.OWN_END):
                    self._end_own(tPart, header, rSum)
        else:
            self._send_row(ctx, tPart, header)

    @cute.jit
    def _end_own(self, tPart: Part, header: Header, rSum: cute.Tensor) -> None:
        """The own rank's sum of a token, rounded: put aside, or in the place of the sum."""
        rX = cute.make_rmem_tensor((WORDS, CONSUMER_SEGMENTS), Uint32)
        for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
            round_vector(rSum[None, segment], rX[None, segment], BFloat16)
        rSum.fill(0.0)
        if header.has(Mark.ASIDE):
            move(plain, rX, self._aside(tPart))
        else:
            for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
                accumulate(rSum[None, segment], rX[None, segment], None)

    @cute.jit
    def _join(self, tPart: Part, rSum: cute.Tensor) -> None:
        """Add what was put aside."""
        rX = cute.make_rmem_tensor((WORDS, CONSUMER_SEGMENTS), Uint32)
        aside = self._aside(tPart)
        for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
            if aside.has(segment):
                move(plain, aside.whole(), rX, turns=[segment])
                accumulate(rSum[None, segment], rX[None, segment], None)

    @cute.jit
    def _add(self, ctx: CombineContext, tPart: Part, weight: Float32 | None, rSum: cute.Tensor) -> None:
        rX = cute.make_rmem_tensor((WORDS, CONSUMER_SEGMENTS), Uint32)
        row = self._row(tPart)
        if tPart.is_whole(ctx):
            move(plain, row.whole(), rX)
            self.ring.leave(ctx, tPart.stage)
            for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
                accumulate(rSum[None, segment], rX[None, segment], weight)
        else:
            for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
                if row.has(segment):
                    move(plain, row.whole(), rX, turns=[segment])
                    accumulate(rSum[None, segment], rX[None, segment], weight)
            self.ring.leave(ctx, tPart.stage)

    @cute.jit
    def _finish(self, ctx: CombineContext, tPart: Part, token: Int32, rSum: cute.Tensor) -> None:
        """The sum of a token to the output."""
        if self.params.recv.is_plain(ctx, token):
            out = row_address(ctx.sums.out, token, Int64(ctx.group.hidden) * COMBINE_ITEMSIZE)
            self._round(ctx, plain, tPart, out, rSum)
        else:
            for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
                if tPart.left > segment * SEGMENT:
                    self.params.recv.finish(ctx, token, tPart.column + segment * SEGMENT, rSum[None, segment])
            rSum.fill(0.0)

    @cute.jit
    def _round(
        self, ctx: CombineContext, store: cutlass.Constexpr, tPart: Part, home: Int64, rSum: cute.Tensor
    ) -> None:
        """A token's sum, rounded, to a row; the next one begins with 0. Its words are never SENTINEL, since a NaN is
        rounded to 0x7FFF."""
        rX = cute.make_rmem_tensor((WORDS, CONSUMER_SEGMENTS), Uint32)
        tHome = self._home(tPart, home)
        for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
            round_vector(rSum[None, segment], rX[None, segment], BFloat16)
        if tPart.is_whole(ctx):
            move(store, rX, tHome.whole())
        else:
            move(store, rX, tHome)
        rSum.fill(0.0)

    @cute.jit
    def _send_row(self, ctx: CombineContext, tPart: Part, header: Header) -> None:
        rX = cute.make_rmem_tensor((WORDS, CONSUMER_SEGMENTS), Uint32)
        row, tHome = self._row(tPart), self._home(tPart, header.target)
        if tPart.is_whole(ctx) & ~header.has(Mark.LOST):
            move(plain, row.whole(), rX)
            self.ring.leave(ctx, tPart.stage)
            move(send, rX, tHome.whole())
        else:
            for segment in cutlass.range_constexpr(CONSUMER_SEGMENTS):
                if row.has(segment):
                    move(plain, row.whole(), rX, turns=[segment])
                    if header.has(Mark.LOST):
                        rX[None, segment].fill(LOST)
                    move(send, rX, tHome.whole(), turns=[segment])
            self.ring.leave(ctx, tPart.stage)

    def _aside(self, tPart: Part) -> Share:
        """The lane's part of what is put aside."""
        return shared_share(tPart.aside, CONSUMER_SEGMENTS, tPart.left)

    def _row(self, tPart: Part) -> Share:
        """The lane's part of the row in the stage."""
        return shared_share(tPart.place, CONSUMER_SEGMENTS, tPart.left)

    def _home(self, tPart: Part, home: Int64) -> Share:
        """The lane's part of a row in memory."""
        return share(row_at(part_at(home, tPart.column * VECTOR_BYTES), tPart.left), 0, CONSUMER_SEGMENTS)

    @cute.jit
    def _end_span(self, ctx: CombineContext, stage: Int32, header: Header) -> None:
        """Count, and if the other consumers have, too, signal the flags of the span, which stand side by side."""
        sStored, sEpoch = shared_array(self.stored, Int32), shared_array(self.params.epoch, Int64)
        cute.arch.sync_warp()
        before = Int32(0)
        if ctx.lane == 0:
            before = cute.arch.atomic_add(element(sStored, stage), Int32(1), sem="acq_rel", scope="cta")
        cute.arch.sync_warp()
        last = (from_lane(before, 0) + 1) % CONSUMERS == 0
        if last & (ctx.lane < header.number):
            signal(word_address(header.target, ctx.lane), sEpoch[0])
