"""Random layouts for the tests of this folder: what hypothesis draws, and CuTe itself to compare with.

Strides are permuted compact with divisible gaps (`tractable`), or the same with some strides 0 (`broadcast`).
"""

from contextlib import contextmanager
from math import prod

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from cute_ep.layouts.tiles.layout import Layout, Swizzle, row_major

LARGEST = 256
LEAVES = (1, 2, 3, 4, 6, 8)
POWERS = (1, 2, 4, 8)

# Sizes are drawn and filtered: what a law needs is rarely what the first draw gives.
FILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]
law = settings(max_examples=60, suppress_health_check=FILTERED)


def nested_like(shape, leaves):
    return tuple(nested_like(item, leaves) for item in shape) if isinstance(shape, tuple) else next(leaves)


@st.composite
def shapes(draw, leaves=LEAVES, depth=3, largest=LARGEST):
    def build(depth):
        if depth == 0 or draw(st.booleans()):
            return draw(st.sampled_from(leaves))
        return tuple(build(depth - 1) for _ in range(draw(st.integers(1, 3))))

    shape = build(depth)
    assume(Layout(shape).size <= largest)
    return shape


@st.composite
def layouts(draw, kind="tractable", leaves=LEAVES, **options):
    """A random layout whose leaves nest in some order; with gaps and strides 0 as `kind` says."""
    shape = draw(shapes(leaves, **options))
    extents = [extent for extent, _ in Layout(shape).modes]
    strides, reach = [0] * len(extents), 1
    for position in draw(st.permutations(range(len(extents)))):
        reach *= draw(st.sampled_from((1, 1, 2, 4) if leaves == POWERS else (1, 1, 2, 3)))
        strides[position] = reach
        reach *= extents[position]
        if kind == "broadcast" and draw(st.booleans()):
            strides[position] = 0
    return Layout(shape, nested_like(shape, iter(strides)))


def offsets(layout):
    return [layout(index) for index in range(layout.size)]


def coordinate(index, shape):
    """Coordinate number `index` of a shape, leftmost-fastest and nested as the shape, by one division a leaf."""

    def digits():
        left = index
        for extent, _ in Layout(shape).modes:
            yield left % extent
            left //= extent

    return nested_like(shape, digits())


@contextmanager
def cute_context():
    """CuTe itself, evaluated eagerly: one context for a whole test."""
    cute = pytest.importorskip("cutlass.cute")
    from cutlass._mlir import ir

    with ir.Context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        yield cute


@st.composite
def tiled_matrices(draw):
    """(rank-2 layout, tile, number of tiles per mode)."""
    tile, counts = ([draw(st.sampled_from((1, 2, 3, 4))) for _ in range(2)] for _ in range(2))
    shape = tuple(map(prod, zip(tile, counts, strict=True)))
    order = draw(st.sampled_from((row_major(*shape), Layout(shape), Layout(shape, (2 * shape[1], 2)))))
    return order, tuple(tile), tuple(counts)


@st.composite
def swizzles(draw):
    bits, base = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    return Swizzle(bits, base, draw(st.sampled_from((1, -1))) * draw(st.integers(max(bits, 1), 4)))
