"""Names that arguments take, as types: what an editor completes and a type checker refuses. The tables in
`cute_ep.layouts` say what each stands for."""

from __future__ import annotations

from typing import Literal, get_args

from cute_ep.layouts.maps.formats import FormatName, ScaledFormat, SwigluFormat
from cute_ep.layouts.maps.routing import RowOrder
from cute_ep.layouts.maps.variants import CombineMode

__all__ = ["CombineMode", "FormatName", "RowIds", "RowOrder", "ScaleLayout", "ScaledFormat", "SwigluFormat"]

ScaleLayout = Literal["atom128x4", "linear", "transposed"]
"""How scale factors may lie (`cute_ep.layouts.maps.scales`)."""
RowIds = Literal["int32", "int64"]
"""Types of the local experts beside rank-major rows."""
ROW_IDS: tuple[RowIds, ...] = get_args(RowIds)
