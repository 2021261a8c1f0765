"""Tensors over global memory: the one place where an address becomes a tensor inside a kernel.

| tensor     | axes            | shape : stride, in its elements                                          |
| ---------- | --------------- | ------------------------------------------------------------------------ |
| `array`    | as given        | row-major, 64-bit strides                                                |
| `row_at`   | (word, vector)  | (4, V) : (1, 4)                                                          |
| `pair_at`  | (element)       | (2) : (1)                                                                |
| `words_at` | (word, word)    | (1, W) : (1, step)                                                       |
| `Share`    | (word, turn)    | (4, S) : (1, 128), from a vector of a row on; of words (1, S) : (1, 32 step) |

The lanes of a warp, or other threads side by side, take a row in turns: in turn s thread l takes vector n s + l of n
threads. So the thread-value layout of a row is (lane, (word, turn)) : (4, (1, 128)), of which a `Share` is one lane's
part, with how much of the row there is from its first vector on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Numeric, Uint32

from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import Int, Region
from cute_ep.layouts.maps.scales import WORD_BYTES

LANES = 32
WORDS = VECTOR_BYTES // WORD_BYTES


class DeviceRegion(Region):
    """A region of the arena in a kernel: offsets are in bytes and 64 bits."""

    def at(self, *coord: Int32 | Int64 | int) -> Int64:
        """Offset of the element at `coord` (leading modes; missing ones are 0)."""
        wide = replace(self, stride=tuple(Int64(stride) for stride in self.stride[: len(coord)]))
        return super(DeviceRegion, wide).at(*(Int64(index) for index in coord))

    def along(self, mode: int, address: Int64, index: Int32 | Int64 | int) -> Int64:
        """As of `Region`, in 64 bits."""
        return super().along(mode, address, Int64(index))


def pointer(address: Int64, dtype: type[Numeric], align: int | None = None) -> cute.Pointer:
    """Global-memory pointer to `dtype` at a 64-bit address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def array(address: Int64, dtype: type[Numeric], *shape: Int32 | int) -> cute.Tensor:
    """Row-major tensor of `dtype` over `shape`; offsets are 64-bit."""
    stride = [Int64(1)]
    for extent in reversed(shape[1:]):
        stride.insert(0, stride[0] * extent)
    return cute.make_tensor(pointer(address, dtype), cute.make_layout(tuple(shape), stride=tuple(stride)))


def pair_at(address: Int64, dtype: type[Numeric]) -> cute.Tensor:
    """Two elements side by side that one access takes: (2) : (1)."""
    return cute.make_tensor(pointer(address, dtype, align=dtype.width // 4), cute.make_layout(2))


def element(values: cute.Tensor, index: Int32 | int) -> cute.Pointer:
    """Pointer to an element of an array of one mode, in global or shared memory."""
    return values.iterator + index


@dataclass(frozen=True)
class Row:
    """A row of vectors, or words, in global memory.

    Attributes:
        address: where it begins. Not a pointer: what is computed from one as a number costs registers.
        layout: (word, vector) : (4, V) : (1, step), or (word, word) : (1, W) : (1, step).
    """

    address: Int64
    layout: cute.Layout


def row_at(address: Int64, vectors: Int32 | int, step: Int32 | int = WORDS) -> Row:
    """A row of 16-byte vectors, `step` words apart."""
    return Row(address, cute.make_layout((WORDS, vectors), stride=(1, step)))


def words_at(address: Int64, words: Int32 | int, step: Int32 | int = 1) -> Row:
    """A row of 32-bit words, `step` words apart."""
    return Row(address, cute.make_layout((1, words), stride=(1, step)))


def row_address(data: Int64, index: Int32 | Int64 | int, nbytes: Int32 | Int64 | int) -> Int64:
    """Address of row `index` of a tensor (row, byte) : (nbytes, 1)."""
    return data + Int64(index) * nbytes


def part_at(data: Int64 | Int32, offset: Int32 | Int64 | int) -> Int64 | Int32:
    """Address of what lies a number of bytes behind another address; or, with 32 bits, byte of shared memory."""
    return data + offset


@dataclass(frozen=True)
class Share:
    """A thread's part of a row: its vectors, or words, turn by turn.

    Attributes:
        tensor: (word, turn).
        left: how many the row has from the first of these on; None: all turns are in the row.
        threads: how many lie from one turn to the next.
        there: whether the row exists, which a lost one does not; None: it does.
    """

    tensor: cute.Tensor
    left: Int32 | None
    threads: Int32 | int
    there: Boolean | None = None

    @property
    def turns(self) -> int:
        """Turns, of which the last ones may be beyond the end of the row."""
        return cute.size(self.tensor, mode=[1])

    def __getitem__(self, turn: int) -> cute.Tensor:
        """The vector, or word, of a turn."""
        return self.tensor[None, turn]

    def has(self, turn: int) -> Boolean | bool:
        """Whether a turn is in the row."""
        if self.left is None:
            return True
        inside = self.left > turn * self.threads
        return inside if self.there is None else inside & self.there

    def whole(self) -> Share:
        """The same where the caller knows that the turns that it moves are in the row."""
        return replace(self, left=None, there=None)


def share(
    row: Row, first: Int32 | int, turns: int, threads: Int32 | int = LANES, there: Boolean | None = None
) -> Share:
    """`turns` turns of a thread that takes every `threads`-th vector, or word, of a row from number `first` on; `there`
    as in `Share`."""
    return Share(_turns(row, first, turns, threads), row.layout.shape[1] - first, threads, there)


def vectors_at(address: Int64, first: Int32 | Int64 | int, count: int = 1) -> Share:
    """`count` vectors side by side that one thread takes, number `first` of a row and on; they are in the row."""
    return Share(_turns(row_at(address, count), first, count, 1), None, 1)


def _turns(row: Row, first: Int32 | Int64 | int, turns: int, threads: Int32 | int) -> cute.Tensor:
    """Tensor (word, turn) from vector, or word, `first` of a row on."""
    width, step = row.layout.shape[0], row.layout.stride[1]
    place = pointer(row.address + Int64(first) * (step * WORD_BYTES), Uint32, align=width * WORD_BYTES)
    step = step * threads
    if not isinstance(step, int):
        step = cute.assume(step, divby=width)
    return cute.make_tensor(place, cute.make_layout((width, turns), stride=(1, step)))


def item_coord(item: Int, extent: Int) -> tuple[Int, Int]:
    """(fast, slow) coordinate of a flat item over `extent` fast positions."""
    if isinstance(extent, int) and extent & (extent - 1) == 0:
        return item & (extent - 1), item >> (extent.bit_length() - 1)
    slow = item // extent
    return item - slow * extent, slow


Vectors: TypeAlias = "cute.Tensor | Share | Sequence[cute.Tensor]"
"""What a thread has of a row, turn by turn: (word, turn) in registers or shared memory, or a vector each turn."""
