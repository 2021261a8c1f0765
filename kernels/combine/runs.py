"""Runs of own tokens, which pipelines add up: what belongs to them, whether it is there, and in which order its rows
come through the ring.

A run has at most as many tokens as a warp has lanes for their entries. Its rows come token by token: of exact sums in
the order of the entries, of partial sums first the own rank's rows, then what other ranks have sent, in ascending
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.entries import checked, entry_at
from cute_ep.kernels.combine.ring import NUMBER_SHIFT, Header, Mark, PipelineParams, PipelineState, Ring, Stages
from cute_ep.kernels.combine.schedule import row_vectors
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext, given_id
from cute_ep.kernels.device.memory import row_address
from cute_ep.kernels.device.slices import from_lane, highest, lowest, without_lowest
from cute_ep.kernels.device.sync import Awaited, wait_signal, warp_all
from cute_ep.layouts.maps.arena import RETURN_SLOT, chunk_of
from cute_ep.layouts.maps.routing import NO_ROW, Phase

NO_RUN = -1
"""In place of a run's first token, before the first one."""


@dataclass(frozen=True)
class LaneEntry:
    """The entry that a lane has of a run's tokens.

    Attributes:
        owner: the rank that has its row; NO_ROW: it is masked, or the lane has none.
        row: the row, if that is the own rank; else NO_ROW.
        weight: NaN where dispatch had no room for the row.
    """

    owner: Int32
    row: Int32
    weight: Float32


