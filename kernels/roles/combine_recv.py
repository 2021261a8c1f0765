"""Reduce role: a source rank waits for what comes home of each of its tokens and sums it.

Each warp takes pieces (`pieces`). A token's slots that hold data are one bit mask from its own top-k ids: bit k where
every expert row came home, bit d where rank d sent a sum. Slots are added in ascending order, then the shared expert's
row, so the result does not depend on arrival. The sum is float32; the epilogue sees it before it is rounded, once, to
the type of the output.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS, accumulate, anew, halves, round_vector
from cute_ep.kernels.device.group import given_id, owns_shared
from cute_ep.kernels.device.lamport import blank_vector, has_blank, home_of, is_express, look_at_vector, wait_whole
from cute_ep.kernels.device.memory import vector_at, vector_atom, vector_tensor
from cute_ep.kernels.device.splits import SEGMENT, Numbers, are_many, first_item, from_lane, has_bit, lowest, piece_of
from cute_ep.kernels.device.sync import wait_at_least, warp_all
from cute_ep.kernels.hooks import EpilogueContext, WeightReader
from cute_ep.kernels.roles.combine_schedule import row_units
from cute_ep.kernels.roles.combine_send import LOST
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE, convoy_of
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import MASKED_ENTRY, OutputType, Phase

SLOTS_IN_FLIGHT = 4
"""Loads of 16 bytes that a thread issues before the first addition."""


class Reduce:
    """Sums returned rows into the output, or (mode "unweighted") hands them out slot by slot.

    segments: neighbouring segments, 1 or 2, of a partial sum that a warp takes at a time when they have arrived.
    """

    def __init__(self, mode: str, segments: int, weights: WeightReader, epilogue, shared: RegionMap) -> None:
        self.mode, self.weights, self.epilogue = mode, weights, epilogue
        self.segments = segments if mode == "partial" else 1
        self.numbers = Numbers("reduce_numbers", shared)

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32, uneven: Boolean) -> Boolean:
        """CTA `first` of `count` receiving CTAs, `uneven`: whose warps do not come together. False after a timeout."""
        alive = Boolean(True)
        items = args.tokens << args.return_pieces
        numbered = uneven | are_many(items, count)
        number = WARPS - 1 - group.warp  # with few tokens the last warps have nothing to send before
        if numbered:
            number = self.numbers.take(group.lane)
        item = first_item(first, count, number)
        while alive and item < items:
            piece = piece_of(item, args.return_pieces, row_units(group))
            if piece.first < piece.last:
                alive = self._take(group, args, epoch, piece)
            item = items
            if numbered:
                item = first_item(first, count, self.numbers.take(group.lane))
        return alive

    @cute.jit
    def _take(self, group, args, epoch: Int64, piece) -> Boolean:
        """Wait for the ranks that own experts of the token, then sum. False after a timeout."""
        lane = group.lane
        index = piece.token * group.top_k + lane
        expert = Int32(MASKED_ENTRY)
        weight = Float32(0.0)
        if lane < group.top_k:
            expert = group.expert_of(given_id(args, index))
            if cutlass.const_expr(self.mode == "exact"):
                weight = self.weights.read(args.router_weights, index, group)
        owner = lane  # of slot `lane`
        bit = Uint32(0)
        if expert >= 0:
            _, chosen = group.by_local_experts.split(expert)
            if cutlass.const_expr(self.mode == "partial"):
                bit = Uint32(1) << Uint32(chosen)
            else:
                owner = chosen
                bit = Uint32(1) << Uint32(lane)
        filled = Uint32(cute.arch.warp_redux_sync(bit, "or"))
        alive = Boolean(True)
        if not is_express(args.tokens):
            arrived = Boolean(True)
            if has_bit(filled, lane):
                # from GiveBack on `owner`
                flag = group.base + group.arena.return_ready.at(owner, convoy_of(piece.index))
                arrived = wait_at_least(group.watch, flag, epoch, owner, Phase.RETURN, piece.index)
            alive = warp_all(arrived)
        if alive:
            if cutlass.const_expr(self.mode == "unweighted"):
                alive = self._hand_out(group, args, epoch, piece, filled, owner)
            else:
                alive = self._sum(group, args, epoch, piece, filled, owner, weight)
        return alive

    @cute.jit
    def _wait_whole(self, group, args, epoch: Int64, piece, filled: Uint32, owner, look) -> Boolean:
        """Look at words of the piece until they are there; rows that are not express have been waited for."""
        settled = Uint32(cutlass.select_(is_express(args.tokens), Uint32(0), filled))
        check = partial(self._has_posted, group, epoch, piece, filled, owner)
        return wait_whole(group, look, check, settled, epoch, owner, Phase.RETURN, piece.index)

    @cute.jit
    def _has_posted(self, group, epoch: Int64, piece, filled: Uint32, owner) -> Uint32:
        """The filled slots whose owners have posted the piece's flag."""
        posted = Boolean(False)
        if has_bit(filled, group.lane):
            flag = group.base + group.arena.return_ready.at(anew(owner), anew(piece.index))
            posted = group.has_posted(flag, epoch)
        slots = Uint32(cute.arch.vote_ballot_sync(posted))
        cute.arch.sync_warp()  # one lane's acquire, for the looks of all
        return slots

    def _home(self, group, args, epoch: Int64, piece) -> Int64:
        """Address of slot 0 of the token."""
        regions = group.arena.express_returns, group.arena.returns
        return group.base + home_of(is_express(args.tokens), *regions, epoch & 1, anew(piece.token))

    @cute.jit
    def _sum(self, group, args, epoch: Int64, piece, filled: Uint32, owner, weight: Float32) -> Boolean:
        """out[token] = the sum of its slots. False after a timeout."""
        alive = Boolean(True)
        if cutlass.const_expr(self.segments == 1):
            alive = self._sum_slots(group, args, epoch, piece, filled, owner, weight)
        else:
            if is_express(args.tokens):
                alive = self._sum_slots(group, args, epoch, piece, filled, owner, weight)
            else:
                self._sum_segments(group, args, epoch, piece, filled)
        return alive

    @cute.jit
    def _sum_slots(self, group, args, epoch: Int64, piece, filled: Uint32, owner, weight: Float32) -> Boolean:
        """`_sum` with as many slots on their way as there are, up to SLOTS_IN_FLIGHT."""
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        add = partial(self._add, rSum, weight)
        alive = Boolean(True)
        segment = piece.first
        while alive and segment < piece.last:
            unit = segment * SEGMENT + group.lane
            rSum.fill(0.0)
            alive = self._take_slots(group, args, epoch, piece, filled, owner, unit, add)
            if alive & (unit < row_units(group)):
                self._finish(group, args, piece.token, unit, rSum)
            segment += 1
        return alive

    @cute.jit
    def _sum_segments(self, group, args, epoch: Int64, piece, filled: Uint32) -> None:
        """`_sum` of a piece that has arrived, with `segments` segments of fewer slots on their way."""
        pitch = group.arena.returns.stride[2]
        slots = SLOTS_IN_FLIGHT // self.segments
        rX = cute.make_rmem_tensor((4, self.segments, slots), Uint32)
        rSum = cute.make_rmem_tensor((VECTOR_ELEMENTS, self.segments), Float32)
        for segment in cutlass.range(piece.first, piece.last, self.segments, unroll=1):
            unit = segment * SEGMENT + anew(group.lane)
            end = cutlass.min(row_units(group), piece.last * SEGMENT)
            home = self._home(group, args, epoch, piece) + Int64(unit) * VECTOR_BYTES
            rSum.fill(0.0)
            left = filled
            while left != Uint32(0):
                again = left
                for turn in cutlass.range_constexpr(slots):
                    if left != Uint32(0):
                        at = home + Int64(lowest(left) * pitch)
                        left = left & (left - Uint32(1))
                        for part in cutlass.range_constexpr(self.segments):
                            if unit + part * SEGMENT < end:
                                cute.copy(vector_atom(), vector_at(at, part * SEGMENT), rX[None, part, turn])
                            else:
                                rX[None, part, turn].fill(0)
                for turn in cutlass.range_constexpr(slots):
                    if again != Uint32(0):
                        again = again & (again - Uint32(1))
                        for part in cutlass.range_constexpr(self.segments):
                            accumulate(rSum[None, part], rX[None, part, turn], None)
            for part in cutlass.range_constexpr(self.segments):
                if unit + part * SEGMENT < end:
                    self._finish(group, args, piece.token, unit + part * SEGMENT, rSum[None, part])

    @cute.jit
    def _finish(self, group, args, token, unit, rSum) -> None:
        """The shared expert's row, the epilogue, and the output."""
        self._add_shared(group, args, token, unit, rSum)
        if cutlass.const_expr(self.epilogue is not None):
            context = EpilogueContext(args.epilogue_data, args.tokens, group.hidden)
            value = self.epilogue((token, unit * VECTOR_ELEMENTS), rSum.load(), context)
            rSum.store(value)
        self._store(args, rSum, Int64(token) * row_units(group) + unit)

    def _add(self, rSum, weight: Float32, rX, slot) -> None:
        """Add one unit of a slot; by all lanes."""
        accumulate(rSum, rX, None if self.mode == "partial" else from_lane(weight, slot))

    @cute.jit
    def _take_slots(
        self, group, args, epoch: Int64, piece, filled: Uint32, owner, unit, take: cutlass.Constexpr
    ) -> Boolean:
        """Wait for one unit of the filled slots and call take(rX, slot) for each, in ascending order; blank what is
        express. False after a timeout."""
        valid = unit < row_units(group)
        pitch = group.arena.returns.stride[2]
        home = self._home(group, args, epoch, piece) + Int64(unit) * VECTOR_BYTES
        rX = cute.make_rmem_tensor((4, SLOTS_IN_FLIGHT), Uint32)
        alive = Boolean(True)
        left = filled
        while alive and left != Uint32(0):
            look = partial(self._look, rX, home, pitch, valid, left)
            alive = self._wait_whole(group, args, epoch, piece, filled, owner, look)
            for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
                if alive & (left != Uint32(0)):
                    slot = lowest(left)
                    left = left & (left - Uint32(1))
                    take(rX[None, turn], slot)
                    if is_express(args.tokens) & valid:
                        blank_vector(home + Int64(slot * pitch))
        return alive

    @cute.jit
    def _look(self, rX, home: Int64, pitch: Int32, valid: Boolean, left: Uint32, settled: Uint32) -> Uint32:
        """One unit of the lowest slots of `left` into rX."""
        missing = Uint32(0)
        for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
            if left != Uint32(0):
                slot = lowest(left)
                left = left & (left - Uint32(1))
                if valid:
                    look_at_vector(rX[None, turn], home + Int64(slot * pitch))
                    if has_blank(rX[None, turn]):
                        missing = missing | (Uint32(1) << Uint32(slot))
        return missing & ~settled

    @cute.jit
    def _add_shared(self, group, args, token, vector, rSum) -> None:
        """Add the shared expert's row of a token of the own rank; NaN for a row that dispatch had no room for."""
        row = token - args.shared_first
        if owns_shared(args, token):
            rX = cute.make_rmem_tensor(4, Uint32)
            rX.fill(LOST)
            if row < args.capacity:
                row_bytes = Int64(group.hidden) * COMBINE_ITEMSIZE
                gRow = vector_tensor(args.rows, vector + 1, args.capacity, row_bytes)
                cute.copy(vector_atom(), gRow[None, vector, row], rX)
            accumulate(rSum, rX, None)

    @cute.jit
    def _hand_out(self, group, args, epoch: Int64, piece, filled: Uint32, owner) -> Boolean:
        """out[token, k] = the row of slot k, zeros where it is masked. False after a timeout."""
        rZero = cute.make_rmem_tensor(4, Uint32)
        rZero.fill(0)
        alive = Boolean(True)
        segment = piece.first
        while alive and segment < piece.last:
            unit = segment * SEGMENT + group.lane
            store = partial(self._store_row, group, args, anew(piece.token), unit)
            alive = self._take_slots(group, args, epoch, piece, filled, owner, unit, store)
            for slot in cutlass.range(group.top_k, unroll=1):
                if not has_bit(filled, slot):
                    store(rZero, slot)
            segment += 1
        return alive

    @cute.jit
    def _store_row(self, group, args, token, unit, rX, slot) -> None:
        """One unit of a returned row into the output's slot."""
        if unit < row_units(group):
            index = (Int64(token) * group.top_k + slot) * row_units(group) + unit
            if args.out_type == int(OutputType.BF16):
                cute.copy(vector_atom(), rX, vector_at(args.out, index))
            else:
                rRow = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
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
