"""Send role: encode tokens and store them into every destination rank's arena.

Each warp takes pieces of tokens (`pieces`): it loads, encodes and stores to the destinations. When all warps of a CTA
have stored their pieces of a convoy, its flag is posted at every rank. Two convoys are dealt to a CTA, so that the
first rows of the next one may be on their way; while it carries one, it takes the number of the one after the next.
A piece of an express row has a flag of its own, which its warp posts at the destinations, and only if one of its words
is BLANK. The destinations are a bit mask that its lanes find from the token's expert ids, one a lane; lanes that share
a scale block sit side by side.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16, Uint32

from cute_ep.kernels.codec import Codec
from cute_ep.kernels.codec.base import join_scale_word, source_vectors, word_lanes
from cute_ep.kernels.device.arith import anew, unit_amax
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.group import given_id, owns_shared
from cute_ep.kernels.device.lamport import has_blank, home_of, is_express, send_vector, send_word
from cute_ep.kernels.device.memory import array, pointer
from cute_ep.kernels.device.splits import (
    SEGMENT,
    dealt_first,
    dealt_stride,
    has_bit,
    own_units,
    piece_of,
    segments_of,
    taken,
    units_of,
    whole_convoys,
)
from cute_ep.kernels.device.sync import post, take
from cute_ep.kernels.roles.prefetch import Source
from cute_ep.layouts.maps.arena import BLANK, CONVOY, SEGMENT_BYTES, StateWord, convoy_of, segment_words
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import MASKED_ENTRY
from cute_ep.layouts.maps.scales import WORD_BYTES, scale_words

STAGED_SEGMENTS = 8
"""Segments whose scale words a warp collects before it stores them: at most one 16-byte vector a lane."""


class Send:
    """Encodes and pushes the messages of one launch."""

    def __init__(self, codec: Codec, input_scale, ahead: bool, shared: RegionMap) -> None:
        self.codec, self.input_scale = codec, input_scale
        self.scale_words = segment_words(codec.fmt)
        self.source = Source(source_vectors(codec.fmt), ahead, shared)
        self.taken = shared.add("send_taken", 4, 2)
        self.staged = shared.add("staged_scales", 4, WARPS, STAGED_SEGMENTS * self.scale_words)

    @cute.jit
    def run(self, group, args, epoch: Int64) -> None:
        lane = group.lane
        scale = self._global_scale(args)
        units = units_of(args.payload_bytes)
        convoys = ~is_express(args.tokens)
        pieces = args.tokens << args.message_pieces
        items = cutlass.select_(convoys, whole_convoys(pieces), pieces)
        first = dealt_first(items, group.cta, args.send_ctas, group.warp, convoys)
        sTaken = shared_array(self.taken, Int32)
        stage, turn = Int32(0), Int32(0)
        self._fetch_first(group, args, first, units, stage)
        item, following = first, first + dealt_stride(items, args.send_ctas)
        while item < items:
            number = Int32(0)
            if convoys & (group.tid == 0):
                number = take(group.state_word(StateWord.DISPATCH_TAKEN))
            piece = piece_of(item, args.message_pieces, units)
            if (piece.first < piece.last) & (item < pieces):
                given = self._load_id(group, args, piece.token, lane)
                if cutlass.const_expr(self.codec.fmt.row_scale):
                    scale = self.codec.row_scale(self._row_maximum(args, piece.token, units, lane))
                regions = group.arena.express_messages, group.arena.messages
                message = home_of(is_express(args.tokens), *regions, epoch & 1, group.rank, piece.token)
                blank, stage = self._push(group, args, message, piece, units, given, scale, stage, following)
                mask = self._destinations(group, args, piece.token, given)
                if cutlass.const_expr(self.codec.fmt.row_scale):
                    if piece.first == 0:
                        # the upper half of a float32 that is a bfloat16 value is that bfloat16
                        self._push_row_scale(group, args, message, mask, scale.bitcast(Uint32) >> 16)
                if cutlass.const_expr(self.codec.fmt.scale is None):
                    if args.scales != Int64(0):
                        blank = blank | self._push_given_scales(group, args, message, piece, mask)
                if is_express(args.tokens):
                    flagged = cute.arch.vote_any_sync(blank)
                    cute.arch.sync_warp()
                    if flagged & has_bit(mask, lane):
                        post(group.sPeers[lane] + group.arena.message_ready.at(group.rank, piece.index), epoch)
            else:
                self._fetch_first(group, args, following, units, stage)
            if not is_express(args.tokens):
                if group.tid == 0:
                    sTaken[turn] = number
                cute.arch.sync_threads()  # all of the convoy is stored
                if (group.warp == 0) & (lane < group.ranks):
                    post(group.sPeers[lane] + group.arena.message_ready.at(group.rank, convoy_of(item)), epoch)
            item = following
            following += dealt_stride(items, args.send_ctas)
            if convoys:
                following = taken(2 * args.send_ctas, sTaken[turn]) * CONVOY + group.warp
                turn = turn ^ 1

    @cute.jit
    def _fetch_first(self, group, args, item, units, stage) -> None:
        """Begin to load the first tile of an item, if it is one."""
        piece = piece_of(item, args.message_pieces, units)
        last = cutlass.select_(item < args.tokens << args.message_pieces, piece.last, Int32(0))
        self.source.fetch(group, args, piece.token, piece.first, last, stage)

    @cute.jit
    def _global_scale(self, args) -> Float32:
        """The scale that the caller gave for all its tokens, 1 without one."""
        scale = Float32(1.0)
        if cutlass.const_expr(self.codec.fmt.global_scale):
            if args.global_scale != Int64(0):
                if cutlass.const_expr(self.input_scale is None):
                    scale = cute.arch.load(pointer(args.global_scale, Float32), Float32)
                else:
                    scale = Float32(self.input_scale(args.global_scale, Int32(0)))
        return scale

    @cute.jit
    def _load_id(self, group, args, token, lane) -> Int32:
        """Entry `lane` of the token's expert ids; MASKED_ENTRY beyond top_k."""
        given = Int32(MASKED_ENTRY)
        if lane < group.top_k:
            given = given_id(args, token * group.top_k + lane)
        return given

    @cute.jit
    def _destinations(self, group, args, token, given: Int32) -> Uint32:
        """Bit set, in every lane, of the ranks that own one of the token's experts, and of the own rank for a token of
        the shared expert. By all 32 lanes, each with its own id."""
        bit = Uint32(owns_shared(args, token)) << Uint32(group.rank)
        expert = group.expert_of(given)
        if expert >= 0:
            _, peer = group.by_local_experts.split(expert)
            bit = bit | (Uint32(1) << Uint32(peer))
        return cute.arch.warp_redux_sync(bit, "or")

    @cute.jit
    def _row_maximum(self, args, token, units, lane) -> Float32:
        """Largest magnitude of a token's row, in every lane."""
        rX = cute.make_rmem_tensor(4 * self.source.vectors, Uint32)
        maximum = Float32(0.0)
        for segment in cutlass.range(segments_of(units), unroll=1):
            self.source.load(args, token, segment * SEGMENT + lane, rX)
            maximum = cute.arch.fmax(maximum, unit_amax(rX, 4 * self.source.vectors))
        return cute.arch.warp_reduction_max(maximum)

    @cute.jit
    def _push(self, group, args, message: Int64, piece, units, given: Int32, scale: Float32, stage, following):
        """Payload and scales of an item's piece, whose first tile is in `stage`; returns whether this lane stored a
        BLANK word, and the stage of the next item's first tile."""
        lane = group.lane
        blank = Boolean(False)
        state = self.codec.state(scale)
        rX = cute.make_rmem_tensor(4 * self.source.vectors, Uint32)
        rQ = cute.make_rmem_tensor((4, self.source.units), Uint32)
        for start in cutlass.range(piece.first, piece.last, STAGED_SEGMENTS, unroll=1):
            end = cutlass.min(start + STAGED_SEGMENTS, piece.last)
            for base in cutlass.range(start, end, self.source.units, unroll=1):
                if base + self.source.units < piece.last:
                    self.source.fetch(group, args, piece.token, base + self.source.units, piece.last, stage ^ 1)
                else:
                    self._fetch_first(group, args, following, units, stage ^ 1)
                self.source.wait()
                for slot in cutlass.range_constexpr(self.source.units):
                    if base + slot < end:
                        self.source.take(group, args, piece.token, base, slot, stage, rX)
                        blank = blank | self._encode(group, base + slot - start, rX, rQ[None, slot], state)
                stage = stage ^ 1
                # `anew`: what follows from the id must not be computed, and waited for, before the loads
                mask = self._destinations(group, args, piece.token, anew(given))
                self._send_units(group, message, rQ, base, own_units(base, end, units, lane), mask)
            if cutlass.const_expr(self.scale_words > 0):
                mask = self._destinations(group, args, piece.token, given)
                blank = blank | self._push_scales(group, args, message, start, end, mask)
        return blank, stage

    @cute.jit
    def _encode(self, group, place, rX, rQ, state) -> Boolean:
        """Encode one unit; returns whether it has a BLANK word. Its scale word waits in shared memory until it fills
        packets with others: a small packet costs a link as much as a large one."""
        bits = self.codec.encode(rX, rQ, state)
        if cutlass.const_expr(self.scale_words > 0):
            lane, warp = group.lane, group.warp
            lanes = word_lanes(self.codec.fmt)
            sStaged = shared_array(self.staged, Uint32)
            word = join_scale_word(self.codec.fmt, bits)
            if remainder(lane, lanes) == 0:
                sStaged[warp, place * self.scale_words + quotient(lane, lanes)] = word
        return has_blank(rQ)

    @cute.jit
    def _send_units(self, group, message: Int64, rQ, base, count, mask: Uint32) -> None:
        """The lane's first `count` units from segment `base` on to each destination. Warps and ranks start with
        different ones, or all would turn to the same link (4 x H200, 4096 BF16 tokens: 471 us instead of 468)."""
        first = message + Int64(base * SEGMENT + group.lane) * VECTOR_BYTES
        peer, _ = group.by_ranks.split(group.rank + group.cta + group.warp)
        for _ in cutlass.range(group.ranks, unroll=1):
            peer += 1
            if peer == group.ranks:
                peer = Int32(0)
            if has_bit(mask, peer):
                home = group.sPeers[peer] + first
                for slot in cutlass.range_constexpr(self.source.units):
                    if slot < count:
                        send_vector(rQ[None, slot], home + slot * SEGMENT_BYTES)

    @cute.jit
    def _push_scales(self, group, args, message: Int64, start, end, mask: Uint32) -> Boolean:
        """Store the staged scale words of segments start .. end - 1, four a lane."""
        lane, warp = group.lane, group.warp
        sStaged = shared_array(self.staged, Uint32)
        rWord = cute.make_rmem_tensor(4, Uint32)
        blank = Boolean(False)
        cute.arch.sync_warp()
        words = scale_words(args.scale_bytes) - start * self.scale_words  # to the end of the row
        if 4 * lane < cutlass.min((end - start) * self.scale_words, words):
            sVector = cute.local_tile(sStaged[warp, None], (4,), (lane,))
            cute.autovec_copy(sVector, rWord)
            blank = has_blank(rWord)
            offset = Int64(args.scales_at) + Int64(start) * (self.scale_words * WORD_BYTES)
            for peer in cutlass.range(group.ranks, unroll=1):
                if has_bit(mask, peer):
                    send_vector(rWord, group.sPeers[peer] + message + offset + Int64(lane) * VECTOR_BYTES)
        cute.arch.sync_warp()
        return blank

    @cute.jit
    def _push_row_scale(self, group, args, message: Int64, mask: Uint32, value: Uint32) -> None:
        """Store a token's own scale (the lower half of a word) at each destination, lane r for rank r."""
        lane = group.lane
        if has_bit(mask, lane):
            send_word(value, group.sPeers[lane] + message + args.row_scale_at)

    @cute.jit
    def _push_given_scales(self, group, args, message: Int64, piece, mask: Uint32) -> Boolean:
        """Rows that came quantised: the caller's scale factors, [T, scale bytes], and row scales, [T] bfloat16."""
        blank = Boolean(False)
        lane = group.lane
        gScale = array(args.scales, Uint8, args.tokens, args.scale_bytes)
        at = message + args.scales_at
        end = cutlass.min(piece.last * args.segment_words, scale_words(args.scale_bytes))
        for word in cutlass.range(piece.first * args.segment_words + lane, end, 32, unroll=1):
            bits = Uint32(0)
            for byte in cutlass.range_constexpr(WORD_BYTES):
                place = word * WORD_BYTES + byte
                if place < args.scale_bytes:
                    bits = bits | (Uint32(gScale[piece.token, place]) << (8 * byte))
            blank = blank | (bits == Uint32(BLANK))
            for peer in cutlass.range(group.ranks, unroll=1):
                if has_bit(mask, peer):
                    send_word(bits, group.sPeers[peer] + at + Int64(word) * WORD_BYTES)
        if (args.row_scale_bytes != 0) & (piece.first == 0):
            gRowScale = array(args.given_row_scales, Uint16, args.tokens)
            self._push_row_scale(group, args, message, mask, Uint32(gRowScale[piece.token]))
        return blank
