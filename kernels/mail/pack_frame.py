"""Pack a frame: a rank's tokens become the frame that the rail's engine takes to the other nodes.

What is read and written, as axes and shape : stride, beside the arguments' own. T tokens, F rows of a frame, K entries,
V vectors of a row, B bytes of its scale factors:

    payload      (token, vector)   (F, V)  : (V, 1)       vectors of 16 bytes; rows from T on stay as they are
    scales_out   (token, byte)     (F, B)  : (B, 1)
    ids          (token, k)        (F, K)  : (K, 1)       int32 at `routes` + 16, -1 from row T on
    weights      (token, k)        (F, K)  : (K, 1)       float32; 1 without weights, and from row T on
    row_scales   (token)           (F)     : (1)          bfloat16
    header       (MailHeader)      (4)     : (1)          int32 at `routes`

The engine reads the frame whenever the host has told it to, so nothing is written before every other node's rank has
read the frame of the round before (its word `free`), and no header after a failure: a header says of which round the
frame is. An id out of range is reported here, and travels as -1.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16

from cute_ep.kernels.device.block import copy_vectors, launch_config
from cute_ep.kernels.device.context import given_id, is_beyond
from cute_ep.kernels.device.memory import LANES, array, part_at, row_address
from cute_ep.kernels.device.slices import first_item, item_stride
from cute_ep.kernels.device.sync import Awaited, report
from cute_ep.kernels.mail.place import Place, open_channel
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.mail import HEADER_BYTES, RoundWord
from cute_ep.layouts.maps.mail_arguments import PackFrameArgs
from cute_ep.layouts.maps.routing import BEYOND, INPUT_ERRORS, MASKED_ENTRY, Phase


class PackFrame:
    """Tokens, strided over the warps of the grid; entries, over its threads."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: PackFrameArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: PackFrameArgs) -> None:
        place = open_channel(args.group)
        epoch = place.rounds(RoundWord.SENT) + 1
        alive = place.wait_free(epoch - 1, Phase.FRAME_READ)
        if alive:
            self._copy_rows(args, place)
            self._write_entries(args, place)
        place.finish(alive, epoch, args.routes, Int64(0), args.frame)

    @cute.jit
    def _copy_rows(self, args: PackFrameArgs, place: Place) -> None:
        ctas = cute.arch.grid_dim()[0]
        gScale = array(args.scales, Uint8, args.tokens, args.scales_pitch)
        gScaleOut = array(args.scales_out, Uint8, args.tokens, args.scale_bytes)
        gOwn, gOwnOut = (
            array(at, Uint16, args.tokens) for at in (args.row_scales, part_at(args.routes, args.row_scales_at))
        )
        first = first_item(cute.arch.block_idx()[0], ctas, place.warp)
        for token in cutlass.range(first, args.tokens, item_stride(ctas), unroll=1):
            to = row_address(args.payload, token, args.vectors * VECTOR_BYTES)
            source = row_address(args.x, token, Int64(args.x_vectors) * VECTOR_BYTES)
            copy_vectors(to, source, args.vectors, place.lane, LANES)
            for byte in cutlass.range(place.lane, args.scale_bytes, LANES, unroll=1):
                gScaleOut[token, byte] = gScale[token, byte]
            if (args.row_scales != 0) & (place.lane == 0):
                gOwnOut[token] = gOwn[token]

    @cute.jit
    def _write_entries(self, args: PackFrameArgs, place: Place) -> None:
        entries, given = args.frame * args.top_k, args.tokens * args.top_k
        gId, gWeight = array(part_at(args.routes, HEADER_BYTES), Int32, entries), array(args.weights, Float32, given)
        gOut = array(part_at(args.routes, args.weights_at), Float32, entries)
        start = cute.arch.block_idx()[0] * THREADS + place.tid
        for index in cutlass.range(start, entries, cute.arch.grid_dim()[0] * THREADS, unroll=1):
            expert, weight = Int32(MASKED_ENTRY), Float32(1.0)
            if index < given:
                expert = self._checked(args, place, index)
                if args.weights != 0:
                    weight = gWeight[index]
            gId[index] = expert
            gOut[index] = weight

    @cute.jit
    def _checked(self, args: PackFrameArgs, place: Place, index: Int32) -> Int32:
        """An id that is an expert's, else MASKED_ENTRY; reported unless it was that. One that does not fit 32 bits is
        reported and counts as its lower half."""
        entries = args.tokens * args.top_k
        given = given_id(args.ids, entries, index)
        wrong = (given < MASKED_ENTRY) | (given >= args.experts)
        seen = given
        if is_beyond(args.ids, entries, index, given):
            seen = Int32(BEYOND)
        if wrong | (seen == BEYOND):
            record = args.group.nodes + INPUT_ERRORS.index(Phase.EXPERT_ID)
            report(place.wait_context, Awaited(record, Phase.EXPERT_ID, index), args.experts, seen)
        return cutlass.select_(wrong, Int32(MASKED_ENTRY), given)
