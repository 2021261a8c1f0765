"""Rows of bfloat16 in, rows of a format out: local quantisation, and a gate between two grouped matmuls.

A warp takes tiles of 1024 values of one row. Its lanes load the sources in memory order and make the values, bfloat16
again; these pass through 2 KiB of the warp's own shared memory, because a lane encodes a whole unit (`codec/base.py`)
and units lie across lanes:

    global  -- lane l: the sources of vectors l, 32 + l, 64 + l, 96 + l, some of them a tile ahead -->  registers
            -- gate -->  shared, vector v at swizzled(v)  -- lane l: the vectors of unit l -->  encode  -->  global

The interleave of gate and up is a pair of layouts: of a row in memory, and of the two sources of one value vector. The
bias of a group is a further row, read where the group's row is computed:

    | row                         | vector (half, v) of the row | number (element, half) of a lane's 16 |
    | --------------------------- | --------------------------- | ------------------------------------- |
    | [gate(D) | up(D)]           | (2, D/8) : (D/8, 1)         | (8, 2) : (1, 8)                       |
    | [gate 0, up 0, gate 1, ...] | (2, D/8) : (1, 2)           | (8, 2) : (2, 1)                       |

Tiles do not depend on each other, so there is no CTA barrier, and the grid may have any size.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32

from cute_ep.kernels.codec import Codec
from cute_ep.kernels.codec.base import State, join_scale_word, source_vectors, word_lanes
from cute_ep.kernels.codec.payload import Payload
from cute_ep.kernels.device.arith import VECTOR_ELEMENTS, unit_amax
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.block import launch_config, shared_array, swizzled_vectors
from cute_ep.kernels.device.divide import quotient, remainder, round_up
from cute_ep.kernels.device.memory import WORDS, array, item_coord, row_address, row_at, share
from cute_ep.kernels.device.scale_rows import store_scale_word, zero_scale_rows
from cute_ep.kernels.device.slices import first_item, item_stride
from cute_ep.kernels.local.gates import NO_BIAS, gated, swiglu
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import TILE_ELEMENTS, WARPS
from cute_ep.layouts.maps.local_arguments import RowsArgs
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.scales import ATOM_ROWS
from cute_ep.layouts.maps.variants import GATED_KERNEL

TILE_VECTORS = TILE_ELEMENTS // VECTOR_ELEMENTS
LANE_VECTORS = TILE_VECTORS // 32
"""Value vectors that a lane makes of one tile."""
AHEAD = 3
"""Turns of a gate whose sources are on their way while a lane computes: one more spills on sm_90a, and with any gate
this one on sm_100a. All without activation."""
TILE_BYTES = TILE_VECTORS * VECTOR_BYTES
INTERLEAVED = "swiglu_interleaved"
ZERO_PARTS = 4
"""Parts, a warp each, into which the zeroing of one group's scale padding is cut: few groups keep many CTAs busy."""


