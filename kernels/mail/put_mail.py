"""Put mail: copy the pieces of this rank's mail to every other node's rank, whose memory the GPU reaches.

As axes and shape : stride. N nodes, B bytes of a piece:

    source   (node, byte)   (N, B) : (step, 1)    of the round's parity; step 0 where all get the same
    to       (byte)         (B)    : (1)          in the map of each node's rank

Vectors of 16 bytes where a piece begins and ends at multiples, else bytes. After a failure nothing is put.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from cute_ep.kernels.device.block import copy_vectors, launch_config
from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.memory import array, part_at, row_address
from cute_ep.kernels.mail.place import open_channel
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.mail import Piece, RoundWord
from cute_ep.layouts.maps.mail_arguments import PutArgs, PutMailArgs


class PutMail:
    """Vectors, strided over the threads of the grid, piece by piece of one node after the other."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: PutMailArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: PutMailArgs) -> None:
        place = open_channel(args.group)
        if place.not_aborted():
            parity = place.rounds(RoundWord.SENT) & 1
            for number in cutlass.range(len(Piece), unroll=1):
                piece = self._piece(args, number)
                for node in cutlass.range(args.group.nodes, unroll=1):
                    if (node != args.group.node) & (piece.num_bytes != 0):
                        mail = array(args.mails, Int64, args.group.nodes)[node]
                        source = row_address(row_address(piece.source, node, piece.step), parity, piece.source_turn)
                        to = row_address(part_at(mail, piece.to), parity, piece.to_turn)
                        self._copy(source, to, piece.num_bytes, place.tid)

    def _piece(self, args: PutMailArgs, number: Int32) -> PutArgs:
        """The piece with a number of `Piece`, chosen at run time: three copies of the loop would spill."""
        fields = zip(args.payload, args.scales, args.routes, strict=True)
        payload, scales = number == int(Piece.PAYLOAD), number == int(Piece.SCALES)
        return PutArgs(*(cutlass.select_(payload, a, cutlass.select_(scales, b, c)) for a, b, c in fields))

    @cute.jit
    def _copy(self, source: Int64, to: Int64, num_bytes: Int64, tid: Int32) -> None:
        thread = cute.arch.block_idx()[0] * THREADS + tid
        threads = cute.arch.grid_dim()[0] * THREADS
        if ((source | to | num_bytes) & (VECTOR_BYTES - 1)) == 0:
            copy_vectors(to, source, Int32(quotient(num_bytes, VECTOR_BYTES)), thread, threads)
        else:
            count = Int32(num_bytes)
            gFrom, gTo = array(source, Uint8, count), array(to, Uint8, count)
            for byte in cutlass.range(thread, count, threads, unroll=1):
                gTo[byte] = gFrom[byte]
