"""Layouts as plain Python values: shape, stride, and the map from coordinates to offsets.

Conventions are CuTe's: an int coordinate is split leftmost-fastest, the last leaf is unbounded, default
strides are column-major, and an extent of 1 has the default stride 0.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from cute_ep.layouts.maps.record import Int

# Sets larger than this are not enumerated; a question that needs it is refused.
ENUMERATED_SIZE = 65536
# CuTe keeps extents and strides in signed 64-bit integers and does not test for overflow.
INT64_LIMIT = 2**63


IntTuple = int | tuple["IntTuple", ...]


class LayoutError(ValueError):
    """A layout, coordinate or operation that has no correct answer; the message names rule and values."""


@dataclass(frozen=True)
class Layout:
    """A map from coordinates to offsets: `Layout((8, 12), (12, 1))` is an 8x12 row-major matrix.

    `shape` and `stride` are ints or nested tuples of ints of the same nesting: extents >= 1, strides >= 0.
    Without `stride` the layout is column-major. Immutable, hashable, `str(layout)` is `(8,12):(12,1)`.

    Raises LayoutError on an extent below 1, a negative stride, different nesting, an empty tuple, or offsets
    that do not fit in 63 bits.
    """

    shape: IntTuple
    stride: IntTuple | None = None

    def __post_init__(self) -> None:
        shape = _int_tuple(self.shape, 1, "extent")
        stride = _compact(shape) if self.stride is None else _int_tuple(self.stride, 0, "stride")
        if not _congruent(shape, stride):
            raise LayoutError(f"shape {int_text(shape)} and stride {int_text(stride)} differ in nesting")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)
        if max(self.size, self.cosize, *int_leaves(stride)) >= INT64_LIMIT:
            raise LayoutError(f"{self} needs more than 63 bits")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that prints as `text`, e.g. `((2,4),3):((1,6),2)`; LayoutError on anything else."""
        try:
            shape, stride = (ast.literal_eval(half.strip().replace(")", ",)")) for half in text.split(":"))
        except (ValueError, SyntaxError) as error:
            raise LayoutError(f"{text!r} is no layout: expected shape:stride") from error
        return cls(shape, stride)

    def __str__(self) -> str:
        return f"{int_text(self.shape)}:{int_text(self.stride)}"

    def __call__(self, *coord: IntTuple) -> int:
        """The offset of a coordinate: `L(i)`, `L(i, j)` or `L((i, (j, k)))`.

        A coordinate is an int, a tuple with one entry per mode (an int where the mode is nested is split,
        leftmost-fastest), or a tuple of one int per leaf. Nothing is bounded above: what exceeds a mode
        goes to its last leaf. Raises LayoutError on another form or a negative entry.
        """
        coord = coord[0] if len(coord) == 1 else coord
        coord = _int_tuple(coord, 0, "coordinate")
        if isinstance(coord, tuple) and len(coord) != self.rank and len(coord) == len(self.modes):
            return sum(_offset(entry, *mode) for entry, mode in zip(coord, self.modes, strict=True))
        return _offset(coord, self.shape, self.stride)

    def __getitem__(self, index: int) -> Layout:
        """Mode `index` as a layout of its own. Raises LayoutError where there is no such mode."""
        shape, stride = (self.shape, self.stride) if isinstance(self.shape, tuple) else ((self.shape,), (self.stride,))
        if not -len(shape) <= index < len(shape):
            raise LayoutError(f"{self} has no mode {index}")
        return Layout(shape[index], stride[index])

    def __iter__(self) -> Iterator[Layout]:
        return (self[index] for index in range(self.rank))

    @property
    def modes(self) -> tuple[tuple[int, int], ...]:
        """The leaves, leftmost first, as `(extent, stride)` pairs."""
        return tuple(zip(int_leaves(self.shape), int_leaves(self.stride), strict=True))

    @property
    def rank(self) -> int:
        """Number of top-level modes; 1 for an int shape."""
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    @property
    def depth(self) -> int:
        """Nesting depth of the shape; 0 for an int shape."""
        return _depth(self.shape)

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return prod(int_leaves(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return sum((extent - 1) * stride for extent, stride in self.modes) + 1

    def offset2crd(self, offset: int) -> IntTuple:
        """The coordinate (nested as the shape) whose offset is `offset`: leaf = (offset // stride) % extent.

        The DSL's `get_hier_coord`, Mojo's `TensorLayout.idx2crd`. Raises LayoutError when the formula finds no
        coordinate of that offset, because there is none or because the leaves overlap.
        """
        leaves = iter((offset // stride) % extent if stride else 0 for extent, stride in self.modes)
        coord = _renest(self.shape, leaves)
        if self(coord) != offset:
            raise LayoutError(f"offset {offset} is not offset (coord // stride) % extent of any coordinate of {self}")
        return coord


@dataclass(frozen=True)
class Swizzle:
    """x ^ ((x & mask) >> shift), mask = `bits` ones at `base + max(shift, 0)`; a negative shift moves left.

    CuTe's `Swizzle<bits, base, shift>` and `make_swizzle(bits, base, shift)`. An involution that keeps the
    low `base` bits. Works on Python ints and on the DSL's integers. Raises LayoutError when abs(shift) < bits, where
    the source and target bits would overlap.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or abs(self.shift) < self.bits:
            raise LayoutError(f"{self} needs bits >= 0, base >= 0 and |shift| >= bits")

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"

    @property
    def source_mask(self) -> int:
        """The bits that are read."""
        return ((1 << self.bits) - 1) << (self.base + max(self.shift, 0))

    def _shifted(self, value: Int) -> Int:
        return value >> self.shift if self.shift >= 0 else value << -self.shift

    def __call__(self, offset: Int) -> Int:
        # The mask comes last: the compiler drops it where an offset is known to be small. Before the shift it stays, at
        # one register of the MXFP8 SwiGLU kernel on sm_90a.
        return offset ^ (self._shifted(offset) & self._shifted(self.source_mask))


def row_major(*shape: IntTuple) -> Layout:
    """The compact layout of `shape` whose last leaf has stride 1; modes may be nested.

    `row_major((4, 16), (8, 2))` is `((4,16),(8,2)):((256,16),(2,1))`. One tuple argument is the shape itself.
    """
    shape = _shape_arguments(shape)
    strides, step = [], 1
    for extent in reversed(int_leaves(shape)):
        strides.append(step if extent > 1 else 0)
        step *= extent
    return Layout(shape, _renest(shape, iter(reversed(strides))))


def is_injective(layout: Layout) -> bool:
    """Whether no two coordinates share an offset. Raises LayoutError where that is too large to decide."""
    modes = [mode for mode in layout.modes if mode[0] > 1]
    if any(stride == 0 for _, stride in modes):
        return False
    if _are_nested(modes):
        return True
    if layout.size > ENUMERATED_SIZE:
        raise LayoutError(f"cannot decide whether {layout} is injective: its leaves interleave")
    return len({layout(index) for index in range(layout.size)}) == layout.size


def _are_nested(modes: list[tuple[int, int]]) -> bool:
    """Whether each leaf, by stride, starts past the leaves of smaller stride: then they cannot overlap."""
    reach = 1
    for stride, extent in sorted((stride, extent) for extent, stride in modes):
        if stride < reach:
            return False
        reach = extent * stride
    return True


def _int_tuple(value: object, least: int, name: str) -> IntTuple:
    if isinstance(value, tuple):
        if not value:
            raise LayoutError(f"empty tuple in {name}s")
        return tuple(_int_tuple(item, least, name) for item in value)
    try:
        number = operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} {value!r} is no int") from None
    if isinstance(value, bool):
        raise LayoutError(f"{name} {value!r} is no int")
    if number < least:
        raise LayoutError(f"{name} {value!r} is below {least}")
    return number


def _congruent(left: IntTuple, right: IntTuple) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_congruent, left, right))
    return not isinstance(left, tuple) and not isinstance(right, tuple)


def int_leaves(value: IntTuple) -> tuple[int, ...]:
    """The ints of a nested tuple, leftmost first."""
    if isinstance(value, tuple):
        return tuple(leaf for item in value for leaf in int_leaves(item))
    return (value,)


def _depth(value: IntTuple) -> int:
    return 1 + max(map(_depth, value)) if isinstance(value, tuple) else 0


def _renest(shape: IntTuple, leaves: Iterator[int]) -> IntTuple:
    return tuple(_renest(item, leaves) for item in shape) if isinstance(shape, tuple) else next(leaves)


def _compact(shape: IntTuple) -> IntTuple:
    strides, step = [], 1
    for extent in int_leaves(shape):
        strides.append(step if extent > 1 else 0)
        step *= extent
    return _renest(shape, iter(strides))


def _shape_arguments(shape: tuple[IntTuple, ...]) -> IntTuple:
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    return _int_tuple(shape, 1, "extent")


def int_text(value: IntTuple) -> str:
    """A nested tuple as CuTe prints it: `((2,4),3)`, `(4)`."""
    return f"({','.join(map(int_text, value))})" if isinstance(value, tuple) else str(value)


def _offset(coord: IntTuple, shape: IntTuple, stride: IntTuple) -> int:
    if isinstance(shape, tuple):
        if not isinstance(coord, tuple):
            split = []
            for mode in shape[:-1]:
                extent = prod(int_leaves(mode))
                split.append(coord % extent)
                coord //= extent
            coord = (*split, coord)
        if len(coord) != len(shape):
            raise LayoutError(f"coordinate {int_text(coord)} does not fit shape {int_text(shape)}")
        return sum(map(_offset, coord, shape, stride))
    if isinstance(coord, tuple):
        raise LayoutError(f"coordinate {int_text(coord)} does not fit extent {shape}")
    return coord * stride
