"""Largest errors of the reference, as fractions of their bounds: `python -m tests.reference.error_table` prints the
table of docs/numerics.md."""

from __future__ import annotations

import sys
from functools import cache

import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.layouts.maps.formats import FORMATS
from tests.reference import oracle

HEAD = (
    "| format | quantising | largest error | largest bound | exact round | partial round |",
    "| --- | --- | --- | --- | --- | --- |",
)


def largest_ratio(value: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest |value - exact| / bound, where the bound is finite; AssertionError when it exceeds 1."""
    assert reference.within(value, exact, bound).all()
    counted = bound.isfinite() & (bound > 0)
    return ((value.double() - exact).abs() / bound)[counted].max().item()


def quantization_ratio(x: torch.Tensor, fmt: str, global_scale: float = 1.0) -> float:
    """`largest_ratio` of rows that have been quantised and dequantised."""
    value = reference.dequantize(reference.quantize(x, fmt, global_scale), fmt, global_scale)
    return largest_ratio(value, x.double(), reference.quantization_bound(x, fmt, global_scale))


@cache
def ratios(fmt: str, global_scale: float) -> tuple[float, float]:
    """`quantization_ratio` of every bfloat16 as element of blocks with several maxima, and as block maximum."""
    block = FORMATS[fmt].block
    elements = (oracle.rows_of_elements(block, maximum) for maximum in oracle.ELEMENT_MAXIMA)
    largest = max(quantization_ratio(x, fmt, global_scale) for x in elements)
    return largest, quantization_ratio(oracle.rows_of_maxima(fmt), fmt, global_scale)


def relative_errors(x: torch.Tensor, fmt: str) -> tuple[float, float]:
    """(largest error, largest bound) of an element, as fractions of the largest magnitude in its block."""
    blocks = x.double().unflatten(1, (-1, FORMATS[fmt].block))
    largest = blocks.abs().amax(dim=2, keepdim=True)
    error = reference.dequantize(reference.quantize(x, fmt), fmt).double().view_as(blocks) - blocks
    bound = reference.quantization_bound(x, fmt).view_as(blocks)
    return (error.abs() / largest).max().item(), (bound / largest).max().item()


def identity_ratio(fmt: str, mode: str) -> float:
    """`largest_ratio` of a round over two ranks with experts that return what they get, and a shared one."""
    cfg = EPConfig(1024, 8, 4, 64, 2, fmt, scale_layout="linear" if FORMATS[fmt].scale else None, row_alignment=4,
                   fused_shared_expert=True)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    xs = [oracle.random_rows(64, cfg.hidden, seed=rank) for rank in range(2)]
    ids = [torch.rand(64, 8, generator=generator).argsort(dim=1)[:, :4].int() for _ in range(2)]
    weights = [torch.rand(64, 4, generator=generator) for _ in range(2)]
    batches = reference.dispatch(cfg, xs, ids, None, weights)
    rows = []
    for batch in batches:
        scales = batch.scales
        if scales is not None:
            scales = scales[:, : cfg.hidden // cfg.format.block].contiguous()
        quantized = QuantizedRows(batch.tokens, scales, batch.row_scales)
        rows.append(reference.dequantize(quantized, fmt).bfloat16())
    sums = reference.combine(cfg, rows, batches, mode=mode)
    bounds = reference.identity_error_bound(cfg, xs, rows, batches, mode=mode)
    return max(largest_ratio(out, value, bound) for out, (value, bound) in zip(sums, bounds, strict=True))


def table() -> list[str]:
    """The lines of the table."""
    lines = list(HEAD)
    for fmt in FORMATS:
        cells = ["0"] * 3
        if FORMATS[fmt].scale:
            random = oracle.random_rows(256, 1024)
            cells = [f"{max(*ratios(fmt, 1.0), quantization_ratio(random, fmt)):.3f}"]
            cells += [f"{value:.4f}" for value in relative_errors(random, fmt)]
        cells += [f"{identity_ratio(fmt, mode):.3f}" for mode in ("exact", "partial")]
        lines.append(f"| `{fmt}` | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write("\n".join(table()) + "\n")
