"""What a receiving rank writes once it knows the routes: offsets, counts, and zeros in the padding."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16

from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.atoms import fill
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.divide import quotient, round_up
from cute_ep.kernels.device.memory import LANES, array, item_coord, row_address, row_at, share
from cute_ep.kernels.device.scale_rows import zero_scale_rows
from cute_ep.kernels.device.slices import first_item, item_stride, vectors_of
from cute_ep.kernels.dispatch.row_tables import Tables
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.routing import LOST_ROW, NO_ROW, Phase
from cute_ep.layouts.maps.scales import ATOM_ROWS

PADDING_PARTS = 16
"""Parts, a warp each, into which the zeroing of one group's padding is cut."""


@cute.jit
def put_expert(ctx: DispatchContext, entry: Int32, expert: Int32) -> None:
    """Element `entry` of row_expert_ids, of which an int64 is two words, the lower one first."""
    wide = ctx.out.wide_ids
    gRowExpert = array(ctx.out.row_expert_ids, Int32, (ctx.out.capacity * ctx.top_k) << wide)
    gRowExpert[entry << wide] = expert
    if wide != 0:
        gRowExpert[(entry << wide) + 1] = expert >> 31


class Outputs:
    """Writes the small outputs from the tables."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    @cute.jit
    def zero_padding(self, ctx: DispatchContext, receiver: Int32, receivers: Int32) -> None:
        """By each receiving CTA, number `receiver` of `receivers`. Jobs go from the last warp down: those have the
        fewest rows, if slices are not drawn. What a block holds after its rows is undefined."""
        if (self.tables.are_scattered(ctx) | (ctx.out.aligned != 0)) & (ctx.out.blocks == 0):
            jobs = (self.tables.groups(ctx) + ctx.shared.groups) * PADDING_PARTS
            last_first = item_stride(receivers) - 1 - first_item(receiver, receivers, ctx.warp)
            for job in cutlass.range(last_first, jobs, item_stride(receivers), unroll=1):
                part, place = item_coord(job, PADDING_PARTS)
                self._zero_group(ctx, place - ctx.shared.groups, part)

    @cute.jit
    def mask_unused(self, ctx: DispatchContext, receiver: Int32, receivers: Int32) -> None:
        """In rank-major order, no experts for rows that no token has: a matmul that reads them leaves these rows out.
        By each receiving CTA, number `receiver` of `receivers`."""
        fits = self.tables.row_start(ctx, self.tables.groups(ctx)) <= ctx.out.capacity
        for group in cutlass.range(self.tables.groups(ctx), unroll=1):
            first = self.tables.row_start(ctx, group) + self.tables.rows_of(ctx, group)
            end = self.tables.row_start(ctx, group + 1)
            if group == self.tables.groups(ctx) - 1:
                end = ctx.out.capacity
            if not fits:
                first, end = Int32(0), cutlass.select_(group == 0, ctx.out.capacity, Int32(0))
            start = first * ctx.top_k + receiver * THREADS + ctx.tid
            for at in cutlass.range(start, end * ctx.top_k, receivers * THREADS, unroll=1):
                put_expert(ctx, at, Int32(NO_ROW))

    @cute.jit
    def run(self, ctx: DispatchContext) -> None:
        """Offsets, counts and headers, by one CTA.

        No rows are published when they do not all fit: a consumer must not be led past the end of the buffers.
        """
        sHeader = shared_array(self.tables.headers, Int32)
        groups = self.tables.groups(ctx) + ctx.shared.groups
        gRowOffset = array(ctx.out.row_offsets, Int32, groups + 1)
        gRowCount = array(ctx.out.row_counts, Int32, groups)
        gExpertId = array(ctx.out.expert_ids, Int32, groups)
        gScaleOffset = array(ctx.out.scales_offsets, Int32, groups)
        gHeader = array(ctx.out.headers, Int32, ctx.ranks, len(HeaderWord))
        gNumRows = array(ctx.out.num_rows, Int32, 1)
        rows = self.tables.row_start(ctx, self.tables.groups(ctx))
        fits = rows <= ctx.out.capacity
        if (ctx.tid == 0) & ~fits:
            ctx.report_input(Phase.ROW_CAPACITY, Int32(0), ctx.out.capacity, rows)
        for place in cutlass.range(ctx.tid, groups + 1, THREADS, unroll=1):
            group = place - ctx.shared.groups
            start = Int32(0)
            rows = ctx.shared.rows
            scale_start = Int32(0)
            if group >= 0:
                start = self.tables.row_start(ctx, group)
                rows = Int32(0)
                if group < self.tables.groups(ctx):
                    rows = self.tables.rows_of(ctx, group)
                    arrived = self.tables.arrived(ctx, group)
                    if rows < arrived:
                        ctx.report_input(Phase.ROW_CAPACITY, group + 1, rows, arrived)
                    scale_start = self.tables.scale_start(ctx, group)
            if not fits:
                start = Int32(0)
                rows = Int32(0)
                scale_start = Int32(0)
            gRowOffset[place] = start
            if group < self.tables.groups(ctx):
                gRowCount[place] = rows
                gExpertId[place] = place
                if ctx.out.scales_offsets != Int64(0):
                    gScaleOffset[place] = quotient(scale_start, ATOM_ROWS) - quotient(start, ATOM_ROWS)
            else:
                gNumRows[0] = start
        for index in cutlass.range(ctx.tid, ctx.ranks * len(HeaderWord), THREADS, unroll=1):
            word, source = item_coord(index, len(HeaderWord))
            gHeader[source, word] = sHeader[source, word]
        if cutlass.const_expr(not self.tables.rank_major):
            self._write_sources(ctx, fits)

    @cute.jit
    def _write_sources(self, ctx: DispatchContext, fits: Boolean) -> None:
        """The rows of each group that came from each source, by one CTA. All rows of the shared expert are
        this rank's own."""
        gRange = array(ctx.out.source_ranges, Int32, (ctx.shared.groups + ctx.local_experts) * ctx.ranks, 2)
        sBase = shared_array(self.tables.bases, Int32)
        room = Int32(0)
        if fits:
            room = cutlass.select_(ctx.out.blocks != 0, ctx.out.row_alignment, Int32(LOST_ROW))
        for pair in cutlass.range(ctx.tid, (ctx.shared.groups + ctx.local_experts) * ctx.ranks, THREADS, unroll=1):
            source, place = ctx.by_ranks.split(pair)
            first = cutlass.select_(source > ctx.rank, ctx.shared.rows, Int32(0))
            end = cutlass.select_(source >= ctx.rank, ctx.shared.rows, Int32(0))
            if place >= ctx.shared.groups:
                count = pair - ctx.shared.groups * ctx.ranks
                first = sBase[count] - sBase[count - source]
                end = sBase[count + 1] - sBase[count - source]
            gRange[pair, 0] = cutlass.min(end, room) - cutlass.min(first, room)
            gRange[pair, 1] = cutlass.min(first, room)

    @cute.jit
    def _zero_group(self, ctx: DispatchContext, group: Int32, part: Int32) -> None:
        """Zero one part of the rows between a group's last one and its end; -1 is the shared expert's."""
        start = Int32(0)
        rows = ctx.shared.rows
        scale_start = Int32(0)
        if group >= 0:
            start = self.tables.row_start(ctx, group)
            rows = self.tables.arrived(ctx, group)
            scale_start = self.tables.scale_start(ctx, group)
        end = start + round_up(rows, ctx.out.row_alignment)
        if end <= ctx.out.capacity:
            if self.tables.are_scattered(ctx):
                scale_end = scale_start + round_up(rows, ctx.scales.alignment)
                zero_scale_rows(ctx.scales, scale_start + rows, scale_end, (part, PADDING_PARTS), ctx.lane)
            if start + rows < end:
                self._zero_rows(ctx, start + rows, end, part)

    @cute.jit
    def _zero_rows(self, ctx: DispatchContext, first: Int32, end: Int32, part: Int32) -> None:
        """Rows of the payload are contiguous, so padding is one run of 16-byte vectors. What lies beside rows is small,
        and tells that they are padding, so it is always written."""
        lane = ctx.lane
        if ctx.out.zeroed != 0:
            vectors = (end - first) * vectors_of(ctx.wire.payload_bytes)
            gOut = row_at(row_address(ctx.out.tokens, first, ctx.wire.payload_bytes), vectors)
            for place in cutlass.range(part * LANES + lane, vectors, LANES * PADDING_PARTS, unroll=1):
                fill(0, share(gOut, place, 1))
        if part == 0:
            gSource = array(ctx.out.src_info, Int32, ctx.out.capacity, 2)
            gRowScale = array(ctx.out.row_scales, Uint16, ctx.out.capacity)
            weights = ctx.top_k if self.tables.rank_major else Int32(1)
            gRowWeight = array(ctx.out.row_weights, Int32, ctx.out.capacity * weights)
            for weight in cutlass.range(first * weights + lane, end * weights, 32, unroll=1):
                gRowWeight[weight] = Int32(0)
            for row in cutlass.range(first + lane, end, 32, unroll=1):
                gSource[row, 0] = Int32(NO_ROW)
                gSource[row, 1] = Int32(NO_ROW)
                if ctx.wire.row_scale_bytes != 0:
                    gRowScale[row] = Uint16(0)

    @cute.jit
    def retract(self, ctx: DispatchContext) -> None:
        """One thread, after a timeout: no rows, no tokens. In rank-major order a row that another CTA was writing may
        keep its experts."""
        groups = self.tables.groups(ctx) + ctx.shared.groups
        gRowOffset = array(ctx.out.row_offsets, Int32, groups + 1)
        gRowCount = array(ctx.out.row_counts, Int32, groups)
        gHeader = array(ctx.out.headers, Int32, ctx.ranks * len(HeaderWord))
        gNumRows = array(ctx.out.num_rows, Int32, 1)
        gNumRows[0] = 0
        gRowOffset[groups] = 0
        # without `opaque` the compiler makes these pointers at the kernel's start, and keeps them
        for place in cutlass.range(opaque(0), groups, unroll=1):
            gRowOffset[place] = 0
            gRowCount[place] = 0
        for index in cutlass.range(opaque(0), ctx.ranks * len(HeaderWord), unroll=1):
            gHeader[index] = 0
        if cutlass.const_expr(not self.tables.rank_major):
            gRange = array(ctx.out.source_ranges, Int32, groups * ctx.ranks * 2)
            for at in cutlass.range(opaque(0), groups * ctx.ranks * 2, unroll=1):
                gRange[at] = 0
        if cutlass.const_expr(self.tables.rank_major):
            for at in cutlass.range(opaque(0), ctx.out.capacity * ctx.top_k, unroll=1):
                put_expert(ctx, at, Int32(NO_ROW))
