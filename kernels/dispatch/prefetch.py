"""Prefetch for a sending warp: its rows on their way into shared memory, a tile before they are needed.

A tile is what a warp encodes at a time: up to TILE_VECTORS vectors of 16 bytes, of one slice. While it does, the next
one, of this slice or of the warp's next, is copied asynchronously, which takes no registers. Loads are coalesced; the
vectors of a unit are neighbours, and `swizzled` spreads them over the banks.

With it 64 CTAs take 57 us for 4096 rows of 7168 as NVFP4, which their instructions need, without it 66 (H200,
2026-11-22).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_ep.kernels.codec.base import source_vectors
from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.atoms import fetch, move, plain
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, shared_array, swizzled_vectors
from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.memory import row_address, row_at, share
from cute_ep.kernels.device.slices import SEGMENT, vectors_of
from cute_ep.kernels.dispatch.given_rows import given_row
from cute_ep.layouts.maps.formats import VECTOR_BYTES, Format
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.scales import WORD_BYTES

STAGES = 2
"""Tiles of a warp: one that it encodes, one on its way."""
TILE_VECTORS = SEGMENT * LOADS_IN_FLIGHT


class Prefetch:
    """The rows that a CTA sends.

    Args:
        fmt: the format of what is sent.
        ahead: whether tiles are loaded ahead, into shared memory; otherwise when they are taken.

    Attributes:
        vectors: 16-byte vectors of a unit.
        units: units that a lane takes from a tile.
    """

    def __init__(self, fmt: Format, ahead: bool, shared: RegionMap) -> None:
        self.fmt, self.vectors, self.ahead = fmt, source_vectors(fmt), ahead
        # without tiles a lane holds what it has loaded: half as much, or sm_120a is short of registers
        self.units = max(1, (LOADS_IN_FLIGHT if ahead else LOADS_IN_FLIGHT // 2) // self.vectors)
        if ahead:
            self.tiles = shared.add("source_tiles", 4, WARPS * STAGES, TILE_VECTORS, 4)

    def row_units(self, ctx: DispatchContext) -> Int32:
        """Units of a row."""
        unit_bytes = self.fmt.unit_words * WORD_BYTES
        if unit_bytes == VECTOR_BYTES:
            return vectors_of(ctx.wire.payload_bytes)
        return Int32(Uint32(ctx.wire.payload_bytes) // unit_bytes)

    def _tile(self, ctx: DispatchContext, stage: Int32) -> cute.Tensor:
        """(vector, word) of a tile of the warp."""
        return shared_array(self.tiles, Uint32)[ctx.warp * STAGES + stage, None, None]

    @cute.jit
    def fetch(self, ctx: DispatchContext, token: Int32, base: Int32, last: Int32, stage: Int32) -> None:
        """Begin to load segments (32 units) base .. base + units - 1 of a row into the warp's tile `stage`, whose
        content it has taken, but none from `last` on; zeros beyond the end of the row."""
        if cutlass.const_expr(self.ahead):
            cute.arch.sync_warp()  # by all lanes
            if base < last:
                lane = opaque(ctx.lane)  # or the places in shared memory would be kept in registers
                first = base * (SEGMENT * self.vectors) + lane
                vectors = cutlass.min(last * (SEGMENT * self.vectors), self.row_units(ctx) * self.vectors)
                tRow = share(row_at(given_row(ctx, token), vectors), first, self.units * self.vectors)
                move(fetch, tRow, swizzled_vectors(self._tile(ctx, stage), lane, tRow.turns, SEGMENT))
            cute.arch.cp_async_commit_group()

    def wait(self) -> None:
        """Wait until the tiles of all the warp's fetches but the last may be read."""
        if self.ahead:
            cute.arch.cp_async_wait_group(STAGES - 1)
            cute.arch.sync_warp()

    @cute.jit
    def read(
        self,
        ctx: DispatchContext,
        token: Int32,
        base: Int32,
        number: cutlass.Constexpr[int],
        stage: Int32,
        rX: cute.Tensor,
    ) -> None:
        """The lane's unit `number` of the tile that begins with segment `base`."""
        lane = opaque(ctx.lane)
        if cutlass.const_expr(self.ahead):
            first = (number * SEGMENT + lane) * self.vectors
            move(plain, swizzled_vectors(self._tile(ctx, stage), first, self.vectors, 1), rX)
        else:
            self.load(ctx, token, (base + number) * SEGMENT + lane, rX)

    def load(self, ctx: DispatchContext, token: Int32, unit: Int32, rX: cute.Tensor) -> None:
        """One unit of a row, from where it is; zeros beyond the end of the row."""
        there = cutlass.select_(unit < self.row_units(ctx), Int32(self.vectors), Int32(0))
        gUnit = row_at(row_address(given_row(ctx, token), unit, self.vectors * VECTOR_BYTES), there)
        move(plain, share(gUnit, 0, self.vectors, 1), rX, outside=0)
