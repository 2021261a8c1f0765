"""Kernel arguments that several launches share."""

from __future__ import annotations

import torch

from cute_ep.layouts.maps.scales import scale_map, scale_row_alignment


def address(tensor: torch.Tensor | None) -> int:
    """Device address of a tensor, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


SCALE_ARGUMENTS = (
    "out_scales",
    "scale_inner",
    "scale_middle",
    "scale_outer",
    "scale_step",
    "scale_words",
    "scale_alignment",
)
"""Parameters of `cute_ep.kernels.device.scale_rows.ScaleArgs`."""


def scale_arguments(
    layout: str | None, scale_bytes: int, scales: torch.Tensor | None, rows: int, row_alignment: int
) -> dict[str, int]:
    """Values of `cute_ep.kernels.device.scale_rows.ScaleArgs` for scale factors of `rows` rows; zeros without any."""
    if layout is None:
        return dict.fromkeys(SCALE_ARGUMENTS, 0)
    places = scale_map(layout, scale_bytes, rows)
    alignment = scale_row_alignment(layout, row_alignment)
    strides = places.inner, places.middle, places.outer, places.step, places.words
    return dict(zip(SCALE_ARGUMENTS, (address(scales), *strides, alignment), strict=True))
