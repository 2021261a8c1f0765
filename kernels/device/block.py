"""CTA-wide building blocks: shared memory by name, prefix sums, flat copies."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Numeric, Uint8, Uint32

from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.divide import quotient
from cute_ep.kernels.device.memory import LANES, WORDS, Share, row_at, share
from cute_ep.kernels.device.twins import TwinRegion
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import CTAS_PER_SM, THREADS
from cute_ep.layouts.maps.record import Region
from cute_ep.layouts.tiles.layout import Swizzle


def launch_config(
    grid: Int32, shared_bytes: int = 0, threads: int = THREADS, residents: int = CTAS_PER_SM, *, fixed: bool = True
) -> dict:
    """Keyword arguments of a kernel's launch: `grid` CTAs of so many threads, or at most so many unless that is
    `fixed`, compiled for so many residents on an SM."""
    block = [threads, 1, 1]
    return {
        "grid": [grid, 1, 1],
        "block": block,
        "max_number_threads": [0, 0, 0] if fixed else block,
        "smem": shared_bytes,
        "min_blocks_per_mp": residents,
        "preferred_smem_carveout": 50,
    }


def shared_array(region: Region, dtype: type[Numeric]) -> cute.Tensor:
    """Tensor over a region of dynamic shared memory, of the thread's twin where each has one."""
    base = cute.arch.get_dyn_smem(Uint8, alignment=VECTOR_BYTES)
    if isinstance(region, TwinRegion):
        first = base.toint()
        pointer = cute.make_ptr(dtype, first + region.of_twin(), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    else:
        pointer = cute.recast_ptr(base + region.offset, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout(region.shape, stride=region.stride))


def shared_share(offset: Int32, turns: int, left: Int32) -> Share:
    """`turns` vectors of a lane, a segment apart, from a byte of dynamic shared memory on, of a row that has `left`
    vectors from there on."""
    base = cute.arch.get_dyn_smem(Uint8, alignment=VECTOR_BYTES).toint()
    place = cute.make_ptr(Uint32, base + offset, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    return Share(cute.make_tensor(place, cute.make_layout((WORDS, turns), stride=(1, WORDS * LANES))), left, LANES)


swizzled = Swizzle(3, 0, 3)
"""Where shared memory holds a vector: eight lanes that write or read together meet all 32 banks, whether their vectors
are 1, 2 or 4 apart."""


def swizzled_vectors(sTile: cute.Tensor, first: Int32, turns: int, apart: int) -> list[cute.Tensor]:
    """Where a (vector, word) tile of shared memory holds vectors first + apart * turn, turn by turn for `move`."""
    return [sTile[swizzled(first + apart * turn), None] for turn in range(turns)]


@cute.jit
def warp_prefix_sum(value: Int32, lane: Int32) -> Int32:
    """Inclusive prefix sum of `value` over the lanes of a warp."""
    prefix = value
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(prefix, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            prefix += below
    return prefix


SCAN_RUN = 8
"""Numbers that a lane loads together in a scan."""


@cute.jit
def warp_exclusive_scan(value: cutlass.Constexpr, sSums: cute.Tensor, count: Int32, lane: Int32, start: Int32) -> None:
    """sSums[i] = start + value(0) + ... + value(i - 1) for i = 0 .. count; value(i) may be what sSums[i] was.

    By one warp, whose lanes take a run of the numbers each; other warps see it after a CTA barrier.
    """
    run = quotient(count + 31, 32)
    first = lane * run
    last = cutlass.min(first + run, count)
    rValue = cute.make_rmem_tensor(SCAN_RUN, Int32)
    total = Int32(0)
    for base in cutlass.range(first, last, SCAN_RUN, unroll=1):
        for index in cutlass.range_constexpr(SCAN_RUN):
            if base + index < last:
                rValue[index] = value(base + index)
                total += rValue[index]
    before = start + warp_prefix_sum(total, lane) - total
    for base in cutlass.range(first, last, SCAN_RUN, unroll=1):
        if run > SCAN_RUN:  # else they are still there
            for index in cutlass.range_constexpr(SCAN_RUN):
                if base + index < last:
                    rValue[index] = value(base + index)
        for index in cutlass.range_constexpr(SCAN_RUN):
            if base + index < last:
                sSums[base + index] = before
                before += rValue[index]
    if lane == 31:
        sSums[count] = before


LOADS_IN_FLIGHT = 4
"""16-byte loads that a thread issues before its first store."""


@cute.jit
def copy_vectors(destination: Int64, source: Int64, vectors: Int32, thread: Int32, threads: Int32 | int) -> None:
    """The part of one of `threads` threads in a copy of 16-byte vectors between 16-byte aligned global addresses."""
    rX = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
    for first in cutlass.range(thread, vectors, threads * LOADS_IN_FLIGHT, unroll=1):
        move(plain, share(row_at(source, vectors), first, LOADS_IN_FLIGHT, threads), rX)
        move(plain, rX, share(row_at(destination, vectors), first, LOADS_IN_FLIGHT, threads))


@cute.jit
def block_memcpy(destination: Int64, source: Int64, num_bytes: Int64, tid: Int32) -> None:
    """Copy `num_bytes` (a multiple of 16) between two 16-byte aligned global addresses with all threads of the CTA."""
    copy_vectors(destination, source, Int32(quotient(num_bytes, VECTOR_BYTES)), tid, THREADS)
