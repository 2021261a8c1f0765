"""Send role: encode a chunk of tokens once and store it into every destination rank's arena.

A CTA takes chunks of `chunk` consecutive tokens. Its warps walk the chunk's segments, 32 units (16 payload bytes each)
of one token, so lanes that share a scale block sit side by side and the whole warp has one set of destinations: a bit
mask that its lanes find from the token's expert ids, one a lane.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16, Uint32

from cute_ep.kernels.arith import unit_amax
from cute_ep.kernels.block import LOADS_IN_FLIGHT, THREADS, WARPS, shared_array
from cute_ep.kernels.codec import Codec
from cute_ep.kernels.codec.base import join_scale_word, source_vectors, word_lanes
from cute_ep.kernels.divide import divisor
from cute_ep.kernels.group import owns_shared
from cute_ep.layouts.device import array, pointer, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import MASKED_ENTRY, MAX_CHUNK_ENTRIES
from cute_ep.layouts.scales import WORD_BYTES, scale_words

SEGMENT = 32
"""Units that a warp takes at a time."""


class Send:
    """Encodes and pushes the messages of one launch."""

    def __init__(self, codec: Codec, input_scale, shared: RegionMap) -> None:
        self.codec, self.input_scale = codec, input_scale
        self.source_vectors = source_vectors(codec.fmt)
        self.batch = LOADS_IN_FLIGHT // self.source_vectors
        self.row_maxima = shared.add("row_maxima", 4, MAX_CHUNK_ENTRIES) if codec.fmt.row_scale else None

    @cute.jit
    def run(self, group, args, epoch: Int64) -> None:
        scale = self._global_scale(args)
        for chunk in cutlass.range(group.cta, args.chunks, args.send_ctas):
            first = chunk * args.chunk
            count = cutlass.min(args.chunk, args.tokens - first)
            if cutlass.const_expr(self.codec.fmt.row_scale):
                self._find_row_maxima(group, args, first, count)
            self._push(group, args, epoch, first, count, scale)
            if cutlass.const_expr(self.codec.fmt.row_scale):
                self._push_row_scales(group, args, epoch, first, count)
            if cutlass.const_expr(self.codec.fmt.scale is None):
                if args.scales != Int64(0):
                    self._push_given_scales(group, args, epoch, first, count)
            cute.arch.sync_threads()
            group.post_all_ranks(group.arena.message_ready, epoch, chunk)

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
            given = array(args.topk_ids, Int32, args.tokens * group.top_k)[token * group.top_k + lane]
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

    def _source(self, args, first, count):
        """(word, vector, token) of the chunk's source rows, units of a row, segments of a row."""
        units = args.payload_bytes // VECTOR_BYTES
        vectors = units * self.source_vectors
        pitch = Int64(vectors) * VECTOR_BYTES
        gX = vector_tensor(args.x + Int64(first) * pitch, vectors, count, pitch)
        return gX, units, (units + (SEGMENT - 1)) // SEGMENT

    @cute.jit
    def _load_unit(self, gX, rX, unit, token, valid: Boolean) -> None:
        """One unit into rX; zeros when it lies beyond the row."""
        if valid:
            for part in cutlass.range_constexpr(self.source_vectors):
                rPart = cute.local_tile(rX, (4,), (part,))
                cute.copy(vector_atom(), gX[None, unit * self.source_vectors + part, token], rPart)
        else:
            rX.fill(0)

    @cute.jit
    def _find_row_maxima(self, group, args, first: Int32, count: Int32) -> None:
        """Largest magnitude of each token's row, as float32 bits: those of positive numbers sort as integers."""
        sMaximum = shared_array(self.row_maxima, Int32)
        lane, warp = group.tid % 32, group.tid // 32
        for token in cutlass.range(group.tid, count, THREADS, unroll=1):
            sMaximum[token] = 0
        cute.arch.sync_threads()
        gX, units, segments = self._source(args, first, count)
        by_segments = divisor(segments)
        rX = cute.make_rmem_tensor(4 * self.source_vectors, Uint32)
        for item in cutlass.range(warp, segments * count, WARPS, unroll=1):
            segment, token = by_segments.split(item)
            unit = segment * SEGMENT + lane
            self._load_unit(gX, rX, unit, token, unit < units)
            maximum = cute.arch.warp_reduction_max(unit_amax(rX, 4 * self.source_vectors))
            if lane == 0:
                cute.arch.atomic_max(sMaximum.iterator + token, maximum.bitcast(Int32))
        cute.arch.sync_threads()

    @cute.jit
    def _push(self, group, args, epoch: Int64, first: Int32, count: Int32, scale: Float32) -> None:
        lane, warp = group.tid % 32, group.tid // 32
        gX, units, segments = self._source(args, first, count)
        items = segments * count
        by_segments = divisor(segments)
        state = self.codec.state(scale)
        rX = cute.make_rmem_tensor((4 * self.source_vectors, self.batch), Uint32)
        rId = cute.make_rmem_tensor(self.batch, Int32)
        for base in cutlass.range(warp, items, WARPS * self.batch, unroll=1):
            for slot in cutlass.range_constexpr(self.batch):
                item = base + slot * WARPS
                segment, token = by_segments.split(item)
                unit = segment * SEGMENT + lane
                if item < items:
                    rId[slot] = self._load_id(group, args, first + token, lane)
                self._load_unit(gX, rX[None, slot], unit, token, (item < items) & (unit < units))
            for slot in cutlass.range_constexpr(self.batch):
                item = base + slot * WARPS
                if item < items:
                    segment, token = by_segments.split(item)
                    unit = segment * SEGMENT + lane
                    mask = self._destinations(group, args, first + token, rId[slot])
                    if cutlass.const_expr(self.codec.fmt.row_scale):
                        state = self.codec.state(self._row_scale(token))
                    message = group.arena.messages.at(epoch & 1, group.rank, first + token)
                    self._push_unit(group, message, unit, units, rX[None, slot], mask, state)

    @cute.jit
    def _row_scale(self, token) -> Float32:
        sMaximum = shared_array(self.row_maxima, Int32)
        return self.codec.row_scale(Int32(sMaximum[token]).bitcast(Float32))

    @cute.jit
    def _push_unit(self, group, message: Int64, unit, units, rX, mask: Uint32, state) -> None:
        """Encode one unit and store it to each destination, starting after the own rank to spread the links."""
        rQ = cute.make_rmem_tensor(4, Uint32)
        bits = self.codec.encode(rX, rQ, state)
        word_index = Int32(0)
        stores_scale = Boolean(False)
        if cutlass.const_expr(self.codec.fmt.scale is not None):
            lanes = word_lanes(self.codec.fmt)
            bits = join_scale_word(self.codec.fmt, bits)
            word_index = unit // lanes
            stores_scale = (unit < units) & (unit % lanes == 0)
        peer = group.rank
        for _ in cutlass.range(group.ranks, unroll=1):
            peer += 1
            if peer == group.ranks:
                peer = Int32(0)
            if (mask >> Uint32(peer)) & Uint32(1) != Uint32(0):
                home = group.sPeers[peer] + message
                if unit < units:
                    gPayload = vector_tensor(home + group.message.payload.offset, 1, unit + 1)
                    cute.copy(vector_atom(), rQ, gPayload[None, 0, unit])
                if cutlass.const_expr(self.codec.fmt.scale is not None):
                    if stores_scale:
                        gScales = array(home + group.message.scales.offset, Uint32, word_index + 1)
                        gScales[word_index] = bits

    @cute.jit
    def _push_row_scales(self, group, args, epoch: Int64, first: Int32, count: Int32) -> None:
        """The upper half of a float32 that is a bfloat16 value is that bfloat16."""
        for token in cutlass.range(group.tid // 32, count, WARPS, unroll=1):
            value = Uint16(self._row_scale(token).bitcast(Uint32) >> 16)
            self._push_row_scale(group, args, epoch, first + token, value)

    @cute.jit
    def _push_row_scale(self, group, args, epoch: Int64, token, value: Uint16) -> None:
        """Store a token's own scale at each destination; by one warp, lane r for rank r."""
        lane = group.tid % 32
        mask = self._destinations(group, args, token, self._load_id(group, args, token, lane))
        if (mask >> Uint32(lane)) & Uint32(1) != Uint32(0):
            at = group.arena.messages.at(epoch & 1, group.rank, token) + group.message.row_scale.offset
            gHome = array(group.sPeers[lane] + at, Uint16, 1)
            gHome[0] = value

    @cute.jit
    def _push_given_scales(self, group, args, epoch: Int64, first: Int32, count: Int32) -> None:
        """Rows that came quantised: the caller's scale factors, [T, scale bytes], and row scales, [T] bfloat16."""
        lane = group.tid % 32
        gScale = array(args.scales, Uint8, args.tokens, args.scale_bytes)
        gRowScale = array(args.given_row_scales, Uint16, args.tokens)
        for token in cutlass.range(first + group.tid // 32, first + count, WARPS, unroll=1):
            mask = self._destinations(group, args, token, self._load_id(group, args, token, lane))
            at = group.arena.messages.at(epoch & 1, group.rank, token) + group.message.scales.offset
            for word in cutlass.range(lane, scale_words(args.scale_bytes), 32, unroll=1):
                bits = Uint32(0)
                for byte in cutlass.range_constexpr(WORD_BYTES):
                    place = word * WORD_BYTES + byte
                    if place < args.scale_bytes:
                        bits = bits | (Uint32(gScale[token, place]) << (8 * byte))
                for peer in cutlass.range(group.ranks, unroll=1):
                    if (mask >> Uint32(peer)) & Uint32(1) != Uint32(0):
                        gHome = array(group.sPeers[peer] + at, Uint32, word + 1)
                        gHome[word] = bits
            if args.row_scale_bytes != 0:
                self._push_row_scale(group, args, epoch, token, Uint16(gRowScale[token]))
