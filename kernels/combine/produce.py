"""The producer warp of a pipeline: which rows come through its ring, in which order.

First all rows of its spans, token by token, each token's in the order in which they are added; behind a span a header
says which flags are due. Then, where pipelines add up, what belongs to this rank's tokens, as soon as the flags of
other ranks are there; some pipelines begin with that. No loop over spans contains a wait for a peer.

A token without rows here is passed over: its source knows that. A row that dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.entries import checked, entry_at, load_entry
from cute_ep.kernels.combine.piped_schedule import PipelineSchedule
from cute_ep.kernels.combine.ring import NUMBER_SHIFT, Header, Mark, PipelineParams, Ring, Stages
from cute_ep.kernels.combine.schedule import Span, row_vectors
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext, given_id
from cute_ep.kernels.device.lamport import region_of
from cute_ep.kernels.device.memory import part_at, row_address
from cute_ep.kernels.device.slices import SEGMENT, from_lane, highest, lowest, without_lowest
from cute_ep.kernels.device.sync import Awaited, wait_signal, warp_all
from cute_ep.layouts.maps.arena import CHUNK, COMBINE_ITEMSIZE, chunk_of
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import PIPELINES
from cute_ep.layouts.maps.routing import NO_ROW, Phase


@dataclass(frozen=True)
class TokenEntries:
    """Entries of an own token that is added up.

    Attributes:
        first: the lane of its first entry.
        owner: in the lane of an entry the rank that has its row; elsewhere, and where there is none, NO_ROW.
        row: there the row, if that is the own rank.
        weight: there its weight.
    """

    token: Int32
    first: Int32
    owner: Int32
    row: Int32
    weight: Float32

    def there(self) -> Uint32:
        """Bit k: entry k has a row."""
        return Uint32(cute.arch.vote_ballot_sync(self.owner >= 0)) >> Uint32(self.first)

    def own(self) -> Uint32:
        """Bit k: entry k has a row of the own rank."""
        return Uint32(cute.arch.vote_ballot_sync(self.row >= 0)) >> Uint32(self.first)

    def ranks(self, first: Int32 | int, behind: Int32) -> Uint32:
        """Bit d: rank d, of first .. behind - 1, has rows."""
        there = (self.owner >= first) & (self.owner < behind)
        bit = cutlass.select_(there, Uint32(1) << Uint32(self.owner), Uint32(0))
        return Uint32(cute.arch.warp_redux_sync(bit, "or"))


class Producer:
    """params, schedule, ring: of its `CombinePipelines`."""

    def __init__(self, params: PipelineParams, schedule: PipelineSchedule, ring: Ring) -> None:
        self.params, self.schedule, self.ring = params, schedule, ring

    @cute.jit
    def run(self, ctx: CombineContext, pipeline: Int32) -> Boolean:
        """False after a timeout."""
        stages = self.ring.stages(ctx, pipeline)
        stage, phase = stages.first, Int32(1)
        number, count = ctx.cta * PIPELINES + pipeline, ctx.grid.send_ctas * PIPELINES
        sender, senders = self.schedule.senders_before(ctx, number), self.schedule.senders_before(ctx, count)
        item = self.schedule.count()
        if self.schedule.sends(ctx, number):
            item = self.schedule.first_of(sender, senders)
        while item < self.schedule.count():
            asked = self.schedule.ask_of(ctx, sender)
            span = self.schedule.span(ctx, item)
            stage, phase = self._put_rows(ctx, stages, stage, phase, span)
            stage, phase = self._put_end(ctx, stages, stage, phase, span)
            item = self.schedule.next_of(ctx, sender, senders, asked)
        alive = Boolean(True)
        if cutlass.const_expr(self.params.adds):
            if self.params.adds_up(ctx):
                if self.schedule.compares(ctx, number, count) & (ctx.ranks > 1):
                    alive = self.params.compare(ctx)
                alive, stage, phase = self._put_sums(ctx, stages, stage, phase, alive)
        stop = Header(Int64(0), Float32(0.0), Int32(int(Mark.STOP)))
        self.ring.put(ctx, stages, stage, phase, stop, Int64(0), Int32(0))
        return alive

    # ---- what is sent

    @cute.jit
    def _put_rows(
        self, ctx: CombineContext, stages: Stages, stage: Int32, phase: Int32, span: Span
    ) -> tuple[Int32, Int32]:
        """All rows of a span. The next stage and its phase."""
        sEpoch = shared_array(self.params.epoch, Int64)
        lamport = self.schedule.are_lamport(span.source)
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
                stage, phase = self.ring.put(ctx, stages, stage, phase, Header(to, own_weight, marks), address, nbytes)
            row, weight = next_row, next_weight
        return stage, phase

    @cute.jit
    def _put_end(
        self, ctx: CombineContext, stages: Stages, stage: Int32, phase: Int32, span: Span
    ) -> tuple[Int32, Int32]:
        """What follows the rows of a span: its chunk's flag, or those of its slices where Lamport rows may contain
        SENTINEL; nothing where there is none. The next stage and its phase."""
        slices, first = self.schedule.slices(span.source), span.index
        flags, flag = cutlass.select_(first < slices, Int32(1), Int32(0)), chunk_of(first)
        if self.schedule.are_lamport(span.source):
            flags, flag = Int32(0), first
            if cutlass.const_expr(not self.params.partial):
                flags = cutlass.max(cutlass.min(slices - first, Int32(CHUNK)), Int32(0))
        if flags > 0:
            home = ctx.there(span.source, ctx.arena.return_ready, ctx.rank, flag)
            end = Header(home, Float32(0.0), flags << NUMBER_SHIFT)
            stage, phase = self.ring.put(ctx, stages, stage, phase, end, Int64(0), Int32(0))
        return stage, phase

    # ---- what has come home

    @cute.jit
    def _put_sums(
        self, ctx: CombineContext, stages: Stages, stage: Int32, phase: Int32, alive: Boolean
    ) -> tuple[Boolean, Int32, Int32]:
        """What is added up for a run of tokens after the other, once it is there. False after a timeout; the next stage
        and its phase."""
        _, run = ctx.by_top_k.split(Int32(32))
        _, mine = ctx.by_top_k.split(ctx.lane)
        token = from_lane(self.schedule.ask_run(ctx), 0) * run
        asked = self.schedule.ask_run(ctx)
        owner, row, weight = self._load_run(ctx, token, run)
        while alive & (token < ctx.sums.tokens):
            following = from_lane(asked, 0) * run
            asked = self.schedule.ask_run(ctx)
            next_owner, next_row, next_weight = self._load_run(ctx, following, run)  # on their way meanwhile
            alive = self._await(ctx, token + mine, owner)
            if alive:
                cute.arch.fence_proxy("async.global")  # copies read what other ranks have stored
                for one in cutlass.range(cutlass.min(run, ctx.sums.tokens - token), unroll=1):
                    its_owner, its_row = (cutlass.select_(mine == one, value, Int32(NO_ROW)) for value in (owner, row))
                    entries = TokenEntries(token + one, one * ctx.top_k, its_owner, its_row, weight)
                    if cutlass.const_expr(self.params.partial):
                        stage, phase = self._put_own_rows(ctx, stages, stage, phase, entries)
                        stage, phase = self._put_rank_sums(ctx, stages, stage, phase, entries)
                    else:
                        stage, phase = self._put_slots(ctx, stages, stage, phase, entries)
            token, owner, row, weight = following, next_owner, next_row, next_weight
        return alive, stage, phase

    @cute.jit
    def _load_run(self, ctx: CombineContext, token: Int32, run: Int32) -> tuple[Int32, Int32, Float32]:
        """(rank, row, weight) of the entry that a lane has of the tokens of a run: NO_ROW as its rank where it is
        masked, as its row where that is of another rank. NaN is the weight of a row that dispatch had no room for."""
        owner, row, weight = Int32(NO_ROW), Int32(NO_ROW), Float32(1.0)
        index = token * ctx.top_k + ctx.lane
        if (ctx.lane < run * ctx.top_k) & (index < ctx.entries):
            expert = ctx.expert_of(given_id(ctx.ids, ctx.entries, index))
            if expert >= 0:
                _, owner = ctx.by_local_experts.split(expert)
            if cutlass.const_expr(not self.params.partial):
                weight = self.params.recv.weights.read(ctx.sums.router_weights, index, ctx)
            if owner == ctx.rank:
                row, own_weight = entry_at(ctx, owner, index, self.params.partial)
                if cutlass.const_expr(self.params.partial):
                    row, weight = checked(ctx, row, own_weight, True)
                elif row >= ctx.rows.capacity:
                    weight = Float32(float("nan"))
                owner = cutlass.select_(row >= 0, owner, Int32(NO_ROW))
        return owner, row, weight

    @cute.jit
    def _await(self, ctx: CombineContext, token: Int32, owner: Int32) -> Boolean:
        """Wait for the flag of a lane's token from its rank, whose consumers signal it; the own rank's rows are there.
        False after a timeout."""
        sEpoch = shared_array(self.params.epoch, Int64)
        arrived, log2 = Boolean(True), ctx.sums.return_slices_log2
        if (owner >= 0) & (owner != ctx.rank):
            flag = ctx.here(ctx.arena.return_ready, owner, chunk_of(token << log2))
            awaited = Awaited(owner, Phase.RETURN, token << log2, slices_log2=log2)
            arrived = wait_signal(ctx.wait_context, flag, sEpoch[0], awaited)
        return warp_all(arrived)

    @cute.jit
    def _put_slots(
        self, ctx: CombineContext, stages: Stages, stage: Int32, phase: Int32, entries: TokenEntries
    ) -> tuple[Int32, Int32]:
        """A token's rows in the order of its entries, from the arena or, those of the own rank, from where they are.
        The next stage and its phase."""
        left, more = entries.there(), Boolean(True)
        home = self._home(ctx, entries.token)
        while more:
            marks = (row_vectors(ctx) << NUMBER_SHIFT) | int(Mark.OUT)
            address, weight, nbytes = home, Float32(1.0), Int32(0)
            if left != Uint32(0):
                k = lowest(left)
                left = without_lowest(left)
                row, weight = from_lane(entries.row, entries.first + k), from_lane(entries.weight, entries.first + k)
                address = row_address(home, k, ctx.arena.returns.stride[2])
                if row >= 0:
                    address = row_address(ctx.rows.data, row, self._row_bytes(ctx))
                nbytes = cutlass.select_(row >= ctx.rows.capacity, Int32(0), self._row_bytes(ctx))
                marks = marks | int(Mark.ROW)
            more = left != Uint32(0)
            marks = marks | cutlass.select_(more, Int32(0), Int32(int(Mark.LAST)))
            header = Header(Int64(entries.token), weight, marks)
            stage, phase = self.ring.put(ctx, stages, stage, phase, header, address, nbytes)
        return stage, phase

    @cute.jit
    def _put_own_rows(
        self, ctx: CombineContext, stages: Stages, stage: Int32, phase: Int32, entries: TokenEntries
    ) -> tuple[Int32, Int32]:
        """The rows of the own rank's partial sum of a token. The next stage and its phase."""
        left = entries.own()
        end = int(Mark.OWN_END) | cutlass.select_(self._goes_aside(ctx, entries), Int32(int(Mark.ASIDE)), Int32(0))
        while left != Uint32(0):
            lane = entries.first + lowest(left)
            left = without_lowest(left)
            last = cutlass.select_(left == Uint32(0), end, Int32(0))
            header = Header(
                Int64(0), from_lane(entries.weight, lane), (row_vectors(ctx) << NUMBER_SHIFT) | int(Mark.ROW) | last
            )
            address = row_address(ctx.rows.data, from_lane(entries.row, lane), self._row_bytes(ctx))
            stage, phase = self.ring.put(ctx, stages, stage, phase, header, address, self._row_bytes(ctx))
        return stage, phase

    @cute.jit
    def _put_rank_sums(
        self, ctx: CombineContext, stages: Stages, stage: Int32, phase: Int32, entries: TokenEntries
    ) -> tuple[Int32, Int32]:
        """What other ranks have sent of a token, in ascending order. The next stage and its phase."""
        home = self._home(ctx, entries.token)
        below = entries.ranks(0, ctx.rank)
        left, more = below | entries.ranks(ctx.rank + 1, ctx.ranks), Boolean(True)
        while more:
            marks = (row_vectors(ctx) << NUMBER_SHIFT) | int(Mark.OUT)
            address, nbytes = home, Int32(0)
            if left != Uint32(0):
                owner = lowest(left)
                left = without_lowest(left)
                address, nbytes = row_address(home, owner, ctx.arena.returns.stride[2]), self._row_bytes(ctx)
                joins = (entries.own() != Uint32(0)) & self._goes_aside(ctx, entries) & (owner == highest(below))
                marks = marks | int(Mark.ROW) | cutlass.select_(joins, Int32(int(Mark.JOIN)), Int32(0))
            more = left != Uint32(0)
            marks = marks | cutlass.select_(more, Int32(0), Int32(int(Mark.LAST)))
            header = Header(Int64(entries.token), Float32(1.0), marks)
            stage, phase = self.ring.put(ctx, stages, stage, phase, header, address, nbytes)
        return stage, phase

    def _goes_aside(self, ctx: CombineContext, entries: TokenEntries) -> Boolean:
        """Whether the own sum of a token is added behind those of two lower ranks."""
        below = entries.ranks(0, ctx.rank)
        return without_lowest(below) != Uint32(0)

    def _home(self, ctx: CombineContext, token: Int32) -> Int64:
        """Address of slot 0 of an own token."""
        return ctx.here(ctx.arena.returns, shared_array(self.params.epoch, Int64)[0] & 1, token)

    def _row_bytes(self, ctx: CombineContext) -> Int32:
        """From row to row."""
        return Int32(ctx.group.hidden * COMBINE_ITEMSIZE)
