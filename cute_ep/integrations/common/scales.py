"""Scale factors as grouped matmuls for Blackwell read them: exponents, four in an int32."""

from __future__ import annotations

import torch

PACKED = 4
"""Exponents (UE8M0) in an int32."""
EXPONENT = 23
"""Place of the exponent's lowest bit in a float32."""


def packed_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Of [..., n] float32 powers of two, or uint8 exponents, n a multiple of PACKED and rows contiguous: exponents as
    [..., n / PACKED] int32, the first in the lowest byte. Of uint8 it is the same memory."""
    bits = scales if scales.dtype == torch.uint8 else (scales.view(torch.int32) >> EXPONENT).to(torch.uint8)
    return bits.view(torch.int32)
