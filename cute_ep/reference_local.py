"""`quantize` and `fused_silu` (`cute_ep.local_ops`) for tensors on the CPU, from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from cute_ep.layouts.formats import Format
from cute_ep.layouts.scales import ATOM, TRANSPOSED
from cute_ep.reference_dispatch import arrange_scales
from cute_ep.reference_formats import quantize, round_to
from cute_ep.reference_swiglu import swiglu


def fill_swiglu(
    fmt: Format,
    layout: str | None,
    values: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor | None],
    bounds: Sequence[int],
    shifts: Sequence[int],
    global_scales: Sequence[float],
) -> None:
    """Write the rows of all groups and their scale factors into `out`, payload and scales, and nothing else.

    Args:
        values: [rows, D] bfloat16, what the rows are before they are encoded.
        bounds: where groups begin and, at last, end.
        shifts, global_scales: of each group; see `fused_silu`.
    """
    payload, scales = out
    if scales is None or layout is None:
        payload[: bounds[-1]] = values[: bounds[-1]]
        return
    for (start, end), shift, global_scale in zip(pairwise(bounds), shifts, global_scales, strict=True):
        rows = quantize(values[start:end], fmt, global_scale)
        payload[start:end] = rows.payload
        arranged = arrange_scales(rows.scales, layout, [end - start])
        if layout == TRANSPOSED:
            scales[:, start:end] = arranged
        else:
            first = start // 128 + shift if layout == ATOM else start
            room = scales[first : first + arranged.shape[0]]
            room[:] = arranged[: room.shape[0]]


def swiglu_rows(x: torch.Tensor, interleaved: bool, alpha: float | None, limit: float | None) -> torch.Tensor:
    """[rows, D] bfloat16: the reference's `swiglu`, rounded."""
    return round_to(swiglu(x, interleaved, alpha, limit).float(), torch.bfloat16)
