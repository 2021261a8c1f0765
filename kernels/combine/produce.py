"""The producer warp of a pipeline: which rows come through its ring, in which order.

First all rows of its spans, token by token, each token's in the order in which they are added; behind a span a header
says which flags are due. Then, where pipelines add up what comes home, the slots of this rank's tokens, as soon as the
flags of their owners are there. No loop over spans contains a wait for a peer.

A token without rows here is passed over: its source knows that. A row that dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.entries import load_entry
from cute_ep.kernels.combine.ring import NUMBER_SHIFT, Header, Mark, PipelineParams, Ring
from cute_ep.kernels.combine.schedule import CombineSchedule, Span, row_vectors
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext, given_id
from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.lamport import is_lamport, region_of
from cute_ep.kernels.device.memory import part_at, row_address
from cute_ep.kernels.device.slices import SEGMENT, from_lane, lowest, without_lowest
from cute_ep.kernels.device.sync import Awaited, wait_signal, warp_all
from cute_ep.layouts.maps.arena import CHUNK, COMBINE_ITEMSIZE, chunk_of
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import PIPELINES
from cute_ep.layouts.maps.routing import NO_ROW, Phase


class Producer:
    """params, schedule, ring: of its `CombinePipelines`."""

    def __init__(self, params: PipelineParams, schedule: CombineSchedule, ring: Ring) -> None:
        self.params, self.schedule, self.ring = params, schedule, ring

    @cute.jit
    def run(self, ctx: CombineContext, pipeline: Int32) -> Boolean:
        """False after a timeout."""
        stage, phase = self.ring.first(pipeline), Int32(1)
        number, count = ctx.cta * PIPELINES + pipeline, ctx.grid.send_ctas * PIPELINES
        item = self.schedule.first_of(number, count)
        while item < self.schedule.count():
            asked = self.schedule.ask_of(ctx, number)
            span = self.schedule.span(ctx, item)
            stage, phase = self._put_rows(ctx, pipeline, stage, phase, span)
            stage, phase = self._put_end(ctx, pipeline, stage, phase, span)
            item = self.schedule.next_of(ctx, number, count, asked)
        alive = Boolean(True)
        if cutlass.const_expr(self.params.adds):
            if self.adds_up(ctx):
                if (number == quotient(count, 2)) & (ctx.ranks > 1):
                    alive = self.params.compare(ctx)
                alive, stage, phase = self._put_sums(ctx, pipeline, stage, phase, number, count, alive)
        stop = Header(Int64(0), Float32(0.0), Int32(int(Mark.STOP)))
        self.ring.put(ctx, pipeline, stage, phase, stop, Int64(0), Int32(0))
        return alive

    def adds_up(self, ctx: CombineContext) -> Boolean:
        """Whether pipelines add up what comes home: all of a launch's CTAs have them, this rank's rows are no Lamport
        rows, and the slices of a token have one flag."""
        if not self.params.adds:
            return Boolean(False)
        every = (ctx.grid.send_ctas == ctx.ctas) & (ctx.grid.receive_from == 0)
        return every & ~is_lamport(ctx.sums.tokens) & (Int32(1) << ctx.sums.return_slices_log2 <= CHUNK)

    # ---- what is sent

    @cute.jit
    def _put_rows(
        self, ctx: CombineContext, pipeline: Int32, stage: Int32, phase: Int32, span: Span
    ) -> tuple[Int32, Int32]:
        """All rows of a span. The next stage and its phase."""
        sEpoch = shared_array(self.params.epoch, Int64)
        lamport = is_lamport(self.schedule.tokens(span.source))
        region = region_of(lamport, ctx.arena.lamport_returns, ctx.arena.returns)
        part = span.first * (SEGMENT * VECTOR_BYTES)
        home = part_at(ctx.there(span.source, region, sEpoch[0] & 1, span.token), part)
        if cutlass.const_expr(self.params.partial):
            home = row_address(home, ctx.rank, region.stride[2])
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
                to = row_address(home, number, region.stride[1])
                marks, nbytes = (vectors << NUMBER_SHIFT) | int(Mark.ROW), vectors * VECTOR_BYTES
                if cutlass.const_expr(self.params.partial):
                    marks = marks | cutlass.select_(wanted == Uint32(0), Int32(int(Mark.LAST)), Int32(0))
                else:
                    to = row_address(to, k, region.stride[2])
                    lost = found >= ctx.rows.capacity
                    marks = marks | cutlass.select_(lost, Int32(int(Mark.LOST)), Int32(0))
                    nbytes = cutlass.select_(lost, Int32(0), nbytes)
                address = row_address(data, found, Int32(ctx.group.hidden * COMBINE_ITEMSIZE))
                stage, phase = self.ring.put(
                    ctx, pipeline, stage, phase, Header(to, own_weight, marks), address, nbytes
                )
            row, weight = next_row, next_weight
        return stage, phase

    @cute.jit
    def _put_end(
        self, ctx: CombineContext, pipeline: Int32, stage: Int32, phase: Int32, span: Span
    ) -> tuple[Int32, Int32]:
        """What follows the rows of a span: its chunk's flag, or those of its slices where Lamport rows may contain
        SENTINEL; nothing where there is none. The next stage and its phase."""
        slices, first = self.schedule.slices(span.source), span.index
        flags, flag = cutlass.select_(first < slices, Int32(1), Int32(0)), chunk_of(first)
        if is_lamport(self.schedule.tokens(span.source)):
            flags, flag = Int32(0), first
            if cutlass.const_expr(not self.params.partial):
                flags = cutlass.max(cutlass.min(slices - first, Int32(CHUNK)), Int32(0))
        if flags > 0:
            home = ctx.there(span.source, ctx.arena.return_ready, ctx.rank, flag)
            end = Header(home, Float32(0.0), flags << NUMBER_SHIFT)
            stage, phase = self.ring.put(ctx, pipeline, stage, phase, end, Int64(0), Int32(0))
        return stage, phase

    # ---- what has come home

    @cute.jit
    def _put_sums(
        self,
        ctx: CombineContext,
        pipeline: Int32,
        stage: Int32,
        phase: Int32,
        number: Int32,
        count: Int32,
        alive: Boolean,
    ) -> tuple[Boolean, Int32, Int32]:
        """What comes home of the tokens of pipeline `number` of `count`, once it is there: runs of as many tokens as a
        warp has lanes for their entries. False after a timeout; the next stage and its phase."""
        _, run = ctx.by_top_k.split(Int32(32))
        slot, mine = ctx.by_top_k.split(ctx.lane)
        token = number * run
        owner, weight = self._load_run(ctx, token, run)
        while alive & (token < ctx.sums.tokens):
            following = token + count * run
            next_owner, next_weight = self._load_run(ctx, following, run)  # on their way meanwhile
            alive = self._await(ctx, token + mine, owner)
            if alive:
                cute.arch.fence_proxy("async.global")  # copies are to read what other ranks have stored
                for one in cutlass.range(cutlass.min(run, ctx.sums.tokens - token), unroll=1):
                    bit = Uint32(1) << Uint32(owner if self.params.partial else slot)
                    bit = cutlass.select_((mine == one) & (owner >= 0), bit, Uint32(0))
                    filled = Uint32(cute.arch.warp_redux_sync(bit, "or"))
                    stage, phase = self._put_slots(
                        ctx, pipeline, stage, phase, token + one, filled, weight, one * ctx.top_k
                    )
            token, owner, weight = following, next_owner, next_weight
        return alive, stage, phase

    @cute.jit
    def _load_run(self, ctx: CombineContext, token: Int32, run: Int32) -> tuple[Int32, Float32]:
        """(rank, weight) of the entry that a lane has of the tokens of a run; NO_ROW: it is masked."""
        owner, weight = Int32(NO_ROW), Float32(1.0)
        index = token * ctx.top_k + ctx.lane
        if (ctx.lane < run * ctx.top_k) & (index < ctx.entries):
            expert = ctx.expert_of(given_id(ctx.ids, ctx.entries, index))
            if expert >= 0:
                _, owner = ctx.by_local_experts.split(expert)
            if cutlass.const_expr(not self.params.partial):
                weight = self.params.recv.weights.read(ctx.sums.router_weights, index, ctx)
        return owner, weight

    @cute.jit
    def _await(self, ctx: CombineContext, token: Int32, owner: Int32) -> Boolean:
        """Wait for the flag of a lane's token from its rank, whose consumers signal it. False after a timeout."""
        sEpoch = shared_array(self.params.epoch, Int64)
        arrived, log2 = Boolean(True), ctx.sums.return_slices_log2
        if owner >= 0:
            flag = ctx.here(ctx.arena.return_ready, owner, chunk_of(token << log2))
            awaited = Awaited(owner, Phase.RETURN, token << log2, slices_log2=log2)
            arrived = wait_signal(ctx.wait_context, flag, sEpoch[0], awaited)
        return warp_all(arrived)

    @cute.jit
    def _put_slots(
        self,
        ctx: CombineContext,
        pipeline: Int32,
        stage: Int32,
        phase: Int32,
        token: Int32,
        filled: Uint32,
        weight: Float32,
        first: Int32,
    ) -> tuple[Int32, Int32]:
        """The slots of a token, in ascending order, with the weights of lanes `first` and on. The next stage and its
        phase."""
        sEpoch = shared_array(self.params.epoch, Int64)
        home = ctx.here(ctx.arena.returns, sEpoch[0] & 1, token)
        vectors = row_vectors(ctx)
        left, more = filled, Boolean(True)
        while more:
            marks = (vectors << NUMBER_SHIFT) | int(Mark.OUT)
            address, own_weight, nbytes = home, Float32(1.0), Int32(0)
            if left != Uint32(0):
                k = lowest(left)
                left = without_lowest(left)
                address, nbytes = row_address(home, k, ctx.arena.returns.stride[2]), vectors * VECTOR_BYTES
                marks = marks | int(Mark.ROW)
                if cutlass.const_expr(not self.params.partial):
                    own_weight = from_lane(weight, first + k)
            more = left != Uint32(0)
            marks = marks | cutlass.select_(more, Int32(0), Int32(int(Mark.LAST)))
            header = Header(Int64(token), own_weight, marks)
            stage, phase = self.ring.put(ctx, pipeline, stage, phase, header, address, nbytes)
        return stage, phase
