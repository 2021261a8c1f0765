"""Reduce role: a source rank waits for each chunk of its own tokens and sums what came home.

A token's slots that hold data are one bit mask from its own top-k ids: bit k in exact mode, bit d in partial mode.
Slots are added in ascending order, so the result does not depend on arrival.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.arith import VECTOR_ELEMENTS, accumulate, round_to_bf16
from cute_ep.kernels.block import THREADS, shared_array
from cute_ep.kernels.divide import divisor
from cute_ep.kernels.route import checked_expert
from cute_ep.layouts.arena import COMBINE_ITEMSIZE
from cute_ep.layouts.device import array, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import MAX_CHUNK_ENTRIES, Phase

SLOTS_IN_FLIGHT = 4
"""Slots of one vector that a thread loads before it adds the first."""


class Reduce:
    """Sums returned rows into the output."""

    def __init__(self, partial: bool, shared: RegionMap) -> None:
        self.partial = partial
        self.masks = shared.add("filled_slots", 4, MAX_CHUNK_ENTRIES)
        self.weights = shared.add("slot_weights", 4, MAX_CHUNK_ENTRIES)

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32) -> Boolean:
        """CTA `first` of `count` receiving CTAs. False after a timeout."""
        alive = Boolean(True)
        chunk = first
        while alive and chunk < args.chunks:
            token = chunk * args.chunk
            tokens = cutlass.min(args.chunk, args.tokens - token)
            self._find_slots(group, args, token, tokens)
            alive = group.wait_all_ranks(group.arena.return_ready, epoch, Phase.RETURN, chunk)  # from GiveBack.run
            if alive:
                self._sum(group, args, epoch, token, tokens)
            cute.arch.sync_threads()
            chunk += count
        return alive

    @cute.jit
    def _find_slots(self, group, args, token, tokens) -> None:
        sMask = shared_array(self.masks, Uint32)
        sWeight = shared_array(self.weights, Float32)
        for owner in cutlass.range(group.tid, tokens, THREADS, unroll=1):
            sMask[owner] = Uint32(0)
        cute.arch.sync_threads()
        entries = args.tokens * group.top_k
        gIds = array(args.topk_ids, Int32, entries)
        for index in cutlass.range(group.tid, tokens * group.top_k, THREADS, unroll=1):
            k, owner = group.by_top_k.split(index)
            expert = checked_expert(gIds[token * group.top_k + index], group.experts)
            if expert >= 0:
                slot = k
                if cutlass.const_expr(self.partial):
                    _, slot = group.by_local_experts.split(expert)
                cute.arch.atomic_or(sMask.iterator + owner, Uint32(1) << Uint32(slot))
            if cutlass.const_expr(not self.partial):
                gWeight = array(args.router_weights, Float32, entries)
                sWeight[index] = gWeight[token * group.top_k + index]

    @cute.jit
    def _sum(self, group, args, epoch: Int64, token, tokens) -> None:
        sMask = shared_array(self.masks, Uint32)
        sWeight = shared_array(self.weights, Float32)
        row_bytes = Int64(group.hidden) * COMBINE_ITEMSIZE
        vectors = group.hidden * COMBINE_ITEMSIZE // VECTOR_BYTES
        returns = group.arena.returns
        base = group.base + returns.at(epoch & 1, token)
        gOut = vector_tensor(args.out + Int64(token) * row_bytes, vectors, tokens, row_bytes)
        slots = group.top_k
        if cutlass.const_expr(self.partial):
            slots = group.ranks
        rX = cute.make_rmem_tensor((4, SLOTS_IN_FLIGHT), Uint32)
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        by_vectors = divisor(vectors)
        for item in cutlass.range(group.tid, tokens * vectors, THREADS, unroll=1):
            vector, owner = by_vectors.split(item)
            filled = Uint32(sMask[owner])
            rSum.fill(0.0)
            for base_slot in cutlass.range(0, slots, SLOTS_IN_FLIGHT, unroll=1):
                for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
                    if (filled >> Uint32(base_slot + turn)) & Uint32(1) != Uint32(0):
                        slot_base = base + (base_slot + turn) * returns.stride[2]
                        gSlot = vector_tensor(slot_base, vectors, tokens, returns.stride[1])
                        cute.copy(vector_atom(), gSlot[None, vector, owner], rX[None, turn])
                for turn in cutlass.range_constexpr(SLOTS_IN_FLIGHT):
                    if (filled >> Uint32(base_slot + turn)) & Uint32(1) != Uint32(0):
                        if cutlass.const_expr(self.partial):
                            accumulate(rSum, rX[None, turn], None)
                        else:
                            accumulate(rSum, rX[None, turn], sWeight[owner * group.top_k + base_slot + turn])
            round_to_bf16(rSum, rX[None, 0])
            cute.copy(vector_atom(), rX[None, 0], gOut[None, vector, owner])
