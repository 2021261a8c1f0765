"""CuTe's layout algebra over plain Python layouts, guarded.

Coalesce, composition, complement, divides, products and inverses are CuTe's own functions, run eagerly
without a GPU. CuTe assumes that its arguments satisfy conditions which it does not test; every function
here tests them, and raises LayoutError where CuTe would return a wrong layout, grow the domain, or kill the
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from cute_ep.layouts.algebra.eager import evaluate
from cute_ep.layouts.algebra.guards import first_gap, inexact_composition, overlapping
from cute_ep.layouts.algebra.layout import (
    ENUMERATED_SIZE,
    INT64_LIMIT,
    IntTuple,
    Layout,
    LayoutError,
    Swizzle,
    col_major,
    idx2crd,
    int_leaves,
    int_text,
    is_injective,
    row_major,
)

__all__ = [
    "Layout",
    "LayoutError",
    "Swizzle",
    "blocked_product",
    "coalesce",
    "col_major",
    "complement",
    "composition",
    "flat_divide",
    "idx2crd",
    "is_injective",
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

# Up to this many coordinates every result is compared with its definition, coordinate by coordinate.
CHECKED_SIZE = 4096

Tiler = Layout | int | None | tuple["Tiler", ...]


def coalesce(layout: Layout, profile: IntTuple | None = None) -> Layout:
    """The same map with as few leaves as possible, flat; with a `profile` (nested tuple) mode by mode.

    `coalesce(layout, (1,) * layout.rank)` keeps the rank. Raises LayoutError when the profile does not fit.
    """
    if profile is None:
        return _checked_map(_run("coalesce", layout), layout, "coalesce")
    return _checked_map(_run("coalesce", layout, target_profile=profile), layout, "coalesce")


def composition(outer: Layout, inner: Tiler, *, partial: bool = False) -> Layout:
    """The layout R with R(c) = outer(inner(c)) for every coordinate c of `inner`.

    `inner` is a layout, an int n (for n:1), or a tuple of these and None (unchanged), one per mode of
    `outer`. `partial` allows offsets of `inner` past the size of `outer`, which continue its last leaf.

    Raises LayoutError when no layout is that map (the strides do not divide, or sums carry), when `inner`
    reaches past `outer`, or when it is too large to decide.
    """
    for part, tiler in _paired(outer, inner, whole=True):
        reach = tiler.cosize
        if reach > part.size and not partial:
            raise LayoutError(f"composition: {tiler} reaches {reach}, past the {part.size} coordinates of {part}")
        reason = inexact_composition(part.modes, tiler.modes)
        if reason and tiler.size > ENUMERATED_SIZE:
            raise LayoutError(f"composition: {part} o {tiler}: {reason}")
        if reason or tiler.size <= CHECKED_SIZE:
            _require_composed(_run("composition", part, tiler), part, tiler, reason)
    return _run("composition", outer, _tiler(inner))


def complement(layout: Layout, cotarget: int = 1) -> Layout:
    """The ordered layout C of offsets that `layout` skips: (layout, C) has every offset below `cotarget`.

    C is disjoint from `layout` except at 0. Leaves of stride 0 and extent 1 are ignored.

    Raises LayoutError when leaves overlap or interleave, when a stride below `cotarget` is not a multiple of what the
    leaves of smaller stride reach, so that no C fills the gap, or `cotarget` < 1.
    """
    if cotarget < 1:
        raise LayoutError(f"complement: cotarget {cotarget} is below 1")
    reason = overlapping(layout.modes)
    if reason:
        raise LayoutError(f"complement of {layout}: {reason}")
    gap = first_gap(layout.modes)
    if gap is not None and gap < cotarget:
        raise LayoutError(
            f"complement of {layout}: no layout beside it has offset {gap} below {cotarget}; each stride must be a "
            "multiple of what the leaves of smaller stride reach"
        )
    return _run("complement", layout, cotarget)


def logical_divide(layout: Layout, tiler: Tiler, *, partial: bool = False) -> Layout:
    """Each mode of `layout` split into (tile, rest): mode 0 walks one tile, mode 1 the tiles.

    `tiler` is a layout or int n, which divides the layout as a whole, or a tuple of these and None, one per
    mode. `partial` allows an extent that the tile does not divide: the rest is rounded up and offsets past
    the layout appear, which the caller must predicate.

    Raises LayoutError on overlapping or broadcast tilers, on tiles that do not divide leaf by leaf, on tiles whose
    gaps no other tiles fill (`complement`), and on everything that `composition` refuses.
    """
    for part, tile in _paired(layout, tiler):
        if not is_injective(tile):
            raise LayoutError(f"divide of {part} by {tile}: the tile repeats an offset")
        try:
            rest = complement(tile, part.size)
        except LayoutError as error:
            raise LayoutError(f"divide of {part} by {tile}: {error}") from None
        split = Layout((tile.shape, rest.shape), (tile.stride, rest.stride))
        if not partial and (split.size != part.size or split.cosize != part.size):
            raise LayoutError(
                f"divide of {part} by {tile}: not whole tiles, {tile.size} x {rest.size} coordinates over "
                f"{part.size}; pass partial=True and predicate"
            )
        composition(part, split, partial=partial)
    return _run("logical_divide", layout, _tiler(tiler))


def zipped_divide(layout: Layout, tiler: Tiler, *, partial: bool = False) -> Layout:
    """`logical_divide` with the tiles gathered in mode 0 and the rests in mode 1; raises as it does."""
    return _regrouped("zipped_divide", layout, tiler, partial)


def tiled_divide(layout: Layout, tiler: Tiler, *, partial: bool = False) -> Layout:
    """`logical_divide` with the tiles gathered in mode 0 and one mode per rest; raises as it does."""
    return _regrouped("tiled_divide", layout, tiler, partial)


def flat_divide(layout: Layout, tiler: Tiler, *, partial: bool = False) -> Layout:
    """`logical_divide` with one mode per tile, then one per rest; raises as it does."""
    return _regrouped("flat_divide", layout, tiler, partial)


def logical_product(block: Layout, tiler: Layout | int) -> Layout:
    """Rank 2: mode 0 is `block`, mode 1 places disjoint copies of it in the order of `tiler` (layout or int).

    Raises LayoutError when `block` overlaps itself, when `tiler` repeats an offset, or when the gaps of
    `block` cannot be filled in the tiler's order.
    """
    tiler = _tiler(tiler)
    if not isinstance(tiler, Layout):
        raise LayoutError(f"product: {tiler} is no layout or int")
    for role, factor in (("block", block), ("tiler", tiler)):
        if not is_injective(factor):
            raise LayoutError(f"product of {block} and {tiler}: the {role} repeats an offset")
    reach = block.size * tiler.cosize
    if reach * block.cosize >= INT64_LIMIT:
        raise LayoutError(f"product of {block} and {tiler} needs more than 63 bits")
    composition(complement(block, reach), tiler)
    return _run("logical_product", block, tiler)


def blocked_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` regrouped mode by mode: mode i is (block mode i, tiler mode i), the block fastest.

    Raises LayoutError when the ranks differ, and as `logical_product`; a padded block whose gaps the tiler
    would have to straddle is refused, where Mojo overlaps.
    """
    return _interleaved("blocked_product", block, tiler)


