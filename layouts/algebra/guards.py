"""The conditions under which CuTe's layout functions return what their definition says.

CuTe tests weaker conditions than these and otherwise returns a wrong layout, a layout with a zero extent
(whose later use kills the process) or one with a larger domain. Every function here takes the leaves of a
layout as `(extent, stride)` pairs, leftmost first, and returns None or one sentence saying which condition
fails.
"""

from __future__ import annotations

from collections.abc import Sequence

Modes = Sequence[tuple[int, int]]


def coalesced(modes: Modes) -> list[tuple[int, int]]:
    """The leaves of coalesce: extents of 1 dropped, a leaf merged into the one before if strides line up.

    The last leaf stays even with extent 1: it is unbounded, so it is part of the map past the layout's size.
    """
    merged = []
    for position, (extent, stride) in enumerate(modes):
        if extent == 1 and position < len(modes) - 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, stride))
    return merged


def overlapping(modes: Modes) -> str | None:
    """Why `complement` is undefined; None if the leaves nest: by stride, each starts past the last.

    Leaves of extent 1 or stride 0 do not count, as in CuTe. Leaves that nest cannot overlap; leaves that do
    not nest make CuTe compute an extent of 0.
    """
    reach = 1
    for stride, extent in sorted((stride, extent) for extent, stride in modes if extent > 1 and stride > 0):
        if stride < reach:
            return f"leaf {extent}:{stride} starts inside the leaves of smaller stride, which reach {reach}"
        reach = extent * stride
    return None


def first_gap(modes: Modes) -> int | None:
    """The smallest offset that leaves which nest cannot be completed to: None if each stride is a multiple of what the
    leaves of smaller stride reach.

    With (2, 2):(1, 3) the leaf of stride 1 reaches 2, and no whole number of steps of 2 leads to 3: 2 is left out, and
    so is the offset 2 after the start of every tile.
    """
    reach = 1
    for stride, extent in sorted((stride, extent) for extent, stride in modes if extent > 1 and stride > 0):
        if stride % reach:
            return stride - stride % reach
        reach = extent * stride
    return None


def inexact_composition(outer: Modes, inner: Modes) -> str | None:
    """Why `composition(outer, inner)` is not the layout of `outer(inner(c))`, or None when it provably is.

    With `outer` coalesced to extents s0, s1, ..., every leaf `n:r` of `inner` must (a) step over whole
    leading leaves of `outer` and then divide the next extent, (b) fill whole extents before it reaches into
    the next one, and (c) no sum of leaves may carry from one extent into the next. (a) and (b) are the
    divisibility conditions of Cecka, arXiv 2603.02298, section on composition; (c) is its disjointness
    condition. The last extent is unbounded. Sufficient for any size; not necessary for tiny inner extents,
    where the caller may compare the maps instead.
    """
    extents = [extent for extent, _ in coalesced(outer)]
    highest_digit = [0] * len(extents)
    for extent, stride in inner:
        if extent == 1 or stride == 0:
            continue
        leaf, position = f"{extent}:{stride}", 0
        while position < len(extents) - 1 and stride % extents[position] == 0:
            stride //= extents[position]
            position += 1
        while position < len(extents) - 1:
            if extents[position] % stride:
                return f"the stride of {leaf} leaves {stride}, no divisor of the extent {extents[position]}"
            capacity = extents[position] // stride
            if extent <= capacity:
                break
            if extent % capacity:
                return f"the extent of {leaf} leaves {extent}, no multiple of {capacity} steps"
            highest_digit[position] += stride * (capacity - 1)
            extent //= capacity
            stride = 1
            position += 1
        highest_digit[position] += stride * (extent - 1)
    for digit, extent in zip(highest_digit[:-1], extents[:-1], strict=True):
        if digit >= extent:
            return f"leaves add up to {digit} in an extent of {extent} and carry into the next leaf"
    return None
