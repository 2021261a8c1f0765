"""Finite numbers give finite numbers in every format (`tests/finite.py` says what that is), on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ep import connect_local, reference
from cute_ep.api.config import EPConfig
from cute_ep.api.gates import Gate
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import LINEAR
from tests.finite import GATES, TABLE, all_numbers, assert_numbers, assert_values, check_gates, check_round

QUANTISED = [name for name, fmt in FORMATS.items() if fmt.scale]
FUSED = [name for name, fmt in FORMATS.items() if not fmt.row_scale]
EXTREME = (0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x3F80, 0x4000, 0x7EFF, 0x7F00, 0x7F5F, 0x7F60, 0x7F7E, 0x7F7F)
"""Bits of bfloat16: zero, the smallest and the largest subnormal and the smallest normal numbers, 1, 2, and the largest
numbers, around those from which on roundings leave float32."""
finite_bits = st.sampled_from([sign | bits for bits in EXTREME for sign in (0, 1 << 15)]) | st.integers(
    -0x7F7F, 0x7F7F
).map(lambda bits: abs(bits) | (bits < 0) << 15)
WIDTH = 128


def rows_of(bits: list[int]) -> torch.Tensor:
    """[1, WIDTH] bfloat16."""
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[None]


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("other", TABLE)
def test_every_number_beside_others(fmt: str, other: float) -> None:
    x = all_numbers(FORMATS[fmt].block, other)
    rows = reference.quantize(x, fmt)
    assert_numbers(fmt, fmt, *rows)
    assert_values(fmt, reference.dequantize(rows, fmt), x)


@pytest.mark.parametrize("fmt", QUANTISED)
@settings(max_examples=40)
@given(st.lists(finite_bits, min_size=WIDTH, max_size=WIDTH), st.integers(-100, 100))
def test_rows_of_extreme_numbers(fmt: str, bits: list[int], exponent: int) -> None:
    """With every global scale that is allowed."""
    x, scale = rows_of(bits), 2.0**exponent if FORMATS[fmt].global_scale else 1.0
    rows = reference.quantize(x, fmt, scale)
    assert_numbers(fmt, fmt, *rows)
    got = reference.dequantize(rows, fmt, scale)
    assert not got.isnan().any()
    if scale == 1.0:
        assert_values(fmt, got, x)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounds_of_extreme_numbers(fmt: str) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.tensor(EXTREME)[torch.randint(len(EXTREME), (23, 256), generator=generator)]
    bits += torch.randint(2, bits.shape, generator=generator) << 15
    layout = LINEAR if FORMATS[fmt].scale else None
    cfg = EPConfig(256, 4, 2, 16, 2, fmt, scale_layout=layout, row_alignment=4 if "fp8" in fmt else None)
    check_round(connect_local(cfg, ["cpu"] * 2), bits.to(torch.int16).view(torch.bfloat16))


@pytest.mark.parametrize("fmt", FUSED)
@pytest.mark.parametrize("gate", GATES, ids=str)
@settings(max_examples=25)
@given(st.data())
def test_gates_of_extreme_numbers(fmt: str, gate: Gate, data: st.DataObject) -> None:
    """Below 2**62, whose products are finite."""
    columns = gate.columns * WIDTH
    below = st.sampled_from([bits for bits in EXTREME if bits < 0x5E80]) | st.integers(0, 0x5E80)
    bits = data.draw(st.lists(below, min_size=columns, max_size=columns))
    signs = data.draw(st.integers(0, 2**columns - 1))
    check_gates(rows_of([bit | (signs >> place & 1) << 15 for place, bit in enumerate(bits)]), fmt, gate)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_numbers_that_are_not_are_noticed(fmt: str) -> None:
    x = torch.ones(2, WIDTH).bfloat16()
    rows = reference.quantize(x, fmt)
    for part in ("scales", "row_scales") if FORMATS[fmt].row_scale else ("scales",):
        held = getattr(rows, part).clone()
        held.fill_(torch.nan if held.is_floating_point() else 255)
        with pytest.raises(AssertionError):
            assert_numbers(fmt, fmt, *rows._replace(**{part: held}))
    for wrong in (torch.full_like(x, torch.nan), torch.full_like(x, torch.inf)):
        with pytest.raises(AssertionError):
            assert_values(fmt, wrong.float(), x)
