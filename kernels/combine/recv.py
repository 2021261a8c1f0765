"""The receiving role: a source rank waits for what comes home of each of its tokens and sums it.

Each warp takes slices (`slices`). A token's slots that hold data are one bit mask from its own top-k ids: bit k where
every expert row came home, bit d where rank d sent a sum. Slots are added in ascending order, then the shared expert's
row, so the result does not depend on arrival. The sum is float32; the epilogue sees it before it is rounded, once, to
the type of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.schedule import row_vectors
from cute_ep.kernels.device.arith import LOST, VECTOR_ELEMENTS, accumulate, halves, opaque
from cute_ep.kernels.device.atoms import clear, move, plain, poll
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT
from cute_ep.kernels.device.context import CombineContext, given_id, owns_shared
from cute_ep.kernels.device.lamport import region_of, wait_lamport
from cute_ep.kernels.device.memory import WORDS, Share, part_at, row_address, row_at, share, vectors_at
from cute_ep.kernels.device.output_type import store_sum
from cute_ep.kernels.device.slices import (
    SEGMENT,
    RowSlice,
    Tickets,
    are_many,
    first_item,
    from_lane,
    has_bit,
    lowest,
    slice_of,
    take_each,
    without_lowest,
)
from cute_ep.kernels.device.sync import Awaited, wait_signal, warp_all
from cute_ep.kernels.hooks import Epilogue, EpilogueContext, WeightReader
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE, RETURN_SLOT, chunk_of
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import MASKED_ENTRY, OutputType, Phase

SLOTS_IN_FLIGHT = 2
"""Slots of which a thread polls 16 bytes before the first addition. Exact combine of 1, 512 and 4096 tokens takes 5.1,
95 and 701 us, with 4 slots 6.1, 107 and 793, with 1 or 3 hardly less (2 x H200, 2026-11-26)."""


@dataclass(frozen=True)
class Slots:
    """A token's slots: bit k of `filled` is set where slot k gets a row, from the rank that is `owner` in lane k."""

    filled: Uint32
    owner: Int32


