"""What a kernel asks of a codec: one unit of bfloat16 in, the words of its payload and its scale bits out.

A unit is the source of one payload vector (16 bytes): 8 elements of BF16, 16 of an 8-bit format, 32 of a 4-bit one; of
a 6-bit one 32, of 24 bytes (`codec/payload.py`). A warp encodes 32 consecutive units of one row, lane l the l-th of
them, so lanes that share a block find each other by shuffles and the scale factors of neighbouring lanes join into
words. Kernels never ask which format they carry.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS
from cute_ep.layouts.maps.formats import Format
from cute_ep.layouts.maps.scales import WORD_BYTES

State: TypeAlias = tuple[Float32, Float32] | None
"""What a codec's `encode` needs besides the unit; None where that is nothing."""


class Codec(Protocol):
    """Device code of one format. `fmt` carries every size."""

    fmt: Format

    def state(self, scale: Float32) -> State:
        """What `encode` needs besides the unit, from the scale that the caller or the row gives.

        Args:
            scale: the tensor's global scale G (formats with `global_scale`), the row's own scale (formats with
                `row_scale`); without meaning to the others.
        """
        ...

    def row_scale(self, amax: Float32) -> Float32:
        """The row's own scale, a bfloat16 value, from the largest magnitude in the row (formats with `row_scale`)."""
        ...

    def encode(self, rX: cute.Tensor, rQ: cute.Tensor, state: State) -> Uint32:
        """Encode one unit; called by all 32 lanes together, since lanes that share a block exchange their maxima.

        Args:
            rX: (4 * source_vectors) Uint32, bfloat16 pairs, lower half first; zeros beyond the end of the row.
            rQ: (unit_words) Uint32, overwritten with the payload.
            state: what `state` returned.

        Returns:
            The scale bits of the unit's blocks, first block lowest; lanes that share a block return the same bits.
            Zero when the format has no scales.
        """
        ...


class UnscaledCodec:
    """The part that codecs share whose blocks need nothing besides the unit.

    Args:
        fmt: the format.
        hardware_fp4: the target has the e2m1 conversion (sm_100 and later).
    """

    def __init__(self, fmt: Format, hardware_fp4: bool) -> None:
        self.fmt, self.hardware = fmt, hardware_fp4

    def state(self, scale: Float32) -> None:
        return None


def source_vectors(fmt: Format) -> int:
    """16-byte vectors of bfloat16 that one unit reads."""
    return fmt.unit // VECTOR_ELEMENTS


def block_lanes(fmt: Format) -> int:
    """Lanes that share one block: units of a block, 1 when a unit holds whole blocks."""
    return max(1, fmt.block // fmt.unit)


def word_lanes(fmt: Format) -> int:
    """Lanes whose scale factors make up one scale word."""
    return WORD_BYTES // fmt.scale_itemsize * fmt.block // fmt.unit


@cute.jit
def join_scale_word(fmt: cutlass.Constexpr, bits: Uint32) -> Uint32:
    """The scale word of `word_lanes` neighbouring lanes, in the first of them. By all 32 lanes."""
    word = bits
    width = 8 * fmt.scale_itemsize * max(1, fmt.unit // fmt.block)
    stride = block_lanes(fmt)
    while cutlass.const_expr(width < 8 * WORD_BYTES):
        word = word | (cute.arch.shuffle_sync_down(word, stride) << width)
        width, stride = 2 * width, 2 * stride
    return word
