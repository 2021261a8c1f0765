"""Division in few instructions: by a number that is the same for a whole launch (one multiplication instead of some
thirty instructions), and by a power of two (one instruction where the DSL's signed `//` and `%` take six)."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_ep.layouts.maps.record import Int


def quotient(value: Int, power: int) -> Int:
    """value // power, rounded down, for a power of two that is known to the compiler."""
    return value >> (power.bit_length() - 1)


def remainder(value: Int, power: int) -> Int:
    """value % power, not negative, for a power of two that is known to the compiler."""
    return value & (power - 1)


def round_up(value: Int, power: Int) -> Int:
    """Smallest multiple of a power of two, known to the compiler or not, that is not below `value`."""
    return (value + power - 1) & -power


@dataclass(frozen=True)
class Divisor:
    """Splits flat items over `extent` fast positions.

    magic: ceil(2^32 / extent), computed by the host (`division_magic`). The quotient is exact while
    item * extent < 2^32 (Granlund and Montgomery 1994, with the error of magic, which is below extent). Items here
    count units of one row, entries of one rank, slices or tokens of all ranks, and stay far below that.
    """

    extent: Int32
    magic: Uint32

    def split(self, item: Int32) -> tuple[Int32, Int32]:
        """(item % extent, item // extent) of a non-negative 32-bit item."""
        slow = Int32(cute.arch.mul_hi(Uint32(item), self.magic))
        slow = cutlass.select_(self.extent == 1, Int32(item), slow)
        return item - slow * self.extent, slow


def division_magic(extent: Uint32) -> Uint32:
    """The `magic` of a Divisor, computed by a thread: some thirty instructions."""
    return Uint32(0xFFFFFFFF) // extent + Uint32(1)
