"""Layouts, formats, records and buffer maps: plain Python numbers, no torch.

`maps`: where every byte is, with the sizes, limits and names that kernels and runtime read. `tiles`: layouts, swizzles
and tiled views, of which kernels take `Layout` and `Swizzle`, `cute-ep layout` the views. `draw`: pictures of
layouts, for this command. This file exports what is not in `maps`.
"""

from cute_ep.layouts.draw import layout_svg, layout_table
from cute_ep.layouts.tiles.layout import Layout, LayoutError, Swizzle, row_major
from cute_ep.layouts.tiles.tile_tensor import TileTensor

__all__ = [
    "Layout",
    "LayoutError",
    "Swizzle",
    "TileTensor",
    "layout_svg",
    "layout_table",
    "row_major",
]
