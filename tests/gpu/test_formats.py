"""Quantisation on the GPU: every bfloat16 value, every block maximum, and dispatch equal to the local kernel."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.compare import assert_bits
from cute_ep.config import EPConfig
from cute_ep.errors import EPInputError
from cute_ep.layouts.formats import FORMATS
from cute_ep.local_ops import copy_bytes, quantize

from .conftest import LIBRARY, connected

SCALED = [name for name, fmt in FORMATS.items() if fmt.scale]
GLOBAL_SCALES = (1.0, 0.37, 2688.0, 2.0**-30, 2.0**40)


def every_bf16() -> torch.Tensor:
    """All 65,536 bfloat16 bit patterns, NaNs and infinities included."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def check_quantized(x: torch.Tensor, fmt: str, scale: float) -> None:
    payload, scales = quantize(x.cuda(), fmt, torch.tensor([scale], device="cuda"), library=str(LIBRARY))
    expected_payload, expected_scales = reference.quantize(x.cuda(), fmt, scale)
    assert_bits(scales, expected_scales, f"scales, G = {scale}")
    assert_bits(payload, expected_payload, f"payload, G = {scale}")


@pytest.mark.parametrize("scale", GLOBAL_SCALES)
@pytest.mark.parametrize("fmt", SCALED)
class TestQuantize:
    def test_every_value_as_block_maximum(self, fmt: str, scale: float) -> None:
        """Value v leads its block; the others are smaller multiples of it, so that every code appears."""
        block = FORMATS[fmt].block
        fractions = torch.linspace(1, 0, block)
        self._check(every_bf16().float()[:, None] * fractions, fmt, scale)

    def test_every_value_beside_a_fixed_maximum(self, fmt: str, scale: float) -> None:
        """Each value as an element of a block with maximum 6, 448 or 1e30: NaN and infinity spoil only their block."""
        block = FORMATS[fmt].block
        for maximum in (6.0, 448.0, 1e30):
            values = every_bf16().float().view(-1, block - 1 if 65536 % (block - 1) == 0 else block // 2)
            rows = torch.cat([values, torch.full((values.shape[0], block - values.shape[1]), maximum)], dim=1)
            self._check(rows, fmt, scale)

    def test_ties(self, fmt: str, scale: float) -> None:
        """Elements at, just below and just above every rounding boundary of the payload."""
        boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        near = torch.stack(
            [boundaries, torch.nextafter(boundaries, boundaries * 0), torch.nextafter(boundaries, boundaries * 9)]
        )
        values = torch.cat([near.flatten(), -near.flatten()]).repeat(16)
        block = FORMATS[fmt].block
        rows = torch.cat(
            [values.view(-1, block // 2), torch.full((values.numel() * 2 // block, block // 2), 6.0)], dim=1
        )
        for exponent in range(-20, 21):
            self._check(rows * 2.0**exponent, fmt, scale)

    def test_random_rows_of_many_sizes(self, fmt: str, scale: float) -> None:
        generator = torch.Generator().manual_seed(7)
        for tokens, hidden in ((1, 32), (3, 96), (17, 2880), (129, 7168), (1000, 2048)):
            self._check(torch.randn(tokens, hidden, generator=generator) * 3, fmt, scale)

    def _check(self, rows: torch.Tensor, fmt: str, scale: float) -> None:
        x = rows.bfloat16()
        if x.shape[1] * FORMATS[fmt].bits // 8 % 16:  # join blocks until a row is whole 16-byte vectors
            x = x[: x.shape[0] // 8 * 8].reshape(-1, x.shape[1] * 8)
        check_quantized(x.contiguous(), fmt, scale)


@pytest.mark.parametrize("fmt", SCALED)
def test_dispatch_quantises_like_the_local_kernel(fmt: str) -> None:
    cfg = EPConfig(2880, 8, 1, 512, 1, fmt, timeout_s=20)
    x = torch.randn(500, 2880).bfloat16().cuda()
    ids = torch.zeros(500, 1, dtype=torch.int32, device="cuda")  # one expert: rows keep the order of the tokens
    scale = torch.tensor([0.7], device="cuda")
    with connected(cfg, ["cuda:0"]) as (communicator,):
        dispatched = communicator.dispatch(x, ids, input_scale=scale)
        communicator.synchronize()
        payload, scales = quantize(x, fmt, scale, library=str(LIBRARY))
        assert_bits(dispatched.tokens[:500], payload, "payload")
        atoms = reference.swizzle_scales(scales, [500])
        assert_bits(dispatched.scales[: atoms.shape[0]], atoms, "scales")


def test_quantize_refuses_bad_input() -> None:
    with pytest.raises(EPInputError, match="hidden = 24"):
        quantize(torch.zeros(2, 24, dtype=torch.bfloat16, device="cuda"), "nvfp4", library=str(LIBRARY))
    with pytest.raises(EPInputError, match="dtype"):
        quantize(torch.zeros(2, 32, device="cuda"), "nvfp4", library=str(LIBRARY))


@pytest.mark.parametrize("num_bytes", [16, 496, 32768, 32784, 7_340_032 + 48])
def test_copy_bytes(num_bytes: int) -> None:
    """Every byte arrives and the byte after the last one is not touched (block_memcpy)."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.full((num_bytes + 16,), 0xA5, dtype=torch.uint8, device="cuda")
    copy_bytes(target[:num_bytes], source, ctas=5, library=str(LIBRARY))
    assert_bits(target[:num_bytes], source, "copy")
    assert bool((target[num_bytes:] == 0xA5).all())
