"""Laws of the layout algebra on random layouts: divides, products, tile to shape, swizzles, views.

The laws: Cecka, arXiv 2603.02298; Carlisle, Shah, Stern, VanKoughnett, arXiv 2601.05972 (tractable layouts).
"""

from itertools import chain, product
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_layouts import POWERS, compact_matrices, cute_context, law, layouts, offsets, pair, swizzles, tiled_matrices

from cute_ep.layouts.algebra.algebra import (
    Layout,
    LayoutError,
    Swizzle,
    blocked_product,
    col_major,
    complement,
    composition,
    flat_divide,
    is_injective,
    logical_divide,
    logical_product,
    raked_product,
    row_major,
    tile_to_shape,
    tiled_divide,
    zipped_divide,
)
from cute_ep.layouts.tiles.tile_tensor import TileTensor

L = Layout.parse


# ---- divides


@law
@given(layouts("broadcast", POWERS), layouts("tractable", POWERS, largest=16))
def test_logical_divide_is_the_composition_with_the_tile_and_its_complement(layout, tile):
    rest_size, remainder = divmod(layout.size, tile.size)
    assume(not remainder and pair(tile, complement(tile, layout.size)).size == layout.size)
    divided = logical_divide(layout, tile)
    assert divided.rank == 2 and (divided[0].size, divided[1].size) == (tile.size, rest_size)
    assert offsets(divided[0]) == [layout(tile(index)) for index in range(tile.size)]
    assert divided == composition(layout, pair(tile, complement(tile, layout.size)))
    assert sorted(offsets(divided)) == sorted(offsets(layout))


DIVIDES = [logical_divide, zipped_divide, tiled_divide, flat_divide]


@settings(law, max_examples=300)
@given(layouts("broadcast"), layouts("tractable", largest=24) | layouts("gapped", largest=24), st.booleans())
def test_divides_keep_every_offset_or_are_refused(layout, tile, partial):
    """All four alike."""
    found = []
    for divide in DIVIDES:
        try:
            found.append(divide(layout, tile, partial=partial))
        except LayoutError:
            found.append(None)
    assert len({divided is None for divided in found}) == 1
    for divided in found:
        if divided is None:
            continue
        if partial:
            assert divided.size >= layout.size and not set(offsets(layout)) - set(offsets(divided))
        else:
            assert sorted(offsets(divided)) == sorted(offsets(layout))


@pytest.mark.parametrize("divide", DIVIDES, ids=lambda divide: divide.__name__)
@pytest.mark.parametrize("layout, tile, gap", [
    ("12:1", "(2,2):(1,3)", 2), ("72:1", "(4,6):(1,6)", 4), ("12:1", "(2,2):(3,1)", 2), ("9:2", "(2,2):(1,5)", 4),
    ("24:1", "(2,2,2):(1,2,5)", 4), ("(4,3):(3,1)", "(3,2):(1,4)", 3), ("40:1", "(3,2):(2,7)", 6),
])  # fmt: skip
def test_tiles_with_a_gap_that_no_tiles_fill_are_refused(divide, layout, tile, gap):
    """Also with partial=True, which allows offsets too many and none too few."""
    for partial in (False, True):
        with pytest.raises(LayoutError, match=rf"divide of .* by .*no layout beside it has offset {gap} below"):
            divide(L(layout), L(tile), partial=partial)


def test_a_gap_behind_the_layout_is_no_gap():
    divided = logical_divide(L("2:1"), L("(2,2):(1,3)"), partial=True)
    assert sorted(offsets(divided)) == [0, 1, 3, 4]


@law
@given(tiled_matrices())
def test_divides_by_mode_are_regroupings(case):
    layout, tile, counts = case
    logical, zipped, tiled, flat = (
        divide(layout, tile) for divide in (logical_divide, zipped_divide, tiled_divide, flat_divide)
    )
    assert (zipped.rank, tiled.rank, flat.rank) == (2, 3, 4)
    assert tuple(mode.size for mode in zipped[1]) == counts
    for (i, j), (k, l) in product(product(*map(range, tile)), product(*map(range, counts))):
        expected = layout(i + k * tile[0], j + l * tile[1])
        assert logical((i, k), (j, l)) == zipped((i, j), (k, l)) == expected
        assert tiled((i, j), k, l) == flat(i, j, k, l) == expected


