"""Outputs: what a receiving rank knows once the routes are in: offsets, counts, and zeros in the padding."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32

from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.atoms import weak
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import quotient, round_up
from cute_ep.kernels.device.memory import array, item_coord, rows
from cute_ep.kernels.device.scale_rows import zero_scale_rows
from cute_ep.kernels.device.slices import first_item, item_stride, vectors_of
from cute_ep.kernels.roles.row_tables import Tables
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.routing import Phase
from cute_ep.layouts.maps.scales import ATOM_ROWS

PADDING_JOBS = 16
"""Slices, a warp each, into which the zeroing of one group's padding is cut."""


class Outputs:
    """Writes the small outputs from the tables."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    @cute.jit
    def zero_padding(self, ctx, receiver: Int32, receivers: Int32) -> None:
        """By each receiving CTA, number `receiver` of `receivers`. Jobs go from the last warp down: those have the
        fewest rows. Blocks hold anything behind their rows."""
        if (self.tables.are_scattered(ctx) | (ctx.out.row_alignment != 1)) & (ctx.out.blocks == 0):
            jobs = (ctx.local_experts + ctx.shared.groups) * PADDING_JOBS
            last_first = item_stride(receivers) - 1 - first_item(receiver, receivers, ctx.warp)
            for job in cutlass.range(last_first, jobs, item_stride(receivers), unroll=1):
                part, place = item_coord(job, PADDING_JOBS)
                self._zero_group(ctx, place - ctx.shared.groups, part)

    @cute.jit
    def run(self, ctx) -> None:
        """Offsets, counts and headers, by one CTA.

        No rows are published when they do not all fit: a consumer must not be led past the end of the buffers.
        """
        sHeader = shared_array(self.tables.headers, Int32)
        groups = ctx.local_experts + ctx.shared.groups
        gRowOffset = array(ctx.out.row_offsets, Int32, groups + 1)
        gRowCount = array(ctx.out.row_counts, Int32, groups)
        gExpertId = array(ctx.out.expert_ids, Int32, groups)
        gScaleOffset = array(ctx.out.scales_offsets, Int32, groups)
        gHeader = array(ctx.out.headers, Int32, ctx.ranks, len(HeaderWord))
        gNumRows = array(ctx.out.num_rows, Int32, 1)
        rows = self.tables.row_start(ctx, ctx.local_experts)
        fits = rows <= ctx.out.capacity
        if (ctx.tid == 0) & ~fits:
            ctx.report_input(Phase.ROW_CAPACITY, Int32(0), ctx.out.capacity, rows)
        for place in cutlass.range(ctx.tid, groups + 1, THREADS, unroll=1):
            expert = place - ctx.shared.groups
            start = Int32(0)
            rows = ctx.shared.rows
            scale_start = Int32(0)
            if expert >= 0:
                start = self.tables.row_start(ctx, expert)
                rows = Int32(0)
                if expert < ctx.local_experts:
                    rows = self.tables.rows_of(ctx, expert)
                    arrived = self.tables.arrived(ctx, expert)
                    if rows < arrived:
                        ctx.report_input(Phase.ROW_CAPACITY, expert + 1, rows, arrived)
                    scale_start = self.tables.scale_start(ctx, expert)
            if not fits:
                start = Int32(0)
                rows = Int32(0)
                scale_start = Int32(0)
            gRowOffset[place] = start
            if expert < ctx.local_experts:
                gRowCount[place] = rows
                gExpertId[place] = place
                if ctx.out.scales_offsets != Int64(0):
                    gScaleOffset[place] = quotient(scale_start, ATOM_ROWS) - quotient(start, ATOM_ROWS)
            else:
                gNumRows[0] = start
        for index in cutlass.range(ctx.tid, ctx.ranks * len(HeaderWord), THREADS, unroll=1):
            word, source = item_coord(index, len(HeaderWord))
            gHeader[source, word] = sHeader[source, word]

    @cute.jit
    def _zero_group(self, ctx, expert: Int32, part: Int32) -> None:
        """Zero one part of the rows between a group's last one and its end; `expert` -1 is the shared one."""
        start = Int32(0)
        rows = ctx.shared.rows
        scale_start = Int32(0)
        if expert >= 0:
            start = self.tables.row_start(ctx, expert)
            rows = self.tables.arrived(ctx, expert)
            scale_start = self.tables.scale_start(ctx, expert)
        end = start + round_up(rows, ctx.out.row_alignment)
        if end <= ctx.out.capacity:
            if self.tables.are_scattered(ctx):
                scale_end = scale_start + round_up(rows, ctx.scales.alignment)
                zero_scale_rows(ctx.scales, scale_start + rows, scale_end, (part, PADDING_JOBS), ctx.lane)
            if start + rows < end:
                self._zero_rows(ctx, start + rows, end, part)

    @cute.jit
    def _zero_rows(self, ctx, first: Int32, end: Int32, part: Int32) -> None:
        """Rows of the payload are contiguous, so padding is one run of 16-byte vectors."""
        lane = ctx.lane
        row_vectors = vectors_of(ctx.wire.payload_bytes)
        vectors = (end - first) * row_vectors
        gOut = rows(ctx.out.tokens + Int64(first) * ctx.wire.payload_bytes, vectors, 1)
        rZero = cute.make_rmem_tensor(4, Uint32)
        rZero.fill(0)
        for vector in cutlass.range(part * 32 + lane, vectors, 32 * PADDING_JOBS, unroll=1):
            cute.copy(weak(), rZero, gOut[None, vector, 0])
        if part == 0:
            gSource = array(ctx.out.src_info, Int32, ctx.out.capacity, 2)
            gRowScale = array(ctx.out.row_scales, Uint16, ctx.out.capacity)
            for row in cutlass.range(first + lane, end, 32, unroll=1):
                gSource[row, 0] = Int32(-1)
                gSource[row, 1] = Int32(-1)
                if ctx.wire.row_scale_bytes != 0:
                    gRowScale[row] = Uint16(0)

    @cute.jit
    def retract(self, ctx) -> None:
        """One thread, after a timeout: no rows, no tokens."""
        groups = ctx.local_experts + ctx.shared.groups
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
