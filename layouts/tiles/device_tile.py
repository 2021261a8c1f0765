"""`DeviceTile`: the verbs of `TileTensor` over a `cute.Tensor`, inside `@cute.jit` and `@cute.kernel`.

A view is an iterator (pointer), a layout of flat modes in scalars, and the number of contiguous scalars per
element. Verbs are CuTe's own (`local_tile`, `zipped_divide`, `slice_and_offset`, `domain_offset`, `copy`);
the conditions are those of the host type (`guards`), tested while tracing. Extents and strides that are only known at
run time are not tested. Views are Python objects: build them inside a run-time loop, do not carry them through it.

Coordinates are widened to 64 bits wherever `offset_bits` of the view says so: the DSL multiplies 32-bit
coordinates in 32 bits even where the product does not fit.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import CopyUniversalOp

from cute_ep.layouts.algebra.layout import Layout, LayoutError, Swizzle, offset_bits
from cute_ep.layouts.tiles.guards import (
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


class DeviceTile:
    """A view of a `cute.Tensor` whose coordinate c stands for `element_size` contiguous scalars.

    `tensor` has one element per scalar (or per first lane of a vector); its strides count scalars. Every
    verb returns a new view, and raises LayoutError where `TileTensor` does.
    """

    def __init__(self, tensor: cute.Tensor, element_size: int = 1):
        if not isinstance(tensor.layout.shape, tuple):
            layout = cute.make_layout((tensor.layout.shape,), stride=(tensor.layout.stride,))
            tensor = cute.make_tensor(tensor.iterator, layout)
        self.tensor = tensor
        self.element_size = element_size

    @property
    def shape(self):
        """One extent per mode; a run-time extent is a DSL integer."""
        return self.tensor.layout.shape

    @property
    def strides(self):
        """One stride per mode, in scalars; a run-time stride is a DSL integer."""
        return self.tensor.layout.stride

    @property
    def rank(self) -> int:
        """Number of modes."""
        return len(self.shape)

    def dim(self, index):
        """Extent of mode `index`; of a nested mode, the product of its leaves."""
        return cute.size(self.tensor.layout, mode=[index])

    def stride(self, index):
        """Stride of flat mode `index`, in scalars."""
        require_flat("stride", (self.shape[index],))
        return self.strides[index]

    def static_layout(self) -> Layout | None:
        """The view as a host layout, or None where an extent or stride is only known at run time."""
        if not cute.is_static(self.tensor.layout):
            return None
        return Layout(self.shape, self.strides)

    def tile(self, shape: tuple, coord: tuple) -> DeviceTile:
        """Tile number `coord` of the view cut into tiles of `shape`; as `TileTensor.tile`."""
        shape, coord = tuple(shape), tuple(coord)
        if any(isinstance(extent, tuple) for extent in self.shape):
            outer, inner = require_inner_tiles(self._known("tile"), shape)
            require_tile_coord(outer.shape, (1,) * outer.rank, coord)
            corners = cute.make_layout(outer.shape, stride=outer.stride)
            return self._view(inner.shape, inner.stride, cute.crd2idx(self._wide(coord), corners))
        require_tiles("tile", self.shape, shape)
        require_tile_coord(self.shape, shape, coord)
        return DeviceTile(cute.local_tile(self.tensor, shape, self._wide(coord)), self.element_size)

    def vectorize(self, *lanes: int) -> DeviceTile:
        """The view in elements of prod(lanes) contiguous scalars; as `TileTensor.vectorize`."""
        if self.element_size != 1:
            raise LayoutError(f"vectorize: the elements are already vectors of {self.element_size}")
        require_lanes(self.shape, self.strides, lanes)
        vectors = cute.zipped_divide(self.tensor, lanes)
        rest = cute.get(vectors.layout, [1])
        return DeviceTile(cute.make_tensor(vectors.iterator, rest), cute.size(vectors.layout, mode=[0]))

    def distribute(self, threads: Layout, tid, swizzle: Swizzle | None = None) -> DeviceTile:
        """The elements of thread `tid` (Python int or DSL integer below threads.size); as on the host.

        `threads` is a host `Layout`, flat, from thread coordinate to thread number.
        """
        require_threads(self.shape, threads)
        owners = cute.make_layout(threads.shape, stride=threads.stride)
        divided = cute.zipped_divide(self.tensor.layout, tuple(mode.size for mode in threads))
        thread = threads.offset2crd(tid) if isinstance(tid, int) else owners.get_flat_coord(tid)
        fragment, offset = cute.slice_and_offset((self._wide(thread), None), divided)
        if swizzle is not None:
            known = self._known("distribute with a swizzle")
            require_plain_swizzle(swizzle, known.shape, known.stride, threads, self.element_size)
            offset = swizzle(offset // self.element_size) * self.element_size
            if not isinstance(offset, int):
                offset = cute.assume(offset, divby=self.element_size)
        fragment = cute.get(fragment, [0])
        return self._view(fragment.shape, fragment.stride, offset)

    def slice(self, *bounds) -> DeviceTile:
        """One Python slice (static ends) or int (static or run-time) per mode; an int drops its mode."""
        require_flat("slice", self.shape)
        if len(bounds) != self.rank or not any(isinstance(bound, slice) for bound in bounds):
            raise LayoutError(f"slice: {bounds} does not leave a view of rank {self.rank}")
        parts = [require_bounds(bound, extent) for bound, extent in zip(bounds, self.shape, strict=True)]
        moved = cute.domain_offset(self._wide(tuple(start for start, _ in parts)), self.tensor)
        kept = [axis for axis, (_, length) in enumerate(parts) if length is not None]
        layout = cute.make_layout(
            tuple(parts[axis][1] for axis in kept), stride=tuple(self.strides[axis] for axis in kept)
        )
        return DeviceTile(cute.make_tensor(moved.iterator, layout), self.element_size)

    def split(self, count: int, axis: int = 0) -> tuple[DeviceTile, ...]:
        """`count` equal parts along `axis` (static), which they must divide."""
        if self._extent(axis) % count:
            raise LayoutError(f"split: {count} parts do not divide the extent {self._extent(axis)}")
        return tuple(self.split_part(index, count, axis) for index in range(count))

    def split_part(self, index: int, count: int, axis: int = 0, align: int = 1) -> DeviceTile:
        """Part `index` (static) of `count` along `axis`; as `TileTensor.split_part`."""
        whole = [slice(None)] * self.rank
        whole[axis] = slice(*part_bounds(self._extent(axis), index, count, align))
        return self.slice(*whole)

    def reshape(self, *shape) -> DeviceTile:
        """The same elements in row-major order, in another shape. The view must be static and row-major."""
        relabelled = require_row_major(self._known("reshape"), self.element_size, shape)
        return self._view(relabelled.shape, relabelled.stride, 0)

    def coalesce(self) -> DeviceTile:
        """The same elements as one mode, in row-major order. The view must be static and row-major."""
        return self.reshape(self._known("coalesce").size)

    def transpose(self) -> DeviceTile:
        """The modes in reverse order."""
        return self._view(self.shape[::-1], self.strides[::-1], 0)

    def lanes(self) -> cute.Tensor:
        """The `cute.Tensor` of lanes (mode 0) and the view's modes (after it), as copy atoms want it."""
        layout = cute.make_layout((self.element_size, *self.shape), stride=(1, *self.strides))
        return cute.make_tensor(self.tensor.iterator, layout)

    def registers(self) -> DeviceTile:
        """An uninitialised register view of the same extents, which must be static, and vector width."""
        shape = self._static_shape("registers")
        fragment = cute.make_rmem_tensor((self.element_size, *shape), self.tensor.element_type)
        view = cute.get(cute.group_modes(fragment.layout, 1, 1 + self.rank), [1])
        return DeviceTile(cute.make_tensor(fragment.iterator, view), self.element_size)

    def load(self, *coord):
        """The element at a coordinate: a scalar, or after `vectorize` a `TensorSSA` of `element_size`."""
        corner = self._at(coord[0] if len(coord) == 1 else coord)
        if self.element_size == 1:
            return corner.tensor[0]
        vector = corner.registers()
        vector.copy_from(corner)
        return vector.lanes().load()

    def store(self, coord, value) -> None:
        """Writes one element, as `load` returns it."""
        corner = self._at(coord)
        if self.element_size == 1:
            corner.tensor[0] = value
        else:
            vector = corner.registers()
            vector.lanes().store(value)
            corner.copy_from(vector)

    def copy_from(self, other: DeviceTile) -> None:
        """Copies every element of `other`, of the same static extents and width, one vector access each."""
        shapes = self._static_shape("copy_from"), other._static_shape("copy_from")
        require_same_shape(*shapes, self.element_size, other.element_size)
        dtype = self.tensor.element_type
        if other.tensor.element_type is not dtype:
            raise LayoutError(f"copy_from: {dtype} from {other.tensor.element_type}")
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=dtype.width * self.element_size)
        cute.copy(atom, other.lanes(), self.lanes())

    def _at(self, coord):
        """A view of the one element at `coord`."""
        moved = cute.domain_offset(self._wide(coord), self.tensor)
        return DeviceTile(cute.make_tensor(moved.iterator, cute.make_layout((1,))), self.element_size)

    def _view(self, shape, stride, offset):
        layout = cute.make_layout(shape, stride=stride)
        return DeviceTile(cute.make_tensor(self.tensor.iterator + offset, layout), self.element_size)

    def _known(self, verb):
        layout = self.static_layout()
        if layout is None:
            raise LayoutError(f"{verb}: {self.tensor.layout} has extents or strides known only at run time")
        return layout

    def _static_shape(self, verb):
        if not cute.is_static(self.shape):
            raise LayoutError(f"{verb}: {self.tensor.layout} has extents known only at run time")
        return self.shape

    def _extent(self, axis):
        require_flat("split", self.shape)
        if not isinstance(self.shape[axis], int):
            raise LayoutError(f"split: the extent of mode {axis} is known only at run time")
        return self.shape[axis]

    def _wide(self, coord):
        """Run-time coordinates as 64-bit integers where 32 bits would overflow."""
        if offset_bits(self.static_layout()) == 32 or isinstance(coord, int):
            return coord
        if isinstance(coord, tuple):
            return tuple(self._wide(entry) for entry in coord)
        return cutlass.Int64(coord)
