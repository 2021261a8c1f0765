"""Bridge from byte maps to CuTe tensors: the one place where an address becomes a tensor inside a kernel.

Mode 0 of a vector tensor is one 16-byte access, (4 x Uint32) : (1); its copy atom is `vector_atom()`.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import Region

WORDS = VECTOR_BYTES // 4


class DeviceRegion(Region):
    """A region whose offsets are 64-bit. A stride of 32 bits costs one instruction, one of 64 bits three."""

    def product(self, index, stride):
        """A 32-bit stride stays one until it is multiplied."""
        return Int64(index) * Int64(stride)


def pointer(address: Int64, dtype, align: int | None = None):
    """Global-memory pointer to `dtype` at a 64-bit address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def array(address: Int64, dtype, *shape):
    """Row-major tensor of `dtype` over `shape`; offsets are 64-bit."""
    stride = [Int64(1)]
    for extent in reversed(shape[1:]):
        stride.insert(0, stride[0] * extent)
    return cute.make_tensor(pointer(address, dtype), cute.make_layout(tuple(shape), stride=tuple(stride)))


def vector_tensor(address: Int64, vectors, rows, pitch_bytes=VECTOR_BYTES):
    """Rows of 16-byte vectors: (word, vector, row) : (1, 4, pitch), every vector aligned to 16 bytes."""
    if isinstance(pitch_bytes, int):
        pitch = pitch_bytes // 4
    else:
        pitch = cute.assume(Int64(pitch_bytes) >> 2, divby=WORDS)
    layout = cute.make_layout((WORDS, vectors, rows), stride=(1, WORDS, pitch))
    return cute.make_tensor(pointer(address, Uint32, align=VECTOR_BYTES), layout)


def vector_at(address: Int64, index):
    """The four words of 16-byte vector number `index` behind an address."""
    return vector_tensor(address + Int64(index) * VECTOR_BYTES, 1, 1)[None, 0, 0]


def vector_atom():
    """Copy atom of one 16-byte access."""
    return cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=8 * VECTOR_BYTES)


def load_vector(words, address: Int64, how: str) -> None:
    """Load 16 bytes with PTX qualifiers that a copy atom does not have: `how` stands between "ld." and ".v4.b32"."""
    _load(words, f"ld.{how}.{FOUR_WORDS};", address)


def load_row(words, address: Int64, once: Boolean) -> None:
    """Load 16 bytes; with `once` they are the first to leave the caches."""
    loads = f"@once ld.global.cs.{FOUR_WORDS}; @!once ld.global.{FOUR_WORDS};"
    _load(words, f"{{ .reg .pred once; setp.ne.u32 once, {{$r1}}, 0; {loads} }}", address, Int32(once))


FOUR_WORDS = "v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]"
"""Operands of a load of `_load`."""


def _load(words, ptx: str, *arguments) -> None:
    """Run PTX that leaves four words, from an address that is its first argument."""
    seen = cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * WORDS, read_only_args=list(arguments))
    for index in range(WORDS):
        words[index] = seen[index]


def item_coord(item, extent):
    """(fast, slow) coordinate of a flat item over `extent` fast positions."""
    if isinstance(extent, int) and extent & (extent - 1) == 0:
        return item & (extent - 1), item >> (extent.bit_length() - 1)
    slow = item // extent
    return item - slow * extent, slow
