"""What a kernel asks of a codec: one unit of bfloat16 in, one 16-byte payload vector and its scales out.

A unit is the source of one payload vector (16 bytes): 8 elements of BF16, 32 of a 4-bit format. Kernels move units and
never ask which format they carry.
"""

from __future__ import annotations

from typing import Any, Protocol

from cute_ep.layouts.formats import VECTOR_BYTES, Format

SOURCE_BITS = 16
"""Bits of a source element (bfloat16)."""


class Codec(Protocol):
    """Device code of one format. `fmt` carries every size."""

    fmt: Format

    def prepare(self, global_scale: Any) -> Any:
        """Per-thread state of `encode`, from the address of the float32 global scale (0: none)."""
        ...

    def encode(self, rX: Any, rQ: Any, state: Any) -> Any:
        """Encode one unit.

        Args:
            rX: (4 * source_vectors) Uint32, bfloat16 pairs, lower half first.
            rQ: (4) Uint32, overwritten with the payload.
            state: what `prepare` returned.

        Returns:
            The unit's scale bytes in an integer of that width, or None when the format has none.
        """
        ...


def source_vectors(fmt: Format) -> int:
    """16-byte vectors of bfloat16 that one unit reads."""
    return SOURCE_BITS // fmt.bits


def unit_scale_bytes(fmt: Format) -> int:
    """Scale bytes that one unit writes (0: the format has no scales)."""
    return fmt.scale_bytes(VECTOR_BYTES * 8 // fmt.bits)
