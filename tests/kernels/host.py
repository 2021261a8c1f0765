"""Device code on the CPU: the DSL compiles the very functions that kernels inline, with stand-ins for the instructions
that only a GPU has. What is left to tests on a GPU are the instructions themselves."""

from __future__ import annotations

import cutlass
import numpy as np
import torch
from cutlass import Float32, Int32, Uint32, Uint64, cute
from cutlass.cute.runtime import from_dlpack

from cute_ep.kernels.codec import e2m1, fp6, fp8, mx, nvfp4
from cute_ep.kernels.device import arith

from .codec_oracle import INFINITY_BITS, MAX_BF16, MIDPOINTS


def select(condition, yes, no):
    return type(yes)(cutlass.select_(condition, yes, no))


def positive_nan(value):
    """What multiplications and minima return on a GPU for any NaN; the host keeps the sign."""
    is_nan = (value.bitcast(Uint32) & Uint32(0x7FFFFFFF)) > Uint32(INFINITY_BITS)
    return select(is_nan, Float32(float("nan")), value)


def host_minmax(function):
    def run(a, b, *, abs=False):
        if not abs:
            return function(a, b)
        return cute.math.copysign(function(cute.math.abs(a), cute.math.abs(b)), positive_nan(a))

    return run


def join_halves(low, high):
    return (low.bitcast(Uint32) >> 16) | (high.bitcast(Uint32) & Uint32(0xFFFF0000))


def host_mul_hi(a, b):
    return Uint32((Uint64(a) * Uint64(b)) >> 32)


def host_clamp(x):
    limited = cute.math.min(cute.math.abs(x), Float32(float(MAX_BF16)), propagate_nan=True)
    return positive_nan(cute.math.copysign(limited, x))


def host_ptx(code, *, write_only_types, read_only_args):
    pairs = [arith.halves(word) for word in read_only_args]
    if "max.bf16x2" in code:
        return join_halves(*[cute.math.max(a, b) for a, b in zip(*pairs, strict=True)])
    assert "min.NaN.xorsign.abs.bf16x2" in code
    return join_halves(*map(host_clamp, pairs[0]))


def host_float8(value, mantissa, bias, largest):
    """The code of a number of 8 bits: a multiple of the step of its binade, whose number is the code's lower bits and
    carries."""
    lowest = 128 - bias  # the exponent field of the smallest normal number in a float32
    size = cute.math.min(cute.math.abs(value), Float32(largest))
    exponent = cutlass.max(size.bitcast(Uint32) >> 23, Uint32(lowest))
    steps = size * ((Uint32(254 + mantissa) - exponent) << 23).bitcast(Float32)  # at most 2**(mantissa + 1), exact
    number = (steps + Float32(2.0**23)).bitcast(Uint32) & Uint32(0xFF)
    code = ((exponent - Uint32(lowest)) << mantissa) + number | ((value.bitcast(Uint32) >> 24) & Uint32(0x80))
    is_nan = (value.bitcast(Uint32) & Uint32(0x7FFFFFFF)) > Uint32(INFINITY_BITS)
    return select(is_nan, Uint32(0x7F), code)


def host_e4m3(value):
    return host_float8(value, 3, 7, 448.0)


def host_e5m2(value):
    return host_float8(value, 2, 15, 57344.0)


def host_round_to_bf16(value):
    """Of a number that is not NaN; without AVX512_BF16 a host's own conversion needs a library function."""
    bits = value.bitcast(Uint32)
    even = (bits >> 16) & Uint32(1)
    return ((bits + Uint32(0x7FFF) + even) & Uint32(0xFFFF0000)).bitcast(Float32)


def host_pack_e4m3(*values):
    return joined([host_e4m3(value) for value in values])


def host_pack_e5m2(*values):
    return joined([host_e5m2(value) for value in values])


def joined(codes):
    return codes[0] | (codes[1] << 8) | (codes[2] << 16) | (codes[3] << 24)


def host_unpack_e4m3(codes):
    values = []
    for element in range(4):
        code = (codes >> (8 * element)) & Uint32(0x7F)
        normal = (code + Uint32(120 << 3)) << 20
        subnormal = (Float32(code) * Float32(2.0**-9)).bitcast(Uint32)
        values.append(select(code < Uint32(8), subnormal, normal).bitcast(Float32))
    return values


def host_pack_e2m1(rY, hardware):
    """The e2m1 instruction: a code is the number of midpoints below; of a midpoint itself the even code wins."""
    packed = Uint32(0)
    for element in range(8):
        value = positive_nan(rY[element])
        size, code = cute.math.abs(value), Uint32(0)
        for index, midpoint in enumerate(MIDPOINTS):
            above = size < Float32(midpoint) if index % 2 else size <= Float32(midpoint)
            code += select(above, Uint32(0), Uint32(1))
        packed = packed | (code | ((value.bitcast(Uint32) >> 28) & Uint32(8))) << (4 * element)
    return packed


others = []
"""The maximum in a unit's partner lanes, while a function is traced."""


def run_map(function, *inputs: np.ndarray, outputs: int = 1) -> list[np.ndarray]:
    """`function` of scalars, compiled for the host, for every element; outputs are 32-bit patterns."""

    @cute.jit
    def loop(arguments: list, results: list):
        for index in range(cute.size(results[0])):
            values = function(*[argument[index] for argument in arguments])
            values = values if isinstance(values, tuple) else (values,)
            for result, value in zip(results, values, strict=True):
                result[index] = value.bitcast(Int32)

    tensors = [torch.from_numpy(np.ascontiguousarray(value)) for value in inputs]
    results = [torch.empty(tensors[0].shape, dtype=torch.int32) for _ in range(outputs)]
    loop([from_dlpack(tensor) for tensor in tensors], [from_dlpack(result) for result in results])
    return [result.numpy().view(np.uint32) for result in results]


def install(monkeypatch):
    """Let kernels that are traced from now on use the stand-ins."""
    monkeypatch.setattr(cute.arch, "fmin", host_minmax(cute.math.min))
    monkeypatch.setattr(cute.arch, "fmax", host_minmax(cute.math.max))
    monkeypatch.setattr(cute.arch, "inline_ptx", host_ptx)
    monkeypatch.setattr(cute.arch, "rcp_approx", lambda value: Float32(1.0) / value)
    monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", lambda value, step: others[-1])
    for module in (e2m1, fp6, fp8, mx, nvfp4):
        monkeypatch.setattr(module, "pack_e4m3", host_pack_e4m3)
    monkeypatch.setattr(fp6, "pack_e5m2", host_pack_e5m2)
    monkeypatch.setattr(nvfp4, "unpack_e4m3", host_unpack_e4m3)
    monkeypatch.setattr(nvfp4, "round_to_bf16", host_round_to_bf16)
