"""Expand role: wait for each chunk of messages and copy every row to its expert rows, scales into their atoms.

Row of entry (source, token, k) with local expert e: base[e, source] + position. Every receiving CTA scans the
gathered counts itself (at most MAX_EXPERTS numbers), so no CTA waits for another.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_ep.kernels.block import LOADS_IN_FLIGHT, THREADS, block_exclusive_scan, shared_array
from cute_ep.kernels.divide import divisor
from cute_ep.kernels.sync import block_all
from cute_ep.layouts.arena import HeaderWord, message_map
from cute_ep.layouts.device import (
    array,
    item_coord,
    region_array,
    scale_words,
    vector_atom,
    vector_tensor,
)
from cute_ep.layouts.formats import VECTOR_BYTES, Format
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
from cute_ep.layouts.scales import ATOM_BYTES, ATOM_COLUMNS, ATOM_ROWS, row_blocks, scale_columns

PADDING_JOBS = 8
"""Pieces into which the zeroing of one expert's padding is cut, so that few experts keep many CTAs busy."""


class Expand:
    """Turns received messages into the ragged, expert-major output."""

    def __init__(self, fmt: Format, shared: RegionMap, scan: Region) -> None:
        self.fmt = fmt
        self.scan = scan
        self.bases = shared.add("row_bases", 4, MAX_EXPERTS + 1)
        self.blocks = shared.add("scale_block_starts", 4, MAX_EXPERTS + 1)
        self.rows = shared.add("chunk_rows", 4, MAX_CHUNK_ENTRIES)
        self.scale_rows = shared.add("chunk_scale_rows", 4, MAX_CHUNK_ENTRIES)
        self.headers = shared.add("headers", 4, MAX_RANKS, len(HeaderWord))

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32) -> Boolean:
        """CTA `first` of `count` receiving CTAs; every source's route is ready. False after a timeout."""
        self._read_routes(group, epoch)
        if first == count // 2:
            self._announce(group, args)
        if cutlass.const_expr(self.fmt.scale is not None):
            self._zero_padding(group, args, first, count)
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
                alive = self._wait_chunk(group, epoch, source, chunk)
                if alive:
                    self._copy_payload(group, args, epoch, source, token, tokens, sRow)
                    if cutlass.const_expr(self.fmt.scale is not None):
                        self._copy_scales(group, args, epoch, source, token, tokens, sRow)
                cute.arch.sync_threads()
            item += count
        return alive

    @cute.jit
    def _read_routes(self, group, epoch: Int64) -> None:
        """sBase[e * R + source] = first output row of that pair, sBase[E] = all rows; block starts; headers."""
        parity = epoch & 1
        sBase = shared_array(self.bases, Int32)
        sBlock = shared_array(self.blocks, Int32)
        sHeader = shared_array(self.headers, Int32)
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
        sScan = shared_array(self.scan, Int32)
        block_exclusive_scan(sBase, group.experts, sScan, group.tid)
        if cutlass.const_expr(self.fmt.scale is not None):
            for expert in cutlass.range(group.tid, group.local_experts, THREADS, unroll=1):
                sBlock[expert] = row_blocks(self._rows_of(group, sBase, expert))
            cute.arch.sync_threads()
            block_exclusive_scan(sBlock, group.local_experts, sScan, group.tid)

    def _rows_of(self, group, sBase, expert):
        return sBase[(expert + 1) * group.ranks] - sBase[expert * group.ranks]

    @cute.jit
    def _find_rows(self, group, args, epoch: Int64, source, token, tokens, sHeader, sRow) -> None:
        """Output row of each entry of the chunk, NO_ROW where it is not this rank's; recorded for combine."""
        sBase = shared_array(self.bases, Int32)
        sBlock = shared_array(self.blocks, Int32)
        sScaleRow = shared_array(self.scale_rows, Int32)
        first = token * group.top_k
        in_rank = group.max_tokens * group.top_k
        gEntry = array(group.base + group.arena.entries.at(epoch & 1, source), Int32, in_rank)
        gWeight = array(group.base + group.arena.weights.at(epoch & 1, source), Int32, in_rank)
        gRowMap = array(args.row_map, Int32, group.ranks, in_rank)
        gWeightOut = array(args.weights, Int32, group.ranks, in_rank)
        gSource = array(args.src_info, Int32, args.capacity, 2)
        weighted = sHeader[source, int(HeaderWord.HAS_WEIGHTS)] != 0
        for index in cutlass.range(group.tid, tokens * group.top_k, THREADS, unroll=1):
            entry = gEntry[first + index]
            row = Int32(NO_ROW)
            local = entry_expert(entry) - group.rank * group.local_experts
            if entry != Int32(MASKED_ENTRY) and local >= 0 and local < group.local_experts:
                row = sBase[local * group.ranks + source] + entry_position(entry)
                if row >= args.capacity:
                    group.report_input(Phase.ROW_CAPACITY, row, args.capacity, row)
                    row = Int32(NO_ROW)
            sRow[index] = row
            if cutlass.const_expr(self.fmt.scale is not None):
                if row >= 0:
                    sScaleRow[index] = row - sBase[local * group.ranks] + sBlock[local] * ATOM_ROWS
            gRowMap[source, first + index] = row
            if row >= 0:
                slot, owner = group.by_top_k.split(index)
                gSource[row, 0] = token + owner
                gSource[row, 1] = slot
                if weighted:
                    gWeightOut[source, first + index] = gWeight[first + index]

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
        row_bytes = group.fmt.payload_bytes(Int64(group.hidden))
        units = group.fmt.payload_bytes(group.hidden) // VECTOR_BYTES
        messages = group.arena.messages
        gMessage = vector_tensor(group.base + messages.at(epoch & 1, source, token), units, tokens, messages.stride[2])
        gOut = vector_tensor(args.out_tokens, units, args.capacity, row_bytes)
        items = units * tokens
        by_units = divisor(units)
        rQ = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
        for base in cutlass.range(group.tid, items, THREADS * LOADS_IN_FLIGHT, unroll=1):
            for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                item = base + slot * THREADS
                if item < items:
                    unit, owner = by_units.split(item)
                    cute.copy(vector_atom(), gMessage[None, unit, owner], rQ[None, slot])
            for k in cutlass.range(group.top_k, unroll=1):
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    item = base + slot * THREADS
                    if item < items:
                        unit, owner = by_units.split(item)
                        row = sRow[owner * group.top_k + k]
                        if row >= 0:
                            cute.copy(vector_atom(), rQ[None, slot], gOut[None, unit, row])

    @cute.jit
    def _copy_scales(self, group, args, epoch: Int64, source, token, tokens, sRow) -> None:
        """Four scale columns (one word) at a time; columns past the last scale are zero."""
        sScaleRow = shared_array(self.scale_rows, Int32)
        scale_bytes = group.fmt.scale_bytes(group.hidden)
        tiles = scale_columns(scale_bytes)
        messages = group.arena.messages
        _, scales, _ = message_map(group.fmt.payload_bytes(Int64(group.hidden)), Int64(scale_bytes))
        base = group.base + messages.at(epoch & 1, source, token) + scales.offset
        gScale = scale_words(args.out_scales, args.capacity, tiles)
        by_tiles = divisor(tiles)
        for item in cutlass.range(group.tid, tiles * tokens, THREADS, unroll=1):
            tile, owner = by_tiles.split(item)
            word = Uint32(array(base + owner * messages.stride[2], Uint32, tiles)[tile])
            beyond = (tile + 1) * ATOM_COLUMNS - scale_bytes
            if beyond > 0:
                word = word & (Uint32(0xFFFFFFFF) >> Uint32(8 * beyond))
            for k in cutlass.range(group.top_k, unroll=1):
                entry = owner * group.top_k + k
                if sRow[entry] >= 0:
                    gScale[sScaleRow[entry], tile] = word

    @cute.jit
    def _zero_padding(self, group, args, first: Int32, count: Int32) -> None:
        """Zero the scale rows between an expert's last row and the end of its last 128-row block."""
        sBase = shared_array(self.bases, Int32)
        sBlock = shared_array(self.blocks, Int32)
        tiles = scale_columns(group.fmt.scale_bytes(group.hidden))
        gScale = scale_words(args.out_scales, args.capacity, tiles)
        rZero = cute.make_rmem_tensor(4, Uint32)
        rZero.fill(0)
        for job in cutlass.range(first, group.local_experts * PADDING_JOBS, count):
            part, expert = item_coord(job, PADDING_JOBS)
            rows = self._rows_of(group, sBase, expert)
            in_block = rows % ATOM_ROWS
            if in_block > 0 and sBase[(expert + 1) * group.ranks] <= args.capacity:
                block = sBlock[expert] + rows // ATOM_ROWS
                block_address = args.out_scales + Int64(block) * ATOM_BYTES * tiles
                own_tiles = (tiles - part + PADDING_JOBS - 1) // PADDING_JOBS
                for item in cutlass.range(group.tid, 32 * own_tiles, THREADS, unroll=1):
                    line, turn = item_coord(item, 32)
                    tile = part + turn * PADDING_JOBS
                    if line >= in_block:  # rows line, line + 32, ... share one 16-byte line of the atom: all padding
                        gLines = vector_tensor(block_address + Int64(tile) * ATOM_BYTES, 1, 32)
                        cute.copy(vector_atom(), rZero, gLines[None, 0, line])
                    else:
                        for row in cutlass.range(line + 32, ATOM_ROWS, 32, unroll=1):
                            if row >= in_block:
                                gScale[block * ATOM_ROWS + row, tile] = Uint32(0)

    @cute.jit
    def _announce(self, group, args) -> None:
        """Offsets, counts and headers of this round, from what `_read_routes` left in shared memory.

        No rows are announced when they do not all fit: a consumer must not be led past the end of the buffers.
        """
        sBase = shared_array(self.bases, Int32)
        sBlock = shared_array(self.blocks, Int32)
        sHeader = shared_array(self.headers, Int32)
        gRowOffset = array(args.row_offsets, Int32, group.local_experts + 1)
        gExpertId = array(args.expert_ids, Int32, group.local_experts)
        gScaleOffset = array(args.scales_offsets, Int32, group.local_experts)
        gHeader = array(args.headers, Int32, group.ranks, len(HeaderWord))
        gNumRows = array(args.num_rows, Int32, 1)
        fits = sBase[group.experts] <= args.capacity
        for expert in cutlass.range(group.tid, group.local_experts + 1, THREADS, unroll=1):
            row = sBase[expert * group.ranks]
            if not fits:
                row = Int32(0)
            gRowOffset[expert] = row
            if expert < group.local_experts:
                gExpertId[expert] = expert
                if cutlass.const_expr(self.fmt.scale is not None):
                    block = sBlock[expert]
                    if not fits:
                        block = Int32(0)
                    gScaleOffset[expert] = block - row // ATOM_ROWS
            else:
                gNumRows[0] = row
        for index in cutlass.range(group.tid, group.ranks * len(HeaderWord), THREADS, unroll=1):
            word, source = item_coord(index, len(HeaderWord))
            gHeader[source, word] = sHeader[source, word]

    @cute.jit
    def withdraw(self, group, args) -> None:
        """One thread, after a timeout: no rows, no tokens."""
        gRowOffset = array(args.row_offsets, Int32, group.local_experts + 1)
        gHeader = array(args.headers, Int32, group.ranks * len(HeaderWord))
        gNumRows = array(args.num_rows, Int32, 1)
        gNumRows[0] = 0
        for expert in cutlass.range(group.local_experts + 1, unroll=1):
            gRowOffset[expert] = 0
        for index in cutlass.range(group.ranks * len(HeaderWord), unroll=1):
            gHeader[index] = 0