class Rows:
    """One kernel.

    Args:
        codec: device code of the output's format.
        activation: None (quantise), or one of GATE_KERNELS; None where the format has row scales.
    """

    def __init__(self, codec: Codec, activation: str | None) -> None:
        self.codec, self.fmt, self.activation = codec, codec.fmt, activation
        self.sources = 1 if activation is None else 2
        self.any_gate = activation == GATED_KERNEL
        self.interleaved = int(activation == INTERLEAVED)
        self.ahead = {None: LANE_VECTORS, GATED_KERNEL: AHEAD - 1}.get(activation, AHEAD)
        self.unit_vectors = source_vectors(codec.fmt)
        self.segments = LANE_VECTORS // self.unit_vectors
        shared = RegionMap(alignment=VECTOR_BYTES)
        self.values = shared.add("values", 4, WARPS, TILE_VECTORS, 4)
        self.payload = Payload(codec.fmt, shared)
        self.shared_bytes = shared.nbytes

    @cute.jit
    def __call__(self, args: RowsArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid, self.shared_bytes))

    @cute.kernel
    def kernel(self, args: RowsArgs) -> None:
        valid = args.rows
        if args.row_offsets != Int64(0):
            valid = cutlass.min(self._row_offsets(args)[args.groups], args.rows)
        if cutlass.const_expr(self.fmt.scale is not None):
            if args.scales.alignment > 1:
                self._zero_padding(args, valid)
        self._convert(args, valid)

    @cute.jit
    def _convert(self, args: RowsArgs, valid: Int32) -> None:
        """Walk over (tile, row): all warps of the grid side by side, or with row scales each warp along its own row."""
        tid = cute.arch.thread_idx()[0]
        lane, warp = remainder(tid, 32), quotient(tid, 32)
        first = cute.arch.block_idx()[0] * WARPS + warp
        warps = cute.arch.grid_dim()[0] * WARPS
        tiles = self._tiles(args)
        tile, row = item_coord(first, tiles)
        tile_step, row_step = item_coord(warps, tiles)
        row_carry = Int32(1)
        if cutlass.const_expr(self.fmt.row_scale):
            tile, row, tile_step, row_step, row_carry = Int32(0), first, Int32(1), Int32(0), warps
        sValue = shared_array(self.values, Uint32)[warp, None, None]
        rX = cute.make_rmem_tensor((4, self.sources, LANE_VECTORS), Uint32)
        source, left = self._source(args, tile, row, valid, lane)
        for turn in cutlass.range_constexpr(self.ahead):
            self._load(args, source, left, rX, turn)
        state = self.codec.state(self._global_scale(args, Int32(0)))
        while row < valid:
            next_tile = tile + tile_step
            next_row = row + row_step
            if next_tile >= tiles:
                next_tile -= tiles
                next_row += row_carry
            next_source, next_left = self._source(args, next_tile, next_row, valid, lane)
            scale_row = row
            if cutlass.const_expr(self.fmt.scale is not None):
                if args.row_offsets != Int64(0):
                    group = self._group_of(args, row, lane)
                    if args.scales_offsets != Int64(0):
                        scale_row += self._first_scale_row(args, group) - self._row_offsets(args)[group]
                    if cutlass.const_expr(self.fmt.global_scale):
                        if args.per_group != 0:
                            state = self.codec.state(self._global_scale(args, group))
            if cutlass.const_expr(self.fmt.row_scale):
                if tile == 0:
                    state = self.codec.state(self._row_scale(args, source, left, row, lane))
            bias = self._bias(args, tile, row, lane)
            for turn in cutlass.range_constexpr(LANE_VECTORS):
                rValue = self._values(args, rX[None, None, turn], bias, left, turn)
                move(plain, [rValue], swizzled_vectors(sValue, turn * 32 + lane, 1, 1))
                if cutlass.const_expr(turn + self.ahead < LANE_VECTORS):
                    self._load(args, source, left, rX, turn + self.ahead)
                else:
                    self._load(args, next_source, next_left, rX, turn + self.ahead - LANE_VECTORS)
            cute.arch.sync_warp()
            self._encode(args, sValue, tile, row, scale_row, lane, state)
            cute.arch.sync_warp()
            tile, row, source, left = next_tile, next_row, next_source, next_left

    def _tiles(self, args: RowsArgs) -> Int32:
        """Tiles of a row."""
        return quotient(args.width + TILE_ELEMENTS - 1, TILE_ELEMENTS)

    @cute.jit
    def _source(self, args: RowsArgs, tile: Int32, row: Int32, valid: Int32, lane: Int32) -> tuple[Int64, Int32]:
        """Address of a lane's first source vector of a tile, and vectors from its value vector to the end of the row
        (0 for a row that is not valid)."""
        vectors = quotient(args.width, VECTOR_ELEMENTS)
        place = tile * TILE_VECTORS + lane
        address = self._address(args, args.x, row, place)
        left = vectors - place
        if row >= valid:
            left = Int32(0)
        return address, left

    def _address(self, args: RowsArgs, start: Int64, row: Int32, place: Int32) -> Int64:
        """Where a row of x or of the bias has the first source of a value vector."""
        columns, step, _ = self._row(args)
        vectors = quotient(args.width, VECTOR_ELEMENTS)
        return row_address(start, Int64(row) * (vectors * columns) + place * step, VECTOR_BYTES)

    def _row(self, args: RowsArgs) -> tuple[Int32 | int, Int32 | int, Int64 | int]:
        """(sources of a value vector, step, behind) of a row, in vectors: `step` leads from the first source of a value
        vector to the first of the next, `behind` from its first source to its second."""
        if not self.any_gate:
            columns, step = self.sources, 1 + self.interleaved
            behind = 1 if self.interleaved else Int64(quotient(args.width, VECTOR_ELEMENTS))
        else:
            columns, step = args.columns, args.interleaved + 1
            behind = Int64(quotient(args.width, VECTOR_ELEMENTS) * (1 - args.interleaved) + args.interleaved)
        return columns, step, behind

    @cute.jit
    def _load(self, args: RowsArgs, source: Int64, left: Int32, rX: cute.Tensor, turn: cutlass.Constexpr) -> None:
        """The source vectors of one turn, zeros beyond the end of the row."""
        columns, step, behind = self._row(args)
        for half in cutlass.range_constexpr(self.sources):
            inside = left
            if cutlass.const_expr(half == 1 and self.any_gate):
                inside = cutlass.select_(columns == 2, left, Int32(0))
            gX = row_at(row_address(source, half, behind * VECTOR_BYTES), inside, step * WORDS)
            move(plain, share(gX, 0, LANE_VECTORS), rX[None, half, None], outside=0, turns=[turn])

    @cute.jit
    def _bias(self, args: RowsArgs, tile: Int32, row: Int32, lane: Int32) -> Int64:
        """Address of a lane's first bias vector of a tile, 0 where there is no bias."""
        bias = Int64(0)
        if cutlass.const_expr(self.any_gate):
            if args.bias != Int64(0):
                bias = self._address(args, args.bias, self._group_of(args, row, lane), tile * TILE_VECTORS + lane)
        return bias

    @cute.jit
    def _values(
        self, args: RowsArgs, rX: cute.Tensor, bias: Int64, left: Int32, turn: cutlass.Constexpr
    ) -> cute.Tensor:
        """The value vector of one turn, from its sources."""
        rValue = cute.make_rmem_tensor(4, Uint32)
        if cutlass.const_expr(self.activation is None):
            rValue.store(rX[None, 0].load())
        elif cutlass.const_expr(self.any_gate):
            rBias = cute.make_rmem_tensor((4, self.sources, LANE_VECTORS), Uint32)
            rBias[None, None, turn].fill(NO_BIAS)
            if args.bias != Int64(0):
                self._load(args, bias, left, rBias, turn)
            gated(args, rX, rBias[None, None, turn], rValue)
        else:
            swiglu(args, rX, rValue, self.interleaved)
        return rValue

    @cute.jit
    def _encode(
        self,
        args: RowsArgs,
        sValue: cute.Tensor,
        tile: Int32,
        number: Int32,
        scale_row: Int32,
        lane: Int32,
        state: State,
    ) -> None:
        """Lane l encodes unit l of each segment, 32 units, of the tile, of row `number`."""
        units = quotient(args.width, VECTOR_ELEMENTS * self.unit_vectors)
        first = tile * (32 * self.segments) + lane
        vectors = units if self.payload.whole else quotient(units * self.payload.vectors, 32)
        out = row_address(args.out, number, vectors * VECTOR_BYTES)
        rX = cute.make_rmem_tensor((WORDS, self.unit_vectors), Uint32)
        rUnit = cute.make_rmem_tensor(self.payload.words, Uint32)
        rQ = cute.make_rmem_tensor((WORDS, self.payload.turns), Uint32)
        for segment in cutlass.range_constexpr(self.segments):
            sUnit = swizzled_vectors(sValue, (segment * 32 + lane) * self.unit_vectors, self.unit_vectors, 1)
            move(plain, sUnit, rX)
            bits = self.codec.encode(rX, rUnit, state)
            unit = first + segment * 32
            if cutlass.const_expr(self.payload.whole):
                move(plain, [rUnit] * self.segments, share(row_at(out, units), first, self.segments), turns=[segment])
            else:
                self.payload.exchange(quotient(cute.arch.thread_idx()[0], 32), lane, rUnit, rQ)
                start = (tile * self.segments + segment) * self.payload.vectors
                end = cutlass.min(start + self.payload.vectors, vectors)
                move(plain, rQ, share(row_at(out, end), start + lane, self.payload.turns))
            if unit >= units:
                bits = Uint32(0)
            if cutlass.const_expr(self.fmt.scale is not None):
                self._store_scale_word(args, bits, scale_row, unit, unit < units)

    @cute.jit
    def _store_scale_word(self, args: RowsArgs, bits: Uint32, scale_row: Int32, unit: Int32, inside: Boolean) -> None:
        """Scale factors of neighbouring units, and zeros beyond the end of the row, as words."""
        word = join_scale_word(self.fmt, bits)
        lanes = word_lanes(self.fmt)
        if inside & (remainder(unit, lanes) == 0) & (Uint32(scale_row) < Uint32(self._scale_rows(args))):
            store_scale_word(args.scales, Uint32(scale_row), quotient(Uint32(unit), lanes), word)

    @cute.jit
    def _global_scale(self, args: RowsArgs, group: Int32) -> Float32:
        """The scale that the caller gave for a group, or with `per_group` 0 for all rows; 1 without one."""
        scale = Float32(1.0)
        if cutlass.const_expr(self.fmt.global_scale):
            if args.global_scales != Int64(0):
                scale = array(args.global_scales, Float32, args.groups)[group * args.per_group]
        return scale

    @cute.jit
    def _row_scale(self, args: RowsArgs, source: Int64, left: Int32, row: Int32, lane: Int32) -> Float32:
        """Find a row's scale and store it. Reads the last tile first: `_convert` begins with what L1 then has."""
        rX = cute.make_rmem_tensor((4, self.sources, LANE_VECTORS), Uint32)
        amax = Float32(0.0)
        tiles = self._tiles(args)
        for done in cutlass.range(tiles, unroll=1):
            tile = tiles - 1 - done
            for turn in cutlass.range_constexpr(LANE_VECTORS):
                self._load(args, row_address(source, tile, TILE_BYTES), left - tile * TILE_VECTORS, rX, turn)
            amax = cute.arch.fmax(amax, unit_amax(rX, 4 * LANE_VECTORS))
        scale = self.codec.row_scale(cute.arch.warp_reduction_max(amax))
        if lane == 0:
            gRowScale = array(args.row_scales, Uint16, args.rows)
            gRowScale[row] = Uint16(scale.bitcast(Uint32) >> 16)
        return scale

    def _row_offsets(self, args: RowsArgs) -> cute.Tensor:
        return array(args.row_offsets, Int32, args.groups + 1)

    @cute.jit
    def _group_of(self, args: RowsArgs, row: Int32, lane: Int32) -> Int32:
        """The last group that starts at or before `row`: 32 probes a turn, one a lane."""
        gRowOffset = self._row_offsets(args)
        group = Int32(0)
        count = args.groups
        while count > 1:
            step = quotient(count + 31, 32)
            before = Boolean(False)
            if lane * step < count:
                before = gRowOffset[group + lane * step] <= row
            probes = cute.arch.popc(cute.arch.vote_ballot_sync(before))
            skipped = cutlass.max(Int32(probes) - 1, 0) * step
            group += skipped
            count = cutlass.min(step, count - skipped)
        return group

    def _scale_rows(self, args: RowsArgs) -> Int32:
        """Scale rows that the output has room for."""
        return (args.rows + args.groups * (args.scales.alignment - 1)) & -args.scales.alignment

    @cute.jit
    def _first_scale_row(self, args: RowsArgs, group: Int32) -> Int32:
        block = quotient(Uint32(self._row_offsets(args)[group]), ATOM_ROWS)
        return Int32((block + array(args.scales_offsets, Uint32, args.groups)[group]) * ATOM_ROWS)

    @cute.jit
    def _zero_padding(self, args: RowsArgs, valid: Int32) -> None:
        """Zero the scale rows between each group's last row and the next multiple of `scale_alignment`."""
        tid = cute.arch.thread_idx()[0]
        groups = Int32(1)
        if args.scales_offsets != Int64(0):
            groups = args.groups
        ctas = cute.arch.grid_dim()[0]
        start = first_item(cute.arch.block_idx()[0], ctas, quotient(tid, 32))
        for job in cutlass.range(start, groups * ZERO_PARTS, item_stride(ctas), unroll=1):
            part, group = item_coord(job, ZERO_PARTS)
            count = valid
            first = Int32(0)
            if args.scales_offsets != Int64(0):
                gRowOffset = self._row_offsets(args)
                count = cutlass.min(gRowOffset[group + 1], valid) - gRowOffset[group]
                first = self._first_scale_row(args, group)
            end = first + round_up(count, args.scales.alignment)
            if (count > 0) & (first >= 0) & (end <= self._scale_rows(args)):
                zero_scale_rows(args.scales, first + count, end, (part, ZERO_PARTS), remainder(tid, 32))
