"""Rows of a matrix that lie apart, overlap, or are one and the same: those that dispatch takes, and those it refuses.

Each view is made from a contiguous matrix [T, columns] of 2-byte or 1-byte elements, with other contents around its
rows; `view.contiguous()` has the rows that must arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

VECTOR_BYTES = 16
View = Callable[[torch.Tensor], torch.Tensor]


def wider(x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    """The rows of `x` as columns of a wider matrix: so many bytes before them, and behind them, are other ones."""
    rows, width = x.shape[0], x.shape[1] * x.element_size()
    wide = torch.full((rows, before + width + behind), 0x5A, dtype=torch.uint8, device=x.device)
    wide[:, before : before + width] = x.view(torch.uint8)
    ends = (before + width + behind) % x.element_size()
    assert not ends, "whole elements"
    return wide.view(x.dtype)[:, before // x.element_size() :][:, : x.shape[1]]


def apart(x: torch.Tensor, stride: int) -> torch.Tensor:
    """As many rows in the memory of `x`, `stride` elements apart."""
    return x.as_strided(x.shape, (stride, 1))


TAKEN: dict[str, View] = {
    "contiguous": lambda x: x,
    "left half of wider rows": lambda x: wider(x, 0, x.shape[1] * x.element_size()),
    "right half of wider rows": lambda x: wider(x, x.shape[1] * x.element_size(), 0),
    "middle of a fused matrix": lambda x: wider(x, VECTOR_BYTES, 3 * VECTOR_BYTES),
    "one vector more": lambda x: wider(x, 0, VECTOR_BYTES),
    "every third row": lambda x: x.repeat_interleave(3, 0)[::3],
    "one of three sequences": lambda x: torch.stack([x, x.flip(0), x], 1)[:, 1],
    "one row for all": lambda x: x[:1].expand(x.shape),
    "rows that overlap": lambda x: apart(x, VECTOR_BYTES // x.element_size()),
    "one row of an odd stride": lambda x: x.as_strided((1, x.shape[1]), (3, 1)),
    "one row of wider rows": lambda x: wider(x, 0, 2 * VECTOR_BYTES)[:1],
    "no rows of a transposed matrix": lambda x: x.t().contiguous().t()[:0],
    "no rows of wider rows": lambda x: wider(x, 0, 2 * VECTOR_BYTES)[:0],
}
"""Views that dispatch takes; the last four have fewer than two rows."""

STRIDE = (
    r"x\.stride\(\) = \(\d+, \d+\): must have stride 1 in the last dimension, and rows a multiple of 16 bytes below "
)
STRIDE += r"32 GiB apart; use x\.contiguous\(\)"
BASE = r"x\.data_ptr\(\) = 0x[0-9a-f]+: must be a multiple of 16 bytes; use x\.clone\(\)"
REFUSED: dict[str, tuple[View, str]] = {
    "a transposed matrix": (lambda x: x.t().contiguous().t(), STRIDE),
    "every other column": (lambda x: x.repeat_interleave(2, 1)[:, ::2], STRIDE),
    "one column for all": (lambda x: x[:, :1].expand(x.shape), STRIDE),
    "one row with other columns between": (lambda x: x.repeat_interleave(2, 1)[:1, ::2], STRIDE),
    "half a vector more": (lambda x: wider(x, 0, VECTOR_BYTES // 2), STRIDE),
    "one element less": (lambda x: apart(x, x.shape[1] - 1), STRIDE),
    "half a vector before": (lambda x: wider(x, VECTOR_BYTES // 2, VECTOR_BYTES // 2), BASE),
    "one element before": (lambda x: x.flatten()[1 : 1 + x.shape[1]].view(1, -1), BASE),
}
"""Views that it refuses, and the rule that it names."""
