"""Expand role: find the rows of each piece of a message, and have it copied there (`copy_piece`).

Row of entry (source, token, k) with local expert e: row_start[e] + base[e, source] - base[e, 0] + position, where base
is the exclusive prefix sum of the gathered counts and row_start leaves room for padding (`tables`). Each warp takes
pieces (`pieces`): lane k finds the row of entry k. A token of the shared expert has one more row, on the own rank.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.device.arith import anew
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.group import owns_shared
from cute_ep.kernels.device.memory import array
from cute_ep.kernels.device.splits import dealt_first, dealt_stride, piece_of, spare_cta, units_of
from cute_ep.kernels.device.sync import meet, wait_two_dated, warp_all
from cute_ep.kernels.roles.outputs import Announce
from cute_ep.kernels.roles.row_copy import CopyPiece
from cute_ep.kernels.roles.row_tables import Tables
from cute_ep.kernels.roles.scale_tiles import ScaleTiles
from cute_ep.layouts.maps.arena import HeaderWord, StateWord
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import (
    LOST_ROW,
    MASKED_ENTRY,
    NO_ROW,
    Phase,
    entry_expert,
    entry_position,
)


class Expand:
    """Turns received messages into the ragged, expert-major output."""

    def __init__(self, shared: RegionMap) -> None:
        self.tables = Tables(shared)
        self.announce = Announce(self.tables)
        self.copy_piece = CopyPiece(self.tables)
        self.scale_tiles = ScaleTiles(self.tables)

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32) -> Boolean:
        """CTA `first` of `count` receiving CTAs. False after a timeout."""
        alive = self.tables.read(group, args, epoch)
        if alive:
            if first == spare_cta(count):
                self.announce.run(group, args)
        sHeader = shared_array(self.tables.headers, Int32)
        sItems = shared_array(self.tables.items, Int32)
        item = dealt_first(sItems[0], first, count, group.warp)
        while alive and item < sItems[0]:
            turn, index = group.by_ranks.split(item)
            source = group.rank + turn
            if source >= group.ranks:
                source -= group.ranks
            piece = piece_of(index, sHeader[source, int(HeaderWord.MESSAGE_PIECES)], units_of(args.payload_bytes))
            if piece.token < sHeader[source, int(HeaderWord.TOKENS)] and piece.first < piece.last:
                alive = self._take(group, args, epoch, source, piece)
            item += dealt_stride(sItems[0], count)
        if alive:
            self.announce.zero_padding(group, args, first, count)
        if self.tables.are_tiled():  # chance, where the tables were not read: then this CTA is not alive
            met = group.state_word(StateWord.DISPATCH_MET)
            alive = meet(group.watch, met, count, group.rank, alive, group.tid)
            if alive:
                self.scale_tiles.run(group, args, epoch, anew(first), anew(count))
        return alive

    @cute.jit
    def _take(self, group, args, epoch: Int64, source, piece) -> Boolean:
        """Wait for one piece and copy it to all its rows. False after a timeout."""
        row, scale_row, came = self._find_row(group, args, epoch, source, piece)
        alive = warp_all(came)
        due = row >= 0
        shared_row = Int32(NO_ROW)
        if source == group.rank and owns_shared(args, piece.token):
            shared_row = self._find_shared_row(group, args, piece)
            due = Boolean(True)
        if row >= args.capacity:
            row = Int32(NO_ROW)
        if alive & cute.arch.vote_any_sync(due):
            alive = self.copy_piece.run(group, args, epoch, source, piece, row, scale_row, shared_row)
        return alive

    @cute.jit
    def _find_row(self, group, args, epoch: Int64, source, piece):
        """(output row, scale row, whether it came) of the token's entry number `lane`, a dated word from `Route`;
        NO_ROW where it is not this rank's, LOST_ROW where the output has no room. The warp with the first piece records
        the rows for combine."""
        lane = group.lane
        sBase = shared_array(self.tables.bases, Int32)
        sHeader = shared_array(self.tables.headers, Int32)
        in_rank = group.max_tokens * group.top_k
        index = piece.token * group.top_k + lane
        row = Int32(NO_ROW)
        scale_row = Int32(NO_ROW)
        came = Boolean(True)
        entry = Int32(MASKED_ENTRY)
        weight = Int32(0)
        if lane < group.top_k:
            words = group.base + group.arena.entries.at(epoch & 1, source, piece.token, lane)
            weights = words
            if piece.first == 0 and sHeader[source, int(HeaderWord.HAS_WEIGHTS)] != 0:
                weights += group.arena.weights.offset - group.arena.entries.offset  # laid out alike
            watch = group.watch
            entry, weight, came = wait_two_dated(watch, words, weights, epoch, source, Phase.ROUTE, piece.token)
            if not came:
                entry = Int32(MASKED_ENTRY)
            local = entry_expert(entry) - group.rank * group.local_experts
            if entry != Int32(MASKED_ENTRY) and local >= 0 and local < group.local_experts:
                in_expert = sBase[local * group.ranks + source] - sBase[local * group.ranks] + entry_position(entry)
                row = self.tables.row_start(group, args, local) + in_expert
                scale_row = self.tables.scale_start(group, args, local) + in_expert
                if self.tables.row_start(group, args, group.local_experts) > args.capacity:
                    row = Int32(LOST_ROW)
            if piece.first == 0:
                gRowMap = array(args.row_map, Int32, group.ranks, in_rank)
                gRowMap[source, index] = row
                if (row >= 0) & (row < args.capacity):
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
            row = Int32(NO_ROW)
        else:
            if (group.lane == 0) & (piece.first == 0):
                gSource = array(args.src_info, Int32, args.capacity, 2)
                gSource[row, 0] = piece.token
                gSource[row, 1] = group.top_k
        return row