@law
@given(st.integers(1, 40), st.integers(1, 9))
def test_partial_divide_rounds_up(extent, tile):
    divided = logical_divide(Layout(extent, 5), tile, partial=True)
    assert (divided[0].size, divided[1].size) == (tile, -(-extent // tile))
    assert set(offsets(divided)) >= {5 * index for index in range(extent)}


# ---- products


@law
@given(layouts("tractable", largest=48), layouts("compact", largest=24))
def test_logical_product_is_exact_or_refused(block, tiler):
    try:
        result = logical_product(block, tiler)
    except LayoutError:
        assert block.cosize != block.size, "a block without gaps takes any tiler"
        return
    assert result[0] == block and result.size == block.size * tiler.size
    assert is_injective(result)
    rest = complement(block, block.size * tiler.cosize)
    assert offsets(result[1]) == [rest(tiler(index)) for index in range(tiler.size)]


def test_logical_product_refuses_a_block_with_a_gap_in_the_way():
    with pytest.raises(LayoutError):
        logical_product(L("4:2"), 3)


@law
@given(compact_matrices(4), compact_matrices(4))
def test_blocked_and_raked_products_have_one_image(block, tiler):
    blocked, raked = blocked_product(block, tiler), raked_product(block, tiler)
    assert sorted(offsets(blocked)) == sorted(offsets(raked)) == list(range(block.size * tiler.size))
    logical = logical_product(block, tiler)
    rows, columns = block[0].size, block[1].size
    for (i, j), (k, l) in product(product(range(rows), range(columns)), product(*(range(m.size) for m in tiler))):
        assert blocked(i + rows * k, j + columns * l) == logical((i, j), (k, l))
        assert raked(k + tiler[0].size * i, l + tiler[1].size * j) == logical((i, j), (k, l))


# ---- tile to shape


@law
@given(compact_matrices(4), st.integers(1, 4), st.integers(1, 4))
def test_tile_to_shape_repeats_the_block_in_the_order_asked_for(block, down, across):
    shape = (block[0].size * down, block[1].size * across)
    by_column, by_row = (tile_to_shape(block, shape, order) for order in ((0, 1), (1, 0)))
    for result in (by_column, by_row):
        assert tuple(mode.size for mode in result) == shape
        assert sorted(offsets(result)) == list(range(prod(shape)))
        assert [result(i, j) for j in range(block[1].size) for i in range(block[0].size)] == offsets(block)
    corners = [[result(block[0].size * i, block[1].size * j) for i in range(down) for j in range(across)]
               for result in (by_column, by_row)]  # fmt: skip
    assert sorted(corners[0]) == sorted(corners[1]) == [block.size * copy for copy in range(down * across)]
    assert corners[1] == sorted(corners[1])


# ---- swizzle


@law
@given(swizzles(), st.integers(0, 2**12), st.integers(0, 2**12))
def test_a_swizzle_is_a_linear_involution(swizzle, left, right):
    assert swizzle(swizzle(left)) == left
    assert swizzle(left ^ right) == swizzle(left) ^ swizzle(right)
    assert swizzle(left) % 2**swizzle.base == left % 2**swizzle.base


@law
@given(swizzles())
def test_a_swizzle_permutes_its_window(swizzle):
    window = 1 << (swizzle.base + abs(swizzle.shift) + swizzle.bits)
    assert sorted(map(swizzle, range(window))) == list(range(window))


def test_a_swizzle_is_that_of_cute():
    with cute_context() as cute:
        for arguments in [(3, 4, 3), (2, 0, -3), (1, 2, 1), (0, 3, 2)]:
            theirs = cute.make_composed_layout(cute.make_swizzle(*arguments), 0, cute.make_layout(1024))
            assert [theirs(index) for index in range(1024)] == [Swizzle(*arguments)(index) for index in range(1024)]


@law
@given(swizzles(), st.integers(0, 7), st.sampled_from((row_major(8, 16), col_major(8, 16))))
def test_a_row_of_a_swizzled_layout_is_a_row_of_its_table(swizzle, row, layout):
    """Slicing the view first and swizzling absolute offsets is slicing the swizzled table."""
    table = [swizzle(offset) for offset in TileTensor(layout).offsets()]
    sliced = TileTensor(layout).slice(row, slice(None))
    assert [swizzle(offset) for offset in sliced.offsets()] == table[16 * row : 16 * row + 16]


# ---- tiling


@law
@given(tiled_matrices())
def test_tiles_partition_the_tensor(case):
    layout, tile, counts = case
    view = TileTensor(layout)
    tiles = [view.tile(tile, coord).offsets() for coord in product(*map(range, counts))]
    assert sorted(chain(*tiles)) == sorted(view.offsets())


@law
@given(tiled_matrices(), st.booleans())
def test_fragments_partition_the_tensor(case, by_row):
    layout, threads, _ = case
    order = row_major(*threads) if by_row else col_major(*threads)
    fragments = [TileTensor(layout).distribute(order, tid).offsets() for tid in range(order.size)]
    assert sorted(chain(*fragments)) == sorted(TileTensor(layout).offsets())


@law
@given(tiled_matrices())
def test_another_thread_order_only_renames_threads(case):
    layout, threads, _ = case
    rows, columns = row_major(*threads), col_major(*threads)
    for coord in product(*map(range, threads)):
        left, right = (TileTensor(layout).distribute(order, order(coord)) for order in (rows, columns))
        assert left == right


def test_vectorize_and_distribute_is_the_tiled_copy_of_cute():
    """`make_tiled_copy_tv(atom, threads, (1, V))`, partitioned for each thread over the coordinates."""
    with cute_context() as cute:
        import cutlass

        for shape, lanes, threads in [
            ((8, 32), 4, row_major(4, 4)),
            ((8, 32), 4, col_major(4, 8)),
            ((6, 16), 8, row_major(3, 2)),
            ((4, 8), 2, col_major(4, 1)),
        ]:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=32 * lanes)
            order = cute.make_layout(threads.shape, stride=threads.stride)
            copy = cute.make_tiled_copy_tv(atom, order, cute.make_layout((1, lanes), stride=(lanes, 1)))
            layout = row_major(*shape)
            for tid in range(threads.size):
                theirs = copy.get_slice(tid).partition_S(cute.make_identity_tensor(shape))
                coords = [theirs[index] for index in range(cute.size(theirs))]
                ours = TileTensor(layout).vectorize(1, lanes).distribute(threads, tid)
                assert sorted(layout(coord) for coord in coords) == sorted(ours.offsets())
                assert [layout(coord) for coord in coords[:lanes]] == ours.offsets()[:lanes]


@law
@given(tiled_matrices())
def test_transpose_undoes_itself_and_reshape_keeps_the_offsets(case):
    layout, tile, counts = case
    view = TileTensor(layout)
    assert view.transpose().transpose() == view
    assert view.transpose().offsets() == [layout(i, j) for j in range(layout[1].size) for i in range(layout[0].size)]
    flat = TileTensor(row_major(*layout.shape))
    assert flat.reshape(*counts, *tile).offsets() == flat.offsets()
