"""Reduce role: a source rank waits for each chunk of its own tokens and sums what came home.

A token's slots that hold data are one bit mask from its own top-k ids: bit k where every expert row came home, bit d
where rank d sent a sum. Slots are added in ascending order, then the shared expert's row, so the result does not
depend on arrival. The sum is float32; the epilogue sees it before it is rounded, once, to the type of the output.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32

from cute_ep.kernels.arith import VECTOR_ELEMENTS, accumulate, halves, round_vector
from cute_ep.kernels.block import THREADS, shared_array
from cute_ep.kernels.divide import divisor
from cute_ep.kernels.group import owns_shared
from cute_ep.kernels.hooks import EpilogueContext, WeightReader
from cute_ep.layouts.arena import COMBINE_ITEMSIZE
from cute_ep.layouts.device import array, vector_at, vector_atom, vector_tensor
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import MAX_CHUNK_ENTRIES, OutputType, Phase

SLOTS_IN_FLIGHT = 4
"""Slots of one vector that a thread loads before it adds the first."""


class Reduce:
    """Sums returned rows into the output, or (mode "unweighted") hands them out slot by slot."""

    def __init__(self, mode: str, weights: WeightReader, epilogue, shared: RegionMap) -> None:
        self.mode, self.weights, self.epilogue = mode, weights, epilogue
        self.masks = shared.add("filled_slots", 4, MAX_CHUNK_ENTRIES)
        self.slot_weights = shared.add("slot_weights", 4, MAX_CHUNK_ENTRIES)

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
                if cutlass.const_expr(self.mode == "unweighted"):
                    self._hand_out(group, args, epoch, token, tokens)
                else:
                    self._sum(group, args, epoch, token, tokens)
            cute.arch.sync_threads()
            chunk += count
        return alive

    @cute.jit
    def _find_slots(self, group, args, token, tokens) -> None:
        sMask = shared_array(self.masks, Uint32)
        sWeight = shared_array(self.slot_weights, Float32)
        for owner in cutlass.range(group.tid, tokens, THREADS, unroll=1):
            sMask[owner] = Uint32(0)
        cute.arch.sync_threads()
        first = token * group.top_k
        gIds = array(args.topk_ids, Int32, args.tokens * group.top_k)
        for index in cutlass.range(group.tid, tokens * group.top_k, THREADS, unroll=1):
            k, owner = group.by_top_k.split(index)
            expert = group.expert_of(gIds[first + index])
            if expert >= 0:
                slot = k
                if cutlass.const_expr(self.mode == "partial"):
                    _, slot = group.by_local_experts.split(expert)
                cute.arch.atomic_or(sMask.iterator + owner, Uint32(1) << Uint32(slot))
            if cutlass.const_expr(self.mode == "exact"):
                sWeight[index] = self.weights.read(args.router_weights, first + index, group)

    @cute.jit
    def _sum(self, group, args, epoch: Int64, token, tokens) -> None:
        sMask = shared_array(self.masks, Uint32)
        sWeight = shared_array(self.slot_weights, Float32)
        vectors = group.hidden // VECTOR_ELEMENTS
        returns = group.arena.returns
        base = group.base + returns.at(epoch & 1, token)
        slots = group.top_k
        if cutlass.const_expr(self.mode == "partial"):
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
                        if cutlass.const_expr(self.mode == "partial"):
                            accumulate(rSum, rX[None, turn], None)
                        else:
                            accumulate(rSum, rX[None, turn], sWeight[owner * group.top_k + base_slot + turn])
            self._add_shared(group, args, token + owner, vector, rX[None, 0], rSum)
            if cutlass.const_expr(self.epilogue is not None):
                context = EpilogueContext(args.epilogue_data, args.tokens, group.hidden)
                value = self.epilogue((token + owner, vector * VECTOR_ELEMENTS), rSum.load(), context)
                rSum.store(value)
            self._store(args, rSum, (Int64(token) + owner) * vectors + vector)

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
    def _hand_out(self, group, args, epoch: Int64, token, tokens) -> None:
        """out[token, k] = the row of slot k, zeros where it is masked."""
        sMask = shared_array(self.masks, Uint32)
        vectors = group.hidden // VECTOR_ELEMENTS
        returns = group.arena.returns
        base = group.base + returns.at(epoch & 1, token)
        rX = cute.make_rmem_tensor(4, Uint32)
        rRow = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        by_vectors = divisor(vectors)
        for item in cutlass.range(group.tid, tokens * group.top_k * vectors, THREADS, unroll=1):
            vector, entry = by_vectors.split(item)
            slot, owner = group.by_top_k.split(entry)
            rX.fill(0)
            if (Uint32(sMask[owner]) >> Uint32(slot)) & Uint32(1) != Uint32(0):
                gSlot = vector_tensor(base + slot * returns.stride[2], vectors, tokens, returns.stride[1])
                cute.copy(vector_atom(), gSlot[None, vector, owner], rX)
            index = (Int64(token) * group.top_k + entry) * vectors + vector
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
