"""Division by a number that is the same for a whole launch: one multiplication instead of some thirty instructions."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32


@dataclass(frozen=True)
class Divisor:
    """Splits flat items over `extent` fast positions.

    magic: ceil(2^32 / extent). The quotient is exact while item * extent < 2^32 (Granlund and Montgomery 1994, with
    the error of magic, which is below extent). Items here count units of one row, entries of one
    rank or pieces of all ranks, and stay far below that.
    """

    extent: Int32
    magic: Uint32 | None

    def split(self, item):
        """(item % extent, item // extent) of a non-negative 32-bit item."""
        if self.magic is None:
            quotient = item // self.extent
        else:
            quotient = Int32(cute.arch.mul_hi(Uint32(item), self.magic))
            quotient = cutlass.select_(self.extent == 1, Int32(item), quotient)
        return item - quotient * self.extent, quotient


def divisor(extent) -> Divisor:
    """Divisor for a device integer, or for a Python integer (then the compiler folds the division)."""
    if isinstance(extent, int):
        return Divisor(extent, None)
    return Divisor(extent, Uint32(0xFFFFFFFF) // Uint32(extent) + Uint32(1))
