"""`TileTensor`: a view into memory that is tiled and dealt out to threads, after Mojo's type.

A view has offsets, which are Python ints, and no storage. Where Mojo's type reads the wrong elements without an error,
this one raises LayoutError. What kernels take of a row (`share` in `kernels/device/memory.py`) is written as a layout
and tested against `distribute`: such verbs over a `cute.Tensor` cost five kernels 8 bytes of spills and up to 80
instructions (sm_90a, DSL 4.8.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from cute_ep.layouts.tiles.guards import (
    fragment_modes,
    require_inner_tiles,
    require_threads,
    require_tile_coord,
    require_tiles,
)
from cute_ep.layouts.tiles.layout import Layout


@dataclass(frozen=True)
class TileTensor:
    """A view: coordinate c stands for the element at base + layout(c).

    Every verb returns a new view of the same memory; all raise LayoutError instead of clipping, rounding or reading
    other elements.
    """

    layout: Layout
    base: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.layout.shape, tuple):
            object.__setattr__(self, "layout", Layout((self.layout.shape,), (self.layout.stride,)))

    @property
    def shape(self) -> tuple:
        """One int per mode, a nested tuple where the mode is nested."""
        return self.layout.shape

    def offsets(self) -> list[int]:
        """Every memory offset, over the view's coordinates in row-major order.

        A nested mode counts as one axis, walked leftmost-fastest.
        """
        return [self.base + self.layout(coord) for coord in product(*(range(mode.size) for mode in self.layout))]

    def tile(self, shape: tuple, coord: tuple) -> TileTensor:
        """Tile number `coord` of the view cut into tiles of `shape`.

        On a parent of nested (outer, inner) modes, as `row_major((2, 4), (3, 5))` builds, a tile is the
        inner leaves and `coord` counts the outer ones. A parent whose blocks come first, as those of CuTe's
        `blocked_product`, is refused, because this rule would read across its blocks.
        """
        shape, coord = tuple(shape), tuple(coord)
        if any(isinstance(extent, tuple) for extent in self.shape):
            outer, inner = require_inner_tiles(self.layout, shape)
            require_tile_coord(outer.shape, (1,) * outer.rank, coord)
            return self._view(inner, outer(coord))
        require_tiles("tile", self.shape, shape)
        require_tile_coord(self.shape, shape, coord)
        step = zip(coord, shape, self.layout.stride, strict=True)
        return self._view(Layout(shape, self.layout.stride), sum(c * size * d for c, size, d in step))

    def distribute(self, threads: Layout, tid: int) -> TileTensor:
        """The elements of thread `tid`: every threads.shape-th one from the thread's coordinate on (cyclic).

        `threads` is a flat layout from thread coordinate to thread number.
        """
        require_threads(self.shape, threads)
        offset = sum(c * d for c, d in zip(threads.offset2crd(tid), self.layout.stride, strict=True))
        return self._view(Layout(*fragment_modes(self.shape, self.layout.stride, threads)), offset)

    def _view(self, layout: Layout, offset: int) -> TileTensor:
        return TileTensor(layout, self.base + offset)
