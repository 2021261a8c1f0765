"""`encode` of every codec, a unit at a time, its partner lanes' maxima given: device code, run on the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.cute.runtime import from_dlpack

from cute_ep.kernels.codec import codec_for, e2m1
from cute_ep.kernels.codec.base import block_lanes, source_vectors
from cute_ep.layouts.maps.formats import FORMATS, NVFP4_ROW, Format

from .codec_oracle import MIDPOINTS, f32, oracle, row_scales
from .host import host_pack_e2m1, others

pytestmark = pytest.mark.usefixtures("host_instructions")

HOPPER, BLACKWELL = "sm_90a", "sm_100a"


def encode_units(codec, words: np.ndarray, partners: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(payload bytes [N, 4 * unit words], scale bits [N]) of `codec.encode` for units [N, words], on the CPU."""

    @cute.jit
    def loop(gX: cute.Tensor, gPartners: cute.Tensor, gScale: cute.Tensor, gQ: cute.Tensor, gBits: cute.Tensor):
        for unit in range(cute.size(gBits)):
            others.append(gPartners[unit])
            rX = cute.make_rmem_tensor(words.shape[1], Uint32)
            rQ = cute.make_rmem_tensor(codec.fmt.unit_words, Uint32)
            for word in cutlass.range_constexpr(words.shape[1]):
                rX[word] = gX[unit, word].bitcast(Uint32)
            gBits[unit] = codec.encode(rX, rQ, codec.state(gScale[unit])).bitcast(Int32)
            for word in cutlass.range_constexpr(codec.fmt.unit_words):
                gQ[unit, word] = rQ[word].bitcast(Int32)

    tensors = [torch.from_numpy(np.ascontiguousarray(value)) for value in (words.view(np.int32), partners, scale)]
    payload = torch.empty(len(words), codec.fmt.unit_words, dtype=torch.int32)
    bits = torch.empty(len(words), dtype=torch.int32)
    loop(*map(from_dlpack, (*tensors, payload, bits)))
    return payload.numpy().view(np.uint8), bits.numpy().view(np.uint32)


def sample_units(elements: int) -> np.ndarray:
    """[N, elements] bfloat16 patterns as uint16: all magnitudes, exact ratios (ties), NaN, infinities, zeros."""
    rng = np.random.default_rng(elements)
    exponents = np.repeat(np.arange(-136, 129), 64)[:, None]
    shape = (len(exponents), elements)
    normal = rng.standard_normal(shape)
    wide = rng.standard_normal(shape) * 2.0 ** -rng.integers(0, 24, shape)
    ratios = rng.integers(-64, 65, shape) / 64 * rng.integers(128, 256, (shape[0], 1)) / 256
    ties = rng.choice([*MIDPOINTS, 0.5, 3, 6, -6, *np.negative(MIDPOINTS)], shape) / 8
    ties *= rng.integers(16, 32, (shape[0], 1)) / 32
    with np.errstate(over="ignore"):
        finite = np.concatenate([np.ldexp(part, exponents) for part in (normal, wide, ratios, ties)])
        finite = finite.astype(f32).astype(ml_dtypes.bfloat16).view(np.uint16)
    rare = finite.copy()
    chance = rng.random(rare.shape)
    for value, (low, high) in {
        0x7FC0: (0, 0.02),
        0xFFC1: (0.02, 0.04),
        0x0000: (0.04, 0.1),
        0x8000: (0.1, 0.2),
    }.items():
        rare[(low <= chance) & (chance < high)] = value
    infinite = rare[::16].copy()
    chance = rng.random(infinite.shape)
    infinite[chance < 0.05], infinite[chance > 0.95] = 0x7F80, 0xFF80
    anything = rng.integers(0, 1 << 16, (1 << 13, elements)).astype(np.uint16)
    special = np.array([0x0000, 0x8000, 0x7FFF, 0xFFFF, 0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x8001], np.uint16)
    few = special[rng.integers(0, len(special), (1 << 12, elements))]
    same = np.repeat(special[:, None], elements, axis=1)
    return np.concatenate([finite, rare, infinite, anything, few, same])


def to_f32(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(f32)


def largest(values: np.ndarray) -> np.ndarray:
    """Largest magnitude of each row, without NaN."""
    return np.where(np.isnan(values), f32(0), np.abs(values)).max(axis=-1)


GLOBAL_SCALES = np.array([1, 2.0**100, 2.0**-100, 1 / 3, 527.3, 2.0**-20, 2688 / 1e33, 2.0**40 * 1.7], f32)


def scales_for(fmt: Format, amax: np.ndarray) -> np.ndarray:
    """The scale that each unit's `state` gets. Row scales: of a row whose maximum is 1 to 2**12 times the unit's, or
    the unit's 6th part divided by a power of two, which makes products hit ties."""
    index = np.arange(len(amax))
    if fmt != NVFP4_ROW:
        return GLOBAL_SCALES[index % len(GLOBAL_SCALES)]
    rows = np.where(index % 2, np.ldexp(amax, index % 13), np.ldexp(amax * 448, -(index // 2 % 9)))
    return row_scales(np.maximum(rows, amax).astype(f32))


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.scale], ids=lambda fmt: fmt.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_encode(fmt, arch, monkeypatch):
    """Every byte of every unit of a wide sample."""
    if arch == BLACKWELL:
        monkeypatch.setattr(e2m1, "pack_e2m1", host_pack_e2m1)
    elements = fmt.unit
    patterns = sample_units(elements)
    x = to_f32(patterns)
    assert np.isnan(x).any() and np.isinf(x).any()
    amax = largest(x.reshape(len(x), -1, min(fmt.block, elements)))
    partners = np.zeros(len(x), f32)
    if block_lanes(fmt) > 1:
        partners[1::2] = np.roll(amax[:, 0], 7)[1::2]
        amax = np.maximum(amax, partners[:, None])
    scale = scales_for(fmt, amax.max(axis=1))
    want, want_bits = oracle(fmt, x, amax, scale)
    separate = np.unpackbits(want[:, :, None], axis=2, bitorder="little")[:, :, : fmt.bits]
    want = np.packbits(separate.reshape(len(want), -1), axis=1, bitorder="little")
    words = patterns.view(np.uint32)
    assert words.shape[1] == 4 * source_vectors(fmt)
    payload, bits = encode_units(codec_for(fmt, arch), words, partners, scale)
    np.testing.assert_array_equal(bits, want_bits)
    np.testing.assert_array_equal(payload, want)


def test_encode_of_bf16_copies():
    patterns = sample_units(8)
    payload, bits = encode_units(
        codec_for(FORMATS["bf16"], HOPPER), patterns.view(np.uint32), *np.zeros((2, len(patterns)), f32)
    )
    np.testing.assert_array_equal(payload.view(np.uint16), patterns)
    assert not bits.any()
