"""What `fused_silu` (`cute_ep.runtime.local_ops`) writes where tensors are on the CPU, from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from cute_ep.api.errors import EPInputError
from cute_ep.api.modes import no_modes
from cute_ep.api.validate import check_global_scale
from cute_ep.layouts.maps.formats import Format
from cute_ep.layouts.maps.scales import ATOM, TRANSPOSED
from cute_ep.reference.dispatch import arrange_scales
from cute_ep.reference.formats import quantize


def check_offsets(row_offsets: Sequence[int], rows: int) -> list[int]:
    """Where groups begin and, at last, end; EPInputError unless they ascend from 0 to at most `rows`."""
    offsets = list(row_offsets)
    if offsets[0] != 0 or any(end < start for start, end in pairwise(offsets)):
        raise EPInputError(f"row_offsets = {_shown(offsets)}: must ascend from 0")
    if offsets[-1] > rows:
        raise EPInputError(f"row_offsets[{len(offsets) - 1}] = {offsets[-1]}: must not exceed the {rows} rows of x")
    return offsets


def _shown(offsets: Sequence[int]) -> str:
    """The first few of them."""
    return str(list(offsets)) if len(offsets) <= 8 else f"[{', '.join(map(str, offsets[:8]))}, ...]"


@no_modes()
def rows_of_groups(values: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """[bounds[-1], ...]: of a tensor with an element for each group, that of each row's group."""
    counts = [end - start for start, end in pairwise(bounds)]
    return values.repeat_interleave(torch.tensor(counts, device=values.device), dim=0)


class Groups(NamedTuple):
    """Groups of rows, as the host knows them.

    Attributes:
        bounds: where they begin and, at last, end.
        shifts: of each, what `scales_offsets` says of it.
        factors: of each, the global scale of its rows.
    """

    bounds: list[int]
    shifts: list[int]
    factors: list[float]

    @classmethod
    def read(cls, bounds: list[int], scales_offsets: torch.Tensor | None, input_scales: torch.Tensor | None) -> Groups:
        """From arguments of `fused_silu`. EPInputError: an input scale is out of range."""
        groups = len(bounds) - 1
        factors = [1.0] if input_scales is None else input_scales.tolist()
        for group, factor in enumerate(factors):
            check_global_scale(factor, f"input_scales[{group}]")
        shifts = [0] * groups if scales_offsets is None else scales_offsets.tolist()
        return cls(bounds, shifts, factors * (groups // len(factors)))


@no_modes()
def fill_groups(
    fmt: Format,
    layout: str | None,
    values: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor | None],
    groups: Groups,
) -> None:
    """Write the rows of all groups and their scale factors into `out`, payload and scales, and nothing else. `values`:
    [rows, D] bfloat16, what the rows are before they are encoded."""
    payload, scales = out
    bounds = groups.bounds
    if scales is None or layout is None:
        payload[: bounds[-1]] = values[: bounds[-1]]
        return
    for (start, end), shift, factor in zip(pairwise(bounds), groups.shifts, groups.factors, strict=True):
        rows = quantize(values[start:end], fmt, factor)
        payload[start:end] = rows.payload
        arranged = arrange_scales(rows.scales, layout, [end - start])
        if layout == TRANSPOSED:
            scales[:, start:end] = arranged
        else:
            first = start // 128 + shift if layout == ATOM else start
            room = scales[first : first + arranged.shape[0]]
            room[:] = arranged[: room.shape[0]]
