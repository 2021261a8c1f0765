"""Send role: encode a chunk of tokens once and store it into every destination rank's arena.

A CTA takes chunks of `chunk` consecutive tokens. Its threads walk the chunk's units (16 payload bytes each) as one
flat list, so any hidden size fills the CTA; a token's destinations are one bit mask in shared memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32

from cute_ep.kernels.block import LOADS_IN_FLIGHT, THREADS, shared_array
from cute_ep.kernels.codec import Codec
from cute_ep.kernels.codec.base import source_vectors, unit_scale_bytes
from cute_ep.kernels.divide import divisor
from cute_ep.kernels.route import checked_expert
from cute_ep.layouts.arena import message_map
from cute_ep.layouts.device import array, vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import MAX_CHUNK_ENTRIES


class Send:
    """Encodes and pushes the messages of one launch."""

    def __init__(self, codec: Codec, shared: RegionMap) -> None:
        self.codec = codec
        self.source_vectors = source_vectors(codec.fmt)
        self.scale_bytes = unit_scale_bytes(codec.fmt)
        self.batch = LOADS_IN_FLIGHT // self.source_vectors
        self.masks = shared.add("destinations", 4, MAX_CHUNK_ENTRIES)

    @cute.jit
    def run(self, group, args, epoch: Int64) -> None:
        sMask = shared_array(self.masks, Uint32)
        state = self.codec.prepare(args.global_scale)
        for chunk in cutlass.range(group.cta, args.chunks, args.send_ctas):
            first = chunk * args.chunk
            count = cutlass.min(args.chunk, args.tokens - first)
            self._find_destinations(group, args, first, count, sMask)
            self._push(group, args, epoch, first, count, sMask, state)
            cute.arch.sync_threads()
            group.post_all_ranks(group.arena.message_ready, epoch, chunk)

    @cute.jit
    def _find_destinations(self, group, args, first: Int32, count: Int32, sMask) -> None:
        """sMask[token in chunk] = bit set of the ranks that own one of its experts."""
        for token in cutlass.range(group.tid, count, THREADS, unroll=1):
            sMask[token] = Uint32(0)
        cute.arch.sync_threads()
        gIds = array(args.topk_ids, Int32, args.tokens * group.top_k)
        for entry in cutlass.range(group.tid, count * group.top_k, THREADS, unroll=1):
            expert = checked_expert(gIds[first * group.top_k + entry], group.experts)
            if expert >= 0:
                _, peer = group.by_local_experts.split(expert)
                _, token = group.by_top_k.split(entry)
                cute.arch.atomic_or(sMask.iterator + token, Uint32(1) << Uint32(peer))
        cute.arch.sync_threads()

    @cute.jit
    def _push(self, group, args, epoch: Int64, first: Int32, count: Int32, sMask, state) -> None:
        row_bytes = Int64(group.hidden) * 2
        source = args.x + Int64(first) * row_bytes
        units = group.fmt.payload_bytes(group.hidden) // VECTOR_BYTES
        gX = vector_tensor(source, units * self.source_vectors, count, row_bytes)
        items = units * count
        by_units = divisor(units)
        rX = cute.make_rmem_tensor((4 * self.source_vectors, self.batch), Uint32)
        for base in cutlass.range(group.tid, items, THREADS * self.batch, unroll=1):
            for slot in cutlass.range_constexpr(self.batch):
                item = base + slot * THREADS
                if item < items:
                    unit, token = by_units.split(item)
                    for part in cutlass.range_constexpr(self.source_vectors):
                        rPart = cute.local_tile(rX[None, slot], (4,), (part,))
                        cute.copy(vector_atom(), gX[None, unit * self.source_vectors + part, token], rPart)
            for slot in cutlass.range_constexpr(self.batch):
                item = base + slot * THREADS
                if item < items:
                    unit, token = by_units.split(item)
                    self._push_unit(group, epoch, first, unit, token, rX[None, slot], sMask[token], state)

    @cute.jit
    def _push_unit(self, group, epoch: Int64, first, unit, token, rX, mask: Uint32, state) -> None:
        """Encode one unit and store it to each destination, starting after the own rank to spread the links."""
        payload, scales, _ = message_map(
            group.fmt.payload_bytes(Int64(group.hidden)), group.fmt.scale_bytes(Int64(group.hidden))
        )
        rQ = cute.make_rmem_tensor(4, Uint32)
        scale = self.codec.encode(rX, rQ, state)
        message = group.arena.messages.at(epoch & 1, group.rank, first + token)
        peer = group.rank
        for _ in cutlass.range(group.ranks, unroll=1):
            peer += 1
            if peer == group.ranks:
                peer = Int32(0)
            if (mask >> Uint32(peer)) & Uint32(1) != Uint32(0):
                arena = group.sPeers[peer]
                gPayload = vector_tensor(arena + message + payload.offset, 1, unit + 1)
                cute.copy(vector_atom(), rQ, gPayload[None, 0, unit])
                if cutlass.const_expr(self.scale_bytes > 0):
                    gScales = array(arena + message + scales.offset, Uint16, unit + 1)
                    gScales[unit] = scale
