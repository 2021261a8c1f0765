"""CTA-wide building blocks: shared memory by name, prefix sum, flat copies."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32

from cute_ep.layouts.device import vector_atom, vector_tensor
from cute_ep.layouts.formats import VECTOR_BYTES
from cute_ep.layouts.record import Region, RegionMap

THREADS = 512
WARPS = THREADS // 32
CTAS_PER_SM = 2
"""Kernels are compiled to fit this many CTAs on one SM (at most 64 registers a thread)."""


def launch_config(grid, shared_bytes: int = 0) -> dict:
    """Keyword arguments of a kernel's launch: `grid` CTAs of THREADS threads, compiled for CTAS_PER_SM residents."""
    return {
        "grid": [grid, 1, 1],
        "block": [THREADS, 1, 1],
        "smem": shared_bytes,
        "min_blocks_per_mp": CTAS_PER_SM,
        "preferred_smem_carveout": 50,
    }


def shared_array(region: Region, dtype):
    """Tensor over a region of dynamic shared memory."""
    base = cute.arch.get_dyn_smem(Uint8, alignment=VECTOR_BYTES)
    pointer = cute.recast_ptr(base + region.offset, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout(region.shape, stride=region.stride))


def scan_scratch(regions: RegionMap) -> Region:
    """Shared memory that `block_prefix_sum` needs."""
    return regions.add("scan", 4, WARPS)


@cute.jit
def warp_prefix_sum(value: Int32, lane: Int32) -> Int32:
    """Inclusive prefix sum of `value` over the lanes of a warp."""
    prefix = value
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(prefix, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            prefix += below
    return prefix


@cute.jit
def block_prefix_sum(value: Int32, sScan, tid: Int32):
    """Inclusive prefix sum of `value` over the CTA's threads; returns (prefix, total).

    Called by all threads; two CTA barriers, the first of which protects the previous use of `sScan`.
    """
    lane = tid % 32
    warp = tid // 32
    prefix = warp_prefix_sum(value, lane)
    cute.arch.sync_threads()
    if lane == 31:
        sScan[warp] = prefix
    cute.arch.sync_threads()
    subtotal = Int32(0)
    if lane < WARPS:
        subtotal = sScan[lane]
    through = warp_prefix_sum(subtotal, lane)
    before = cute.arch.shuffle_sync(through, (warp + 31) % 32)
    if warp == 0:
        before = Int32(0)
    return prefix + before, cute.arch.shuffle_sync(through, 31)


@cute.jit
def block_exclusive_scan(sValues, count: Int32, sScan, tid: Int32) -> Int32:
    """Replace sValues[0 .. count) by its exclusive prefix sum, store the total at [count] and return it."""
    total = Int32(0)
    for first in cutlass.range(0, count, THREADS, unroll=1):
        index = first + tid
        value = Int32(0)
        if index < count:
            value = sValues[index]
        prefix, subtotal = block_prefix_sum(value, sScan, tid)
        if index < count:
            sValues[index] = total + prefix - value
        total += subtotal
    cute.arch.sync_threads()
    if tid == 0:
        sValues[count] = total
    cute.arch.sync_threads()
    return total


LOADS_IN_FLIGHT = 4
"""16-byte loads that a thread issues before its first store."""


@cute.jit
def block_memcpy(destination, source, num_bytes, tid: Int32) -> None:
    """Copy `num_bytes` (a multiple of 16) between two 16-byte aligned global addresses with all threads of the CTA."""
    vectors = Int32(num_bytes // VECTOR_BYTES)
    gSource = vector_tensor(source, vectors, 1)
    gDestination = vector_tensor(destination, vectors, 1)
    rX = cute.make_rmem_tensor((4, LOADS_IN_FLIGHT), Uint32)
    for first in cutlass.range(tid, vectors, THREADS * LOADS_IN_FLIGHT, unroll=1):
        for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            vector = first + slot * THREADS
            if vector < vectors:
                cute.copy(vector_atom(), gSource[None, vector, 0], rX[None, slot])
        for slot in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            vector = first + slot * THREADS
            if vector < vectors:
                cute.copy(vector_atom(), rX[None, slot], gDestination[None, vector, 0])
