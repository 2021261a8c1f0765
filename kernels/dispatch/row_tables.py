"""The tables of a receiving CTA: what every source has sent to this rank, and where its rows begin.

Every receiving CTA scans the counts itself (at most MAX_EXPERTS numbers), so no CTA waits for another one's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.device.block import shared_array, warp_exclusive_scan
from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.divide import round_up
from cute_ep.kernels.device.lamport import is_lamport
from cute_ep.kernels.device.slices import most_slices
from cute_ep.kernels.device.sync import Awaited, wait_ll
from cute_ep.kernels.device.twins import sync_twin
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.launch import THREADS
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS, Phase
from cute_ep.layouts.maps.scales import (
    FEW_WORDS,
    SCATTERED_LAMPORT_WORDS,
    SCATTERED_RANK_MAJOR_WORDS,
    SCATTERED_WORDS,
)


class Tables:
    """Shared memory that `read` fills.

    A group is a local expert, whose rows are counted by source; in rank-major order it is a source rank, whose rows
    have one count.

    Attributes:
        bases: [g * R + source], or [g] in rank-major order: the rows before those that this count counts; the last
            element is the number of all rows.
        row_starts, scale_starts: [g]: the first row, or scale row, of group g where they are aligned or in blocks; the
            last element is the number of all.
        items: ranks times the slices of the source that has the most.
        tiled: 1 if `ScaleTiles` writes the scale factors.
        headers: [source]: its `HeaderWord`s.
    """

    def __init__(self, rank_major: bool, shared: RegionMap) -> None:
        self.rank_major = rank_major
        self.bases = shared.add("row_bases", 4, MAX_EXPERTS + 1)
        self.row_starts = shared.add("row_starts", 4, MAX_EXPERTS + 1)
        self.scale_starts = shared.add("scale_row_starts", 4, MAX_EXPERTS + 1)
        self.items = shared.add("message_items", 4, 1)
        self.tiled = shared.add("scales_tiled", 4, 1)
        self.headers = shared.add("headers", 4, MAX_RANKS, len(HeaderWord))

    def groups(self, ctx: DispatchContext) -> Int32:
        """Groups of rows, without the shared expert's."""
        return ctx.ranks if self.rank_major else ctx.local_experts

    def counts_of_group(self, ctx: DispatchContext) -> Int32:
        """Counts that make up a group."""
        return Int32(1) if self.rank_major else ctx.ranks

    def counts(self, ctx: DispatchContext) -> Int32:
        """Counts of all groups."""
        return ctx.ranks if self.rank_major else ctx.experts

    @cute.jit
    def read(self, ctx: DispatchContext) -> Boolean:
        """Wait for every source's counts and header (`Route`) and fill the tables from them. False after a timeout."""
        parity = ctx.epoch & 1
        sBase = shared_array(self.bases, Int32)
        sStart = shared_array(self.row_starts, Int32)
        sScaleStart = shared_array(self.scale_starts, Int32)
        sHeader = shared_array(self.headers, Int32)
        alive = Boolean(True)
        words = self.counts(ctx) + ctx.ranks * len(HeaderWord)
        for item in cutlass.range(ctx.tid, words, THREADS, unroll=1):
            source, column = ctx.by_ranks.split(item)
            word = ctx.here(ctx.arena.table, parity, source, column)
            value, came = wait_ll(ctx.wait_context, word, ctx.epoch, Awaited(source, Phase.ROUTE_TABLE, column))
            if column < len(HeaderWord):
                sHeader[source, column] = value
            else:
                sBase[item - ctx.ranks * len(HeaderWord)] = value
            alive = alive & came
        alive = ctx.block_all(alive)
        if alive:
            self._place_rows(ctx, sBase, sStart, sScaleStart)
        return alive

    @cute.jit
    def _place_rows(
        self, ctx: DispatchContext, sBase: cute.Tensor, sStart: cute.Tensor, sScaleStart: cute.Tensor
    ) -> None:
        """Scan the counts, then find the groups' first rows and first scale rows side by side: a warp each."""
        sHeader, sItems = shared_array(self.headers, Int32), shared_array(self.items, Int32)
        sTiled = shared_array(self.tiled, Int32)
        if ctx.warp == 0:
            warp_exclusive_scan(lambda pair: sBase[pair], sBase, self.counts(ctx), ctx.lane, Int32(0))
        if ctx.tid == 32:
            sItems[0] = most_slices(sHeader, ctx.ranks) * ctx.ranks
        if ctx.tid == 64:
            sTiled[0] = Int32(0)
        sync_twin()
        if (ctx.out.aligned != 0) | (ctx.scales.words != 0):
            if ctx.warp == 0:
                if ctx.out.aligned != 0:
                    self._place_groups(ctx, sStart, ctx.shared.rows, ctx.out.row_alignment)
            if ctx.warp == 1:
                if (ctx.scales.words != 0) & (ctx.scales.alignment != ctx.out.row_alignment):
                    self._place_groups(ctx, sScaleStart, ctx.shared.rows, ctx.scales.alignment)
            if ctx.warp == 2:
                tokens = Int32(0)
                if ctx.lane < ctx.ranks:
                    tokens = sHeader[ctx.lane, int(HeaderWord.TOKENS)]
                flagged = cute.arch.vote_all_sync((tokens == 0) | ~is_lamport(tokens))
                words = Int64(sBase[self.counts(ctx)] + ctx.shared.rows) * Int64(ctx.scales.words)
                scattered = cutlass.select_(flagged, Int64(SCATTERED_WORDS), Int64(SCATTERED_LAMPORT_WORDS))
                if cutlass.const_expr(self.rank_major):
                    scattered = Int64(SCATTERED_RANK_MAJOR_WORDS)
                many = words > Int64(cute.arch.warp_redux_sync(tokens, "add")) * scattered
                if not flagged:
                    many = many & (words > FEW_WORDS)
                sTiled[0] = Int32((ctx.out.has_tiles != 0) & many)
            sync_twin()

    def are_tiled(self) -> Boolean:
        """Whether `ScaleTiles` writes the scale factors of this launch: with many of them, and a layout that has tiles.
        The same in all receiving CTAs."""
        return shared_array(self.tiled, Int32)[0] != 0

    def are_scattered(self, ctx: DispatchContext) -> Boolean:
        """Whether scale factors are stored, and padding zeroed, word by word, without `ScaleTiles`."""
        return (ctx.scales.words != 0) & ~self.are_tiled()

    def row_start(self, ctx: DispatchContext, group: Int32) -> Int32:
        """First output row of a group; for the number of these, all rows."""
        plain = ctx.shared.rows + shared_array(self.bases, Int32)[group * self.counts_of_group(ctx)]
        return cutlass.select_(ctx.out.aligned == 0, plain, shared_array(self.row_starts, Int32)[group])

    def scale_start(self, ctx: DispatchContext, group: Int32) -> Int32:
        """First scale row of a group; for the number of these, all scale rows."""
        start = self.row_start(ctx, group)
        scale_start = shared_array(self.scale_starts, Int32)[group]
        return cutlass.select_(ctx.scales.alignment == ctx.out.row_alignment, start, scale_start)

    def arrived(self, ctx: DispatchContext, group: Int32) -> Int32:
        """Rows that ranks have sent to a group."""
        sBase = shared_array(self.bases, Int32)
        counts = self.counts_of_group(ctx)
        return sBase[(group + 1) * counts] - sBase[group * counts]

    def rows_of(self, ctx: DispatchContext, group: Int32) -> Int32:
        """Rows of a group, without padding, and without those that its block has no room for."""
        rows = self.arrived(ctx, group)
        return cutlass.select_((ctx.out.blocks != 0) & (rows > ctx.out.row_alignment), ctx.out.row_alignment, rows)

    @cute.jit
    def _place_groups(self, ctx: DispatchContext, sStart: cute.Tensor, shared_rows: Int32, alignment: Int32) -> None:
        """sStart[g] = rows before group g when every group is rounded up to `alignment` (a power of two), or, with
        blocks, has `alignment` rows; by one warp."""

        def room_of(group: Int32) -> Int32:
            aligned = round_up(self.arrived(ctx, group), alignment)
            return cutlass.select_(ctx.out.blocks != 0, alignment, aligned)

        warp_exclusive_scan(room_of, sStart, self.groups(ctx), ctx.lane, round_up(shared_rows, alignment))
