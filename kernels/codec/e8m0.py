"""e8m0: one byte for a power of two, 2**(byte - 127); exact integer arithmetic on float32 bits."""

from __future__ import annotations

from cutlass import Float32, Uint32

MANTISSA_BITS = 23
MANTISSA = (1 << MANTISSA_BITS) - 1
SMALLEST = 0x00400000
"""Bits of 2**-127, the power of byte 0."""
LARGEST_SUM = 254


def round_up(value: Float32) -> Uint32:
    """The byte of the smallest power of two >= value, for 2**-127 < value <= 2**127."""
    return (value.bitcast(Uint32) + Uint32(MANTISSA)) >> MANTISSA_BITS


def inverse_power(byte: Uint32) -> Float32:
    """1 / 2**(byte - 127) = 2**(127 - byte), for byte < 254: the exponents of a power and its inverse add up to 254."""
    return ((Uint32(LARGEST_SUM) - byte) << MANTISSA_BITS).bitcast(Float32)
