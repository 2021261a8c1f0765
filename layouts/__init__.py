"""Layouts, formats, records and buffer maps: plain Python numbers, no torch.

`maps`: where every byte is, with the sizes, limits and names that kernels and runtime read. `algebra`: CuTe's layout
algebra. `tiles`: tiled views. Kernels take `Layout` and `Swizzle` from the algebra, and their tiles are tested against
the views; the rest is for `cute-ep layout` and for readers. This file exports the algebra.
"""

from cute_ep.layouts.algebra.algebra import (
    Layout,
    LayoutError,
    Swizzle,
    blocked_product,
    coalesce,
    col_major,
    complement,
    composition,
    flat_divide,
    idx2crd,
    is_injective,
    left_inverse,
    logical_divide,
    logical_product,
    raked_product,
    recast_layout,
    right_inverse,
    row_major,
    tile_to_shape,
    tiled_divide,
    zipped_divide,
)
from cute_ep.layouts.draw import layout_svg, layout_table, layout_text
from cute_ep.layouts.tiles.tile_tensor import TileTensor

__all__ = [
    "Layout",
    "LayoutError",
    "Swizzle",
    "TileTensor",
    "blocked_product",
    "coalesce",
    "col_major",
    "complement",
    "composition",
    "flat_divide",
    "idx2crd",
    "is_injective",
    "layout_svg",
    "layout_table",
    "layout_text",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "raked_product",
    "recast_layout",
    "right_inverse",
    "row_major",
    "tile_to_shape",
    "tiled_divide",
    "zipped_divide",
]
