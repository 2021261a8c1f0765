"""Expand role: wait for each piece of a message and copy it to the token's expert rows, with its scale factors.

Row of entry (source, token, k) with local expert e: row_start[e] + base[e, source] - base[e, 0] + position, where base
is the exclusive prefix sum of the gathered counts and row_start leaves room for padding (`tables`). Each warp takes
pieces (`pieces`): lane k finds the row of entry k. A token of the shared expert has one more row, on the own rank.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32

from cute_ep.kernels.announce import Announce
from cute_ep.kernels.arith import anew
from cute_ep.kernels.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.divide import quotient
from cute_ep.kernels.express import (
    blank_vector,
    blank_word,
    has_blank,
    home_of,
    is_express,
    look_at_vector,
    look_at_word,
    wait_whole,
)
from cute_ep.kernels.group import owns_shared
from cute_ep.kernels.pieces import (
    SEGMENT,
    dealt_first,
    dealt_stride,
    from_lane,
    lowest,
    piece_of,
    spare_cta,
    units_of,
)
from cute_ep.kernels.scale_rows import store_scale_word
from cute_ep.kernels.scale_tiles import ScaleTiles
from cute_ep.kernels.sync import meet, wait_at_least, wait_two_dated, warp_all
from cute_ep.kernels.tables import Tables
from cute_ep.layouts.arena import BLANK, SEGMENT_BYTES, HeaderWord, StateWord, convoy_of
from cute_ep.layouts.device import array, pointer, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import (
    LOST_ROW,
    MASKED_ENTRY,
    NO_ROW,
    Phase,
    entry_expert,
    entry_position,
)
from cute_ep.layouts.scales import WORD_BYTES

SCALES_IN_FLIGHT = 2
"""Scale words that a lane loads before it stores the first."""


class Expand:
    """Turns received messages into the ragged, expert-major output. Knows sizes of rows, not formats."""

    def __init__(self, shared: RegionMap) -> None:
        self.tables = Tables(shared)
        self.announce = Announce(self.tables)
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
            express = is_express(self._tokens(source))
            if not express:
                alive = self._wait_piece(group, epoch, source, piece)
            if alive:
                wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
                rWord = cute.make_rmem_tensor(SCALES_IN_FLIGHT, Uint32)
                rWord.fill(BLANK)
                alive = self._copy_payload(group, args, epoch, source, piece, row, wanted, shared_row, rWord)
                if alive & (args.scale_words != 0) & (express | ~self.tables.are_tiled()):
                    alive = self._copy_scales(group, args, epoch, source, piece, scale_row, wanted, shared_row, rWord)
                if alive & (args.row_scale_bytes != 0) & (piece.first == 0):
                    alive = self._copy_row_scale(group, args, epoch, source, piece, row, shared_row)
        return alive

    def _tokens(self, source) -> Int32:
        """Tokens of a source, from its header."""
        return shared_array(self.tables.headers, Int32)[source, int(HeaderWord.TOKENS)]

    def _message(self, group, args, epoch: Int64, source, piece) -> Int64:
        """Address of the message that the piece belongs to."""
        regions = group.arena.express_messages, group.arena.messages
        coord = epoch & 1, anew(source), anew(piece.token)
        return group.base + home_of(is_express(self._tokens(source)), *regions, *coord)

    @cute.jit
    def _wait_whole(self, group, args, epoch: Int64, source, piece, look) -> Boolean:
        """Look at words of the piece until they are there; rows that are not express have been waited for."""
        settled = Uint32(~is_express(self._tokens(source)))
        check = partial(self._has_posted, group, args, epoch, source, piece)
        return wait_whole(group, look, check, settled, epoch, source, Phase.MESSAGE, piece.index)

    def _has_posted(self, group, args, epoch: Int64, source, piece) -> Uint32:
        """Whether the source has posted the piece's flag."""
        flag = group.base + group.arena.message_ready.at(anew(source), anew(piece.index))
        return Uint32(group.has_posted(flag, epoch))

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
                weights = group.base + group.arena.weights.at(epoch & 1, source, piece.token, lane)
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

    @cute.jit
    def _wait_piece(self, group, epoch: Int64, source, piece) -> Boolean:
        """Warp-wide wait for message_ready[source][convoy], posted by `Send.run` on `source`."""
        arrived = Boolean(True)
        if group.lane == 0:
            flag = group.base + group.arena.message_ready.at(source, convoy_of(piece.index))
            arrived = wait_at_least(group.watch, flag, epoch, source, Phase.MESSAGE, piece.index)
        return warp_all(arrived)

    @cute.jit
    def _copy_payload(
        self, group, args, epoch: Int64, source, piece, row, wanted: Uint32, shared_row, rWord
    ) -> Boolean:
        """The piece's payload to all its rows; rWord is a first look at its scale words, whose latency the stores hide.
        False after a timeout."""
        lane = group.lane
        units = units_of(anew(args.payload_bytes))
        gOut = vector_tensor(args.out_tokens, units, args.capacity, Int64(args.payload_bytes))
        rQ = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
        alive = Boolean(True)
        base = piece.first
        while alive and base < piece.last:
            # the first unit of the lane's; its others are SEGMENT units apart
            message = self._message(group, args, epoch, source, piece) + Int64(base * SEGMENT + lane) * VECTOR_BYTES
            count = self._own_units(base, piece.last, units, lane)
            look = partial(self._look_at_units, rQ, message, count)
            alive = self._wait_whole(group, args, epoch, source, piece, look)
            if is_express(self._tokens(source)):
                for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    if slot < count:
                        blank_vector(message + slot * SEGMENT_BYTES)
            if (args.scale_words != 0) & is_express(self._tokens(source)) & (base + LOADS_IN_FLIGHT >= piece.last):
                words = self._scale_count(args, piece) - lane
                self._look_at_scales(rWord, self._first_scale(group, args, epoch, source, piece), words, Uint32(0))
            store = partial(self._store_units, gOut, rQ, base, lane, count)
            self._to_each(row, wanted, shared_row, store)
            base += LOADS_IN_FLIGHT
        return alive

    @cute.jit
    def _to_each(self, row, wanted: Uint32, shared_row, store: cutlass.Constexpr) -> None:
        """Call store(target) for each row that a piece is copied to: in lanes `wanted`, then the shared expert's."""
        copies = Int32(cute.arch.popc(wanted)) + Int32(shared_row >= 0)
        left = wanted
        for _ in cutlass.range(copies, unroll=1):
            target = shared_row
            if left != Uint32(0):
                target = from_lane(row, lowest(left))
                left = left & (left - Uint32(1))
            store(target)

    @cute.jit
    def _store_units(self, gOut, rQ, base, lane, count, target) -> None:
        """`count` units of a lane, from segment `base` on, to one row."""
        for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            if slot < count:
                cute.copy(vector_atom(), rQ[None, slot], gOut[None, (base + slot) * SEGMENT + lane, target])

    def _own_units(self, base, last, units, lane) -> Int32:
        """Units of a lane from segment `base` on, in segments below `last`."""
        return cutlass.min(last - base, quotient(units - base * SEGMENT - lane + (SEGMENT - 1), SEGMENT))

    @cute.jit
    def _look_at_units(self, rQ, message: Int64, count, settled: Uint32) -> Uint32:
        blank = Boolean(False)
        for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            if slot < count:
                look_at_vector(rQ[None, slot], message + slot * SEGMENT_BYTES)
                blank = blank | has_blank(rQ[None, slot])
        return Uint32(blank) & ~settled

    def _first_scale(self, group, args, epoch: Int64, source, piece) -> Int64:
        """Address of the lane's first scale word of a piece."""
        word = piece.first * args.segment_words + group.lane
        return self._message(group, args, epoch, source, piece) + args.scales_at + Int64(word) * WORD_BYTES

    def _scale_count(self, args, piece) -> Int32:
        """Scale words of a piece."""
        return cutlass.min(piece.last * args.segment_words, args.scale_words) - piece.first * args.segment_words

    @cute.jit
    def _copy_scales(
        self, group, args, epoch: Int64, source, piece, scale_row, wanted: Uint32, shared_row, rWord
    ) -> Boolean:
        """The words of the piece's segments, to all its rows or aside for `ScaleTiles`; rWord is what a look at the
        first of them has seen. False after a timeout."""
        count = self._scale_count(args, piece)
        alive = Boolean(True)
        base = Int32(0)
        while alive and base < count:
            scales = self._first_scale(group, args, epoch, source, piece) + Int64(base) * WORD_BYTES
            words = count - base - group.lane
            missing = Boolean(base != 0)
            for slot in cutlass.range_constexpr(SCALES_IN_FLIGHT):
                missing = missing | ((32 * slot < words) & (rWord[slot] == Uint32(BLANK)))
            if cute.arch.vote_any_sync(missing):
                look = partial(self._look_at_scales, rWord, scales, words)
                alive = self._wait_whole(group, args, epoch, source, piece, look)
            if is_express(self._tokens(source)):
                for slot in cutlass.range_constexpr(SCALES_IN_FLIGHT):
                    if 32 * slot < words:
                        blank_word(scales + slot * (32 * WORD_BYTES))
            word = piece.first * args.segment_words + base + group.lane
            if self.tables.are_tiled():
                kept = group.base + group.arena.kept_scales.at(anew(source), anew(piece.token))
                for slot in cutlass.range_constexpr(SCALES_IN_FLIGHT):
                    if 32 * slot < words:
                        place = kept + Int64(word + 32 * slot) * WORD_BYTES
                        cute.arch.store(pointer(place, Uint32), rWord[slot])
            else:
                self._to_each(scale_row, wanted, shared_row, partial(self._store_words, args, rWord, word, words))
            base += 32 * SCALES_IN_FLIGHT
        return alive

    @cute.jit
    def _store_words(self, args, rWord, word, words, target) -> None:
        """The words of `_look_at_scales`, of which `word` is the first, to one scale row."""
        for slot in cutlass.range_constexpr(SCALES_IN_FLIGHT):
            if 32 * slot < words:
                store_scale_word(args, target, word + 32 * slot, rWord[slot])

    @cute.jit
    def _look_at_scales(self, rWord, scales: Int64, words, settled: Uint32) -> Uint32:
        """Words 0, 32, 64, ... of the `words` that follow an address."""
        blank = Boolean(False)
        for slot in cutlass.range_constexpr(SCALES_IN_FLIGHT):
            if 32 * slot < words:
                rWord[slot] = look_at_word(scales + slot * (32 * WORD_BYTES))
                blank = blank | (rWord[slot] == Uint32(BLANK))
        return Uint32(blank) & ~settled

    @cute.jit
    def _copy_row_scale(self, group, args, epoch: Int64, source, piece, row, shared_row) -> Boolean:
        at = self._message(group, args, epoch, source, piece) + args.row_scale_at
        rWord = cute.make_rmem_tensor(SCALES_IN_FLIGHT, Uint32)
        look = partial(self._look_at_scales, rWord, at, Int32(1))
        alive = self._wait_whole(group, args, epoch, source, piece, look)
        scale = Uint16(rWord[0])
        gRowScale = array(args.out_row_scales, Uint16, args.capacity)
        if row >= 0:
            gRowScale[row] = scale
        if group.lane == 0:
            if shared_row >= 0:
                gRowScale[shared_row] = scale
            if is_express(self._tokens(source)):
                blank_word(at)
        return alive
