"""Give-back role: an expert rank returns its rows of each token of each source, or their weighted sum.

Each warp takes pieces (`pieces`), with the source varying fastest, starting after the own rank, so all links work at
once. If rows of some source are not express all are taken in convoys, and each convoy of such a source has a flag. Lane
k holds the row and the weight of entry k. A token without rows here is passed over: its source knows. A row that
dispatch had no room for comes home as NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.arith import VECTOR_ELEMENTS, accumulate, anew, round_vector
from cute_ep.kernels.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.divide import quotient
from cute_ep.kernels.express import has_blank, home_of, is_express, send_vector
from cute_ep.kernels.pieces import SEGMENT, dealt_first, dealt_stride, from_lane, lowest, piece_of, whole_convoys
from cute_ep.kernels.sync import post
from cute_ep.layouts.arena import COMBINE_ITEMSIZE, CONVOY, HeaderWord, convoy_of
from cute_ep.layouts.device import array, vector_at, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import Region, RegionMap
from cute_ep.layouts.routing import MAX_RANKS, NO_ROW

LOST = 0x7FFF7FFF
"""Two bfloat16 NaN."""


class GiveBack:
    """Pushes expert rows, or their weighted sums, to the source ranks.

    segments: neighbouring segments, 1 or 2, that a warp sums at a time.
    """

    def __init__(self, partial: bool, segments: int, epoch: Region, shared: RegionMap) -> None:
        self.partial, self.segments, self.epoch = partial, segments, epoch
        self.items = shared.add("give_back_items", 4, 1)
        self.convoys = shared.add("give_back_convoys", 4, 1)
        self.headers = shared.add("give_back_headers", 4, MAX_RANKS, len(HeaderWord))

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
        item = dealt_first(items, group.cta, args.send_ctas, group.warp, convoys)
        source, index = self._split(group, item, convoys)
        piece = piece_of(index, from_lane(log2, source), row_units(group))
        due = (item < items) & (piece.token < from_lane(tokens, source)) & (piece.first < piece.last)
        return self._load_entries(group, args, source, piece, due)

    @cute.jit
    def run(self, group, args, row: Int32, weight: Float32) -> None:
        """By the warps of sending CTAs, after `prepare`, which returned row and weight, and the wait for
        `combine_consumed`."""
        sHeader, sItems = shared_array(self.headers, Int32), shared_array(self.items, Int32)
        item = dealt_first(sItems[0], group.cta, args.send_ctas, group.warp, self._are_convoys())
        while item < sItems[0]:
            source, piece = self._item(group, args, item)
            self._give_back(group, args, item, source, piece, row, weight)
            if self._are_convoys():
                cute.arch.sync_threads()  # all of the convoy is stored
                if group.tid == 0:
                    self._post_convoy(group, args, item)
            item += dealt_stride(sItems[0], args.send_ctas)
            source, piece = self._item(group, args, item)
            due = (item < sItems[0]) & (piece.token < sHeader[source, int(HeaderWord.TOKENS)])
            row, weight = self._load_entries(group, args, source, piece, due & (piece.first < piece.last))

    def _are_convoys(self) -> Boolean:
        """Whether rows of some source are not express: then items are dealt for convoys."""
        return shared_array(self.convoys, Int32)[0] != 0

    def _split(self, group, item, convoys: Boolean):
        """(source, number of the piece) of an item. The source varies fastest from piece to piece, or from convoy to
        convoy."""
        turn, run = group.by_ranks.split(cutlass.select_(convoys, convoy_of(item), item))
        source = group.rank + 1 + turn
        source -= cutlass.select_(source >= group.ranks, group.ranks, Int32(0))
        return source, cutlass.select_(convoys, run * CONVOY + (item & (CONVOY - 1)), run)

    @cute.jit
    def _post_convoy(self, group, args, item) -> None:
        """The flag of the convoy that an item belongs to; express rows need none."""
        sEpoch = shared_array(self.epoch, Int64)
        source, piece = self._item(group, args, anew(item))
        if not self._is_express(source):
            flag = group.arena.return_ready.at(group.rank, convoy_of(piece.index))
            post(group.sPeers[source] + flag, sEpoch[0])

    def _item(self, group, args, item):
        """(source, piece) of an item."""
        source, index = self._split(group, item, self._are_convoys())
        pieces = shared_array(self.headers, Int32)[source, int(HeaderWord.RETURN_PIECES)]
        return source, piece_of(index, pieces, row_units(group))

    @cute.jit
    def _load_entries(self, group, args, source, piece, due: Boolean):
        """(row, weight) of the token's entry number `lane`; NO_ROW where it has none here."""
        in_rank = group.max_tokens * group.top_k
        index = piece.token * group.top_k + group.lane
        row = Int32(NO_ROW)
        weight = Float32(0.0)
        if due & (group.lane < group.top_k):
            row = array(args.row_map, Int32, group.ranks, in_rank)[source, index]
            if cutlass.const_expr(self.partial):
                weight = Float32(array(args.weights, Float32, group.ranks, in_rank)[source, index])
        return row, weight

    def _is_express(self, source) -> Boolean:
        return is_express(shared_array(self.headers, Int32)[source, int(HeaderWord.TOKENS)])

    @cute.jit
    def _give_back(self, group, args, item, source, piece, row: Int32, weight: Float32) -> None:
        lane = group.lane
        sEpoch = shared_array(self.epoch, Int64)
        wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
        if wanted != Uint32(0):
            regions = group.arena.express_returns, group.arena.returns
            home = group.sPeers[source] + home_of(self._is_express(source), *regions, sEpoch[0] & 1, piece.token)
            blank = Boolean(False)
            if cutlass.const_expr(self.partial):
                self._push_sum(group, args, home, piece, row, weight, wanted)
            else:
                blank = self._push_rows(group, args, home, piece, row, wanted)
            # computed again, not kept: registers are short above
            target, again = self._item(group, args, anew(item))
            flagged = cute.arch.vote_any_sync(blank)
            cute.arch.sync_warp()
            if flagged & (lane == 0) & self._is_express(target):
                post(group.sPeers[target] + group.arena.return_ready.at(group.rank, again.index), sEpoch[0])

    def _unit_at(self, group, args, row, unit) -> Int64:
        """Address of one unit of an expert's output."""
        return args.rows + Int64(row) * Int64(group.hidden * COMBINE_ITEMSIZE) + Int64(unit) * VECTOR_BYTES

    @cute.jit
    def _push_rows(self, group, args, home: Int64, piece, row, wanted: Uint32) -> Boolean:
        """Each row to its own slot; returns whether this lane stored a BLANK word."""
        lane = group.lane
        units = row_units(group)
        blank = Boolean(False)
        rX = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
        left = wanted
        for _ in cutlass.range(Int32(cute.arch.popc(wanted)), unroll=1):
            k = lowest(left)
            left = left & (left - Uint32(1))
            one = from_lane(row, k)
            slot_home = home + k * group.arena.returns.stride[2]
            for base in cutlass.range(piece.first, piece.last, LOADS_IN_FLIGHT, unroll=1):
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    unit = (base + slot) * SEGMENT + lane
                    rX[None, slot].fill(LOST)
                    if (base + slot < piece.last) & (unit < units) & (one < args.capacity):
                        cute.copy(vector_atom(), vector_at(self._unit_at(group, args, one, unit), 0), rX[None, slot])
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    unit = (base + slot) * SEGMENT + lane
                    if (base + slot < piece.last) & (unit < units):
                        send_vector(rX[None, slot], slot_home + Int64(unit) * VECTOR_BYTES)
                        blank = blank | has_blank(rX[None, slot])
        return blank

    @cute.jit
    def _push_sum(self, group, args, home: Int64, piece, row, weight, wanted: Uint32) -> None:
        """The rows' weighted sum to the own rank's slot. Its words are never BLANK: a NaN is rounded to 0x7FFF."""
        own_home = home + group.rank * group.arena.returns.stride[2]
        segment = piece.first
        if cutlass.const_expr(self.segments == 2):
            while segment + 1 < piece.last:
                self._push_segments(group, args, own_home, segment, row, weight, wanted, 2)
                segment += 2
        while segment < piece.last:
            self._push_segments(group, args, own_home, segment, row, weight, wanted, 1)
            segment += 1

    @cute.jit
    def _push_segments(
        self, group, args, own_home: Int64, segment, row, weight, wanted: Uint32, segments: cutlass.Constexpr
    ) -> None:
        """Neighbouring segments of the sum, with LOADS_IN_FLIGHT loads before the first addition."""
        units = row_units(group)
        unit = segment * SEGMENT + anew(group.lane)
        rows = LOADS_IN_FLIGHT // self.segments
        rX = cute.make_rmem_tensor((4, segments, rows), Uint32)
        rSum = cute.make_rmem_tensor((VECTOR_ELEMENTS, segments), Float32)
        rSum.fill(0.0)
        left = wanted
        while left != Uint32(0):
            again = left
            for turn in cutlass.range_constexpr(rows):
                if left != Uint32(0):
                    one = from_lane(row, lowest(left))
                    left = left & (left - Uint32(1))
                    at = self._unit_at(group, args, one, unit)
                    for part in cutlass.range_constexpr(segments):
                        if (unit + part * SEGMENT < units) & (one < args.capacity):
                            cute.copy(vector_atom(), vector_at(at, part * SEGMENT), rX[None, part, turn])
                        else:
                            rX[None, part, turn].fill(LOST)
            for turn in cutlass.range_constexpr(rows):
                if again != Uint32(0):
                    factor = from_lane(weight, lowest(again))
                    again = again & (again - Uint32(1))
                    for part in cutlass.range_constexpr(segments):
                        accumulate(rSum[None, part], rX[None, part, turn], factor)
        for part in cutlass.range_constexpr(segments):
            if unit + part * SEGMENT < units:
                round_vector(rSum[None, part], rX[None, part, 0], BFloat16)
                send_vector(rX[None, part, 0], own_home + Int64(unit + part * SEGMENT) * VECTOR_BYTES)


def row_units(group) -> Int32:
    """16-byte units of a returned row."""
    return quotient(group.hidden, VECTOR_ELEMENTS)
