"""Hooks of the tests: router weights in bfloat16, and an input scale given as a reciprocal."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float32

from cute_ep.kernels.device.memory import array, pointer


@cute.jit
def bfloat16_weight(address, token, k, top_k):
    """Router weights [T, K] bfloat16."""
    index = token * top_k + k
    return Float32(array(address, BFloat16, index + 1)[index])


@cute.jit
def reciprocal(address, expert):
    """One over a float32[1]."""
    return Float32(1.0) / cute.arch.load(pointer(address, Float32), Float32)
