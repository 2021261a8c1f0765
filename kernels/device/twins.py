"""Twins: the halves of a wide CTA of dispatch, each of which works as a CTA of THREADS threads does.

A rank that may use a few SMs has each of them alone, so two CTAs could run there; but two CTAs of one launch go to two
SMs while any is free. A wide CTA is on one SM. Its twins share nothing: each has warps, a barrier and shared memory of
its own, and `Context.cta` counts twins, so roles do not tell them from CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import THREADS, WIDE_WARPS
from cute_ep.layouts.maps.record import Region, RegionMap


@dataclass(frozen=True)
class TwinRegion(Region):
    """A region of shared memory that each twin has; `map`: all that one has."""

    map: TwinMap

    def of_twin(self) -> Int32:
        """Offset of the thread's twin's."""
        return twin() * self.map.nbytes + self.offset


class TwinMap(RegionMap):
    """Shared memory of a CTA of THREADS threads, or of each twin of a wide one, whose CTA has twice as much."""

    def __init__(self) -> None:
        super().__init__(alignment=VECTOR_BYTES)

    def add(self, name: str, itemsize: int, *shape: int) -> TwinRegion:
        """As of `RegionMap`."""
        made = super().add(name, itemsize, *shape)
        region = TwinRegion(made.name, made.offset, made.itemsize, made.shape, made.stride, self)
        self.regions[name] = region
        return region


def twin() -> Int32:
    """Which twin of its CTA this thread is in; 0 in a CTA that has none."""
    return cute.arch.thread_idx()[0] >> THREADS.bit_length() - 1


def twins_log2(warps: Int32) -> Int32:
    """Base-2 logarithm of the twins of a CTA of so many warps: 1 in a wide one, else 0."""
    return Int32(warps >= WIDE_WARPS)


def twin_barrier() -> Int32:
    """Number of the barrier of the thread's twin."""
    return twin() + 1


def sync_twin() -> None:
    """Barrier of the threads of a twin."""
    cute.arch.barrier(barrier_id=twin_barrier(), number_of_threads=THREADS)