def raked_product(block: Layout, tiler: Layout) -> Layout:
    """`blocked_product` with the copies interleaved: mode i is (tiler mode i, block mode i)."""
    return _interleaved("raked_product", block, tiler)


def tile_to_shape(block: Layout, shape: tuple, order: tuple[int, ...]) -> Layout:
    """`block` repeated to fill `shape`; `order` ranks the modes along which copies follow (0 first).

    Raises LayoutError unless the block divides the shape mode by mode.
    """
    product_shape = tuple(prod(int_leaves(mode)) for mode in shape)
    whole = block.rank == len(product_shape) == len(order)
    if not whole or any(extent % mode.size for extent, mode in zip(product_shape, block, strict=True)):
        raise LayoutError(f"tile_to_shape: {block} does not tile {int_text(shape)} in order {int_text(order)}")
    if overlapping(block.modes) is not None or not is_injective(block):
        raise LayoutError(f"tile_to_shape: {block} overlaps itself")
    result = _run("tile_to_shape", block, product_shape, order)
    if tuple(mode.size for mode in result) != product_shape:
        raise LayoutError(f"tile_to_shape: {block} over {int_text(shape)} gives {result}")
    return result


def right_inverse(layout: Layout) -> Layout:
    """The largest R with layout(R(i)) = i for i < size(R)."""
    result = _run("right_inverse", layout)
    for index in _probes(result.size):
        if layout(result(index)) != index:
            raise LayoutError(f"right_inverse of {layout}: CuTe gives {result}, wrong at {index}")
    return result


def left_inverse(layout: Layout) -> Layout:
    """An L with layout(L(layout(i))) = layout(i); L(layout(i)) = i where `layout` is injective.

    Raises LayoutError when leaves overlap or interleave.
    """
    reason = overlapping(layout.modes)
    if reason:
        raise LayoutError(f"left_inverse of {layout}: {reason}")
    result = _run("left_inverse", layout)
    for index in _probes(layout.size):
        if layout(result(layout(index))) != layout(index):
            raise LayoutError(f"left_inverse of {layout}: CuTe gives {result}, wrong at {index}")
    return result


