"""Byte records: the only place where offsets inside a message or a buffer are computed.

Functions of `Int` take Python integers (host) or device integers (inside a kernel), so the same code that sizes an
allocation on the host addresses it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar


class DeviceInt(Protocol):
    """A number of the DSL, which no type checker sees: the operators that `layouts` uses."""

    def __add__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __sub__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __mul__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __radd__(self, other: int, /) -> DeviceInt: ...
    def __rsub__(self, other: int, /) -> DeviceInt: ...
    def __rmul__(self, other: int, /) -> DeviceInt: ...
    def __floordiv__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __mod__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __lshift__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __rshift__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __and__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __or__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __xor__(self, other: int | DeviceInt, /) -> DeviceInt: ...
    def __neg__(self) -> DeviceInt: ...


Int = TypeVar("Int", int, DeviceInt)
"""A Python int or a device integer."""


def align_up(value: Int, alignment: int) -> Int:
    """Smallest multiple of `alignment` that is not below `value`."""
    return (value + (alignment - 1)) // alignment * alignment


@dataclass(frozen=True)
class Region:
    """A strided array of `itemsize`-byte elements at a byte offset.

    `shape` and `stride` (in elements) have one entry a mode; the last mode is contiguous. In a kernel offset and
    strides may be numbers of the DSL, as in the argument records.
    """

    name: str
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.stride[0] * self.itemsize

    def at(self, *coord: int) -> int:
        """Byte offset of the element at `coord` (leading modes; missing ones are 0)."""
        offset = self.offset
        for index, stride in zip(coord, self.stride, strict=False):
            offset = offset + index * stride * self.itemsize
        return offset

    def address(self, base: int, *coord: int) -> int:
        """Address of the element at `coord` in memory that begins at `base`."""
        return base + self.at(*coord)

    def along(self, mode: int, address: int, index: int) -> int:
        """Address of the element that is `index` further along a mode than the one at `address`."""
        return address + index * self.stride[mode] * self.itemsize

    def beside(self, other: Region, address: int) -> int:
        """Address of the element of this region with the coordinate of the element at `address` of another region,
        which is laid out alike."""
        return address + (self.offset - other.offset)


class RegionMap:
    """Regions laid out one after the other, each aligned to `alignment` bytes."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.nbytes = 0
        self.regions: dict[str, Region] = {}

    def add(self, name: str, itemsize: int, *shape: int) -> Region:
        """Append a row-major array `shape` of `itemsize`-byte elements."""
        stride = [1]
        for extent in reversed(shape[1:]):
            stride.insert(0, stride[0] * extent)
        region = Region(name, self.nbytes, itemsize, shape, tuple(stride))
        self.nbytes = align_up(self.nbytes + region.nbytes, self.alignment)
        self.regions[name] = region
        return region
