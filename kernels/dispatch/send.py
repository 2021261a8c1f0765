"""The sending role: encode tokens and store them into every destination rank's arena.

Each warp takes slices of tokens (`slices`): it loads, encodes and stores to the destinations. When all warps of a CTA
have stored their slices of a chunk, its flag is signaled at every rank. Two chunks of a CTA are scheduled statically,
so that the first rows of the next one may be on their way; while it carries one, it draws the ticket for the one after
the next. A slice of a Lamport row has a flag of its own, which its warp signals at the destinations, and only if one of
its words is SENTINEL. The destinations are a bit mask that its lanes find from the token's expert ids, one per lane;
lanes that share a scale block sit side by side.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.codec import Codec
from cute_ep.kernels.codec.base import State, join_scale_word, word_lanes
from cute_ep.kernels.codec.payload import Payload
from cute_ep.kernels.device.arith import opaque, unit_amax
from cute_ep.kernels.device.atoms import has_sentinel, move, plain, send, word_of
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import DispatchContext, given_id, owns_shared
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.lamport import is_lamport, region_of
from cute_ep.kernels.device.memory import WORDS, pointer, row_at, share
from cute_ep.kernels.device.slices import (
    SEGMENT,
    RowSlice,
    has_bit,
    item_of,
    segments_of,
    slice_of,
    static_first,
    static_stride,
    vectors_of,
    whole_chunks,
)
from cute_ep.kernels.device.sync import signal, take_ticket
from cute_ep.kernels.device.twins import sync_twin
from cute_ep.kernels.dispatch.given_rows import given_row_scale, given_scale_word
from cute_ep.kernels.dispatch.message import message_row_scale, message_scales, scale_vectors
from cute_ep.kernels.dispatch.prefetch import Prefetch
from cute_ep.kernels.hooks import InputScale
from cute_ep.layouts.maps.arena import CHUNK, SENTINEL, StateWord, chunk_of
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import MASKED_ENTRY
from cute_ep.layouts.maps.scales import scale_words

STAGED_SEGMENTS = 8
"""Segments whose scale words a warp collects before it stores them: at most one 16-byte vector a lane."""


class DispatchSend:
    """Encodes and pushes the messages of one launch. direct: as of `RowCopy`; the own rank is no destination."""

    def __init__(
        self, codec: Codec, input_scale: InputScale | None, ahead: bool, direct: bool, shared: RegionMap
    ) -> None:
        self.codec, self.input_scale, self.direct = codec, input_scale, direct
        self.scale_words = SEGMENT // word_lanes(codec.fmt) if codec.fmt.scale else 0  # of a segment: 32 units
        self.prefetch = Prefetch(codec.fmt, ahead, shared)
        self.payload = Payload(codec.fmt, shared)
        assert self.payload.whole or self.prefetch.units == 1, "`exchange` has room for one unit of a lane"
        self.tickets = shared.add("send_tickets", 4, 2)
        self.staged = shared.add("staged_scales", 4, WARPS, STAGED_SEGMENTS * self.scale_words)

    @cute.jit
    def run(self, ctx: DispatchContext) -> None:
        lane = ctx.lane
        scale = self._global_scale(ctx)
        units = self.prefetch.row_units(ctx)
        chunks = ~is_lamport(ctx.input.tokens)
        slices = ctx.input.tokens << ctx.input.message_slices_log2
        items = cutlass.select_(chunks, whole_chunks(slices), slices)
        if cutlass.const_expr(self.direct):
            items = cutlass.select_(ctx.ranks == 1, Int32(0), items)
        first = static_first(items, ctx.cta, ctx.grid.send_ctas, ctx.warp, chunks)
        sTickets = shared_array(self.tickets, Int32)
        stage, place = Int32(0), Int32(0)
        self._fetch_first(ctx, first, units, stage)
        item, following = first, first + static_stride(items, ctx.grid.send_ctas)
        while item < items:
            number = Int32(0)
            if chunks & (ctx.tid == 0):
                number = take_ticket(ctx.state_word(StateWord.DISPATCH_TICKETS))
            row_slice = slice_of(item, ctx.input.message_slices_log2, units)
            if (row_slice.first < row_slice.last) & (item < slices):
                given = self._load_id(ctx, row_slice.token, lane)
                if cutlass.const_expr(self.codec.fmt.row_scale):
                    scale = self.codec.row_scale(self._row_maximum(ctx, row_slice.token, units, lane))
                regions = ctx.arena.lamport_messages, ctx.arena.messages
                region = region_of(is_lamport(ctx.input.tokens), *regions)
                message_offset = region.at(ctx.epoch & 1, ctx.rank, row_slice.token)
                collided, stage = self._push(ctx, message_offset, row_slice, units, given, scale, stage, following)
                mask = self._destinations(ctx, row_slice.token, given)
                if cutlass.const_expr(self.codec.fmt.row_scale):
                    if row_slice.first == 0:
                        # the upper half of a float32 that is a bfloat16 value is that bfloat16
                        self._push_row_scale(ctx, message_offset, mask, scale.bitcast(Uint32) >> 16)
                if cutlass.const_expr(self.codec.fmt.scale is None):
                    if ctx.input.scales != Int64(0):
                        collided = collided | self._push_given_scales(ctx, message_offset, row_slice, mask)
                if is_lamport(ctx.input.tokens):
                    flagged = cute.arch.vote_any_sync(collided)
                    cute.arch.sync_warp()
                    if flagged & has_bit(mask, lane):
                        signal(ctx.there(lane, ctx.arena.message_ready, ctx.rank, row_slice.index), ctx.epoch)
            else:
                self._fetch_first(ctx, following, units, stage)
            if not is_lamport(ctx.input.tokens):
                if ctx.tid == 0:
                    sTickets[place] = number
                sync_twin()  # all of the chunk is stored
                if (ctx.warp == 0) & (lane < ctx.ranks) & self._is_destination(ctx, lane):
                    signal(ctx.there(lane, ctx.arena.message_ready, ctx.rank, chunk_of(item)), ctx.epoch)
            item = following
            following += static_stride(items, ctx.grid.send_ctas)
            if chunks:
                following = item_of(2 * ctx.grid.send_ctas, sTickets[place]) * CHUNK + ctx.warp
                place = place ^ 1

    @cute.jit
    def _fetch_first(self, ctx: DispatchContext, item: Int32, units: Int32, stage: Int32) -> None:
        """Begin to load the first tile of an item, if it is one."""
        row_slice = slice_of(item, ctx.input.message_slices_log2, units)
        last = cutlass.select_(item < ctx.input.tokens << ctx.input.message_slices_log2, row_slice.last, Int32(0))
        self.prefetch.fetch(ctx, row_slice.token, row_slice.first, last, stage)

    @cute.jit
    def _global_scale(self, ctx: DispatchContext) -> Float32:
        """The scale that the caller gave for all its tokens, 1 without one."""
        scale = Float32(1.0)
        if cutlass.const_expr(self.codec.fmt.global_scale):
            if ctx.input.global_scale != Int64(0):
                if cutlass.const_expr(self.input_scale is None):
                    scale = cute.arch.load(pointer(ctx.input.global_scale, Float32), Float32)
                else:
                    scale = Float32(self.input_scale(ctx.input.global_scale, Int32(0)))
        return scale

    @cute.jit
    def _load_id(self, ctx: DispatchContext, token: Int32, lane: Int32) -> Int32:
        """Entry `lane` of the token's expert ids; MASKED_ENTRY beyond top_k."""
        given = Int32(MASKED_ENTRY)
        if lane < ctx.top_k:
            given = given_id(ctx.ids, ctx.entries, token * ctx.top_k + lane)
        return given

    @cute.jit
    def _destinations(self, ctx: DispatchContext, token: Int32, given: Int32) -> Uint32:
        """Bit set, in every lane, of the ranks that own one of the token's experts, and of the own rank for a token of
        the shared expert. By all 32 lanes, each with its own id."""
        bit = Uint32(owns_shared(ctx.shared, token)) << Uint32(ctx.rank)
        expert = ctx.expert_of(given)
        if expert >= 0:
            _, peer = ctx.by_local_experts.split(expert)
            bit = bit | (Uint32(1) << Uint32(peer))
        mask = Uint32(cute.arch.warp_redux_sync(bit, "or"))
        if cutlass.const_expr(self.direct):
            mask = mask & ~(Uint32(1) << Uint32(ctx.rank))
        return mask

    def _is_destination(self, ctx: DispatchContext, rank: Int32) -> Boolean:
        return rank != ctx.rank if self.direct else Boolean(True)

    @cute.jit
    def _row_maximum(self, ctx: DispatchContext, token: Int32, units: Int32, lane: Int32) -> Float32:
        """Largest magnitude of a token's row, in every lane."""
        rX = cute.make_rmem_tensor((WORDS, self.prefetch.vectors), Uint32)
        maximum = Float32(0.0)
        for segment in cutlass.range(segments_of(units), unroll=1):
            self.prefetch.load(ctx, token, segment * SEGMENT + lane, rX)
            maximum = cute.arch.fmax(maximum, unit_amax(rX, 4 * self.prefetch.vectors))
        return cute.arch.warp_reduction_max(maximum)

    @cute.jit
    def _push(
        self,
        ctx: DispatchContext,
        message_offset: Int64,
        row_slice: RowSlice,
        units: Int32,
        given: Int32,
        scale: Float32,
        stage: Int32,
        following: Int32,
    ) -> tuple[Boolean, Int32]:
        """Payload and scales of an item's slice, whose first tile is in `stage`. Returns whether this lane stored a
        SENTINEL word, and the stage of the next item's first tile. message_offset: of the item's message in all
        arenas; `ctx.at_peer` makes it an address."""
        collided = Boolean(False)
        state = self.codec.state(scale)
        rX = cute.make_rmem_tensor((WORDS, self.prefetch.vectors), Uint32)
        rQ = cute.make_rmem_tensor((WORDS, self.prefetch.units * self.payload.turns), Uint32)
        for start in cutlass.range(row_slice.first, row_slice.last, STAGED_SEGMENTS, unroll=1):
            end = cutlass.min(start + STAGED_SEGMENTS, row_slice.last)
            for base in cutlass.range(start, end, self.prefetch.units, unroll=1):
                if base + self.prefetch.units < row_slice.last:
                    self.prefetch.fetch(ctx, row_slice.token, base + self.prefetch.units, row_slice.last, stage ^ 1)
                else:
                    self._fetch_first(ctx, following, units, stage ^ 1)
                self.prefetch.wait()
                for number in cutlass.range_constexpr(self.prefetch.units):
                    if base + number < end:
                        self.prefetch.read(ctx, row_slice.token, base, number, stage, rX)
                        collided = collided | self._encode(ctx, base + number - start, rX, rQ, number, state)
                stage = stage ^ 1
                # `opaque`: what follows from the id must not be computed, and waited for, before the loads
                mask = self._destinations(ctx, row_slice.token, opaque(given))
                self._send_vectors(ctx, message_offset, rQ, base, self._store_end(ctx, base, end, units), mask)
            if cutlass.const_expr(self.scale_words > 0):
                mask = self._destinations(ctx, row_slice.token, given)
                collided = collided | self._push_scales(ctx, message_offset, start, end, mask)
        return collided, stage

    def _store_end(self, ctx: DispatchContext, base: Int32, end: Int32, units: Int32) -> Int32:
        """The vector of a message at which a store of what was encoded from segment `base` on ends, before that of
        segment `end`."""
        if self.payload.whole:
            return cutlass.min(end * SEGMENT, units)
        return cutlass.min((base + 1) * self.payload.vectors, vectors_of(ctx.wire.payload_bytes))

    @cute.jit
    def _encode(
        self,
        ctx: DispatchContext,
        place: Int32,
        rX: cute.Tensor,
        rQ: cute.Tensor,
        number: cutlass.Constexpr[int],
        state: State,
    ) -> Boolean:
        """Encode unit `number` of the lane's tile; returns whether it has a SENTINEL word. Its scale word waits in
        shared memory until it fills packets with others: a small packet costs a link as much as a large one."""
        collided = Boolean(False)
        if cutlass.const_expr(self.payload.whole):
            bits = self.codec.encode(rX, rQ[None, number], state)
        else:
            rUnit = cute.make_rmem_tensor(self.payload.words, Uint32)
            bits = self.codec.encode(rX, rUnit, state)
            self.payload.exchange(ctx.warp, ctx.lane, rUnit, rQ)
        if cutlass.const_expr(self.scale_words > 0):
            lane, warp = ctx.lane, ctx.warp
            lanes = word_lanes(self.codec.fmt)
            sStaged = shared_array(self.staged, Uint32)
            word = join_scale_word(self.codec.fmt, bits)
            if remainder(lane, lanes) == 0:
                sStaged[warp, place * self.scale_words + quotient(lane, lanes)] = word
        for part in cutlass.range_constexpr(self.payload.turns):
            collided = collided | has_sentinel(rQ[None, number + part])
        return collided

    @cute.jit
    def _send_vectors(
        self, ctx: DispatchContext, message_offset: Int64, rQ: cute.Tensor, base: Int32, vectors: Int32, mask: Uint32
    ) -> None:
        """The lane's vectors from segment `base` on, of the message's first `vectors`, to each destination. Warps and
        ranks start with different ones, or all would use the same link at once: 4096 BF16 tokens take 468 us so, else
        471 (4 x H200)."""
        peer, _ = ctx.by_ranks.split(ctx.rank + ctx.cta + ctx.warp)
        for _ in cutlass.range(ctx.ranks, unroll=1):
            peer += 1
            if peer == ctx.ranks:
                peer = Int32(0)
            if has_bit(mask, peer):
                gMessage = row_at(ctx.at_peer(peer, message_offset), vectors)
                move(send, rQ, share(gMessage, base * self.payload.vectors + ctx.lane, cute.size(rQ, mode=[1])))

    @cute.jit
    def _push_scales(
        self, ctx: DispatchContext, message_offset: Int64, start: Int32, end: Int32, mask: Uint32
    ) -> Boolean:
        """Store the staged scale words of segments start .. end - 1, four a lane."""
        lane, warp = ctx.lane, ctx.warp
        sStaged = shared_array(self.staged, Uint32)
        rWord = cute.make_rmem_tensor((WORDS, 1), Uint32)
        rWord.fill(0)
        cute.arch.sync_warp()
        words = cutlass.min(end * self.scale_words, scale_words(ctx.wire.scale_bytes))
        if start * self.scale_words + WORDS * lane < words:
            move(plain, [cute.local_tile(sStaged[warp, None], (WORDS,), (lane,))], rWord)
            first = quotient(start * self.scale_words, WORDS) + lane
            for peer in cutlass.range(ctx.ranks, unroll=1):
                if has_bit(mask, peer):
                    gScale = scale_vectors(ctx.wire, ctx.at_peer(peer, message_offset), words)
                    move(send, rWord, share(gScale, first, 1))
        collided = has_sentinel(rWord[None, 0])
        cute.arch.sync_warp()
        return collided

    @cute.jit
    def _push_row_scale(self, ctx: DispatchContext, message_offset: Int64, mask: Uint32, value: Uint32) -> None:
        """Store a token's own scale (the lower half of a word) at each destination, lane r for rank r."""
        lane = ctx.lane
        if has_bit(mask, lane):
            move(send, word_of(value), share(message_row_scale(ctx.wire, ctx.at_peer(lane, message_offset)), 0, 1))

    @cute.jit
    def _push_given_scales(
        self, ctx: DispatchContext, message_offset: Int64, row_slice: RowSlice, mask: Uint32
    ) -> Boolean:
        """Rows that came quantised: the caller's scale factors, [T, scale bytes], and row scales, [T] bfloat16."""
        collided = Boolean(False)
        lane = ctx.lane
        end = cutlass.min(row_slice.last * ctx.wire.segment_words, scale_words(ctx.wire.scale_bytes))
        for word in cutlass.range(row_slice.first * ctx.wire.segment_words + lane, end, 32, unroll=1):
            bits = given_scale_word(ctx, row_slice.token, word)
            collided = collided | (bits == Uint32(SENTINEL))
            for peer in cutlass.range(ctx.ranks, unroll=1):
                if has_bit(mask, peer):
                    gScale = message_scales(ctx.wire, ctx.at_peer(peer, message_offset), end)
                    move(send, word_of(bits), share(gScale, word, 1))
        if (ctx.wire.row_scale_bytes != 0) & (row_slice.first == 0):
            self._push_row_scale(ctx, message_offset, mask, given_row_scale(ctx, row_slice.token))
        return collided