def recast_layout(new_bits: int, old_bits: int, layout: Layout) -> Layout:
    """The layout in elements of `new_bits` of a tensor of `old_bits` elements: upcast by 2 is (16, 8).

    Raises LayoutError unless the widths divide and each new element covers, or splits, whole old ones.
    """
    if max(new_bits, old_bits) % min(new_bits, old_bits):
        raise LayoutError(f"recast from {old_bits} to {new_bits} bits: neither divides the other")
    result = _run("recast_layout", new_bits, old_bits, layout)
    if max(result.size, layout.size) > ENUMERATED_SIZE:
        raise LayoutError(f"recast of {layout}: too large to check")
    wide, narrow = (result, layout) if new_bits >= old_bits else (layout, result)
    factor = max(new_bits, old_bits) // min(new_bits, old_bits)
    covered = sorted(factor * wide(index) + part for index in range(wide.size) for part in range(factor))
    if covered != sorted(narrow(index) for index in range(narrow.size)):
        raise LayoutError(
            f"recast of {layout} from {old_bits} to {new_bits} bits: elements straddle, CuTe gives {result}"
        )
    return result


@lru_cache(maxsize=8192)
def _run(operation: str, *operands: Tiler, **options: IntTuple) -> Layout:
    try:
        shape, stride = evaluate(operation, *operands, **options)
    except ImportError as missing:
        raise LayoutError(str(missing)) from missing
    except Exception as refusal:
        shown = ", ".join(str(operand) for operand in operands)
        raise LayoutError(f"{operation}({shown}): refused by CuTe: {refusal}") from refusal
    return Layout(shape, stride)


def _tiler(tiler: Tiler) -> Tiler:
    """Ints become n:1 at the top; inside a tuple CuTe reads them so itself."""
    return Layout(tiler) if isinstance(tiler, int) else tiler


def _paired(layout: Layout, tiler: Tiler, whole: bool = False) -> Iterator[tuple[Layout, Layout]]:
    """Yields (part of `layout`, layout tiler) for every layout or int in a nested tiler."""
    tiler = _tiler(tiler)
    if isinstance(tiler, Layout):
        yield layout, tiler
    elif isinstance(tiler, tuple):
        # A short tuple drops the remaining modes in CuTe's composition and keeps them in its divides.
        if not isinstance(layout.shape, tuple) or len(tiler) > layout.rank or (whole and len(tiler) < layout.rank):
            raise LayoutError(f"a tiler of {len(tiler)} entries does not fit the modes of {layout}")
        for index, entry in enumerate(tiler):
            yield from _paired(layout[index], entry, whole)
    elif tiler is not None:
        raise LayoutError(f"{tiler!r} is no tiler: expected a layout, an int, None or a tuple of these")


def _require_composed(result: Layout, outer: Layout, inner: Layout, reason: str | None) -> None:
    for index in range(inner.size):
        expected = outer(inner(index))
        if result(index) != expected:
            why = reason or "CuTe's result differs from the definition"
            raise LayoutError(f"composition: {outer} o {inner} at {index} is {expected}, not {result(index)}: {why}")
    if result.size != inner.size:
        raise LayoutError(f"composition: {outer} o {inner} gives {result}, of another size")


def _checked_map(result: Layout, layout: Layout, operation: str) -> Layout:
    if result.size != layout.size or any(result(index) != layout(index) for index in _probes(layout.size)):
        raise LayoutError(f"{operation}: {layout} and {result} differ")
    return result


def _regrouped(operation: str, layout: Layout, tiler: Tiler, partial: bool) -> Layout:
    divided = logical_divide(layout, tiler, partial=partial)
    result = _run(operation, layout, _tiler(tiler))
    if result.size != divided.size or result.cosize != divided.cosize:
        raise LayoutError(f"{operation} of {layout}: {result} does not regroup {divided}")
    return result


def _interleaved(operation: str, block: Layout, tiler: Layout) -> Layout:
    if block.rank != tiler.rank:
        raise LayoutError(f"{operation}: {block} and {tiler} differ in rank")
    product = logical_product(block, tiler)
    result = _run(operation, block, tiler)
    if result.size != product.size or result.cosize != product.cosize or not is_injective(result):
        raise LayoutError(f"{operation}: {result} does not regroup {product}")
    return result


def _probes(size: int) -> list[int]:
    """Every index when there are few, else evenly spread ones and the last."""
    return [*range(0, size, -(-size // CHECKED_SIZE)), size - 1]
