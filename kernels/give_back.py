"""Give-back role: an expert rank returns its rows of each token of each source, or their weighted sum.

Each warp takes pieces (`pieces`), with the source varying fastest, starting after the own rank, so all links work at
once. If rows of some source are not express all are taken in convoys, and each convoy of such a source has a flag. The
warps of a convoy carry its tokens one after the other, each token together: tokens have different numbers of rows. Lane
k holds the row and the weight of entry k. A token without rows here is passed over: its source knows. A row that
dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.arith import VECTOR_ELEMENTS, accumulate, anew, round_vector
from cute_ep.kernels.block import LOADS_IN_FLIGHT, WARPS, shared_array
from cute_ep.kernels.divide import quotient, remainder
from cute_ep.kernels.express import has_blank, home_of, is_express, send_vector
from cute_ep.kernels.pieces import (
    SEGMENT,
    Numbers,
    are_many,
    dealt_first,
    first_item,
    from_lane,
    item_stride,
    lowest,
    piece_of,
    taken,
    whole_convoys,
)
from cute_ep.kernels.sync import post, take
from cute_ep.layouts.arena import COMBINE_ITEMSIZE, CONVOY, COUNTERS, SEGMENT_BYTES, HeaderWord, convoy_of
from cute_ep.layouts.device import array, load_once, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import Region, RegionMap
from cute_ep.layouts.routing import MAX_RANKS, NO_ROW

LOST = 0x7FFF7FFF
"""Two bfloat16 NaN."""
FEW_ROUNDS = 4
"""Up to so many express pieces a warp are dealt out to CTAs; more are taken by them."""


class GiveBack:
    """Pushes expert rows, or their weighted sums, to the source ranks.

    segments: neighbouring segments, 1 or 2, that a warp carries at a time.
    """

    def __init__(self, partial: bool, segments: int, epoch: Region, shared: RegionMap) -> None:
        self.partial, self.segments, self.epoch = partial, segments, epoch
        self.items = shared.add("give_back_items", 4, 1)
        self.convoys = shared.add("give_back_convoys", 4, 1)
        self.headers = shared.add("give_back_headers", 4, MAX_RANKS, len(HeaderWord))
        self.numbers = Numbers("give_back_numbers", WARPS, shared)
        self.taken = shared.add("give_back_taken", 4, 2)

    @cute.jit
    def prepare(self, group, args):
        """Read the headers, and begin with the warp's first item: what `_load_entries` returns, for `run`. A CTA
        barrier must follow before `run`."""
        sHeader, sItems = shared_array(self.headers, Int32), shared_array(self.items, Int32)
        gHeader = vector_tensor(args.headers, 1, group.ranks)
        rHeader = cute.make_rmem_tensor(len(HeaderWord), Uint32)
        rHeader.fill(0)
        if group.lane < group.ranks:
            cute.copy(vector_atom(), gHeader[None, 0, group.lane], rHeader)
            if group.warp == 0:
                for word in cutlass.range_constexpr(len(HeaderWord)):
                    sHeader[group.lane, word] = Int32(rHeader[word])
        tokens, log2 = Int32(rHeader[int(HeaderWord.TOKENS)]), Int32(rHeader[int(HeaderWord.RETURN_PIECES)])
        convoys = cute.arch.vote_any_sync(~is_express(tokens))
        most = Int32(cute.arch.warp_redux_sync(tokens << log2, "max"))
        items = cutlass.select_(convoys, whole_convoys(most), most) * group.ranks
        sConvoys = shared_array(self.convoys, Int32)
        if group.tid == 0:
            sItems[0] = items
            sConvoys[0] = Int32(convoys)
        self.numbers.open(group.tid)
        item = self._first(group, args, items, convoys)
        source, run = self._split(group, cutlass.select_(convoys, convoy_of(item), item))
        index = cutlass.select_(convoys, run * CONVOY + remainder(item, CONVOY), run)
        piece = piece_of(index, from_lane(log2, source), row_units(group))
        due = (item < items) & (piece.token < from_lane(tokens, source)) & (piece.first < piece.last)
        return self._load_entries(group, args, source, piece.token, due)

    @cute.jit
    def run(self, group, args, row: Int32, weight: Float32) -> None:
        """By the warps of sending CTAs, after `prepare`, which returned row and weight, and the wait for
        `combine_consumed`."""
        if self._are_convoys():
            self._carry_convoys(group, args, row, weight)
        else:
            self._carry_pieces(group, args, row, weight)

    @cute.jit
    def _carry_pieces(self, group, args, row: Int32, weight: Float32) -> None:
        """Express rows: a warp carries a piece. With few tokens this half waits for nothing but these instructions:
        256 tokens of 4 rows each took 12,000 of a scheduler's 18,000 cycles (H200, 2026-11-21). With more, CTAs take
        pieces of their source from each other (4 x H200, 2026-11-22: 512 tokens 63.6 us, dealt out 69.0)."""
        sItems, sEpoch = shared_array(self.items, Int32), shared_array(self.epoch, Int64)
        region = group.arena.express_returns
        item = self._first(group, args, sItems[0], Boolean(False))
        source, index = self._split(group, item)
        piece = self._piece(group, source, index)
        first, last = piece.first, piece.last
        home = group.sPeers[source] + region.at(sEpoch[0] & 1, piece.token)
        while item < sItems[0]:
            number = Int32(0)
            if self._are_most(args) & (group.lane == 0):
                number = self._take(
                    group, remainder(group.warp, COUNTERS)
                )  # for the next item: it comes while this one is carried
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            blank = Boolean(False)
            if wanted != Uint32(0):
                blank = self._push(group, args, home, first, last, Int32(self.segments), row, weight, wanted)
            if cutlass.const_expr(not self.partial):
                self._post_piece(group, source, index, blank)
            item = sItems[0]
            if self._are_most(args):
                number = from_lane(number, 0) * COUNTERS + remainder(group.warp, COUNTERS)
                item = self._taken(group, args, item_stride(args.send_ctas), number)
            elif are_many(sItems[0], args.send_ctas):
                item = first_item(group.cta, args.send_ctas, self.numbers.take(group.lane))
            source, index = self._split(group, item)
            piece = self._piece(group, source, index)
            first, last = piece.first, piece.last
            due = (item < sItems[0]) & (piece.token < self._tokens(source)) & (first < last)
            row, weight = self._load_entries(group, args, source, piece.token, due)
            home = group.sPeers[source] + region.at(sEpoch[0] & 1, piece.token)

    @cute.jit
    def _carry_convoys(self, group, args, row: Int32, weight: Float32) -> None:
        """Rows of which some are not express: the warps of a convoy carry its tokens one after the other. Meanwhile the
        number of the CTA's next convoy comes, sTaken[turn], written before and read behind the convoy's barrier."""
        sItems, sEpoch = shared_array(self.items, Int32), shared_array(self.epoch, Int64)
        sTaken = shared_array(self.taken, Int32)
        item = self._first(group, args, sItems[0], Boolean(True))
        turn = Int32(0)
        while item < sItems[0]:
            if (remainder(item, CONVOY) == 0) & (group.tid == 0):
                sTaken[turn] = self._take(group, Int32(0))
            source, piece = self._item(group, item)
            wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
            if wanted != Uint32(0):
                regions = group.arena.express_returns, group.arena.returns
                home = group.sPeers[source] + home_of(self._is_express(source), *regions, sEpoch[0] & 1, piece.token)
                # where in the token each warp begins: a step behind the last one of the token before
                steps = quotient(piece.last - piece.first + (self.segments - 1), self.segments)
                first = piece.first + remainder(group.warp - piece.token * steps, CONVOY) * self.segments
                self._push(group, args, home, first, piece.last, Int32(self.segments * CONVOY), row, weight, wanted)
            # computed again, not kept: registers are short above
            source, piece = self._item(group, anew(item))
            item += self._together(source)
            if remainder(item, CONVOY) == 0:
                cute.arch.sync_threads()  # all of the convoy is stored
                if group.warp == 0:
                    self._post_convoy(group, source, convoy_of(piece.index))
                item = self._taken(group, args, args.send_ctas, sTaken[turn]) * CONVOY
                turn = turn ^ 1
            source, piece = self._item(group, item)
            due = (item < sItems[0]) & (piece.token < self._tokens(source)) & (piece.first < piece.last)
            row, weight = self._load_entries(group, args, source, piece.token, due)

    def _are_most(self, args) -> Boolean:
        """Whether there are so many express pieces that CTAs take them from each other."""
        return shared_array(self.items, Int32)[0] > FEW_ROUNDS * item_stride(args.send_ctas)

    def _take(self, group, counter) -> Int32:
        """The next number from one of the counters that CTAs with the same turn share."""
        turn, _ = group.by_ranks.split(group.cta)
        return take(group.base + group.arena.combine_taken.at(turn, counter))

    def _taken(self, group, args, dealt: Int32, number: Int32) -> Int32:
        """The item or convoy of a number: for the CTA's source, where ranks divide `dealt`."""
        turn, _ = group.by_ranks.split(group.cta)
        return taken(dealt, number, cutlass.min(group.ranks, args.send_ctas), turn)

    def are_uneven(self, args) -> Boolean:
        """Whether warps of a sending CTA do not come back from `run` together."""
        return ~self._are_convoys() & are_many(shared_array(self.items, Int32)[0], args.send_ctas)

    def _are_convoys(self) -> Boolean:
        """Whether rows of some source are not express: then items are dealt for convoys."""
        return shared_array(self.convoys, Int32)[0] != 0

    def _first(self, group, args, items, convoys: Boolean) -> Int32:
        """A warp's first item. Warps of a convoy carry all its tokens together."""
        warp = cutlass.select_(convoys, Int32(0), group.warp)
        return dealt_first(items, group.cta, args.send_ctas, warp, convoys)

    def _split(self, group, item):
        """(source, number of its piece or convoy) of an item or convoy: the source varies fastest."""
        turn, run = group.by_ranks.split(item)
        source = group.rank + 1 + turn
        return source - cutlass.select_(source >= group.ranks, group.ranks, Int32(0)), run

    def _piece(self, group, source, index, count=1):
        """`piece_of` in what a source gets back."""
        pieces = shared_array(self.headers, Int32)[source, int(HeaderWord.RETURN_PIECES)]
        return piece_of(index, pieces, row_units(group), count)

    def _item(self, group, item):
        """(source, pieces of a token that are carried together, as one) of an item of a convoy."""
        source, run = self._split(group, convoy_of(item))
        return source, self._piece(group, source, run * CONVOY + remainder(item, CONVOY), self._together(source))

    def _together(self, source) -> Int32:
        """Pieces of a token in a convoy."""
        pieces = Int32(1) << shared_array(self.headers, Int32)[source, int(HeaderWord.RETURN_PIECES)]
        return cutlass.min(pieces, Int32(CONVOY))

    def _tokens(self, source) -> Int32:
        return shared_array(self.headers, Int32)[source, int(HeaderWord.TOKENS)]

    @cute.jit
    def _post_convoy(self, group, source, convoy: Int32) -> None:
        """The flag of a convoy, by one warp; those of its pieces where rows are express and may hold a BLANK word."""
        sHeader, sEpoch = shared_array(self.headers, Int32), shared_array(self.epoch, Int64)
        pieces = sHeader[source, int(HeaderWord.TOKENS)] << sHeader[source, int(HeaderWord.RETURN_PIECES)]
        first = convoy * CONVOY
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
        return is_express(self._tokens(source))

    @cute.jit
    def _push(
        self, group, args, home: Int64, first: Int32, last: Int32, step: Int32, row, weight, wanted: Uint32
    ) -> Boolean:
        """`segments` segments of every `step`, in first .. last - 1; returns whether this lane stored a BLANK word."""
        blank = Boolean(False)
        segment = first
        while segment < last:
            if cutlass.const_expr(self.segments == 2):
                if segment + 1 < last:
                    blank = blank | self._push_segments(group, args, home, segment, row, weight, wanted, 2)
                else:
                    blank = blank | self._push_segments(group, args, home, segment, row, weight, wanted, 1)
            else:
                blank = blank | self._push_segments(group, args, home, segment, row, weight, wanted, 1)
            segment += step
        return blank

    @cute.jit
    def _push_segments(
        self, group, args, home: Int64, segment, row, weight, wanted: Uint32, segments: cutlass.Constexpr
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
                            load_once(rX[None, part, turn], row_at + part * SEGMENT_BYTES)
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


def row_units(group) -> Int32:
    """16-byte units of a returned row."""
    return quotient(group.hidden, VECTOR_ELEMENTS)
