"""What a tile or a distribution must satisfy.

Each function raises LayoutError naming the verb, the rule and the values.
"""

from __future__ import annotations

from cute_ep.layouts.tiles.layout import Layout, LayoutError, is_injective, row_major


def require_flat(verb: str, shape: tuple) -> None:
    """Every mode is one leaf."""
    if any(isinstance(extent, tuple) for extent in shape):
        raise LayoutError(f"{verb} needs flat modes, not {shape}")


def require_tiles(verb: str, shape: tuple, tile: tuple[int, ...]) -> None:
    """`tile` has one positive int per mode of `shape` and divides it: nothing clipped, nothing left over."""
    require_flat(verb, shape)
    if len(tile) != len(shape) or any(not isinstance(size, int) or size < 1 for size in tile):
        raise LayoutError(f"{verb}: {tile} must be one positive int per mode of {shape}")
    for extent, size in zip(shape, tile, strict=True):
        if extent % size:
            raise LayoutError(f"{verb}: {size} does not divide the extent {extent} of {shape}")


def require_tile_coord(shape: tuple, tile: tuple[int, ...], coord: tuple) -> None:
    """`coord` names a whole tile inside `shape`."""
    if len(coord) != len(shape):
        raise LayoutError(f"tile: coordinate {coord} does not fit {shape}")
    for extent, size, position in zip(shape, tile, coord, strict=True):
        if not 0 <= position < extent // size:
            raise LayoutError(f"tile: coordinate {coord} is outside {shape} in tiles of {tile}")


def require_threads(shape: tuple, threads: Layout) -> None:
    """`threads` is flat, numbers its coordinates 0..size-1 each once, and divides `shape`."""
    require_flat("distribute", threads.shape if isinstance(threads.shape, tuple) else ())
    if threads.cosize != threads.size or not is_injective(threads):
        raise LayoutError(f"distribute: {threads} does not number its threads 0 to {threads.size - 1}")
    require_tiles("distribute", shape, tuple(mode.size for mode in threads))


def require_inner_tiles(layout: Layout, shape: tuple) -> tuple[Layout, Layout]:
    """(outer, inner) layouts of a parent whose modes are (outer, inner) leaves and whose tiles are `shape`.

    Only a row-major or a column-major layout over nested modes counts, and not where the first leaves alone are
    gapless, which is what a block-first layout looks like.
    """
    if any(not isinstance(extent, tuple) or len(extent) != 2 for extent in layout.shape) or layout.depth != 2:
        raise LayoutError(
            f"tile: {layout} has nested modes that are not all pairs of numbers (outer, inner): give a layout whose "
            "modes are all such pairs, or all numbers"
        )
    outer, inner = (Layout(*zip(*layout.modes[which::2], strict=True)) for which in (0, 1))
    strides = [stride for extent, stride in layout.modes if extent > 1]
    orders = (row_major(layout.shape), Layout(layout.shape))
    ordered = strides in ([stride for extent, stride in order.modes if extent > 1] for order in orders)
    if not ordered or (outer.size > 1 and outer.cosize == outer.size and is_injective(outer)):
        raise LayoutError(f"tile: the modes of {layout} are not (outer, inner), its blocks may come first")
    if shape != inner.shape:
        raise LayoutError(f"tile: the tiles of {layout} are {inner.shape}, not {shape}")
    return outer, inner


def fragment_modes(shape: tuple, stride: tuple, threads: Layout) -> tuple[tuple, tuple]:
    """Shape and stride of one thread's elements: every threads.shape-th one."""
    counts = [mode.size for mode in threads]
    rest = tuple(extent // count for extent, count in zip(shape, counts, strict=True))
    return rest, tuple(step * count for step, count in zip(stride, counts, strict=True))
