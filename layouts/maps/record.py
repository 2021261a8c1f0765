"""Byte records: the only place where offsets inside a message or a buffer are computed.

All sizes may be Python integers (host) or device integers (inside a kernel): only +, *, // are used,
so the same code that sizes an allocation on the host addresses it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Int = Any
"""A Python int or a device integer."""


def align_up(value: Int, alignment: int) -> Int:
    """Smallest multiple of `alignment` that is not below `value`."""
    return (value + (alignment - 1)) // alignment * alignment


@dataclass(frozen=True)
class Region:
    """A strided array of `itemsize`-byte elements at a byte offset.

    `shape` and `stride` (in elements) have one entry a mode; the last mode is contiguous.
    """

    name: str
    offset: Int
    itemsize: int
    shape: tuple[Int, ...]
    stride: tuple[Int, ...]

    @property
    def nbytes(self) -> Int:
        return self.shape[0] * self.stride[0] * self.itemsize

    def at(self, *coord: Int) -> Int:
        """Byte offset of the element at `coord` (leading modes; missing ones are 0)."""
        offset = self.offset
        for index, stride in zip(coord, self.stride, strict=False):
            offset = offset + index * stride * self.itemsize
        return offset


class RegionMap:
    """Regions laid out one after the other, each aligned to `alignment` bytes."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.nbytes: Int = 0
        self.regions: dict[str, Region] = {}

    def add(self, name: str, itemsize: int, *shape: Int) -> Region:
        """Append a row-major array `shape` of `itemsize`-byte elements."""
        stride: list[Int] = [1]
        for extent in reversed(shape[1:]):
            stride.insert(0, stride[0] * extent)
        region = Region(name, self.nbytes, itemsize, shape, tuple(stride))
        self.nbytes = align_up(self.nbytes + region.nbytes, self.alignment)
        self.regions[name] = region
        return region
