"""Give-back role: an expert rank returns its rows of each chunk of each source's tokens.

Items are (source, chunk) with the source varying fastest, starting after the own rank, so all links work at once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.arith import VECTOR_ELEMENTS, accumulate, round_vector
from cute_ep.kernels.block import LOADS_IN_FLIGHT, THREADS, shared_array
from cute_ep.kernels.divide import divisor
from cute_ep.kernels.sync import post
from cute_ep.layouts.arena import COMBINE_ITEMSIZE, HeaderWord
from cute_ep.layouts.device import array, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import MAX_CHUNK_ENTRIES, MAX_RANKS, NO_ROW

ROWS_IN_FLIGHT = 4
"""Rows of one vector that a thread loads before it adds the first (partial mode)."""


class GiveBack:
    """Pushes expert rows, or their weighted sums, to the source ranks."""

    def __init__(self, partial: bool, shared: RegionMap) -> None:
        self.partial = partial
        self.rows = shared.add("give_back_rows", 4, MAX_CHUNK_ENTRIES)
        self.weights = shared.add("give_back_weights", 4, MAX_CHUNK_ENTRIES)
        self.headers = shared.add("give_back_headers", 4, MAX_RANKS, len(HeaderWord))
        self.entries = shared.add("give_back_entries", 4, MAX_CHUNK_ENTRIES + 1)

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
        most_chunks = Int32(0)
        for source in cutlass.range(group.ranks, unroll=1):
            most_chunks = cutlass.max(most_chunks, sHeader[source, int(HeaderWord.CHUNKS)])
        for item in cutlass.range(group.cta, most_chunks * group.ranks, args.send_ctas):
            turn, chunk = group.by_ranks.split(item)
            source = group.rank + 1 + turn
            if source >= group.ranks:
                source -= group.ranks
            if chunk < sHeader[source, int(HeaderWord.CHUNKS)]:
                tokens_per_chunk = sHeader[source, int(HeaderWord.CHUNK)]
                token = chunk * tokens_per_chunk
                tokens = cutlass.min(tokens_per_chunk, sHeader[source, int(HeaderWord.TOKENS)] - token)
                self._find_rows(group, args, source, token, tokens)
                if cutlass.const_expr(self.partial):
                    self._push_sums(group, args, epoch, source, token, tokens)
                else:
                    self._push_rows(group, args, epoch, source, token)
                cute.arch.sync_threads()
                if group.tid == 0:
                    post(group.sPeers[source] + group.arena.return_ready.at(group.rank, chunk), epoch)

    @cute.jit
    def _find_rows(self, group, args, source, token, tokens) -> None:
        """sRow[entry of the chunk]; exact mode also lists the entries that have a row, in order."""
        sRow = shared_array(self.rows, Int32)
        sEntry = shared_array(self.entries, Int32)
        sWeight = shared_array(self.weights, Float32)
        in_rank = group.max_tokens * group.top_k
        gRowMap = array(args.row_map, Int32, group.ranks, in_rank)
        gWeight = array(args.weights, Float32, group.ranks, in_rank)
        first = token * group.top_k
        entries = tokens * group.top_k
        for index in cutlass.range(group.tid, entries, THREADS, unroll=1):
            row = gRowMap[source, first + index]
            if row >= args.capacity:
                row = Int32(NO_ROW)
            sRow[index] = row
            if cutlass.const_expr(self.partial):
                if row >= 0:
                    sWeight[index] = gWeight[source, first + index]
        cute.arch.sync_threads()
        if cutlass.const_expr(not self.partial):
            if group.tid < 32:
                listed = Int32(0)
                for step in cutlass.range(0, entries, 32, unroll=1):
                    index = step + group.tid
                    present = Boolean(False)
                    if index < entries:
                        present = sRow[index] >= 0
                    votes = Uint32(cute.arch.vote_ballot_sync(present))
                    if present:
                        sEntry[listed + Int32(cute.arch.popc(votes & Uint32(cute.arch.lanemask_lt())))] = index
                    listed += Int32(cute.arch.popc(votes))
                if group.tid == 0:
                    sEntry[MAX_CHUNK_ENTRIES] = listed
            cute.arch.sync_threads()

    def _rows_tensor(self, group, args):
        """(word, vector, row) of the expert outputs, and the vectors of one row."""
        row_bytes = Int64(group.hidden) * COMBINE_ITEMSIZE
        vectors = group.hidden * COMBINE_ITEMSIZE // VECTOR_BYTES
        return vector_tensor(args.rows, vectors, args.capacity, row_bytes), vectors

    @cute.jit
    def _push_rows(self, group, args, epoch: Int64, source, token) -> None:
        sRow = shared_array(self.rows, Int32)
        sEntry = shared_array(self.entries, Int32)
        gRow, vectors = self._rows_tensor(group, args)
        returns = group.arena.returns
        base = group.sPeers[source] + returns.at(epoch & 1, token)
        items = sEntry[MAX_CHUNK_ENTRIES] * vectors
        by_vectors = divisor(vectors)
        rX = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
        for first in cutlass.range(group.tid, items, THREADS * LOADS_IN_FLIGHT, unroll=1):
            for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                item = first + slot * THREADS
                if item < items:
                    vector, listed = by_vectors.split(item)
                    cute.copy(vector_atom(), gRow[None, vector, sRow[sEntry[listed]]], rX[None, slot])
            for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                item = first + slot * THREADS
                if item < items:
                    vector, listed = by_vectors.split(item)
                    k, owner = group.by_top_k.split(sEntry[listed])
                    home = base + owner * returns.stride[1] + k * returns.stride[2]
                    gHome = vector_tensor(home, vectors, 1)
                    cute.copy(vector_atom(), rX[None, slot], gHome[None, vector, 0])

    @cute.jit
    def _push_sums(self, group, args, epoch: Int64, source, token, tokens) -> None:
        sRow = shared_array(self.rows, Int32)
        sWeight = shared_array(self.weights, Float32)
        gRow, vectors = self._rows_tensor(group, args)
        returns = group.arena.returns
        base = group.sPeers[source] + returns.at(epoch & 1, token, group.rank)
        gHome = vector_tensor(base, vectors, tokens, returns.stride[1])
        rX = cute.make_rmem_tensor((4, ROWS_IN_FLIGHT), Uint32)
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        by_vectors = divisor(vectors)
        for item in cutlass.range(group.tid, tokens * vectors, THREADS, unroll=1):
            vector, owner = by_vectors.split(item)
            rSum.fill(0.0)
            present = Boolean(False)
            for base_k in cutlass.range(0, group.top_k, ROWS_IN_FLIGHT, unroll=1):
                for turn in cutlass.range_constexpr(ROWS_IN_FLIGHT):
                    row = self._row_of(group, sRow, owner, base_k + turn)
                    if row >= 0:
                        cute.copy(vector_atom(), gRow[None, vector, row], rX[None, turn])
                for turn in cutlass.range_constexpr(ROWS_IN_FLIGHT):
                    if self._row_of(group, sRow, owner, base_k + turn) >= 0:
                        accumulate(rSum, rX[None, turn], sWeight[owner * group.top_k + base_k + turn])
                        present = Boolean(True)
            if present:
                round_vector(rSum, rX[None, 0], BFloat16)
                cute.copy(vector_atom(), rX[None, 0], gHome[None, vector, owner])

    @cute.jit
    def _row_of(self, group, sRow, owner, k) -> Int32:
        row = Int32(NO_ROW)
        if k < group.top_k:
            row = sRow[owner * group.top_k + k]
        return row
