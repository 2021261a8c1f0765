"""What formats make of NaN and infinities: every cell of the table in docs/reference.md, computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cute_ep import fused_silu, reference
from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.reference.backend import connect_reference
from cute_ep.reference.decode import dequantize

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
HIDDEN = 256
PLACES = [0, 3, 31, 127, 128, 255]
"""Of the broken element: first and last ones of blocks, of words and of the row."""


def table() -> dict[str, list[str]]:
    """By format: what becomes of a NaN among numbers, one among zeros, an infinity, a 1 beside it, a 1 elsewhere."""
    section = PAGE.partition("## NaN and infinities")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    return {name.strip("`"): cells for name, *cells in rows}


def kind(value: float) -> str:
    """What a decoded element looks like."""
    if value != value:
        return "NaN"
    if abs(value) == torch.inf:
        return "infinity"
    return "0" if value == 0 else "1" if abs(value - 1) < 0.1 else "a number"


def fits(found: str, cell: str) -> bool:
    """Whether an element is what a cell says: a number may happen to be about 1."""
    return found == cell or (cell == "a number" and found == "1")


def as_quantised(x: torch.Tensor, fmt: str) -> torch.Tensor:
    return dequantize(reference.quantize(x, fmt), fmt)


def as_dispatched(x: torch.Tensor, fmt: str) -> torch.Tensor:
    (ep,) = connect_reference(EPConfig(HIDDEN, 1, 1, len(x), 1, fmt))
    batch = ep.dispatch(x, torch.zeros(len(x), 1, dtype=torch.int32))
    ep.synchronize()
    return dequantize(batch, fmt)[: len(x)]


def as_activated(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """Behind a gate that is 1 for these rows: silu(g) * u with u = x / silu(g), g = 8."""
    one = torch.full_like(x, 8)
    rows = fused_silu(torch.cat([one, x / 8], dim=1), fmt=fmt)
    return rows.float() if isinstance(rows, torch.Tensor) else dequantize(rows, fmt)


WAYS = {"quantize": as_quantised, "dispatch": as_dispatched, "fused_silu": as_activated}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_broken_elements_become_what_the_table_says(fmt: str, way: str) -> None:
    if way == "fused_silu" and FORMATS[fmt].row_scale:
        pytest.skip("fused_silu writes no rows of this format")
    decode, cells, block = WAYS[way], table()[fmt], FORMATS[fmt].block
    for at in PLACES:
        inside = [one for one in range(at // block * block, at // block * block + block) if one != at]
        outside = [one for one in range(HIDDEN) if one != at and one not in inside]
        x = torch.ones(4, HIDDEN)
        x[1] = 0
        x[:2, at], x[2, at], x[3, at] = torch.nan, torch.inf, -torch.inf
        ones, zeros, *infinite = decode(x.bfloat16(), fmt)
        assert fits(kind(ones[at].item()), cells[0]) and fits(kind(zeros[at].item()), cells[1]), (at, ones, zeros)
        assert all(kind(one) == "1" for one in ones[[*inside, *outside]].tolist()), "a NaN changes no other element"
        for row in infinite:
            assert fits(kind(row[at].item()), cells[2]), (at, row[at])
            assert {kind(one) for one in row[inside].tolist()} <= {cells[3]}, at
            assert {kind(one) for one in row[outside].tolist()} <= {cells[4]}, at


def test_tokens_that_are_nan_all_over_arrive_as_the_page_says() -> None:
    broken = torch.full((1, HIDDEN), torch.nan).bfloat16()
    decoded = {fmt: as_dispatched(broken, fmt) for fmt in FORMATS}
    zeros = {fmt for fmt, rows in decoded.items() if not rows.any()}
    assert zeros == {"mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4", "nvfp4_row"}
    assert "zeros in `mxfp8`,\n`mxfp6_*`, `nvfp4` and `nvfp4_row`" in PAGE
    assert decoded["mxfp4"].unique().tolist() == [pytest.approx(3.5e-38, rel=0.01)] and "3.5e-38 in `mxfp4`" in PAGE
    assert all(decoded[fmt].isnan().all() for fmt in ("bf16", "fp8", "fp8_pow2"))


@pytest.mark.parametrize("mode", ["exact", "partial", "unweighted"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_combine_passes_on_nan_and_infinities_of_experts(fmt: str, mode: str) -> None:
    (ep,) = connect_reference(EPConfig(HIDDEN, 1, 1, 2, 1, fmt))
    batch = ep.dispatch(torch.ones(2, HIDDEN).bfloat16(), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))
    rows = torch.ones(len(batch.tokens), HIDDEN).bfloat16()
    rows[0, 3], rows[1, 5] = torch.nan, torch.inf
    out = ep.combine(rows, batch, mode=mode).view(2, HIDDEN)  # type: ignore[arg-type]
    assert out[0, 3].isnan() and out[1, 5].isinf() and (~out.isfinite()).sum() == 2


def test_every_format_has_a_row() -> None:
    assert list(table()) == list(FORMATS) and re.search(r"ep\.check_finite = True", PAGE)
