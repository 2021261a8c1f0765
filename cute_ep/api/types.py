"""Names that arguments take, as types: what an editor completes and a type checker refuses. The tables in
`cute_ep.layouts` say what each stands for."""

from __future__ import annotations

from typing import Literal

from cute_ep.layouts.maps.routing import RowOrder
from cute_ep.layouts.maps.variants import CombineMode

__all__ = ["CombineMode", "FormatName", "RowOrder", "ScaleLayout", "ScaledFormat", "SwigluFormat"]

SwigluFormat = Literal["fp8", "fp8_pow2", "mxfp8", "mxfp4", "nvfp4"]
"""Formats with scale factors that `fused_silu` makes."""
ScaledFormat = Literal["fp8", "fp8_pow2", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row"]
"""Formats with scale factors: what `quantize` makes."""
FormatName = Literal["bf16", "fp8", "fp8_pow2", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row"]
"""Formats of dispatched rows (`cute_ep.layouts.maps.formats`)."""
ScaleLayout = Literal["atom128x4", "linear", "transposed"]
"""How scale factors may lie (`cute_ep.layouts.maps.scales`)."""
