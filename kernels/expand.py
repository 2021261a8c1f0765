"""Expand role: wait for each piece of a message and copy it to the token's expert rows, with its scale factors.

Row of entry (source, token, k) with local expert e: row_start[e] + base[e, source] - base[e, 0] + position, where base
is the exclusive prefix sum of the gathered counts and row_start leaves room for padding. Every receiving CTA scans the
counts itself (at most MAX_EXPERTS numbers), so no CTA waits for another. Then each warp takes pieces (`pieces`): lane k
finds the row of entry k. A token of the shared expert has one more row, on the own rank.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32

from cute_ep.kernels.announce import Announce, announcer
from cute_ep.kernels.block import LOADS_IN_FLIGHT, THREADS, block_exclusive_scan, shared_array
from cute_ep.kernels.group import owns_shared
from cute_ep.kernels.pieces import SEGMENT, first_item, from_lane, item_stride, lowest, most_pieces, piece_of, units_of
from cute_ep.kernels.scale_rows import store_scale_word
from cute_ep.kernels.sync import block_all, warp_all
from cute_ep.layouts.arena import HeaderWord
from cute_ep.layouts.device import array, vector_atom, vector_tensor
from cute_ep.layouts.record import Region, RegionMap
from cute_ep.layouts.routing import (
    MASKED_ENTRY,
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
        self.headers = shared.add("headers", 4, MAX_RANKS, len(HeaderWord))
        self.announce = Announce(self.bases, self.row_starts, self.scale_starts, self.headers)

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32) -> Boolean:
        """CTA `first` of `count` receiving CTAs. False after a timeout."""
        alive = self._read_routes(group, args, epoch)
        if alive:
            if first == announcer(count):
                self.announce.run(group, args)
        sHeader = shared_array(self.headers, Int32)
        most = most_pieces(sHeader, group.ranks, HeaderWord.MESSAGE_PIECES)
        item = first_item(first, count, group.tid // 32)
        while alive and item < most * group.ranks:
            turn, index = group.by_ranks.split(item)
            source = group.rank + turn
            if source >= group.ranks:
                source -= group.ranks
            piece = piece_of(index, sHeader[source, int(HeaderWord.MESSAGE_PIECES)], units_of(args.payload_bytes))
            if piece.token < sHeader[source, int(HeaderWord.TOKENS)] and piece.first < piece.last:
                alive = self._take(group, args, epoch, source, piece)
            item += item_stride(count)
        if alive:
            self.announce.zero_padding(group, args, first, count)
        return alive

    @cute.jit
    def _read_routes(self, group, args, epoch: Int64) -> Boolean:
        """Wait for every source's counts and header (`Route`) and fill the tables in shared memory from them.

        sBase[e * R + source] = entries before that pair, sBase[E] = all. sStart[e] = first output row of local expert
        e, sStart[L] = all rows; sScaleStart[e] = its first scale row.
        """
        parity = epoch & 1
        sBase = shared_array(self.bases, Int32)
        sStart = shared_array(self.row_starts, Int32)
        sScaleStart = shared_array(self.scale_starts, Int32)
        sHeader = shared_array(self.headers, Int32)
        sScan = shared_array(self.scan, Int32)
        alive = Boolean(True)
        pairs = group.experts + group.ranks * len(HeaderWord)
        for item in cutlass.range(group.tid, pairs, THREADS, unroll=1):
            source, column = group.by_ranks.split(item)
            word = group.base + group.arena.table.at(parity, source, column)
            value, came = group.read_dated(word, epoch, source, Phase.ROUTE, column)
            if column < len(HeaderWord):
                sHeader[source, column] = value
            else:
                sBase[item - group.ranks * len(HeaderWord)] = value
            alive = alive & came
        alive = block_all(alive)
        if alive:
            self._place_rows(group, args, sBase, sStart, sScaleStart, sScan)
        return alive

    @cute.jit
    def _place_rows(self, group, args, sBase, sStart, sScaleStart, sScan) -> None:
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
    def _take(self, group, args, epoch: Int64, source, piece) -> Boolean:
        """Wait for one piece and copy it to all its rows. False after a timeout."""
        row, scale_row, came = self._find_row(group, args, epoch, source, piece)
        alive = warp_all(came)
        shared_row = Int32(NO_ROW)
        if source == group.rank and owns_shared(args, piece.token):
            shared_row = self._find_shared_row(group, args, piece)
        wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
        if alive & ((wanted != Uint32(0)) | (shared_row >= 0)):
            alive = self._wait_piece(group, epoch, source, piece)
            if alive:
                self._copy_payload(group, args, epoch, source, piece, row, wanted, shared_row)
                if args.scale_words != 0:
                    self._copy_scales(group, args, epoch, source, piece, scale_row, wanted, shared_row)
                if (args.row_scale_bytes != 0) & (piece.number == 0):
                    self._copy_row_scale(group, args, epoch, source, piece, row, shared_row)
        return alive

    @cute.jit
    def _find_row(self, group, args, epoch: Int64, source, piece):
        """(output row, scale row, whether it came) of the token's entry number `lane`, a dated word from `Route`;
        NO_ROW where it is not this rank's. The warp with the first piece records the rows for combine."""
        lane = group.tid % 32
        sBase = shared_array(self.bases, Int32)
        sStart = shared_array(self.row_starts, Int32)
        sScaleStart = shared_array(self.scale_starts, Int32)
        sHeader = shared_array(self.headers, Int32)
        in_rank = group.max_tokens * group.top_k
        index = piece.token * group.top_k + lane
        row = Int32(NO_ROW)
        scale_row = Int32(NO_ROW)
        came = Boolean(True)
        entry = Int32(MASKED_ENTRY)
        weight = Int32(0)
        if lane < group.top_k:
            turns = Int32(1)
            if piece.number == 0 and sHeader[source, int(HeaderWord.HAS_WEIGHTS)] != 0:
                turns = Int32(2)
            for turn in cutlass.range(turns, unroll=1):
                words = group.arena.entries.at(epoch & 1, source, piece.token, lane)
                if turn != 0:
                    words = group.arena.weights.at(epoch & 1, source, piece.token, lane)
                value, in_time = group.read_dated(group.base + words, epoch, source, Phase.ROUTE, piece.token)
                came = came & in_time
                if turn == 0:
                    entry = value
                else:
                    weight = value
            if not came:
                entry = Int32(MASKED_ENTRY)
            local = entry_expert(entry) - group.rank * group.local_experts
            if entry != Int32(MASKED_ENTRY) and local >= 0 and local < group.local_experts:
                in_expert = sBase[local * group.ranks + source] - sBase[local * group.ranks] + entry_position(entry)
                row = sStart[local] + in_expert
                scale_row = row
                if args.scale_alignment != args.row_alignment:
                    scale_row = sScaleStart[local] + in_expert
                if row >= args.capacity:
                    group.report_input(Phase.ROW_CAPACITY, row, args.capacity, row)
                    row = Int32(NO_ROW)
            if piece.number == 0:
                gRowMap = array(args.row_map, Int32, group.ranks, in_rank)
                gRowMap[source, index] = row
                if row >= 0:
                    gSource = array(args.src_info, Int32, args.capacity, 2)
                    gSource[row, 0] = piece.token
                    gSource[row, 1] = lane
                    if sHeader[source, int(HeaderWord.HAS_WEIGHTS)] != 0:
                        gWeightOut = array(args.weights, Int32, group.ranks, in_rank)
                        gWeightOut[source, index] = weight
        return row, scale_row, came

    @cute.jit
    def _find_shared_row(self, group, args, piece) -> Int32:
        """The token's row in group 0, which is its scale row too."""
        row = piece.token - args.shared_first
        if row >= args.capacity:
            group.report_input(Phase.ROW_CAPACITY, row, args.capacity, row)
            row = Int32(NO_ROW)
        else:
            if (group.tid % 32 == 0) & (piece.number == 0):
                gSource = array(args.src_info, Int32, args.capacity, 2)
                gSource[row, 0] = piece.token
                gSource[row, 1] = group.top_k
        return row

    @cute.jit
    def _wait_piece(self, group, epoch: Int64, source, piece) -> Boolean:
        """Warp-wide wait for message_ready[source][piece], posted by `Send.run` on `source`."""
        arrived = Boolean(True)
        if group.tid % 32 == 0:
            flag = group.base + group.arena.message_ready.at(source, piece.index)
            arrived = group.wait_one(flag, epoch, source, Phase.MESSAGE, piece.index)
        return warp_all(arrived)

    @cute.jit
    def _copy_payload(self, group, args, epoch: Int64, source, piece, row, wanted: Uint32, shared_row) -> None:
        lane = group.tid % 32
        units = units_of(args.payload_bytes)
        message = group.base + group.arena.messages.at(epoch & 1, source, piece.token)
        gMessage = vector_tensor(message, units, 1)
        gOut = vector_tensor(args.out_tokens, units, args.capacity, Int64(args.payload_bytes))
        copies = Int32(cute.arch.popc(wanted)) + Int32(shared_row >= 0)
        rQ = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
        for base in cutlass.range(piece.first, piece.last, LOADS_IN_FLIGHT, unroll=1):
            for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                unit = (base + slot) * SEGMENT + lane
                if (base + slot < piece.last) & (unit < units):
                    cute.copy(vector_atom(), gMessage[None, unit, 0], rQ[None, slot])
            left = wanted
            for _ in cutlass.range(copies, unroll=1):
                target = shared_row
                if left != Uint32(0):
                    target = from_lane(row, lowest(left))
                    left = left & (left - Uint32(1))
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    unit = (base + slot) * SEGMENT + lane
                    if (base + slot < piece.last) & (unit < units):
                        cute.copy(vector_atom(), rQ[None, slot], gOut[None, unit, target])

    @cute.jit
    def _copy_scales(self, group, args, epoch: Int64, source, piece, scale_row, wanted: Uint32, shared_row) -> None:
        """The words of the piece's segments."""
        lane = group.tid % 32
        message = group.base + group.arena.messages.at(epoch & 1, source, piece.token)
        gWord = array(message + group.message.scales.offset, Uint32, args.scale_words)
        end = cutlass.min(piece.last * args.segment_words, args.scale_words)
        copies = Int32(cute.arch.popc(wanted)) + Int32(shared_row >= 0)
        rWord = cute.make_rmem_tensor(LOADS_IN_FLIGHT, Uint32)
        for base in cutlass.range(piece.first * args.segment_words + lane, end + lane, 32 * LOADS_IN_FLIGHT, unroll=1):
            for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                if base + 32 * slot < end:
                    rWord[slot] = gWord[base + 32 * slot]
            left = wanted
            for _ in cutlass.range(copies, unroll=1):
                target = shared_row
                if left != Uint32(0):
                    target = from_lane(scale_row, lowest(left))
                    left = left & (left - Uint32(1))
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    if base + 32 * slot < end:
                        store_scale_word(args, target, base + 32 * slot, rWord[slot])

    @cute.jit
    def _copy_row_scale(self, group, args, epoch: Int64, source, piece, row, shared_row) -> None:
        message = group.base + group.arena.messages.at(epoch & 1, source, piece.token)
        scale = array(message + group.message.row_scale.offset, Uint16, 1)[0]
        gRowScale = array(args.out_row_scales, Uint16, args.capacity)
        if row >= 0:
            gRowScale[row] = scale
        if (shared_row >= 0) & (group.tid % 32 == 0):
            gRowScale[shared_row] = scale