@dataclass(frozen=True)
class TokenEntries:
    """Entries of an own token that is added up.

    Attributes:
        first: the lane of its first entry.
        owner, row, weight: of its entries, in their lanes, as of `LaneEntry`; elsewhere owner and row are NO_ROW.
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


class Runs:
    """params, ring: of its `CombinePipelines`."""

    def __init__(self, params: PipelineParams, ring: Ring) -> None:
        self.params, self.ring = params, ring

    @cute.jit
    def load(self, ctx: CombineContext, token: Int32, run: Int32) -> LaneEntry:
        """The lane's entry of a run of so many tokens."""
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
        return LaneEntry(owner, row, weight)

    @cute.jit
    def are_there(self, ctx: CombineContext, token: Int32, owner: Int32) -> Boolean:
        """Whether the rows of all lanes' tokens are there; a look, which does not ask whether the rank has failed."""
        sEpoch = shared_array(self.params.epoch, Int64)
        there = Boolean(True)
        if self._comes(ctx, owner):
            there = ctx.has_signaled(self._flag(ctx, token, owner), sEpoch[0])
        return warp_all(there)

    @cute.jit
    def wait(self, ctx: CombineContext, token: Int32, owner: Int32) -> Boolean:
        """Wait for them. False after a timeout."""
        sEpoch = shared_array(self.params.epoch, Int64)
        arrived, log2 = Boolean(True), ctx.sums.return_slices_log2
        if self._comes(ctx, owner):
            awaited = Awaited(owner, Phase.RETURN, token << log2, slices_log2=log2)
            arrived = wait_signal(ctx.wait_context, self._flag(ctx, token, owner), sEpoch[0], awaited)
        return warp_all(arrived)

    @cute.jit
    def put(
        self,
        ctx: CombineContext,
        stages: Stages,
        state: PipelineState,
        token: Int32,
        tokens: Int32,
        entry: LaneEntry,
    ) -> PipelineState:
        """What is added up for a run of so many tokens, all of it there: what `load` has found. Returns the
        next state."""
        _, mine = ctx.by_top_k.split(ctx.lane)
        cute.arch.fence_proxy("async.global")  # copies read what other ranks have stored
        for one in cutlass.range(tokens, unroll=1):
            owner, row = (cutlass.select_(mine == one, value, Int32(NO_ROW)) for value in (entry.owner, entry.row))
            entries = TokenEntries(token + one, one * ctx.top_k, owner, row, entry.weight)
            if cutlass.const_expr(self.params.partial):
                state = self._put_own_rows(ctx, stages, state, entries)
                state = self._put_rank_sums(ctx, stages, state, entries)
            else:
                state = self._put_slots(ctx, stages, state, entries)
        return state

    @cute.jit
    def _put_slots(
        self, ctx: CombineContext, stages: Stages, state: PipelineState, entries: TokenEntries
    ) -> PipelineState:
        """A token's rows in the order of its entries, from the arena or, those of the own rank, from where they are.
        Returns the next state."""
        left, more = entries.there(), Boolean(True)
        home = self._home(ctx, entries.token)
        while more:
            marks = (row_vectors(ctx) << NUMBER_SHIFT) | int(Mark.OUT)
            address, weight, nbytes = home, Float32(1.0), Int32(0)
            if left != Uint32(0):
                k = lowest(left)
                left = without_lowest(left)
                row, weight = from_lane(entries.row, entries.first + k), from_lane(entries.weight, entries.first + k)
                address = ctx.arena.returns.along(RETURN_SLOT, home, k)
                if row >= 0:
                    address = row_address(ctx.rows.data, row, ctx.row_bytes)
                nbytes = cutlass.select_(row >= ctx.rows.capacity, Int32(0), ctx.row_bytes)
                marks = marks | int(Mark.ROW)
            more = left != Uint32(0)
            marks = marks | cutlass.select_(more, Int32(0), Int32(int(Mark.LAST)))
            header = Header(Int64(entries.token), weight, marks)
            state = self.ring.put(ctx, stages, state, header, address, nbytes)
        return state

    @cute.jit
    def _put_own_rows(
        self, ctx: CombineContext, stages: Stages, state: PipelineState, entries: TokenEntries
    ) -> PipelineState:
        """The rows of the own rank's partial sum of a token. Returns the next state."""
        left = entries.own()
        end = int(Mark.OWN_END) | cutlass.select_(self._goes_aside(ctx, entries), Int32(int(Mark.ASIDE)), Int32(0))
        while left != Uint32(0):
            lane = entries.first + lowest(left)
            left = without_lowest(left)
            last = cutlass.select_(left == Uint32(0), end, Int32(0))
            header = Header(
                Int64(0), from_lane(entries.weight, lane), (row_vectors(ctx) << NUMBER_SHIFT) | int(Mark.ROW) | last
            )
            address = row_address(ctx.rows.data, from_lane(entries.row, lane), ctx.row_bytes)
            state = self.ring.put(ctx, stages, state, header, address, ctx.row_bytes)
        return state

    @cute.jit
    def _put_rank_sums(
        self, ctx: CombineContext, stages: Stages, state: PipelineState, entries: TokenEntries
    ) -> PipelineState:
        """What other ranks have sent of a token, in ascending order. Returns the next state."""
        home = self._home(ctx, entries.token)
        below = entries.ranks(0, ctx.rank)
        left, more = below | entries.ranks(ctx.rank + 1, ctx.ranks), Boolean(True)
        while more:
            marks = (row_vectors(ctx) << NUMBER_SHIFT) | int(Mark.OUT)
            address, nbytes = home, Int32(0)
            if left != Uint32(0):
                owner = lowest(left)
                left = without_lowest(left)
                address, nbytes = ctx.arena.returns.along(RETURN_SLOT, home, owner), ctx.row_bytes
                joins = (entries.own() != Uint32(0)) & self._goes_aside(ctx, entries) & (owner == highest(below))
                marks = marks | int(Mark.ROW) | cutlass.select_(joins, Int32(int(Mark.JOIN)), Int32(0))
            more = left != Uint32(0)
            marks = marks | cutlass.select_(more, Int32(0), Int32(int(Mark.LAST)))
            header = Header(Int64(entries.token), Float32(1.0), marks)
            state = self.ring.put(ctx, stages, state, header, address, nbytes)
        return state

    def _goes_aside(self, ctx: CombineContext, entries: TokenEntries) -> Boolean:
        """Whether the own sum of a token is added behind those of two lower ranks."""
        below = entries.ranks(0, ctx.rank)
        return without_lowest(below) != Uint32(0)

    def _comes(self, ctx: CombineContext, owner: Int32) -> Boolean:
        """Whether a lane has a row of another rank; the own rank's are there."""
        return (owner >= 0) & (owner != ctx.rank)

    def _flag(self, ctx: CombineContext, token: Int32, owner: Int32) -> Int64:
        """The flag of a token's rows of a rank, whose consumers signal it."""
        return ctx.here(ctx.arena.return_ready, owner, chunk_of(token << ctx.sums.return_slices_log2))

    def _home(self, ctx: CombineContext, token: Int32) -> Int64:
        """Address of slot 0 of an own token."""
        return ctx.here(ctx.arena.returns, shared_array(self.params.epoch, Int64)[0] & 1, token)
