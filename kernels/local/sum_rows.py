"""Sum rows: an expert rank adds its rows of each token, and one row with the sum goes home in their place.

What is read and written, as axes and shape : stride. R sources, T tokens of each at most, K entries, V = hidden / 8
vectors of a row, N rows:

    rows                (row, vector)         (N, V)    : (V, 1)           vectors of 16 bytes
    sums                (row, vector)         (S, V)    : (V, 1)           S = min(N, R T)
    row_map, last_map   (source, token, k)    (R, T, K) : (T K, K, 1)      rows of entries, negative: none
    headers             (source, word)        (R, 4)    : (4, 1)           how many tokens a source has

A warp takes slices of tokens. The sum is float32, over k ascending from +0, rounded once; a row that dispatch had no
room for makes it NaN. It is row source * T + token of `sums` where these are fewer than rows, else that of the token's
last row. `last_map` has it at the token's last entry. What follows a source's tokens is neither read nor written.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import LOST, VECTOR_ELEMENTS, accumulate, round_vector
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, launch_config
from cute_ep.kernels.device.divide import Divisor, quotient, remainder
from cute_ep.kernels.device.memory import WORDS, array, row_address, row_at, share
from cute_ep.kernels.device.slices import (
    SEGMENT,
    RowSlice,
    first_item,
    from_lane,
    highest,
    item_stride,
    slice_of,
    take_each,
)
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.local_arguments import SumArgs
from cute_ep.layouts.maps.routing import NO_ROW


class SumRows:
    """Slices of tokens, strided over the warps of the grid; neighbouring ones go to different CTAs."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: SumArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: SumArgs) -> None:
        tid = cute.arch.thread_idx()[0]
        lane, warp = remainder(tid, 32), quotient(tid, 32)
        gHeader = array(args.headers, Int32, args.sources, len(HeaderWord))
        by_sources = Divisor(args.sources, args.sources_magic)
        items, ctas = (args.sources * args.max_tokens) << args.slices_log2, cute.arch.grid_dim()[0]
        first = first_item(cute.arch.block_idx()[0], ctas, warp)
        for item in cutlass.range(first, items, item_stride(ctas), unroll=1):
            row_slice = slice_of(item, args.slices_log2, args.vectors)
            source, token = by_sources.split(row_slice.token)
            if token < gHeader[source, int(HeaderWord.TOKENS)]:
                self._take(args, source * args.max_tokens + token, row_slice, lane)

    @cute.jit
    def _take(self, args: SumArgs, place: Int32, row_slice: RowSlice, lane: Int32) -> None:
        """A slice of the token that is number `place` of all; the first slice also writes its entries' rows."""
        tokens = args.sources * args.max_tokens
        gRow, gLast = (array(data, Int32, tokens, args.top_k) for data in (args.row_map, args.last_map))
        row = Int32(NO_ROW)
        if lane < args.top_k:
            row = gRow[place, lane]
        wanted = Uint32(cute.arch.vote_ballot_sync(row >= 0))
        last, to = highest(wanted), place  # last: -1 where the token has no row here
        if (args.by_token == 0) & (wanted != Uint32(0)):
            to = from_lane(row, last)
        if (row_slice.first == 0) & (lane < args.top_k):
            gLast[place, lane] = cutlass.select_(lane == last, to, Int32(NO_ROW))
        segment = row_slice.first
        while (segment < row_slice.last) & (wanted != Uint32(0)) & (to < args.room):
            self._sum_segment(args, segment * SEGMENT + lane, row, wanted, to)
            segment += 1

    @cute.jit
    def _sum_segment(self, args: SumArgs, column: Int32, own: Int32, wanted: Uint32, to: Int32) -> None:
        """One vector a lane of the sum of rows `own` of the lanes in `wanted`, into row `to`. LOADS_IN_FLIGHT loads go
        before the first use."""
        row_bytes = Int64(args.vectors) * VECTOR_BYTES
        rX = cute.make_rmem_tensor((WORDS, 1, LOADS_IN_FLIGHT), Uint32)
        rSum = cute.make_rmem_tensor(VECTOR_ELEMENTS, Float32)
        rSum.fill(0.0)

        def load(k: Int32, turn: int) -> None:
            found = from_lane(own, k)
            gRow = row_at(row_address(args.rows, found, row_bytes), args.vectors)
            tRow = share(gRow, column, 1, there=found < args.capacity)
            move(plain, tRow, rX[None, None, turn], outside=LOST)

        take_each(wanted, LOADS_IN_FLIGHT, load, lambda k, turn: accumulate(rSum, rX[None, 0, turn], None))
        round_vector(rSum, rX[None, 0, 0], BFloat16)
        move(plain, rX[None, None, 0], share(row_at(row_address(args.sums, to, row_bytes), args.vectors), column, 1))
