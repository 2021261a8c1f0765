"""Give-back role: an expert rank returns its rows of each token of each source, or their weighted sum.

Each warp carries pieces of returned rows, and where rows are not express all warps of a CTA a convoy, which has a flag
(`returns` says which). The warps of a convoy carry its tokens one after the other, each token together: tokens have
different numbers of rows. Lane k holds the row and the weight of entry k. A token without rows here is passed over: its
source knows. A row that dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS, accumulate, anew, round_vector
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.lamport import has_blank, home_of, is_express, send_vector
from cute_ep.kernels.device.memory import array, load_row
from cute_ep.kernels.device.splits import SEGMENT, from_lane, lowest
from cute_ep.kernels.device.sync import post
from cute_ep.kernels.roles.combine_schedule import Returns, row_units
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE, CONVOY, SEGMENT_BYTES, convoy_of
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import NO_ROW

LOST = 0x7FFF7FFF
"""Two bfloat16 NaN."""


class GiveBack:
    """Pushes expert rows, or their weighted sums, to the source ranks.

    segments: neighbouring segments, 1 or 2, that a warp carries at a time.
    """

    def __init__(self, partial: bool, segments: int, epoch: Region, shared: RegionMap) -> None:
        self.partial, self.segments, self.epoch = partial, segments, epoch
        self.returns = Returns(epoch, shared)

    def prepare(self, group, args):
        """Begin with the warp's first item: its row and weight, for `run`. A CTA barrier must follow before `run`."""
        return self._load_entries(group, args, *self.returns.open(group, args))

    @cute.jit
    def run(self, group, args, row: Int32, weight: Float32) -> None:
        """By the warps of sending CTAs, after `prepare`, which returned row and weight, and the wait for
        `combine_consumed`."""
        if self.returns.are_convoys():
            self._carry_convoys(group, args, row, weight)
        else:
            self._carry_pieces(group, args, row, weight)

    @cute.jit
    def _carry_pieces(self, group, args, row: Int32, weight: Float32) -> None:
        """Express rows: a warp carries a piece. With few tokens this half waits for nothing but these instructions:
        256 tokens of 4 rows each took 12,000 of a scheduler's 18,000 cycles (H200, 2026-11-21). With more, CTAs take
        pieces of their source from each other (4 x H200, 2026-11-22: 512 tokens 63.6 us, dealt out 69.0)."""
        sEpoch = shared_array(self.epoch, Int64)
        region = group.arena.express_returns
        item = self.returns.first(group, args, False)
        source, index = self.returns.split(group, item)
        piece = self.returns.piece(group, source, index)
        first, last = piece.first, piece.last
        home = group.sPeers[source] + region.at(sEpoch[0] & 1, piece.token)
        while item < self.returns.count():
            number = self.returns.ask(group, args)
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            blank = Boolean(False)
            if wanted != Uint32(0):
                # of a few tokens' rows loads take less time if they may stay; whole rows leave no register for it
                once = self.returns.are_many(args) if self.partial else Boolean(True)
                blank = self._push(group, args, home, first, last, Int32(self.segments), row, weight, wanted, once)
            if cutlass.const_expr(not self.partial):
                self._post_piece(group, source, index, blank)
            item = self.returns.next(group, args, number)
            source, index = self.returns.split(group, item)
            piece = self.returns.piece(group, source, index)
            first, last = piece.first, piece.last
            due = self.returns.is_due(item, source, piece)
            row, weight = self._load_entries(group, args, source, piece.token, due)
            home = group.sPeers[source] + region.at(sEpoch[0] & 1, piece.token)

    @cute.jit
    def _carry_convoys(self, group, args, row: Int32, weight: Float32) -> None:
        """Rows of which some are not express: the warps of a convoy carry its tokens one after the other. Meanwhile the
        number of the CTA's next convoy comes, before the convoy's barrier, behind which it is read."""
        sEpoch = shared_array(self.epoch, Int64)
        item = self.returns.first(group, args, True)
        turn = Int32(0)
        while item < self.returns.count():
            if (remainder(item, CONVOY) == 0) & (group.tid == 0):
                self.returns.ask_convoy(group, turn)
            source, piece = self.returns.convoy_piece(group, item)
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            if wanted != Uint32(0):
                regions = group.arena.express_returns, group.arena.returns
                home = group.sPeers[source] + home_of(self._is_express(source), *regions, sEpoch[0] & 1, piece.token)
                # where in the token each warp begins: a step behind the last one of the token before
                steps = quotient(piece.last - piece.first + (self.segments - 1), self.segments)
                first = piece.first + remainder(group.warp - piece.token * steps, CONVOY) * self.segments
                step = Int32(self.segments * CONVOY)
                self._push(group, args, home, first, piece.last, step, row, weight, wanted, Boolean(True))
            # computed again, not kept: registers are short above
            source, piece = self.returns.convoy_piece(group, anew(item))
            item += self.returns.together(source)
            if remainder(item, CONVOY) == 0:
                cute.arch.sync_threads()  # all of the convoy is stored
                if group.warp == 0:
                    self._post_convoy(group, source, convoy_of(piece.index))
                item = self.returns.next_convoy(group, args, turn)
                turn = turn ^ 1
            source, piece = self.returns.convoy_piece(group, item)
            due = self.returns.is_due(item, source, piece)
            row, weight = self._load_entries(group, args, source, piece.token, due)

    @cute.jit
    def _post_convoy(self, group, source, convoy: Int32) -> None:
        """The flag of a convoy, by one warp; those of its pieces where rows are express and may hold a BLANK word."""
        sEpoch = shared_array(self.epoch, Int64)
        pieces, first = self.returns.pieces(source), convoy * CONVOY
        flag, due = convoy, (group.lane == 0) & (first < pieces)
        if self._is_express(source):
            flag = first + group.lane
            due = Boolean(not self.partial) & (group.lane < CONVOY) & (flag < pieces)
        if due:
            post(group.sPeers[source] + group.arena.return_ready.at(group.rank, flag), sEpoch[0])

    @cute.jit
    def _post_piece(self, group, source, index: Int32, blank: Boolean) -> None:
        """The flag of an express piece in which some lane stored a BLANK word."""
        sEpoch = shared_array(self.epoch, Int64)
        flagged = cute.arch.vote_any_sync(blank)
        cute.arch.sync_warp()
        if flagged & (group.lane == 0):
            post(group.sPeers[source] + group.arena.return_ready.at(group.rank, index), sEpoch[0])

    @cute.jit
    def _load_entries(self, group, args, source, token, due: Boolean):
        """(row, weight) of the token's entry number `lane`; NO_ROW where it has none here. In a sum a row that dispatch
        had no room for is row 0 with weight NaN."""
        in_rank = group.max_tokens * group.top_k
        index = token * group.top_k + group.lane
        row = Int32(NO_ROW)
        weight = Float32(0.0)
        if due & (group.lane < group.top_k):
            row = array(args.row_map, Int32, group.ranks, in_rank)[source, index]
            if cutlass.const_expr(self.partial):
                weight = Float32(array(args.weights, Float32, group.ranks, in_rank)[source, index])
                if row >= args.capacity:
                    row, weight = Int32(0), Float32(float("nan"))
        return row, weight

    def _is_express(self, source) -> Boolean:
        return is_express(self.returns.tokens(source))

    @cute.jit
    def _push(
        self, group, args, home: Int64, first: Int32, last: Int32, step: Int32, row, weight, wanted: Uint32, once
    ) -> Boolean:
        """`segments` segments of every `step`, in first .. last - 1; `once`: loaded rows are the first to leave the
        caches. Returns whether this lane stored a BLANK word."""
        blank = Boolean(False)
        segment = first
        while segment < last:
            if cutlass.const_expr(self.segments == 2):
                if segment + 1 < last:
                    blank = blank | self._push_segments(group, args, home, segment, row, weight, wanted, once, 2)
                else:
                    blank = blank | self._push_segments(group, args, home, segment, row, weight, wanted, once, 1)
            else:
                blank = blank | self._push_segments(group, args, home, segment, row, weight, wanted, once, 1)
            segment += step
        return blank

    @cute.jit
    def _push_segments(
        self, group, args, home: Int64, segment, row, weight, wanted: Uint32, once: Boolean, segments: cutlass.Constexpr
    ) -> Boolean:
        """Neighbouring segments of the rows, each to its own slot, or of their weighted sum to the own rank's: its
        words are never BLANK, since a NaN is rounded to 0x7FFF. LOADS_IN_FLIGHT loads go before the first use. Returns
        whether this lane stored a BLANK word."""
        units = row_units(group)
        unit = segment * SEGMENT + anew(group.lane)
        at = args.rows + Int64(unit) * VECTOR_BYTES
        rows = LOADS_IN_FLIGHT // self.segments
        rX = cute.make_rmem_tensor((4, segments, rows), Uint32)
        rSum = cute.make_rmem_tensor((VECTOR_ELEMENTS, segments), Float32)
        rSum.fill(0.0)
        blank = Boolean(False)
        left = wanted
        while left != Uint32(0):
            again = left
            for turn in cutlass.range_constexpr(rows):
                if left != Uint32(0):
                    one = from_lane(row, lowest(left))
                    left = left & (left - Uint32(1))
                    row_at = at + Int64(one) * Int32(group.hidden * COMBINE_ITEMSIZE)
                    for part in cutlass.range_constexpr(segments):
                        if cutlass.const_expr(not self.partial):
                            rX[None, part, turn].fill(LOST)
                        if (unit + part * SEGMENT < units) & (self.partial | (one < args.capacity)):
                            load_row(rX[None, part, turn], row_at + part * SEGMENT_BYTES, once)
            for turn in cutlass.range_constexpr(rows):
                if again != Uint32(0):
                    k = lowest(again)
                    again = again & (again - Uint32(1))
                    for part in cutlass.range_constexpr(segments):
                        if cutlass.const_expr(self.partial):
                            accumulate(rSum[None, part], rX[None, part, turn], from_lane(weight, k))
                        else:
                            blank = blank | self._store(group, home, k, unit + part * SEGMENT, rX[None, part, turn])
        if cutlass.const_expr(self.partial):
            for part in cutlass.range_constexpr(segments):
                round_vector(rSum[None, part], rX[None, part, 0], BFloat16)
                self._store(group, home, group.rank, unit + part * SEGMENT, rX[None, part, 0])
        return blank

    @cute.jit
    def _store(self, group, home: Int64, slot, unit, rX) -> Boolean:
        """One unit of a row to a slot; returns whether it has a BLANK word."""
        blank = Boolean(False)
        if unit < row_units(group):
            send_vector(rX, home + slot * group.arena.returns.stride[2] + Int64(unit) * VECTOR_BYTES)
            if cutlass.const_expr(not self.partial):
                blank = has_blank(rX)
        return blank
