"""Scale tiles role: scale factors of many rows, written when all messages are here, 128 rows at a time.

In the layouts that matmuls read, the scale words of a row lie far apart, and the rows of one token lie anywhere. Stored
with the payload, each word is a 4-byte store to a 32-byte sector of its own: more than half of the time of receiving
4096 NVFP4 tokens a rank. But four rows of a tile have their words of one column side by side (`scales.py`). So a
lane takes such four rows, a *line*: it reads 16 bytes of each, four columns, and stores them column by column, 16 bytes
each, next to those of its neighbours.

That takes every row of a tile, whichever CTA took its message, so a grid barrier of all receiving CTAs comes first. The
words come from the messages in the arena, which stay until the next launch signals `consumed`; those of Lamport
messages were staged before they were cleared, and `RowCopy` has put those of own tokens where a message would have
them. The token of a row stands in `src_info`, its source follows from its place among the rows of its expert.
`Tables.are_tiled` says where this pays. Weak loads are enough: the barrier orders them after all that any CTA has
waited for or stored.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.lamport import is_lamport
from cute_ep.kernels.device.memory import WORDS, array, row_address, row_at, share, vectors_at
from cute_ep.kernels.device.scale_rows import scale_row_address
from cute_ep.kernels.device.slices import first_item, from_lane, item_stride
from cute_ep.kernels.dispatch.row_tables import Tables
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.scales import ATOM_ROWS, LANE_ROWS, tile_row

WARP_COLUMNS = WORDS * WORDS
"""Word columns that a warp takes: 64 bytes of a row, four lanes."""
LINES = 16
"""Lines, LANE_ROWS rows each, that a warp takes: half a tile."""
SIDE_BY_SIDE = 32 // WORDS
"""Lines that a warp takes at a time, neighbours: their words of a column are 128 bytes."""
TURNS = LINES // SIDE_BY_SIDE
FOUND_ROWS = LINES * LANE_ROWS // 32
"""Rows of which a lane finds the messages."""


class ScaleTiles:
    """Writes the scale factors of all rows, and zeros where a group is padded."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    @cute.jit
    def run(self, ctx: DispatchContext, receiver: Int32, receivers: Int32) -> None:
        """By the warps of receiving CTA `receiver` of `receivers`, after their grid barrier. If rows were lost there
        is nothing to write.

        Neighbouring items are the columns of the same rows, so that the words of a row are read at about the same
        time: 512 and 1024 NVFP4 tokens on two H200s take 19.9 and 30.3 us, in the other order 20.6 and 31.0
        (2026-11-22).
        """
        rows = self.tables.scale_start(ctx, self.tables.groups(ctx))
        if self.tables.row_start(ctx, self.tables.groups(ctx)) > ctx.out.capacity:
            rows = Int32(0)
        halves = quotient(rows + (ATOM_ROWS - 1), ATOM_ROWS) * (ATOM_ROWS // LANE_ROWS // LINES)
        across = quotient(ctx.scales.words + (WARP_COLUMNS - 1), WARP_COLUMNS)
        item = first_item(receiver, receivers, ctx.warp)
        while item < halves * across:
            half = Int32(Uint32(item) // Uint32(across))
            self._write(ctx, rows, half * LINES, (item - half * across) * WARP_COLUMNS)
            item += item_stride(receivers)

    def _row(self, ctx: DispatchContext, line: Int32, part: Int32 | int) -> Int32:
        """Scale row `part` of a line; lines are counted through all tiles."""
        in_tile = ATOM_ROWS // LANE_ROWS
        is_atom = Int32(ctx.scales.is_atom)
        return quotient(line, in_tile) * ATOM_ROWS + tile_row(remainder(line, in_tile), part, is_atom)

    @cute.jit
    def _write(self, ctx: DispatchContext, rows: Int32, first_line: Int32, column: Int32) -> None:
        """WARP_COLUMNS columns from `column` on of LINES lines: lane (q, i) = (lane % 4, lane // 4) takes vector q of
        lines i and SIDE_BY_SIDE + i."""
        rWhere = self._find_messages(ctx, rows, first_line)
        lane = opaque(ctx.lane)
        place = column + remainder(lane, WORDS) * WORDS
        # no load depends on a condition: then all are on their way at once
        inside = cutlass.min(quotient(place, WORDS), quotient(ctx.scales.words - 1, WORDS))
        rX = cute.make_rmem_tensor((WORDS, LANE_ROWS), Uint32)
        rLine = cute.make_rmem_tensor((LANE_ROWS, WORDS), Uint32)
        for turn in cutlass.range_constexpr(TURNS):
            for part in cutlass.range_constexpr(LANE_ROWS):
                where = self._from_finder(rWhere, lane, turn, part)
                move(plain, vectors_at(row_address(ctx.base, where, VECTOR_BYTES), inside), [rX[None, part]])
            for part in cutlass.range_constexpr(LANE_ROWS):
                if self._from_finder(rWhere, lane, turn, part) == Uint32(0):
                    rX[None, part].fill(0)
            row = self._row(ctx, first_line + turn * SIDE_BY_SIDE + quotient(lane, WORDS), 0)
            if row < rows:
                for word in cutlass.range_constexpr(WORDS):
                    for part in cutlass.range_constexpr(LANE_ROWS):
                        rLine[part, word] = rX[word, part]
                gLine = row_at(scale_row_address(ctx.scales, row, place), ctx.scales.words - place, ctx.scales.step)
                move(plain, rLine, share(gLine, 0, WORDS, 1))

    def _from_finder(self, rWhere: cute.Tensor, lane: Int32, turn: int, part: int) -> Uint32:
        """Where the row of a lane's turn and part is, from the lane that found it."""
        finder = (part // FOUND_ROWS) * LINES + turn * SIDE_BY_SIDE + quotient(lane, WORDS)
        return from_lane(rWhere[part % FOUND_ROWS], finder)

    @cute.jit
    def _find_messages(self, ctx: DispatchContext, rows: Int32, first_line: Int32) -> cute.Tensor:
        """Where the scale words of rows lie in the arena, in vectors of 16 bytes; 0 for padding. Lane (i, j) =
        (lane % LINES, lane // LINES) finds FOUND_ROWS rows, from part j * FOUND_ROWS on, of line i."""
        rWhere = cute.make_rmem_tensor(FOUND_ROWS, Uint32)
        rWhere.fill(0)
        lane = opaque(ctx.lane)
        line = first_line + remainder(lane, LINES)
        part = FOUND_ROWS * quotient(lane, LINES)
        row = self._row(ctx, line, part)
        if row < rows:
            group = self._group_of(ctx, row)
            for index in cutlass.range_constexpr(FOUND_ROWS):
                rWhere[index] = self._message_of(ctx, group, self._row(ctx, line, part + index))
        return rWhere

    @cute.jit
    def _group_of(self, ctx: DispatchContext, row: Int32) -> Int32:
        """The group that a scale row belongs to; -1 for the shared expert's."""
        low = Int32(0)
        high = self.tables.groups(ctx)
        while low < high:
            middle = quotient(low + high, 2)
            if self.tables.scale_start(ctx, middle) <= row:
                low = middle + 1
            else:
                high = middle
        return low - 1

    @cute.jit
    def _message_of(self, ctx: DispatchContext, group: Int32, row: Int32) -> Uint32:
        """The same for one scale row of a group, or of the shared expert's (-1)."""
        sBase = shared_array(self.tables.bases, Int32)
        sHeader = shared_array(self.tables.headers, Int32)
        start, first, count = Int32(0), Int32(0), ctx.shared.rows  # of the group: scale row, output row, rows
        if group >= 0:
            start, first = self.tables.scale_start(ctx, group), self.tables.row_start(ctx, group)
            count = self.tables.arrived(ctx, group)
        place = row - start
        known = cutlass.select_(place < count, first + place, Int32(0))  # no branch: loads of two rows overlap
        token = array(ctx.out.src_info, Int32, ctx.out.capacity, 2)[known, 0]
        source = ctx.rank
        if group >= 0:
            source = group
            if cutlass.const_expr(not self.tables.rank_major):
                source = Int32(0)
                number = sBase[group * ctx.ranks] + place
                for other in cutlass.range(1, ctx.ranks, unroll=1):
                    source += Int32(sBase[group * ctx.ranks + other] <= number)
        where = Uint32(0)
        if place < count:
            tokens = sHeader[source, int(HeaderWord.TOKENS)]
            if Uint32(token) < Uint32(tokens):
                offset = ctx.arena.messages.at(opaque(ctx.epoch & 1), source, token) + ctx.wire.scales_at
                if is_lamport(tokens):
                    offset = ctx.arena.staged_scales.at(source, token)
                where = Uint32(quotient(offset, VECTOR_BYTES))
        return where
