"""Scale tiles role: scale factors of many rows, written when all messages are here, 128 rows at a time.

In the layouts that matmuls read, the scale words of a row lie far apart, and the rows of one token lie anywhere. Stored
with the payload, each word is a 4-byte store to a 32-byte sector of its own: more than half of the time of receiving
4096 NVFP4 tokens a rank. But four rows of a tile have their words of one column side by side (`layouts.scales`). So a
lane takes such four rows: it reads 16 bytes of each from its message, four columns, and stores them column by column,
16 bytes each, next to those of its neighbours.

That takes every row of a tile, whichever CTA took its message: all receiving CTAs of the launch meet first. The words
come from the arena, where they stay until the next launch posts `consumed`, so no source may be express. The token of a
row stands in `src_info`, its source follows from its place among the rows of its expert. `Tables.are_tiled` says where
this pays.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_ep.kernels.arith import anew
from cute_ep.kernels.block import shared_array
from cute_ep.kernels.divide import quotient
from cute_ep.kernels.express import look_at_vector
from cute_ep.kernels.pieces import first_item, item_stride
from cute_ep.kernels.scale_rows import scale_word_offset
from cute_ep.kernels.tables import Tables
from cute_ep.layouts.arena import HeaderWord
from cute_ep.layouts.device import WORDS, array, vector_at, vector_atom
from cute_ep.layouts.scales import ATOM_ROWS, LANE_ROWS, WORD_BYTES, tile_row

CHUNK_WORDS = 16
"""Word columns of a tile that a warp takes."""


class ScaleTiles:
    """Writes the scale factors of all rows, and zeros where a group is padded."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    @cute.jit
    def run(self, group, args, epoch: Int64, first: Int32, count: Int32) -> None:
        """By the warps of CTA `first` of `count`, after all of these have met. Lost rows leave nothing to write."""
        tile = first_item(first, count, group.warp)
        column = Int32(0)
        if shared_array(self.tables.row_starts, Int32)[group.local_experts] > args.capacity:
            column = args.scale_words
        while column < args.scale_words:
            tiles = quotient(self._start(args, anew(group.local_experts)) + (ATOM_ROWS - 1), ATOM_ROWS)
            if tile < tiles:
                self._write(group, args, epoch, tile * ATOM_ROWS, column)
                tile += item_stride(count)
            else:
                tile -= tiles
                column += CHUNK_WORDS

    def _start(self, args, expert) -> Int32:
        """First scale row of a local expert; all scale rows for the number of them."""
        start = shared_array(self.tables.row_starts, Int32)[expert]
        scale_start = shared_array(self.tables.scale_starts, Int32)[expert]
        return cutlass.select_(args.scale_alignment == args.row_alignment, start, scale_start)

    @cute.jit
    def _write(self, group, args, epoch: Int64, first_row: Int32, column: Int32) -> None:
        """CHUNK_WORDS columns from `column` on of the tile that begins with a scale row."""
        is_atom = Int32(args.scale_middle == 1)
        row = first_row + tile_row(anew(group.lane), 0, is_atom)
        if row < self._start(args, group.local_experts):
            expert = self._expert_of(group, args, row)
            rFrom = cute.make_rmem_tensor(LANE_ROWS, Int64)
            for part in cutlass.range_constexpr(LANE_ROWS):
                rFrom[part] = self._message_of(group, args, epoch, expert, row + tile_row(0, part, is_atom))
            rX = cute.make_rmem_tensor((WORDS, LANE_ROWS), Uint32)
            rLine = cute.make_rmem_tensor(LANE_ROWS, Uint32)
            end = cutlass.min(column + CHUNK_WORDS, args.scale_words)
            line = args.out_scales + WORD_BYTES * scale_word_offset(args, row, column)
            for at in cutlass.range(column, end, WORDS, unroll=1):
                rX.fill(0)
                for part in cutlass.range_constexpr(LANE_ROWS):
                    if rFrom[part] != Int64(0):
                        look_at_vector(rX[None, part], rFrom[part] + Int64(at) * WORD_BYTES)
                for word in cutlass.range_constexpr(WORDS):
                    if at + word < end:
                        for part in cutlass.range_constexpr(LANE_ROWS):
                            rLine[part] = rX[word, part]
                        cute.copy(vector_atom(), rLine, vector_at(line, 0))
                    line += Int64(args.scale_step) * WORD_BYTES

    @cute.jit
    def _expert_of(self, group, args, row: Int32) -> Int32:
        """The local expert that a scale row belongs to; -1 for the shared one."""
        low = Int32(0)
        high = group.local_experts
        while low < high:
            middle = quotient(low + high, 2)
            if self._start(args, middle) <= row:
                low = middle + 1
            else:
                high = middle
        return low - 1

    @cute.jit
    def _message_of(self, group, args, epoch: Int64, expert: Int32, row: Int32) -> Int64:
        """Address of the scale words of a row's message; 0 for padding."""
        sBase = shared_array(self.tables.bases, Int32)
        sStart = shared_array(self.tables.row_starts, Int32)
        sHeader = shared_array(self.tables.headers, Int32)
        source = group.rank
        token = Int32(-1)
        if expert < 0:
            if row < args.shared_rows:
                token = row + args.shared_first
        else:
            place = row - self._start(args, expert)
            number = sBase[expert * group.ranks] + place
            if number < sBase[(expert + 1) * group.ranks]:
                source = Int32(0)
                for other in cutlass.range(1, group.ranks, unroll=1):
                    source += Int32(sBase[expert * group.ranks + other] <= number)
                token = array(args.src_info, Int32, args.capacity, 2)[sStart[expert] + place, 0]
        address = Int64(0)
        if (token >= 0) & (token < sHeader[source, int(HeaderWord.TOKENS)]):
            address = group.base + group.arena.messages.at(anew(epoch & 1), source, token) + args.scales_at
        return address
