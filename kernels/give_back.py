"""Give-back role: an expert rank returns its rows of each token of each source, or their weighted sum.

Each warp takes pieces (`pieces`), with the source varying fastest, starting after the own rank, so all links work at
once; lane k holds the row and the weight of entry k. A token without rows here is passed over: its source knows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from cute_ep.kernels.arith import VECTOR_ELEMENTS, accumulate, round_vector
from cute_ep.kernels.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.pieces import SEGMENT, first_item, from_lane, item_stride, lowest, most_pieces, piece_of
from cute_ep.kernels.sync import post
from cute_ep.layouts.arena import COMBINE_ITEMSIZE, HeaderWord
from cute_ep.layouts.device import array, vector_atom, vector_tensor
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import MAX_RANKS, NO_ROW

ROWS_IN_FLIGHT = 4
"""Rows of one vector that a thread loads before it adds the first (partial mode)."""


class GiveBack:
    """Pushes expert rows, or their weighted sums, to the source ranks."""

    def __init__(self, partial: bool, shared: RegionMap) -> None:
        self.partial = partial
        self.headers = shared.add("give_back_headers", 4, MAX_RANKS, len(HeaderWord))

    @cute.jit
    def run(self, group, args, epoch: Int64) -> None:
        sHeader = shared_array(self.headers, Int32)
        gHeader = vector_tensor(args.headers, 1, group.ranks)
        rHeader = cute.make_rmem_tensor(len(HeaderWord), Uint32)
        if group.tid < group.ranks:
            cute.copy(vector_atom(), gHeader[None, 0, group.tid], rHeader)
            for word in cutlass.range_constexpr(len(HeaderWord)):
                sHeader[group.tid, word] = Int32(rHeader[word])
        cute.arch.sync_threads()
        most = most_pieces(sHeader, group.ranks, HeaderWord.RETURN_PIECES)
        start = first_item(group.cta, args.send_ctas, group.tid // 32)
        for item in cutlass.range(start, most * group.ranks, item_stride(args.send_ctas), unroll=1):
            turn, index = group.by_ranks.split(item)
            source = group.rank + 1 + turn
            if source >= group.ranks:
                source -= group.ranks
            piece = piece_of(index, sHeader[source, int(HeaderWord.RETURN_PIECES)], row_units(group))
            if piece.token < sHeader[source, int(HeaderWord.TOKENS)] and piece.first < piece.last:
                self._give_back(group, args, epoch, source, piece)

    @cute.jit
    def _give_back(self, group, args, epoch: Int64, source, piece) -> None:
        lane = group.tid % 32
        in_rank = group.max_tokens * group.top_k
        index = piece.token * group.top_k + lane
        row = Int32(NO_ROW)
        weight = Float32(0.0)
        if lane < group.top_k:
            row = array(args.row_map, Int32, group.ranks, in_rank)[source, index]
            if row >= args.capacity:
                row = Int32(NO_ROW)
            if cutlass.const_expr(self.partial):
                weight = Float32(array(args.weights, Float32, group.ranks, in_rank)[source, index])
        wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
        if wanted != Uint32(0):
            if cutlass.const_expr(self.partial):
                self._push_sum(group, args, epoch, source, piece, row, weight, wanted)
            else:
                self._push_rows(group, args, epoch, source, piece, row, wanted)
            cute.arch.sync_warp()
            if lane == 0:
                post(group.sPeers[source] + group.arena.return_ready.at(group.rank, piece.index), epoch)

    def _rows_tensor(self, group, args):
        """(word, vector, row) of the expert outputs."""
        return vector_tensor(args.rows, row_units(group), args.capacity, Int64(group.hidden) * COMBINE_ITEMSIZE)

    @cute.jit
    def _push_rows(self, group, args, epoch: Int64, source, piece, row, wanted: Uint32) -> None:
        lane = group.tid % 32
        units = row_units(group)
        gRow = self._rows_tensor(group, args)
        home = group.sPeers[source] + group.arena.returns.at(epoch & 1, piece.token)
        rX = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
        left = wanted
        for _ in cutlass.range(Int32(cute.arch.popc(wanted)), unroll=1):
            k = lowest(left)
            left = left & (left - Uint32(1))
            one = from_lane(row, k)
            gHome = vector_tensor(home + k * group.arena.returns.stride[2], units, 1)
            for base in cutlass.range(piece.first, piece.last, LOADS_IN_FLIGHT, unroll=1):
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    unit = (base + slot) * SEGMENT + lane
                    if (base + slot < piece.last) & (unit < units):
                        cute.copy(vector_atom(), gRow[None, unit, one], rX[None, slot])
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    unit = (base + slot) * SEGMENT + lane
                    if (base + slot < piece.last) & (unit < units):
                        cute.copy(vector_atom(), rX[None, slot], gHome[None, unit, 0])

    @cute.jit
    def _push_sum(self, group, args, epoch: Int64, source, piece, row, weight, wanted: Uint32) -> None:
        lane = group.tid % 32
        units = row_units(group)
        gRow = self._rows_tensor(group, args)
        home = group.sPeers[source] + group.arena.returns.at(epoch & 1, piece.token, group.rank)
        gHome = vector_tensor(home, units, 1)
        rX = cute.make_rmem_tensor((4, ROWS_IN_FLIGHT), Uint32)
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        for segment in cutlass.range(piece.first, piece.last, unroll=1):
            unit = segment * SEGMENT + lane
            rSum.fill(0.0)
            left = wanted
            while left != Uint32(0):
                again = left
                for turn in cutlass.range_constexpr(ROWS_IN_FLIGHT):
                    if left != Uint32(0):
                        one = from_lane(row, lowest(left))
                        left = left & (left - Uint32(1))
                        if unit < units:
                            cute.copy(vector_atom(), gRow[None, unit, one], rX[None, turn])
                for turn in cutlass.range_constexpr(ROWS_IN_FLIGHT):
                    if again != Uint32(0):
                        accumulate(rSum, rX[None, turn], from_lane(weight, lowest(again)))
                        again = again & (again - Uint32(1))
            if unit < units:
                round_vector(rSum, rX[None, 0], BFloat16)
                cute.copy(vector_atom(), rX[None, 0], gHome[None, unit, 0])


def row_units(group) -> Int32:
    """16-byte units of a returned row."""
    return group.hidden // VECTOR_ELEMENTS
