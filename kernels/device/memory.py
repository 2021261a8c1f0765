"""Tensors over global memory: the one place where an address becomes a tensor inside a kernel.

| tensor      | axes               | shape : stride, in its elements                        |
| ----------- | ------------------ | ------------------------------------------------------ |
| `array`     | as given           | row-major, 64-bit strides                              |
| `vectors`   | (word, vector)     | (4, V) : (1, 4)                                        |
| `rows`      | (word, vector, row)| (4, V, R) : (1, 4, pitch)                              |
| `lane_tile` | (word, turn)       | (4, S) : (1, 128), from a vector of a row on           |
| `lane_words`| (turn)             | (S) : (32), from a word of a row on                    |

A warp takes a row in segments of 32 vectors, one a lane: in turn s lane l takes vector 32 s + l. So the thread-value
layout of the row is (lane, (word, segment)) : (4, (1, 128)), of which `lane_tile` is one lane's part.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, Numeric, Uint32

from cute_ep.kernels.device.atoms import WORDS
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import Int, Region
from cute_ep.layouts.maps.scales import WORD_BYTES

LANES = 32


class DeviceRegion(Region):
    """A region of the arena in a kernel: offsets are those of its CuTe layout, in bytes and 64 bits."""

    def at(self, *coord: Int32 | Int64 | int) -> Int64:
        """Offset of the element at `coord` (leading modes; missing ones are 0)."""
        strides = tuple(Int64(stride) for stride in self.stride[: len(coord)])
        if not coord:
            return self.offset
        layout = cute.make_layout((1 << 30,) * len(coord), stride=strides)
        return self.offset + cute.crd2idx(tuple(Int64(index) for index in coord), layout)


def pointer(address: Int64, dtype: type[Numeric], align: int | None = None) -> cute.Pointer:
    """Global-memory pointer to `dtype` at a 64-bit address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def array(address: Int64, dtype: type[Numeric], *shape: Int32 | int) -> cute.Tensor:
    """Row-major tensor of `dtype` over `shape`; offsets are 64-bit."""
    stride = [Int64(1)]
    for extent in reversed(shape[1:]):
        stride.insert(0, stride[0] * extent)
    return cute.make_tensor(pointer(address, dtype), cute.make_layout(tuple(shape), stride=tuple(stride)))


def rows(
    address: Int64, vectors: Int32 | int, count: Int32 | int, pitch_bytes: Int32 | Int64 | int = VECTOR_BYTES
) -> cute.Tensor:
    """Rows of 16-byte vectors, `pitch_bytes` apart."""
    if isinstance(pitch_bytes, int):
        pitch = pitch_bytes // 4
    else:
        pitch = cute.assume(Int64(pitch_bytes) >> 2, divby=WORDS)
    layout = cute.make_layout((WORDS, vectors, count), stride=(1, WORDS, pitch))
    return cute.make_tensor(pointer(address, Uint32, align=VECTOR_BYTES), layout)


def vector(address: Int64, index: Int32 | Int64 | int = 0) -> cute.Tensor:
    """Vector number `index` of a row."""
    return lane_tile(address, index, 1)[None, 0]


def row_address(data: Int64, row: Int32, nbytes: Int32 | Int64) -> Int64:
    """Address of row `row` of a tensor (row, byte) : (nbytes, 1)."""
    return data + Int64(row) * nbytes


def lane_tile(address: Int64, index: Int32 | Int64 | int, turns: Int32 | int) -> cute.Tensor:
    """`turns` vectors of a row, every 32nd from number `index` on: a lane's."""
    place = address + Int64(index) * VECTOR_BYTES
    layout = cute.make_layout((WORDS, turns), stride=(1, WORDS * LANES))
    return cute.make_tensor(pointer(place, Uint32, align=VECTOR_BYTES), layout)


def lane_words(address: Int64, word: Int32 | int, turns: Int32 | int) -> cute.Tensor:
    """`turns` words of a row of words, every 32nd from number `word` on: a lane's."""
    place = address + Int64(word) * WORD_BYTES
    return cute.make_tensor(pointer(place, Uint32), cute.make_layout(turns, stride=LANES))


def place_of(tensor: cute.Tensor, index: Int32 | int) -> cute.Pointer:
    """Pointer to an element."""
    return tensor.iterator + cute.crd2idx(index, tensor.layout)


def item_coord(item: Int, extent: Int) -> tuple[Int, Int]:
    """(fast, slow) coordinate of a flat item over `extent` fast positions."""
    if isinstance(extent, int) and extent & (extent - 1) == 0:
        return item & (extent - 1), item >> (extent.bit_length() - 1)
    slow = item // extent
    return item - slow * extent, slow
