"""Quantisation on the GPU: every bfloat16 value, every block maximum, every tie, and dispatch equal to the local
kernel."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.formats import FORMATS, VECTOR_BYTES, Format
from cute_ep.runtime.local_ops import copy_bytes, quantize
from cute_ep.testing.compare import assert_bits

from .conftest import LIBRARY, connected

SCALED = [name for name, fmt in FORMATS.items() if fmt.scale]
GLOBAL_SCALES = (1.0, 0.37, 2688.0, 2.0**-30, 2.0**40, 2.0**-100, 2.0**100)
CASES = [(name, scale) for name in SCALED for scale in (GLOBAL_SCALES if FORMATS[name].global_scale else (None,))]
HIDDEN = (32, 96, 128, 896, 1056, 2048, 2880, 2944, 4096, 7168)
"""Parts of a segment of 32 vectors, part tiles of 1024 elements, and the widths of models."""


def every_bf16() -> torch.Tensor:
    """All 65,536 bfloat16 bit patterns, NaNs and infinities included."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def holds(fmt: Format, hidden: int) -> bool:
    return hidden % fmt.block == 0 and fmt.payload_bytes(hidden) % VECTOR_BYTES == 0


def check_quantized(rows: torch.Tensor, fmt: str, scale: float | None) -> None:
    """`rows` [T, n] whole blocks; joined where n is less than a 16-byte vector of payload."""
    x = rows.bfloat16().cuda()
    if not holds(FORMATS[fmt], x.shape[1]):
        x = x[: x.shape[0] // 8 * 8].reshape(-1, x.shape[1] * 8)
    given = None if scale is None else torch.tensor([scale], device="cuda")
    actual = quantize(x.contiguous(), fmt, given, library=str(LIBRARY))
    expected = reference.quantize(x, fmt, 1.0 if scale is None else scale)
    for name, is_a, should_be in zip(actual._fields, actual, expected, strict=True):
        if should_be is None:
            assert is_a is None, name
        else:
            assert_bits(is_a, should_be, f"{name} of {tuple(x.shape)}, G = {scale}")


@pytest.mark.parametrize(("fmt", "scale"), CASES)
class TestQuantize:
    def test_every_value_as_block_maximum(self, fmt: str, scale: float | None) -> None:
        """Value v leads its block; the others are smaller multiples of it, so that every code appears."""
        fractions = torch.linspace(1, 0, FORMATS[fmt].block)
        check_quantized(every_bf16().float()[:, None] * fractions, fmt, scale)

    def test_every_value_as_row_maximum(self, fmt: str, scale: float | None) -> None:
        """Rows of two blocks, or one where that is a vector; the second has smaller numbers than the first."""
        block = FORMATS[fmt].block
        fractions = torch.linspace(1, -0.01, max(32, block))
        check_quantized(every_bf16().float()[:, None] * fractions, fmt, scale)

    def test_every_value_beside_a_fixed_maximum(self, fmt: str, scale: float | None) -> None:
        """Each value as an element of a block with maximum 6, 448 or 1e30: NaN and infinity spoil only their block."""
        half = FORMATS[fmt].block // 2
        for maximum in (6.0, 448.0, 1e30):
            values = every_bf16().float().view(-1, half)
            check_quantized(torch.cat([values, torch.full((values.shape[0], half), maximum)], dim=1), fmt, scale)

    def test_ties(self, fmt: str, scale: float | None) -> None:
        """Elements at every rounding boundary of the payload, and the bfloat16 numbers beside it."""
        element = FORMATS[fmt].element
        decode = getattr(reference, f"decode_{element.name}")
        numbers = decode(torch.arange(element.magnitude + (element.nan is None), dtype=torch.uint8))
        bits = ((numbers[1:] + numbers[:-1]) / 2).bfloat16().view(torch.int16)
        near = torch.cat([bits - 1, bits, bits + 1]).view(torch.bfloat16).float()
        values = torch.cat([near, -near])
        half = FORMATS[fmt].block // 2
        values = values.repeat(8 * half).view(-1, half)
        rows = torch.cat([values, torch.full_like(values, numbers[-1].item())], dim=1)
        for exponent in (-40, -20, -7, -1, 0, 1, 5, 20, 60):
            check_quantized(rows * 2.0**exponent, fmt, scale)

    def test_random_rows_of_many_sizes(self, fmt: str, scale: float | None) -> None:
        generator = torch.Generator().manual_seed(7)
        for hidden in HIDDEN:
            if holds(FORMATS[fmt], hidden):
                for tokens in (0, 1, 3, 17, 129, 1000):
                    magnitudes = 2.0 ** torch.randint(-20, 20, (tokens, 1), generator=generator)
                    check_quantized(torch.randn(tokens, hidden, generator=generator) * magnitudes, fmt, scale)

    def test_more_rows_than_warps(self, fmt: str, scale: float | None) -> None:
        """Each warp takes several tiles, so that what it loads ahead belongs to other rows."""
        hidden = next(size for size in (1056, 1152) if holds(FORMATS[fmt], size))
        generator = torch.Generator().manual_seed(8)
        check_quantized(torch.randn(20011, hidden, generator=generator), fmt, scale)


@pytest.mark.parametrize("fmt", SCALED)
def test_dispatch_quantises_like_the_local_kernel(fmt: str) -> None:
    record = FORMATS[fmt]
    hidden = 2944 if record.block == 128 else 2880
    cfg = EPConfig(hidden, 8, 1, 512, 1, fmt, timeout_s=20, scale_layout="linear")
    x = torch.randn(500, hidden).bfloat16().cuda()
    ids = torch.zeros(500, 1, dtype=torch.int32, device="cuda")  # one expert: rows keep the order of the tokens
    scale = torch.tensor([0.7], device="cuda") if record.global_scale else None
    with connected(cfg, ["cuda:0"]) as (communicator,):
        dispatched = communicator.dispatch(x, ids, input_scale=scale)
        communicator.synchronize()
        rows = quantize(x, fmt, scale, library=str(LIBRARY))
        assert_bits(dispatched.tokens[:500], rows.payload, "payload")
        assert_bits(dispatched.scales[:500, : rows.scales.shape[1]], rows.scales, "scales")
        if record.row_scale:
            assert_bits(dispatched.row_scales[:500], rows.row_scales, "row scales")


def test_quantize_refuses_bad_input() -> None:
    """What the host checks is in tests/runtime/test_local_ops.py."""
    with pytest.raises(EPInputError, match=r"input_scale\.device"):
        x = torch.zeros(2, 32, dtype=torch.bfloat16, device="cuda")
        quantize(x, "nvfp4", torch.ones(1), library=str(LIBRARY))


@pytest.mark.parametrize("num_bytes", [16, 496, 32768, 32784, 7_340_032 + 48])
def test_copy_bytes(num_bytes: int) -> None:
    """Every byte arrives and the byte after the last one is not touched (block_memcpy)."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.full((num_bytes + 16,), 0xA5, dtype=torch.uint8, device="cuda")
    copy_bytes(target[:num_bytes], source, ctas=5, library=str(LIBRARY))
    assert_bits(target[:num_bytes], source, "copy")
    assert bool((target[num_bytes:] == 0xA5).all())
