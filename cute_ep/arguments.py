"""Kernel arguments that several launches share."""

from __future__ import annotations

import torch

from cute_ep.layouts.scales import scale_map, scale_row_alignment


def address(tensor: torch.Tensor | None) -> int:
    """Device address of a tensor, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def scale_arguments(
    layout: str | None, scale_bytes: int, scales: torch.Tensor | None, rows: int, row_alignment: int
) -> dict[str, int]:
    """Values of `cute_ep.kernels.scale_rows.ScaleArgs` for scale factors of `rows` rows; empty without any."""
    if layout is None:
        return {}
    places = scale_map(layout, scale_bytes, rows)
    return {
        "out_scales": address(scales),
        "scale_inner": places.inner,
        "scale_middle": places.middle,
        "scale_outer": places.outer,
        "scale_step": places.step,
        "scale_words": places.words,
        "scale_alignment": scale_row_alignment(layout, row_alignment),
    }
