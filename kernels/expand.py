"""Expand role: wait for each chunk of messages and copy every row to its expert rows, with its scale factors.

Row of entry (source, token, k) with local expert e: row_start[e] + base[e, source] - base[e, 0] + position, where base
is the exclusive prefix sum of the gathered counts and row_start leaves room for padding. Every receiving CTA scans the
counts itself (at most MAX_EXPERTS numbers), so no CTA waits for another. A token of the shared expert has one more
entry, with the own rank as its source.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32

from cute_ep.kernels.announce import Announce
from cute_ep.kernels.block import LOADS_IN_FLIGHT, THREADS, block_exclusive_scan, shared_array
from cute_ep.kernels.divide import divisor
from cute_ep.kernels.group import owns_shared
from cute_ep.kernels.scale_rows import scale_tensor
from cute_ep.kernels.sync import block_all
from cute_ep.layouts.arena import HeaderWord
from cute_ep.layouts.device import array, region_array, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import Region, RegionMap
from cute_ep.layouts.routing import (
    MASKED_ENTRY,
    MAX_CHUNK_ENTRIES,
    MAX_EXPERTS,
    MAX_RANKS,
    NO_ROW,
    Phase,
    entry_expert,
    entry_position,
)


class Expand:
    """Turns received messages into the ragged, expert-major output. Knows sizes of rows, not formats."""

    def __init__(self, shared: RegionMap, scan: Region) -> None:
        self.scan = scan
        self.bases = shared.add("row_bases", 4, MAX_EXPERTS + 1)
        self.row_starts = shared.add("row_starts", 4, MAX_EXPERTS + 1)
        self.scale_starts = shared.add("scale_row_starts", 4, MAX_EXPERTS + 1)
        self.rows = shared.add("chunk_rows", 4, MAX_CHUNK_ENTRIES)
        self.scale_rows = shared.add("chunk_scale_rows", 4, MAX_CHUNK_ENTRIES)
        self.headers = shared.add("headers", 4, MAX_RANKS, len(HeaderWord))
        self.announce = Announce(self.bases, self.row_starts, self.scale_starts, self.headers)

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32) -> Boolean:
        """CTA `first` of `count` receiving CTAs; every source's route is ready. False after a timeout."""
        self._read_routes(group, args, epoch)
        self.announce.run(group, args, first, count)
        sHeader = shared_array(self.headers, Int32)
        sRow = shared_array(self.rows, Int32)
        most_chunks = Int32(0)
        for source in cutlass.range(group.ranks, unroll=1):
            most_chunks = cutlass.max(most_chunks, sHeader[source, int(HeaderWord.CHUNKS)])
        alive = Boolean(True)
        item = first
        while alive and item < most_chunks * group.ranks:
            turn, chunk = group.by_ranks.split(item)
            source = group.rank + turn
            if source >= group.ranks:
                source -= group.ranks
            if chunk < sHeader[source, int(HeaderWord.CHUNKS)]:
                tokens_per_chunk = sHeader[source, int(HeaderWord.CHUNK)]
                token = chunk * tokens_per_chunk
                tokens = cutlass.min(tokens_per_chunk, sHeader[source, int(HeaderWord.TOKENS)] - token)
                self._find_rows(group, args, epoch, source, token, tokens, sHeader, sRow)
                if args.shared_groups != 0:
                    self._find_shared_rows(group, args, source, token, tokens, sRow)
                alive = self._wait_chunk(group, epoch, source, chunk)
                if alive:
                    self._copy_payload(group, args, epoch, source, token, tokens, sRow)
                    if args.scale_words != 0:
                        self._copy_scales(group, args, epoch, source, token, tokens, sRow)
                    if args.row_scale_bytes != 0:
                        self._copy_row_scales(group, args, epoch, source, token, tokens, sRow)
                cute.arch.sync_threads()
            item += count
        return alive

    @cute.jit
    def _read_routes(self, group, args, epoch: Int64) -> None:
        """Fill the tables in shared memory from the counts and headers that the sources have sent.

        sBase[e * R + source] = entries before that pair, sBase[E] = all. sStart[e] = first output row of local expert
        e, sStart[L] = all rows; sScaleStart[e] = its first scale row.
        """
        parity = epoch & 1
        sBase = shared_array(self.bases, Int32)
        sStart = shared_array(self.row_starts, Int32)
        sScaleStart = shared_array(self.scale_starts, Int32)
        sHeader = shared_array(self.headers, Int32)
        sScan = shared_array(self.scan, Int32)
        gCounts = region_array(group.base, group.arena.counts, Int32, parity)
        gHeader = vector_tensor(group.base + group.arena.header.at(parity), 1, group.ranks)
        rHeader = cute.make_rmem_tensor(len(HeaderWord), Uint32)
        if group.tid < group.ranks:
            cute.copy(vector_atom(), gHeader[None, 0, group.tid], rHeader)
        for pair in cutlass.range(group.tid, group.experts, THREADS, unroll=1):
            source, expert = group.by_ranks.split(pair)
            sBase[pair] = gCounts[source, expert]
        if group.tid < group.ranks:
            for word in cutlass.range_constexpr(len(HeaderWord)):
                sHeader[group.tid, word] = Int32(rHeader[word])
        cute.arch.sync_threads()
        block_exclusive_scan(sBase, group.experts, sScan, group.tid)
        self._place_groups(group, sBase, sStart, sScan, args.shared_rows, args.row_alignment)
        if (args.scale_words != 0) & (args.scale_alignment != args.row_alignment):
            self._place_groups(group, sBase, sScaleStart, sScan, args.shared_rows, args.scale_alignment)

    @cute.jit
    def _place_groups(self, group, sBase, sStart, sScan, shared_rows: Int32, alignment: Int32) -> None:
        """sStart[e] = rows before local expert e when every group is rounded up to `alignment` (a power of two)."""
        before = (shared_rows + alignment - 1) & -alignment
        if alignment == 1:
            for expert in cutlass.range(group.tid, group.local_experts + 1, THREADS, unroll=1):
                sStart[expert] = before + sBase[expert * group.ranks]
            cute.arch.sync_threads()
        else:
            for expert in cutlass.range(group.tid, group.local_experts, THREADS, unroll=1):
                rows = sBase[(expert + 1) * group.ranks] - sBase[expert * group.ranks]
                sStart[expert] = (rows + alignment - 1) & -alignment
            cute.arch.sync_threads()
            block_exclusive_scan(sStart, group.local_experts, sScan, group.tid)
            if before != 0:
                for expert in cutlass.range(group.tid, group.local_experts + 1, THREADS, unroll=1):
                    sStart[expert] = sStart[expert] + before
                cute.arch.sync_threads()

    @cute.jit
    def _find_rows(self, group, args, epoch: Int64, source, token, tokens, sHeader, sRow) -> None:
        """Output row of each entry of the chunk, NO_ROW where it is not this rank's; recorded for combine."""
        sBase = shared_array(self.bases, Int32)
        sStart = shared_array(self.row_starts, Int32)
        first = token * group.top_k
        in_rank = group.max_tokens * group.top_k
        gEntry = array(group.base + group.arena.entries.at(epoch & 1, source), Int32, in_rank)
        gWeight = array(group.base + group.arena.weights.at(epoch & 1, source), Int32, in_rank)
        gRowMap = array(args.row_map, Int32, group.ranks, in_rank)
        gWeightOut = array(args.weights, Int32, group.ranks, in_rank)
        weighted = sHeader[source, int(HeaderWord.HAS_WEIGHTS)] != 0
        for index in cutlass.range(group.tid, tokens * group.top_k, THREADS, unroll=1):
            entry = gEntry[first + index]
            row = Int32(NO_ROW)
            slot, owner = group.by_top_k.split(index)
            local = entry_expert(entry) - group.rank * group.local_experts
            if entry != Int32(MASKED_ENTRY) and local >= 0 and local < group.local_experts:
                in_expert = sBase[local * group.ranks + source] - sBase[local * group.ranks] + entry_position(entry)
                row = self._keep_row(group, args, sRow, owner, slot, local, sStart[local], in_expert, token)
                if weighted and row >= 0:
                    gWeightOut[source, first + index] = gWeight[first + index]
            else:
                sRow[owner * (group.top_k + args.shared_groups) + slot] = row
            gRowMap[source, first + index] = row

    @cute.jit
    def _find_shared_rows(self, group, args, source, token, tokens, sRow) -> None:
        """The row of each token of the chunk in group 0, NO_ROW where the shared expert does not take it."""
        for owner in cutlass.range(group.tid, tokens, THREADS, unroll=1):
            if source == group.rank and owns_shared(args, token + owner):
                row = token + owner - args.shared_first
                self._keep_row(group, args, sRow, owner, group.top_k, Int32(-1), Int32(0), row, token)
            else:
                sRow[owner * (group.top_k + args.shared_groups) + group.top_k] = Int32(NO_ROW)

    @cute.jit
    def _keep_row(self, group, args, sRow, owner, slot, expert, start, in_group, token) -> Int32:
        """Note where one entry's row goes; NO_ROW, and a report, when it lies beyond the buffers."""
        sScaleRow = shared_array(self.scale_rows, Int32)
        sScaleStart = shared_array(self.scale_starts, Int32)
        gSource = array(args.src_info, Int32, args.capacity, 2)
        entry = owner * (group.top_k + args.shared_groups) + slot
        row = start + in_group
        scale_row = row
        if row >= args.capacity:
            group.report_input(Phase.ROW_CAPACITY, row, args.capacity, row)
            row = Int32(NO_ROW)
        else:
            gSource[row, 0] = token + owner
            gSource[row, 1] = slot
            if args.scale_alignment != args.row_alignment:
                scale_row = in_group
                if expert >= 0:
                    scale_row = sScaleStart[expert] + in_group
        sRow[entry] = row
        sScaleRow[entry] = scale_row
        return row

    @cute.jit
    def _wait_chunk(self, group, epoch: Int64, source, chunk) -> Boolean:
        """CTA-wide wait for message_ready[source][chunk], posted by `Send.run` on `source`.

        By the last thread, which is the least likely to be busy with `_find_rows`.
        """
        arrived = Boolean(True)
        if group.tid == THREADS - 1:
            flag = group.base + group.arena.message_ready.at(source, chunk)
            arrived = group.wait_one(flag, epoch, source, Phase.MESSAGE, chunk)
        return block_all(arrived)

    @cute.jit
    def _copy_payload(self, group, args, epoch: Int64, source, token, tokens, sRow) -> None:
        units = args.payload_bytes // VECTOR_BYTES
        slots = group.top_k + args.shared_groups
        messages = group.arena.messages
        gMessage = vector_tensor(group.base + messages.at(epoch & 1, source, token), units, tokens, messages.stride[2])
        gOut = vector_tensor(args.out_tokens, units, args.capacity, Int64(args.payload_bytes))
        items = units * tokens
        by_units = divisor(units)
        rQ = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
        for base in cutlass.range(group.tid, items, THREADS * LOADS_IN_FLIGHT, unroll=1):
            for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                item = base + slot * THREADS
                if item < items:
                    unit, owner = by_units.split(item)
                    cute.copy(vector_atom(), gMessage[None, unit, owner], rQ[None, slot])
            for k in cutlass.range(slots, unroll=1):
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    item = base + slot * THREADS
                    if item < items:
                        unit, owner = by_units.split(item)
                        row = sRow[owner * slots + k]
                        if row >= 0:
                            cute.copy(vector_atom(), rQ[None, slot], gOut[None, unit, row])

    @cute.jit
    def _copy_scales(self, group, args, epoch: Int64, source, token, tokens, sRow) -> None:
        """One word of scale factors at a time."""
        sScaleRow = shared_array(self.scale_rows, Int32)
        slots = group.top_k + args.shared_groups
        messages = group.arena.messages
        base = group.base + messages.at(epoch & 1, source, token) + group.message.scales.offset
        gScale = scale_tensor(args, args.capacity)
        by_words = divisor(args.scale_words)
        for item in cutlass.range(group.tid, args.scale_words * tokens, THREADS, unroll=1):
            column, owner = by_words.split(item)
            word = Uint32(array(base + owner * messages.stride[2], Uint32, args.scale_words)[column])
            for k in cutlass.range(slots, unroll=1):
                entry = owner * slots + k
                if sRow[entry] >= 0:
                    gScale[sScaleRow[entry], column] = word

    @cute.jit
    def _copy_row_scales(self, group, args, epoch: Int64, source, token, tokens, sRow) -> None:
        slots = group.top_k + args.shared_groups
        messages = group.arena.messages
        base = group.base + messages.at(epoch & 1, source, token) + group.message.row_scale.offset
        gRowScale = array(args.out_row_scales, Uint16, args.capacity)
        for owner in cutlass.range(group.tid, tokens, THREADS, unroll=1):
            scale = array(base + owner * messages.stride[2], Uint16, 1)[0]
            for k in cutlass.range(slots, unroll=1):
                row = sRow[owner * slots + k]
                if row >= 0:
                    gRowScale[row] = scale
