"""`TileTensor`: a view into memory that is tiled, vectorised and dealt out to threads, after Mojo's type.

Offsets are Python ints, storage (if any) is a flat sequence. Where Mojo's type reads the wrong elements without an
error, this one raises LayoutError. What kernels take of a row (`share` in `kernels/device/memory.py`) is written as
a layout and tested against these verbs: the same verbs over a `cute.Tensor` cost five kernels 8 bytes of spills and up
to 80 instructions (sm_90a, DSL 4.8.1).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from cute_ep.layouts.tiles.guards import (
    fragment_modes,
    part_bounds,
    require_bounds,
    require_flat,
    require_inner_tiles,
    require_lanes,
    require_plain_swizzle,
    require_row_major,
    require_same_shape,
    require_threads,
    require_tile_coord,
    require_tiles,
)
from cute_ep.layouts.tiles.layout import IntTuple, Layout, LayoutError, Swizzle


@dataclass(frozen=True)
class TileTensor:
    """A view: coordinate c stands for the `element_size` contiguous elements at base + layout(c).

    Strides and base count scalars, also after `vectorize`. `data` is a flat, mutable sequence (list, array,
    1-D tensor) for `load`, `store` and `copy_from`, and may be left out where only offsets matter. Every
    verb returns a new view of the same data; all raise LayoutError instead of clipping, rounding or reading
    other elements.
    """

    layout: Layout
    base: int = 0
    element_size: int = 1
    data: MutableSequence | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout.shape, tuple):
            object.__setattr__(self, "layout", Layout((self.layout.shape,), (self.layout.stride,)))

    @property
    def shape(self) -> tuple:
        """One int per mode, a nested tuple where the mode is nested."""
        return self.layout.shape

    @property
    def rank(self) -> int:
        """Number of modes."""
        return self.layout.rank

    def dim(self, index: int) -> int:
        """Extent of mode `index`; of a nested mode, the product of its leaves."""
        return self.layout[index].size

    def stride(self, index: int) -> int:
        """Stride of flat mode `index`, in scalars."""
        require_flat("stride", (self.layout[index].shape,))
        return self.layout[index].stride

    def offsets(self) -> list[int]:
        """Every memory offset, over the view's coordinates in row-major order, vector lanes innermost.

        A nested mode counts as one axis, walked leftmost-fastest.
        """
        corners = (self.base + self.layout(coord) for coord in self._coords())
        return [corner + lane for corner in corners for lane in range(self.element_size)]

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

    def vectorize(self, *lanes: int) -> TileTensor:
        """The view in elements of prod(lanes) contiguous scalars: extents divided, strides multiplied."""
        if self.element_size != 1:
            raise LayoutError(f"vectorize: the elements are already vectors of {self.element_size}")
        require_lanes(self.shape, self.layout.stride, lanes, self.base)
        shape = tuple(extent // size for extent, size in zip(self.shape, lanes, strict=True))
        stride = tuple(step * size for step, size in zip(self.layout.stride, lanes, strict=True))
        return TileTensor(Layout(shape, stride), self.base, prod(lanes), self.data)

    def distribute(self, threads: Layout, tid: int, swizzle: Swizzle | None = None) -> TileTensor:
        """The elements of thread `tid`: every threads.shape-th one from the thread's coordinate on (cyclic).

        `threads` is a flat layout from thread coordinate to thread number. `swizzle` permutes the threads'
        bases, counted in elements from this view's base.
        """
        require_threads(self.shape, threads)
        offset = sum(c * d for c, d in zip(threads.offset2crd(tid), self.layout.stride, strict=True))
        if swizzle is not None:
            require_plain_swizzle(swizzle, self.shape, self.layout.stride, threads, self.element_size)
            offset = swizzle(offset // self.element_size) * self.element_size
        return self._view(Layout(*fragment_modes(self.shape, self.layout.stride, threads)), offset)

    def slice(self, *bounds: int | slice) -> TileTensor:
        """One Python slice (step 1, negative ends wrap) or int per mode; an int drops its mode."""
        require_flat("slice", self.shape)
        if len(bounds) != self.rank or all(isinstance(bound, int) for bound in bounds):
            raise LayoutError(f"slice: {bounds} does not leave a view of {self.layout}")
        parts = [require_bounds(bound, extent) for bound, extent in zip(bounds, self.shape, strict=True)]
        strides = self.layout.stride
        kept = [(length, step) for (_, length), step in zip(parts, strides, strict=True) if length is not None]
        offset = sum(start * step for (start, _), step in zip(parts, strides, strict=True))
        return self._view(Layout(*zip(*kept, strict=True)), offset)

    def split(self, count: int, axis: int = 0) -> tuple[TileTensor, ...]:
        """`count` equal parts along `axis`, which they must divide."""
        if self.dim(axis) % count:
            raise LayoutError(f"split: {count} parts do not divide the extent {self.dim(axis)}")
        return tuple(self.split_part(index, count, axis) for index in range(count))

    def split_part(self, index: int, count: int, axis: int = 0, align: int = 1) -> TileTensor:
        """Part `index` of `count` along `axis`: ceil(extent / count) up to `align`, the last one shorter."""
        require_flat("split", self.shape)
        start, stop = part_bounds(self.dim(axis), index, count, align)
        whole = [slice(None)] * self.rank
        whole[axis] = slice(start, stop)
        return self.slice(*whole)

    def reshape(self, *shape: int) -> TileTensor:
        """The same elements in row-major order, in another shape. The view must be row-major without gaps."""
        return self._view(require_row_major(self.layout, self.element_size, shape), 0)

    def coalesce(self) -> TileTensor:
        """The same elements as one mode, in row-major order. The view must be row-major without gaps."""
        return self.reshape(self.layout.size)

    def transpose(self) -> TileTensor:
        """The modes in reverse order."""
        return self._view(Layout(self.layout.shape[::-1], self.layout.stride[::-1]), 0)

    def load(self, *coord: IntTuple) -> float | Sequence[float]:
        """The element at a coordinate: a scalar, or `element_size` contiguous scalars after `vectorize`."""
        start = self.base + self.layout(*coord)
        return self.data[start] if self.element_size == 1 else self.data[start : start + self.element_size]

    def store(self, coord: IntTuple, value: float | Sequence[float]) -> None:
        """Writes one element, as `load` returns it. Mutates `data`."""
        start = self.base + self.layout(coord)
        if self.element_size == 1:
            self.data[start] = value
        elif len(value) == self.element_size:
            self.data[start : start + self.element_size] = value
        else:
            raise LayoutError(f"store: {len(value)} lanes into elements of {self.element_size}")

    def copy_from(self, other: TileTensor) -> None:
        """Writes every element of `other`, of the same extents and vector width, coordinate by coordinate."""
        require_same_shape(self.shape, other.shape, self.element_size, other.element_size)
        for coord in self._coords():
            self.store(coord, other.load(coord))

    def _coords(self) -> Iterator[tuple[int, ...]]:
        return product(*(range(mode.size) for mode in self.layout))

    def _view(self, layout: Layout, offset: int) -> TileTensor:
        return TileTensor(layout, self.base + offset, self.element_size, self.data)
