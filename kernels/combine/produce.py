"""The producer warp of a pipeline: which rows come through its ring, in which order.

All rows of a span, token by token, each token's in the order in which they are added; behind a span a header says
which flags are due. Where pipelines add up, also what belongs to this rank's tokens, once the flags of other ranks are
there: some pipelines send all spans first, others only while there is nothing to add up. `pipeline` says why no peer
waits for a pipeline that waits.

A token without rows here is passed over: its source knows that. A row that dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.entries import load_entry
from cute_ep.kernels.combine.piped_schedule import PipelineSchedule, Sender
from cute_ep.kernels.combine.ring import NUMBER_SHIFT, Header, Mark, PipelineParams, PipelineState, Ring, Stages
from cute_ep.kernels.combine.runs import NO_RUN, LaneEntry, Runs
from cute_ep.kernels.combine.schedule import Span, row_vectors
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.lamport import region_of
from cute_ep.kernels.device.memory import part_at, row_address
from cute_ep.kernels.device.slices import SEGMENT, from_lane, lowest, without_lowest
from cute_ep.layouts.maps.arena import CHUNK, RETURN_SLOT, RETURN_TOKEN, chunk_of
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import PIPELINES
from cute_ep.layouts.maps.routing import NO_ROW


class Producer:
    """params, schedule, ring: of its `CombinePipelines`."""

    def __init__(self, params: PipelineParams, schedule: PipelineSchedule, ring: Ring) -> None:
        self.params, self.schedule, self.ring = params, schedule, ring
        self.runs = Runs(params, ring)

    @cute.jit
    def run(self, ctx: CombineContext, pipeline: Int32) -> Boolean:
        """False after a timeout."""
        stages = self.ring.stages(ctx, pipeline)
        state, alive = PipelineState(stages.first, Int32(1)), Boolean(True)
        number, count = ctx.cta * PIPELINES + pipeline, ctx.grid.send_ctas * PIPELINES
        sender = self.schedule.sender(ctx, number, count)
        if cutlass.const_expr(self.params.adds):
            compares = self.schedule.compares(ctx, number, count) & (ctx.ranks > 1)
            alive, state = self._put_all(ctx, stages, state, sender, compares)
        else:
            item = self.schedule.first_of(sender)
            while item < self.schedule.count():
                asked = self.schedule.ask_of(ctx, sender)
                state = self._put_span(ctx, stages, state, item)
                item = self.schedule.next_of(ctx, sender, asked)
        stop = Header(Int64(0), Float32(0.0), Int32(int(Mark.STOP)))
        self.ring.put(ctx, stages, state, stop, Int64(0), Int32(0))
        return alive

    @cute.jit
    def _put_all(
        self, ctx: CombineContext, stages: Stages, state: PipelineState, sender: Sender, compares: Boolean
    ) -> tuple[Boolean, PipelineState]:
        """Send spans and, where pipelines add up, put the rows that runs of tokens are added up from, a run at a time.
        False after a timeout; the next state.

        A pipeline that `drains` holds `item`, the next span, and sends until its counter has none. Any other one looks
        for its run. If that has not arrived, and the counter may have spans (`may_draw`), the pipeline draws one and
        sends it at once; a draw precedes each such send, so that no span is sent twice. NO_RUN stands for an empty
        first run, which counts as arrived.
        """
        adds_up = self.params.adds_up(ctx)
        tokens = cutlass.select_(adds_up, ctx.sums.tokens, Int32(0))
        run_tokens = self.schedule.run_tokens(ctx)
        _, mine = ctx.by_top_k.split(ctx.lane)
        token, asked_run = cutlass.select_(adds_up, Int32(NO_RUN), Int32(0)), Int32(0)
        entry = LaneEntry(Int32(NO_ROW), Int32(NO_ROW), Float32(0.0))
        item, spans = self.schedule.first_of(sender), self.schedule.count()
        drains, may_draw, alive = item < spans, spans > 0, Boolean(True)
        while alive & (may_draw | (token < tokens)):
            arrived, looks = Boolean(False), Int32(0)
            if ~drains & (token < tokens):
                arrived = self.runs.are_there(ctx, token + mine, entry.owner)
                while ~arrived & may_draw & (looks < self.schedule.looks(ctx)):
                    arrived, looks = self.runs.are_there(ctx, token + mine, entry.owner), looks + 1
            if ~drains & ~arrived & may_draw:
                item = self.schedule.next_of(ctx, sender, self.schedule.ask_of(ctx, sender))
                may_draw = item < spans
            if ~arrived & (item < spans):
                asked = Int32(0)
                if drains:
                    asked = self.schedule.ask_of(ctx, sender)
                state = self._put_span(ctx, stages, state, item)
                if drains:
                    item = self.schedule.next_of(ctx, sender, asked)
                    drains = item < spans
                    may_draw = drains
            elif token < tokens:
                if token == NO_RUN:
                    asked_run = self.schedule.ask_run(ctx)
                    if compares:
                        alive = self.params.compare(ctx)
                following = from_lane(asked_run, 0) * run_tokens
                asked_run = self.schedule.ask_run(ctx)
                next_entry = self.runs.load(ctx, following, run_tokens)  # on their way meanwhile
                if ~arrived & alive:
                    alive = self.runs.wait(ctx, token + mine, entry.owner)
                if alive & (token != NO_RUN):
                    count = cutlass.min(run_tokens, tokens - token)
                    state = self.runs.put(ctx, stages, state, token, count, entry)
                token, entry = following, next_entry
        return alive, state

    # ---- what is sent

    @cute.jit
    def _put_span(self, ctx: CombineContext, stages: Stages, state: PipelineState, item: Int32) -> PipelineState:
        """All rows of a span, and what follows them. Returns the next state."""
        span = self.schedule.span(ctx, item)
        state = self._put_rows(ctx, stages, state, span)
        return self._put_end(ctx, stages, state, span)

    @cute.jit
    def _put_rows(self, ctx: CombineContext, stages: Stages, state: PipelineState, span: Span) -> PipelineState:
        """All rows of a span. Returns the next state."""
        sEpoch = shared_array(self.params.epoch, Int64)
        lamport = self.schedule.are_lamport(span.source)
        region = region_of(lamport, ctx.arena.lamport_returns, ctx.arena.returns)
        part = span.first * (SEGMENT * VECTOR_BYTES)
        home = part_at(ctx.there(span.source, region, sEpoch[0] & 1, span.token), part)
        if cutlass.const_expr(self.params.partial):
            home = region.along(RETURN_SLOT, home, ctx.rank)
        data = part_at(ctx.rows.data, part)
        vectors = cutlass.min(row_vectors(ctx), span.last * SEGMENT) - span.first * SEGMENT
        row, weight = load_entry(ctx, span.source, span.token, span.tokens > 0, self.params.partial)
        for number in cutlass.range(span.tokens, unroll=1):
            # those of the next token are on their way while this one's rows are copied
            due = number + 1 < span.tokens
            next_row, next_weight = load_entry(ctx, span.source, span.token + (number + 1), due, self.params.partial)
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            while wanted != Uint32(0):
                k = lowest(wanted)
                wanted = without_lowest(wanted)
                found, own_weight = from_lane(row, k), from_lane(weight, k)
                to = region.along(RETURN_TOKEN, home, number)
                marks, nbytes = (vectors << NUMBER_SHIFT) | int(Mark.ROW), vectors * VECTOR_BYTES
                if cutlass.const_expr(self.params.partial):
                    marks = marks | cutlass.select_(wanted == Uint32(0), Int32(int(Mark.LAST)), Int32(0))
                else:
                    to = region.along(RETURN_SLOT, to, k)
                    lost = found >= ctx.rows.capacity
                    marks = marks | cutlass.select_(lost, Int32(int(Mark.LOST)), Int32(0))
                    nbytes = cutlass.select_(lost, Int32(0), nbytes)
                address = row_address(data, found, ctx.row_bytes)
                state = self.ring.put(ctx, stages, state, Header(to, own_weight, marks), address, nbytes)
            row, weight = next_row, next_weight
        return state

    @cute.jit
    def _put_end(self, ctx: CombineContext, stages: Stages, state: PipelineState, span: Span) -> PipelineState:
        """What follows the rows of a span: its chunks' flags, or those of its slices where Lamport rows may contain
        SENTINEL; nothing where there is none. Returns the next state."""
        slices, first = self.schedule.slices(span.source), span.index
        last = cutlass.min(slices, first + self.schedule.in_span(ctx))
        flags, flag = chunk_of(last + (CHUNK - 1)) - chunk_of(first), chunk_of(first)
        if self.schedule.are_lamport(span.source):
            flags, flag = Int32(0), first
            if cutlass.const_expr(not self.params.partial):
                flags = cutlass.max(cutlass.min(slices - first, Int32(CHUNK)), Int32(0))
        if flags > 0:
            home = ctx.there(span.source, ctx.arena.return_ready, ctx.rank, flag)
            end = Header(home, Float32(0.0), flags << NUMBER_SHIFT)
            state = self.ring.put(ctx, stages, state, end, Int64(0), Int32(0))
        return state
