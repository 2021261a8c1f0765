"""The receiving role: find the rows of each slice of a message, and have it copied there (`row_copy`).

Row of entry (source, token, k) in group g: row_start[g] + base[g, source] - base[g, 0] + position, where base is the
exclusive prefix sum of the gathered counts and row_start leaves room for padding, or is the first row of the group's
block (`row_tables`); rows beyond a block are lost. The group is the entry's local expert. In rank-major order it is the
source: of a token's entries for this rank only the last has a row, and beside that row stand all its local experts.
Each warp takes slices (`recv_schedule`): lane k finds the row of entry k. A token of the shared expert has one more
row, on the own rank.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import DispatchContext, owns_shared
from cute_ep.kernels.device.memory import array, pair_at, row_address
from cute_ep.kernels.device.slices import RowSlice, control_cta, from_lane, highest
from cute_ep.kernels.device.sync import Awaited, grid_barrier, wait_two_ll, warp_all
from cute_ep.kernels.dispatch.outputs import Outputs, put_expert
from cute_ep.kernels.dispatch.recv_schedule import RecvSchedule
from cute_ep.kernels.dispatch.row_copy import RowCopy, Targets
from cute_ep.kernels.dispatch.row_tables import Tables
from cute_ep.kernels.dispatch.scale_tiles import ScaleTiles
from cute_ep.layouts.maps.arena import HeaderWord, StateWord, has_weights
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import (
    LOST_ROW,
    MASKED_ENTRY,
    NO_ROW,
    Phase,
    entry_expert,
    entry_position,
)

SRC_INFO_BYTES = 8
ONE = 0x3F800000
"""Bits of the float32 1.0."""


class DispatchRecv:
    """Turns received messages into the ragged output.

    rank_major: the order of rows; direct: as in `RowCopy`; fused: whether the launch sends, too.
    """

    def __init__(self, rank_major: bool, direct: bool, fused: bool, shared: RegionMap) -> None:
        self.rank_major = rank_major
        self.tables = Tables(rank_major, shared)
        self.schedule = RecvSchedule(self.tables, direct, fused)
        self.outputs = Outputs(self.tables)
        self.row_copy = RowCopy(self.tables, direct)
        self.scale_tiles = ScaleTiles(self.tables)

    @cute.jit
    def run(self, ctx: DispatchContext, receiver: Int32, receivers: Int32) -> Boolean:
        """By each receiving CTA, number `receiver` of `receivers`. False after a timeout."""
        alive = self.tables.read(ctx)
        if alive:
            if receiver == control_cta(receivers):
                self.outputs.run(ctx)
        number, turned = self.schedule.first(ctx, receiver, receivers), Int32(0)
        while alive and self.schedule.exists(ctx, number):
            item = self.schedule.begin(ctx, number, turned, receivers)
            row_slice, turned = item.row_slice, item.turned
            if row_slice.token < self.schedule.tokens(item.source) and row_slice.first < row_slice.last:
                alive = self._take(ctx, item.source, row_slice)
            number = self.schedule.next(ctx, item, receivers)
        if alive:
            self.outputs.zero_padding(ctx, receiver, receivers)
            if cutlass.const_expr(self.rank_major):
                self.outputs.mask_unused(ctx, receiver, receivers)
        if self.tables.are_tiled():  # undefined if the tables were not read; harmless, as `alive` is False then
            counter = ctx.state_word(StateWord.DISPATCH_BARRIER)
            alive = grid_barrier(ctx, counter, receivers, alive)
            if alive:
                self.scale_tiles.run(ctx, opaque(receiver), opaque(receivers))
        return alive

    @cute.jit
    def _take(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice) -> Boolean:
        """Wait for one slice and copy it to all its rows. False after a timeout."""
        row, scale_row, came = self._find_row(ctx, source, row_slice)
        alive = warp_all(came)
        due = row >= 0
        shared_row = Int32(NO_ROW)
        if cutlass.const_expr(not self.rank_major):
            if source == ctx.rank and owns_shared(ctx.shared, row_slice.token):
                shared_row = self._find_shared_row(ctx, row_slice)
                due = Boolean(True)
        if row >= ctx.out.capacity:
            row = Int32(NO_ROW)
        if alive & cute.arch.vote_any_sync(due):
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            alive = self.row_copy.run(ctx, source, row_slice, Targets(row, scale_row, shared_row, wanted))
        return alive

    @cute.jit
    def _find_row(self, ctx: DispatchContext, source: Int32, row_slice: RowSlice) -> tuple[Int32, Int32, Boolean]:
        """(output row, scale row, whether it came) of the token's entry number `lane`, an LL word from `Route`;
        NO_ROW where it has none, LOST_ROW where the output has no room. The warp with the first slice records the rows
        for combine."""
        lane = ctx.lane
        sBase = shared_array(self.tables.bases, Int32)
        sHeader = shared_array(self.tables.headers, Int32)
        in_rank = ctx.group.max_tokens * ctx.top_k
        index = row_slice.token * ctx.top_k + lane
        row = Int32(NO_ROW)
        scale_row = Int32(NO_ROW)
        came = Boolean(True)
        entry = Int32(MASKED_ENTRY)
        weight = Int32(0)
        if lane < ctx.top_k:
            words = ctx.here(ctx.arena.entries, ctx.epoch & 1, source, row_slice.token, lane)
            weights = words
            if row_slice.first == 0 and has_weights(sHeader[source, int(HeaderWord.MESSAGES)]) != 0:
                weights = ctx.arena.weights.beside(ctx.arena.entries, words)
            awaited = Awaited(source, Phase.ROUTE_ENTRY, index)
            entry, weight, came = wait_two_ll(ctx.wait_context, words, weights, ctx.epoch, awaited)
            if not came:
                entry = Int32(MASKED_ENTRY)
            if has_weights(sHeader[source, int(HeaderWord.MESSAGES)]) == 0:
                weight = Int32(ONE)
            local = entry_expert(entry) - ctx.rank * ctx.local_experts
            if entry == Int32(MASKED_ENTRY) or local < 0 or local >= ctx.local_experts:
                entry = Int32(MASKED_ENTRY)  # of another rank
            elif cutlass.const_expr(not self.rank_major):
                in_expert = sBase[local * ctx.ranks + source] - sBase[local * ctx.ranks] + entry_position(entry)
                row, scale_row = self._place(ctx, local, in_expert)
            if cutlass.const_expr(not self.rank_major):
                if row_slice.first == 0:
                    gRowMap = array(ctx.out.row_map, Int32, ctx.ranks, in_rank)
                    gRowMap[source, index] = row
                    if (row >= 0) & (row < ctx.out.capacity):
                        self._tell_source(ctx, row, row_slice.token, lane)
                        gWeight = array(ctx.out.weights, Int32, ctx.ranks, in_rank)
                        gWeight[source, index] = weight
                        gRowWeight = array(ctx.out.row_weights, Int32, ctx.out.capacity)
                        gRowWeight[row] = weight
        if cutlass.const_expr(self.rank_major):
            row, scale_row = self._find_rank_row(ctx, source, row_slice, entry, weight)
        return row, scale_row, came

    def _tell_source(self, ctx: DispatchContext, row: Int32, token: Int32, slot: Int32) -> None:
        """`src_info` of a row, in one store."""
        rSource = cute.make_rmem_tensor(2, Int32)
        rSource[0], rSource[1] = token, slot
        home = row_address(ctx.out.src_info, row, SRC_INFO_BYTES)
        pair_at(home, Int32).store(rSource.load())

    @cute.jit
    def _place(self, ctx: DispatchContext, group: Int32, in_group: Int32) -> tuple[Int32, Int32]:
        """(output row, scale row) of a row of a group."""
        row = self.tables.row_start(ctx, group) + in_group
        if self.tables.row_start(ctx, self.tables.groups(ctx)) > ctx.out.capacity:
            row = Int32(LOST_ROW)
        if (ctx.out.blocks != 0) & (in_group >= ctx.out.row_alignment):
            row = Int32(LOST_ROW)
        return row, self.tables.scale_start(ctx, group) + in_group

    @cute.jit
    def _find_rank_row(
        self, ctx: DispatchContext, source: Int32, row_slice: RowSlice, entry: Int32, weight: Int32
    ) -> tuple[Int32, Int32]:
        """The same in rank-major order: the token's last entry here has its row, in the group of the source. Beside
        the row go the local experts and weights of all of them. In the sum on the way home its weight is 1."""
        lane = ctx.lane
        row = Int32(NO_ROW)
        scale_row = Int32(NO_ROW)
        here = Uint32(cute.arch.vote_ballot_sync(entry != Int32(MASKED_ENTRY)))
        last = highest(here)
        if (here != Uint32(0)) & (lane == last):
            row, scale_row = self._place(ctx, source, entry_position(entry))
        home = from_lane(row, last)
        if (row_slice.first == 0) & (lane < ctx.top_k):
            at = row_slice.token * ctx.top_k + lane
            gRowMap = array(ctx.out.row_map, Int32, ctx.ranks, ctx.group.max_tokens * ctx.top_k)
            gRowMap[source, at] = row
            if (here != Uint32(0)) & (home < ctx.out.capacity):
                local = entry_expert(entry) - ctx.rank * ctx.local_experts
                gRowWeight = array(ctx.out.row_weights, Int32, ctx.out.capacity, ctx.top_k)
                own = cutlass.select_(entry != Int32(MASKED_ENTRY), local, Int32(NO_ROW))
                put_expert(ctx, home * ctx.top_k + lane, own)
                gRowWeight[home, lane] = cutlass.select_(entry != Int32(MASKED_ENTRY), weight, Int32(0))
                if lane == last:
                    self._tell_source(ctx, row, row_slice.token, lane)
                    gWeight = array(ctx.out.weights, Int32, ctx.ranks, ctx.group.max_tokens * ctx.top_k)
                    gWeight[source, at] = Int32(ONE)
        return row, scale_row

    @cute.jit
    def _find_shared_row(self, ctx: DispatchContext, row_slice: RowSlice) -> Int32:
        """The token's row in group 0, which is its scale row too."""
        row = row_slice.token - ctx.shared.first
        if row >= ctx.out.capacity:
            row = Int32(NO_ROW)
        else:
            if (ctx.lane == 0) & (row_slice.first == 0):
                self._tell_source(ctx, row, row_slice.token, ctx.top_k)
                gRowWeight = array(ctx.out.row_weights, Int32, ctx.out.capacity)
                gRowWeight[row] = Int32(ONE)
        return row
