"""Reduce role: a source rank waits for what comes home of each of its tokens and sums it.

Each warp takes pieces (`pieces`). A token's slots that hold data are one bit mask from its own top-k ids: bit k where
every expert row came home, bit d where rank d sent a sum. Slots are added in ascending order, then the shared expert's
row, so the result does not depend on arrival. The sum is float32; the epilogue sees it before it is rounded, once, to
the type of the output.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32

from cute_ep.kernels.arith import VECTOR_ELEMENTS, accumulate, halves, round_vector
from cute_ep.kernels.give_back import row_units
from cute_ep.kernels.group import owns_shared
from cute_ep.kernels.hooks import EpilogueContext, WeightReader
from cute_ep.kernels.pieces import SEGMENT, first_item, from_lane, item_stride, lowest, piece_of
from cute_ep.kernels.sync import warp_all
from cute_ep.layouts.arena import COMBINE_ITEMSIZE
from cute_ep.layouts.device import array, vector_at, vector_atom, vector_tensor
from cute_ep.layouts.routing import MASKED_ENTRY, OutputType, Phase

SLOTS_IN_FLIGHT = 4
"""Slots of one vector that a thread loads before it adds the first."""


class Reduce:
    """Sums returned rows into the output, or (mode "unweighted") hands them out slot by slot."""

    def __init__(self, mode: str, weights: WeightReader, epilogue) -> None:
        self.mode, self.weights, self.epilogue = mode, weights, epilogue

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32) -> Boolean:
        """CTA `first` of `count` receiving CTAs. False after a timeout."""
        alive = Boolean(True)
        item = first_item(first, count, group.tid // 32)
        while alive and item < args.tokens << args.return_pieces:
            piece = piece_of(item, args.return_pieces, row_units(group))
            if piece.first < piece.last:
                alive = self._take(group, args, epoch, piece)
            item += item_stride(count)
        return alive

    @cute.jit
    def _take(self, group, args, epoch: Int64, piece) -> Boolean:
        """Wait for the ranks that own experts of the token, then sum. False after a timeout."""
        lane = group.tid % 32
        index = piece.token * group.top_k + lane
        expert = Int32(MASKED_ENTRY)
        weight = Float32(0.0)
        if lane < group.top_k:
            expert = group.expert_of(array(args.topk_ids, Int32, args.tokens * group.top_k)[index])
            if cutlass.const_expr(self.mode == "exact"):
                weight = self.weights.read(args.router_weights, index, group)
        bit = Uint32(0)
        if expert >= 0:
            _, owner = group.by_local_experts.split(expert)
            bit = Uint32(1) << Uint32(owner)
        owners = cute.arch.warp_redux_sync(bit, "or")
        filled = owners
        if cutlass.const_expr(self.mode != "partial"):
            filled = Uint32(cute.arch.vote_ballot_sync(expert >= 0))
        arrived = Boolean(True)
        if (owners >> Uint32(lane)) & Uint32(1) != Uint32(0):
            flag = group.base + group.arena.return_ready.at(lane, piece.index)  # from GiveBack on rank `lane`
            arrived = group.wait_one(flag, epoch, lane, Phase.RETURN, piece.index)
        alive = warp_all(arrived)
        if alive:
            if cutlass.const_expr(self.mode == "unweighted"):
                self._hand_out(group, args, epoch, piece, filled)
            else:
                self._sum(group, args, epoch, piece, filled, weight)
        return alive

    @cute.jit
    def _sum(self, group, args, epoch: Int64, piece, filled: Uint32, weight: Float32) -> None:
        lane = group.tid % 32
        units = row_units(group)
        returns = group.arena.returns
        base = group.base + returns.at(epoch & 1, piece.token)
        rX = cute.make_rmem_tensor((4, SLOTS_IN_FLIGHT), Uint32)
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        for segment in cutlass.range(piece.first, piece.last, unroll=1):
            unit = segment * SEGMENT + lane
            rSum.fill(0.0)
            left = filled
            while left != Uint32(0):
                again = left
                for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
                    if left != Uint32(0):
                        gSlot = vector_tensor(base + lowest(left) * returns.stride[2], units, 1)
                        left = left & (left - Uint32(1))
                        if unit < units:
                            cute.copy(vector_atom(), gSlot[None, unit, 0], rX[None, turn])
                for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
                    if again != Uint32(0):
                        if cutlass.const_expr(self.mode == "partial"):
                            accumulate(rSum, rX[None, turn], None)
                        else:
                            accumulate(rSum, rX[None, turn], from_lane(weight, lowest(again)))
                        again = again & (again - Uint32(1))
            if unit < units:
                self._add_shared(group, args, piece.token, unit, rX[None, 0], rSum)
                if cutlass.const_expr(self.epilogue is not None):
                    context = EpilogueContext(args.epilogue_data, args.tokens, group.hidden)
                    value = self.epilogue((piece.token, unit * VECTOR_ELEMENTS), rSum.load(), context)
                    rSum.store(value)
                self._store(args, rSum, Int64(piece.token) * units + unit)

    @cute.jit
    def _add_shared(self, group, args, token, vector, rX, rSum) -> None:
        """Add the shared expert's row of a token of the own rank."""
        row = token - args.shared_first
        if owns_shared(args, token) & (row < args.capacity):
            row_bytes = Int64(group.hidden) * COMBINE_ITEMSIZE
            gRow = vector_tensor(args.rows, vector + 1, args.capacity, row_bytes)
            cute.copy(vector_atom(), gRow[None, vector, row], rX)
            accumulate(rSum, rX, None)

    @cute.jit
    def _hand_out(self, group, args, epoch: Int64, piece, filled: Uint32) -> None:
        """out[token, k] = the row of slot k, zeros where it is masked."""
        lane = group.tid % 32
        units = row_units(group)
        returns = group.arena.returns
        base = group.base + returns.at(epoch & 1, piece.token)
        rX = cute.make_rmem_tensor(4, Uint32)
        rRow = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        for slot in cutlass.range(group.top_k, unroll=1):
            gSlot = vector_tensor(base + slot * returns.stride[2], units, 1)
            for segment in cutlass.range(piece.first, piece.last, unroll=1):
                unit = segment * SEGMENT + lane
                if unit < units:
                    rX.fill(0)
                    if (filled >> Uint32(slot)) & Uint32(1) != Uint32(0):
                        cute.copy(vector_atom(), gSlot[None, unit, 0], rX)
                    index = (Int64(piece.token) * group.top_k + slot) * units + unit
                    if args.out_type == int(OutputType.BF16):
                        cute.copy(vector_atom(), rX, vector_at(args.out, index))
                    else:
                        for word in cutlass.range_constexpr(VECTOR_ELEMENTS // 2):
                            low, high = halves(rX[word])
                            rRow[2 * word] = low
                            rRow[2 * word + 1] = high
                        self._store(args, rRow, index)

    @cute.jit
    def _store(self, args, rSum, index: Int64) -> None:
        """Round eight float32 to the output's type and store them as its vector number `index`."""
        rX = cute.make_rmem_tensor(4, Uint32)
        if args.out_type == int(OutputType.F32):
            rWords = cute.recast_tensor(rSum, Uint32)
            for half in cutlass.range_constexpr(2):
                for word in cutlass.range_constexpr(4):
                    rX[word] = rWords[4 * half + word]
                cute.copy(vector_atom(), rX, vector_at(args.out, 2 * index + half))
        else:
            if args.out_type == int(OutputType.FP16):
                round_vector(rSum, rX, Float16)
            else:
                round_vector(rSum, rX, BFloat16)
            cute.copy(vector_atom(), rX, vector_at(args.out, index))