class CombineRecv:
    """Sums returned rows into the output, or (mode "unweighted") hands them out slot by slot.

    segments: neighbouring segments, 1 or 2, of a partial sum that a warp takes at a time when they have arrived.
    """

    def __init__(
        self, mode: str, segments: int, weights: WeightReader, epilogue: Epilogue | None, shared: RegionMap
    ) -> None:
        self.mode, self.weights, self.epilogue = mode, weights, epilogue
        self.segments = segments if mode == "partial" else 1
        self.tickets = Tickets("sum_tickets", shared)

    @cute.jit
    def run(self, ctx: CombineContext, receiver: Int32, receivers: Int32, absent: Int32, staggered: Boolean) -> Boolean:
        """By each receiving CTA, number `receiver` of `receivers`, but for its first `absent` warps; `staggered`: its
        warps come at different times. False after a timeout."""
        alive = Boolean(True)
        items = ctx.sums.tokens << ctx.sums.return_slices_log2
        numbered = staggered | are_many(items + absent * receivers, receivers, ctx.warps)
        number = ctx.warps - 1 - ctx.warp  # with few tokens the last warps have nothing to send before
        if numbered:
            number = self.tickets.draw(ctx.lane)
        item = first_item(receiver, receivers, number)
        while alive and item < items:
            row_slice = slice_of(item, ctx.sums.return_slices_log2, row_vectors(ctx))
            if row_slice.first < row_slice.last:
                alive = self._take(ctx, row_slice)
            item = items
            if numbered:
                item = first_item(receiver, receivers, self.tickets.draw(ctx.lane))
        return alive

    @cute.jit
    def _take(self, ctx: CombineContext, row_slice: RowSlice) -> Boolean:
        """Wait for the ranks that own experts of the token, then sum. False after a timeout."""
        lane = ctx.lane
        index = row_slice.token * ctx.top_k + lane
        expert = Int32(MASKED_ENTRY)
        weight = Float32(0.0)
        if lane < ctx.top_k:
            expert = ctx.expert_of(given_id(ctx.ids, ctx.entries, index))
            if cutlass.const_expr(self.mode == "exact"):
                weight = self.weights.read(ctx.sums.router_weights, index, ctx)
        owner = lane  # of slot `lane`
        bit = Uint32(0)
        if expert >= 0:
            _, chosen = ctx.by_local_experts.split(expert)
            if cutlass.const_expr(self.mode == "partial"):
                bit = Uint32(1) << Uint32(chosen)
            else:
                owner = chosen
                bit = Uint32(1) << Uint32(lane)
        filled = Uint32(cute.arch.warp_redux_sync(bit, "or"))
        alive = Boolean(True)
        if not ctx.gets_lamport:
            arrived = Boolean(True)
            if has_bit(filled, lane):
                # signaled by CombineSend, or a consumer, on `owner`
                flag = ctx.here(ctx.arena.return_ready, owner, chunk_of(row_slice.index))
                awaited = self._awaited(ctx, owner, Phase.RETURN, row_slice)
                arrived = wait_signal(ctx.wait_context, flag, ctx.epoch, awaited)
            alive = warp_all(arrived)
        if alive:
            if cutlass.const_expr(self.mode == "unweighted"):
                alive = self._write_slots(ctx, row_slice, Slots(filled, owner))
            else:
                alive = self._sum(ctx, row_slice, Slots(filled, owner), weight)
        return alive

    def _awaited(self, ctx: CombineContext, owner: Int32, phase: Phase, row_slice: RowSlice) -> Awaited:
        return Awaited(owner, phase, row_slice.index, slices_log2=ctx.sums.return_slices_log2)

    @cute.jit
    def _wait_lamport(
        self, ctx: CombineContext, row_slice: RowSlice, slots: Slots, poll: Callable[[Uint32], Uint32]
    ) -> Boolean:
        """Poll words of the slice until they are there; rows that are not Lamport rows have been waited for."""
        flagged = Uint32(cutlass.select_(ctx.gets_lamport, Uint32(0), slots.filled))
        check = partial(self._has_signaled, ctx, row_slice, slots)
        awaited = self._awaited(ctx, slots.owner, Phase.RETURN_WORDS, row_slice)
        return wait_lamport(ctx, poll, check, flagged, awaited)

    @cute.jit
    def _has_signaled(self, ctx: CombineContext, row_slice: RowSlice, slots: Slots) -> Uint32:
        """The filled slots whose owners have signaled the slice's flag."""
        signaled = Boolean(False)
        if has_bit(slots.filled, ctx.lane):
            flag = ctx.here(ctx.arena.return_ready, opaque(slots.owner), opaque(row_slice.index))
            signaled = ctx.has_signaled(flag, ctx.epoch)
        found = Uint32(cute.arch.vote_ballot_sync(signaled))
        cute.arch.sync_warp()  # one lane's acquire orders the polls of all
        return found

    def _home(self, ctx: CombineContext, row_slice: RowSlice) -> Int64:
        """Address of slot 0 of the token."""
        regions = ctx.arena.lamport_returns, ctx.arena.returns
        return ctx.here(region_of(ctx.gets_lamport, *regions), ctx.epoch & 1, opaque(row_slice.token))

    @cute.jit
    def _sum(self, ctx: CombineContext, row_slice: RowSlice, slots: Slots, weight: Float32) -> Boolean:
        """out[token] = the sum of its slots. False after a timeout."""
        alive = Boolean(True)
        if cutlass.const_expr(self.segments == 1):
            alive = self._sum_slots(ctx, row_slice, slots, weight)
        else:
            if ctx.gets_lamport:
                alive = self._sum_slots(ctx, row_slice, slots, weight)
            else:
                self._sum_segments(ctx, row_slice, slots.filled)
        return alive

    @cute.jit
    def _sum_slots(self, ctx: CombineContext, row_slice: RowSlice, slots: Slots, weight: Float32) -> Boolean:
        """`_sum` with as many slots on their way as there are, up to SLOTS_IN_FLIGHT."""
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        add = partial(self._add, rSum, weight)
        alive = Boolean(True)
        segment = row_slice.first
        while alive and segment < row_slice.last:
            column = segment * SEGMENT + ctx.lane
            rSum.fill(0.0)
            alive = self._take_slots(ctx, row_slice, slots, column, add)
            if alive & (column < row_vectors(ctx)):
                self.finish(ctx, row_slice.token, column, rSum)
            segment += 1
        return alive

    @cute.jit
    def _sum_segments(self, ctx: CombineContext, row_slice: RowSlice, filled: Uint32) -> None:
        """`_sum` of a slice that has arrived, with `segments` segments of fewer slots on their way."""
        slots = LOADS_IN_FLIGHT // self.segments
        rX = cute.make_rmem_tensor((WORDS, self.segments, slots), Uint32)
        rSum = cute.make_rmem_tensor((VECTOR_ELEMENTS, self.segments), Float32)
        for segment in cutlass.range(row_slice.first, row_slice.last, self.segments, unroll=1):
            column = segment * SEGMENT + opaque(ctx.lane)
            end = cutlass.min(row_vectors(ctx), row_slice.last * SEGMENT)
            share_of = self._shares(ctx, row_slice, column, end - column, self.segments)
            rSum.fill(0.0)
            take_each(filled, slots, partial(self._load_segments, rX, share_of), partial(self._add_segments, rSum, rX))
            for part in cutlass.range_constexpr(self.segments):
                if column + part * SEGMENT < end:
                    self.finish(ctx, row_slice.token, column + part * SEGMENT, rSum[None, part])

    def _shares(
        self, ctx: CombineContext, row_slice: RowSlice, column: Int32, left: Int32, turns: int
    ) -> Callable[[Int32], Share]:
        """By slot: what the lane takes of it in so many turns, from a column on, where the row has `left` vectors."""
        home = part_at(self._home(ctx, row_slice), column * VECTOR_BYTES)

        def share_of(slot: Int32) -> Share:
            slot_at = ctx.arena.returns.along(RETURN_SLOT, home, slot)
            return share(row_at(opaque(slot_at), left), 0, turns)

        return share_of

    def _load_segments(
        self, rX: cute.Tensor, share_of: Callable[[Int32], Share], slot: Int32, turn: cutlass.Constexpr
    ) -> None:
        move(plain, share_of(slot), rX[None, None, turn])

    @cute.jit
    def _add_segments(self, rSum: cute.Tensor, rX: cute.Tensor, slot: Int32, turn: cutlass.Constexpr) -> None:
        for part in cutlass.range_constexpr(self.segments):
            accumulate(rSum[None, part], rX[None, part, turn], None)

    @cute.jit
    def finish(self, ctx: CombineContext, token: Int32, column: Int32, rSum: cute.Tensor) -> None:
        """The shared expert's row, the epilogue, and the output."""
        self._add_shared(ctx, token, column, rSum)
        if cutlass.const_expr(self.epilogue is not None):
            context = EpilogueContext(ctx.sums.epilogue_data, ctx.sums.tokens, ctx.group.hidden)
            value = self.epilogue((token, column * VECTOR_ELEMENTS), rSum.load(), context)
            rSum.store(value)
        store_sum(ctx.sums.out, ctx.sums.out_type, rSum, Int64(token) * row_vectors(ctx) + column)

    def is_plain(self, ctx: CombineContext, token: Int32) -> Boolean:
        """Whether `finish` of a token does no more than round to bfloat16."""
        plainly = ctx.sums.out_type == int(OutputType.BF16)
        return plainly & ~owns_shared(ctx.shared, token) if self.epilogue is None else Boolean(False)

    def _add(self, rSum: cute.Tensor, weight: Float32, rX: cute.Tensor, slot: Int32) -> None:
        """Add one vector of a slot; by all lanes."""
        accumulate(rSum, rX, None if self.mode == "partial" else from_lane(weight, slot))

    @cute.jit
    def _take_slots(
        self, ctx: CombineContext, row_slice: RowSlice, slots: Slots, column: Int32, use: cutlass.Constexpr
    ) -> Boolean:
        """Wait for one vector of the filled slots and call use(rX, slot) for each, in ascending order; clear Lamport
        words. False after a timeout."""
        share_of = self._shares(ctx, row_slice, column, row_vectors(ctx) - column, 1)
        rX = cute.make_rmem_tensor((WORDS, 1, SLOTS_IN_FLIGHT), Uint32)
        lamport = Boolean(ctx.gets_lamport)
        alive = Boolean(True)
        left = slots.filled
        while alive and left != Uint32(0):
            alive = self._wait_lamport(ctx, row_slice, slots, partial(self._poll, rX, share_of, left))
            for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
                if alive & (left != Uint32(0)):
                    slot = lowest(left)
                    left = without_lowest(left)
                    clear(replace(share_of(slot), there=lamport))
                    use(rX[None, 0, turn], slot)
        return alive

    @cute.jit
    def _poll(self, rX: cute.Tensor, share_of: cutlass.Constexpr, left: Uint32, flagged: Uint32) -> Uint32:
        """One vector of the lowest slots of `left` into rX; share_of(slot): where it is."""
        missing = Uint32(0)
        for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
            others = without_lowest(left)
            source = replace(share_of(lowest(left)), there=left != Uint32(0))
            if poll(source, rX[None, None, turn]):
                missing = missing | (left ^ others)
            left = others
        return missing & ~flagged

    @cute.jit
    def _add_shared(self, ctx: CombineContext, token: Int32, column: Int32, rSum: cute.Tensor) -> None:
        """Add the shared expert's row of a token of the own rank; NaN for a row that dispatch had no room for."""
        found = token - ctx.shared.first
        if owns_shared(ctx.shared, token):
            rX = cute.make_rmem_tensor((WORDS, 1), Uint32)
            address = row_address(ctx.rows.data, found, Int64(ctx.group.hidden) * COMBINE_ITEMSIZE)
            there = cutlass.select_(found < ctx.rows.capacity, row_vectors(ctx), Int32(0))
            move(plain, share(row_at(address, there), column, 1), rX, outside=LOST)
            accumulate(rSum, rX, None)

    @cute.jit
    def _write_slots(self, ctx: CombineContext, row_slice: RowSlice, slots: Slots) -> Boolean:
        """out[token, k] = the row of slot k, zeros where it is masked. False after a timeout."""
        rZero = cute.make_rmem_tensor(4, Uint32)
        rZero.fill(0)
        alive = Boolean(True)
        segment = row_slice.first
        while alive and segment < row_slice.last:
            column = segment * SEGMENT + ctx.lane
            store = partial(self._store_row, ctx, opaque(row_slice.token), column)
            alive = self._take_slots(ctx, row_slice, slots, column, store)
            for slot in cutlass.range(ctx.top_k, unroll=1):
                if not has_bit(slots.filled, slot):
                    store(rZero, slot)
            segment += 1
        return alive

    @cute.jit
    def _store_row(self, ctx: CombineContext, token: Int32, column: Int32, rX: cute.Tensor, slot: Int32) -> None:
        """One vector of a returned row into the output's slot."""
        if column < row_vectors(ctx):
            index = (Int64(token) * ctx.top_k + slot) * row_vectors(ctx) + column
            if ctx.sums.out_type == int(OutputType.BF16):
                move(plain, [rX], vectors_at(ctx.sums.out, index))
            else:
                rRow = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
                for word in cutlass.range_constexpr(VECTOR_ELEMENTS // 2):
                    low, high = halves(rX[word])
                    rRow[2 * word] = low
                    rRow[2 * word + 1] = high
                store_sum(ctx.sums.out, ctx.sums.out_type, rRow, index)
