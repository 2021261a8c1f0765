"""Laws of the layout algebra on random layouts: twelve groups, from CuTe's documentation, tests and papers.

The laws: Cecka, arXiv 2603.02298; Carlisle, Shah, Stern, VanKoughnett, arXiv 2601.05972 (tractable
layouts); group 12: linear layouts over two elements, arXiv 2505.23819. Strides are permuted compact
(`compact`), the same with divisible gaps (`tractable`), or the latter with some strides 0 (`broadcast`).
"""

from contextlib import contextmanager
from itertools import chain, product
from math import prod

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

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
    right_inverse,
    row_major,
    tile_to_shape,
    tiled_divide,
    zipped_divide,
)
from cute_ep.layouts.algebra.guards import inexact_composition
from cute_ep.layouts.maps.scales import (
    ATOM,
    ATOM_BYTES,
    LINEAR,
    TRANSPOSED,
    atom_shape_stride,
    scale_map,
    scale_row_alignment,
    scale_shape,
    scale_words,
)
from cute_ep.layouts.tiles.tile_tensor import TileTensor

L = Layout.parse
LARGEST = 256
LEAVES = (1, 2, 3, 4, 6, 8)
POWERS = (1, 2, 4, 8)

# Sizes and fitting pairs are drawn and filtered: what a law needs is rarely what the first draw gives.
FILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]
law = settings(max_examples=60, deadline=None, suppress_health_check=FILTERED)


def leaf_count(shape):
    return sum(map(leaf_count, shape)) if isinstance(shape, tuple) else 1


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
    """A random layout whose leaves nest in some order; with gaps, and with strides 0, as `kind` says."""
    shape = draw(shapes(leaves, **options))
    extents = [extent for extent, _ in Layout(shape).modes]
    strides, reach = [0] * len(extents), 1
    for position in draw(st.permutations(range(len(extents)))):
        reach *= 1 if kind == "compact" else draw(st.sampled_from((1, 1, 2, 4) if leaves == POWERS else (1, 1, 2, 3)))
        strides[position] = reach
        reach *= extents[position]
        if kind == "broadcast" and draw(st.booleans()):
            strides[position] = 0
    return Layout(shape, nested_like(shape, iter(strides)))


def offsets(layout):
    return [layout(index) for index in range(layout.size)]


def pair(left, right):
    return Layout((left.shape, right.shape), (left.stride, right.stride))


# 1. Index


@law
@given(layouts("broadcast"), st.integers(1, 3))
def test_1_all_coordinate_forms_agree(layout, beyond):
    for index in range(layout.size):
        coord = idx2crd(index, layout.shape)
        flat = idx2crd(index, layout.flatten().shape)
        assert layout(index) == layout(coord) == layout.flatten()(flat)
        if layout.rank > 1:
            modes = idx2crd(index, tuple(mode.size for mode in layout))
            assert layout(modes) == layout(index) == sum(map(Layout.__call__, layout, modes))
    last_extent, last_stride = layout.modes[-1]
    tail = layout.size - 1
    assert layout(tail + beyond * layout.size) == layout(tail) + beyond * last_extent * last_stride


@law
@given(layouts("tractable"))
def test_1_offsets_give_back_coordinates(layout):
    for index, offset in enumerate(offsets(layout)):
        if is_injective(layout):
            assert layout.offset2crd(offset) == idx2crd(index, layout.shape)


@contextmanager
def cute_context():
    """CuTe itself, evaluated eagerly: one context for a whole test."""
    cute = pytest.importorskip("cutlass.cute")
    from cutlass._mlir import ir

    with ir.Context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        yield cute


def test_1_the_map_is_cute_s():
    with cute_context() as cute:

        @settings(law, max_examples=25)
        @given(layouts("broadcast", largest=48))
        def same(layout):
            theirs = cute.make_layout(layout.shape, stride=layout.stride)
            assert (cute.size(theirs), cute.cosize(theirs)) == (layout.size, layout.cosize)
            assert str(theirs) == str(layout)
            assert str(cute.make_layout(layout.shape)) == str(Layout(layout.shape))
            for index in range(layout.size + 3):
                assert theirs(index) == layout(index)

        same()


# 2. Coalesce


@law
@given(layouts("broadcast"))
def test_2_coalesce_keeps_the_map_and_is_idempotent(layout):
    simple = coalesce(layout)
    assert offsets(simple) == offsets(layout)
    assert simple.depth <= 1
    assert coalesce(simple) == simple
    assert all(extent > 1 for extent, _ in simple.modes) or simple.size == 1


@law
@given(layouts("broadcast"))
def test_2_coalesce_by_mode_keeps_the_rank(layout):
    assume(isinstance(layout.shape, tuple))
    simple = coalesce(layout, (1,) * layout.rank)
    assert simple.rank == layout.rank and simple.depth <= 2
    assert [offsets(mode) for mode in simple] == [offsets(mode) for mode in layout]


# 3. Composition. Powers of two always compose; other extents compose exactly or are refused.


@law
@given(layouts("broadcast", POWERS), layouts("tractable", POWERS, largest=32))
def test_3_composition_is_the_composed_map(outer, inner):
    assume(inner.cosize <= outer.size)
    result = composition(outer, inner)
    assert offsets(result) == [outer(inner(index)) for index in range(inner.size)]
    assert [mode.size for mode in result] == [mode.size for mode in inner] or inner.rank == 1


@settings(law, max_examples=250)
@given(layouts("broadcast"), layouts("broadcast", largest=48))
def test_3_composition_is_exact_or_refused(outer, inner):
    exact = inexact_composition(outer.modes, inner.modes) is None and inner.cosize <= outer.size
    # CuTe reads, and may refuse, the stride of a leaf of extent 1, which no coordinate ever uses.
    unused_stride = any(extent == 1 and stride for extent, stride in inner.modes)
    try:
        result = composition(outer, inner)
    except LayoutError:
        assert not exact or unused_stride, "the conditions hold: CuTe must have the right answer"
    else:
        assert offsets(result) == [outer(inner(index)) for index in range(inner.size)]


@law
@given(layouts("broadcast"))
def test_3_identity(layout):
    assert offsets(composition(layout, Layout(layout.size))) == offsets(layout)


@law
@given(layouts("broadcast", POWERS), layouts("compact", POWERS, largest=32), st.data())
def test_3_distributes_over_concatenation(outer, inner, data):
    """Parts that do not share bits, so that their sums cannot carry."""
    other = complement(inner, inner.size * data.draw(st.sampled_from(POWERS)))
    both = pair(inner, other)
    assume(both.cosize <= outer.size)
    assert composition(outer, both) == pair(composition(outer, inner), composition(outer, other))


@law
@given(
    layouts("broadcast", POWERS),
    layouts("compact", POWERS, largest=64),
    layouts("compact", POWERS, largest=32),
)
def test_3_associative_inside_the_domains(first, second, third):
    assume(second.cosize <= first.size and third.cosize <= second.size)
    left = composition(composition(first, second), third)
    assert offsets(left) == offsets(composition(first, composition(second, third)))


def test_3_not_associative_outside_the_domains():
    first, second, third = L("(5,3):(1,7)"), L("4:1"), L("2:5")
    with pytest.raises(LayoutError, match="reaches 6, past the 4"):
        composition(second, third)
    beyond = composition(second, third, partial=True)
    assert composition(first, beyond)(1) == 7
    assert composition(composition(first, second), third, partial=True)(1) == 5


# 4. Complement


@law
@given(layouts("broadcast"), st.integers(1, 200))
def test_4_complement_is_ordered_and_disjoint(layout, cotarget):
    rest = complement(layout, cotarget)
    assert offsets(rest) == sorted(set(offsets(rest)))
    assert set(offsets(rest)) & set(offsets(layout)) <= {0}
    assert pair(layout, rest).cosize >= cotarget
    assert complement(pair(layout, rest)).size == 1


@law
@given(layouts("tractable"), st.integers(1, 200))
def test_4_a_tractable_layout_and_its_complement_fill_an_interval(layout, cotarget):
    rest = complement(layout, cotarget)
    assume(layout.size * rest.size <= 4096)
    whole = pair(layout, rest)
    assert sorted(offsets(whole)) == list(range(whole.size))
    assert complement(complement(rest, layout.cosize), cotarget) == rest


def test_4_the_documented_bound_on_the_cosize_is_wrong():
    """cosize(C) <= cotarget rounded up to cosize(A) is stated by CuTe's documentation; 45 > 40."""
    rest = complement(L("(4,2):(1,16)"), 40)
    assert (str(rest), rest.cosize) == ("(4,2):(4,32)", 45)


# 5. Inverses


@law
@given(layouts("broadcast"))
def test_5_right_inverse(layout):
    inverse = right_inverse(layout)
    assert [layout(inverse(index)) for index in range(inverse.size)] == list(range(inverse.size))


@law
@given(layouts("tractable"))
def test_5_right_inverse_covers_all_contiguous_offsets(layout):
    assert right_inverse(layout).size not in offsets(layout)


@law
@given(layouts("broadcast"))
def test_5_left_inverse(layout):
    inverse = left_inverse(layout)
    for index, offset in enumerate(offsets(layout)):
        assert layout(inverse(offset)) == offset
        if is_injective(layout):
            assert inverse(offset) == index


@law
@given(layouts("compact"))
def test_5_compact_layouts_have_one_inverse(layout):
    inverse = left_inverse(layout)
    assert offsets(inverse) == offsets(right_inverse(layout))
    assert str(coalesce(composition(inverse, layout))) in (f"{layout.size}:1", "1:0")


# 6. Divides


@law
@given(layouts("broadcast", POWERS), layouts("tractable", POWERS, largest=16))
def test_6_logical_divide_by_a_layout(layout, tile):
    rest_size, remainder = divmod(layout.size, tile.size)
    assume(not remainder and pair(tile, complement(tile, layout.size)).size == layout.size)
    divided = logical_divide(layout, tile)
    assert divided.rank == 2 and (divided[0].size, divided[1].size) == (tile.size, rest_size)
    assert offsets(divided[0]) == [layout(tile(index)) for index in range(tile.size)]
    assert divided == composition(layout, pair(tile, complement(tile, layout.size)))
    assert sorted(offsets(divided)) == sorted(offsets(layout))


@settings(law, max_examples=150)
@given(layouts("broadcast"), layouts("tractable", largest=24), st.booleans())
def test_6_divide_keeps_every_offset_or_is_refused(layout, tile, partial):
    try:
        divided = logical_divide(layout, tile, partial=partial)
    except LayoutError:
        return
    if partial:
        assert divided.size >= layout.size and not set(offsets(layout)) - set(offsets(divided))
    else:
        assert sorted(offsets(divided)) == sorted(offsets(layout))


@st.composite
def tiled_matrices(draw):
    """(rank-2 layout, tile, number of tiles per mode)."""
    tile, counts = ([draw(st.sampled_from((1, 2, 3, 4))) for _ in range(2)] for _ in range(2))
    shape = tuple(map(prod, zip(tile, counts, strict=True)))
    order = draw(st.sampled_from((row_major(*shape), col_major(*shape), Layout(shape, (2 * shape[1], 2)))))
    return order, tuple(tile), tuple(counts)


@law
@given(tiled_matrices())
def test_6_divides_by_mode_are_regroupings(case):
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
def test_6_partial_divide_rounds_up(extent, tile):
    divided = logical_divide(Layout(extent, 5), tile, partial=True)
    assert (divided[0].size, divided[1].size) == (tile, -(-extent // tile))
    assert set(offsets(divided)) >= {5 * index for index in range(extent)}


# 7. Products


@law
@given(layouts("tractable", largest=48), layouts("compact", largest=24))
def test_7_logical_product_is_exact_or_refused(block, tiler):
    try:
        result = logical_product(block, tiler)
    except LayoutError:
        assert block.cosize != block.size, "a block without gaps takes any tiler"
        return
    assert result[0] == block and result.size == block.size * tiler.size
    assert is_injective(result)
    rest = complement(block, block.size * tiler.cosize)
    assert offsets(result[1]) == [rest(tiler(index)) for index in range(tiler.size)]


def test_7_a_gap_can_be_in_the_way():
    with pytest.raises(LayoutError):
        logical_product(L("4:2"), 3)


@st.composite
def compact_matrices(draw, largest):
    shape = tuple(draw(st.sampled_from((1, 2, 3, largest))) for _ in range(2))
    return draw(st.sampled_from((row_major, col_major)))(*shape)


@law
@given(compact_matrices(4), compact_matrices(4))
def test_7_blocked_and_raked_products_have_one_image(block, tiler):
    blocked, raked = blocked_product(block, tiler), raked_product(block, tiler)
    assert sorted(offsets(blocked)) == sorted(offsets(raked)) == list(range(block.size * tiler.size))
    logical = logical_product(block, tiler)
    rows, columns = block[0].size, block[1].size
    for (i, j), (k, l) in product(product(range(rows), range(columns)), product(*(range(m.size) for m in tiler))):
        assert blocked(i + rows * k, j + columns * l) == logical((i, j), (k, l))
        assert raked(k + tiler[0].size * i, l + tiler[1].size * j) == logical((i, j), (k, l))


# 8. Tile to shape


@law
@given(compact_matrices(4), st.integers(1, 4), st.integers(1, 4))
def test_8_tile_to_shape(block, down, across):
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


# 9. Swizzle


@st.composite
def swizzles(draw):
    bits, base = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    return Swizzle(bits, base, draw(st.sampled_from((1, -1))) * draw(st.integers(max(bits, 1), 4)))


@law
@given(swizzles(), st.integers(0, 2**12), st.integers(0, 2**12))
def test_9_swizzle_is_a_linear_involution(swizzle, left, right):
    assert swizzle(swizzle(left)) == left
    assert swizzle(left ^ right) == swizzle(left) ^ swizzle(right)
    assert swizzle(left) % 2**swizzle.base == left % 2**swizzle.base


@law
@given(swizzles())
def test_9_swizzle_permutes_its_window(swizzle):
    window = 1 << (swizzle.base + abs(swizzle.shift) + swizzle.bits)
    assert sorted(map(swizzle, range(window))) == list(range(window))


def test_9_swizzle_is_cute_s():
    with cute_context() as cute:
        for arguments in [(3, 4, 3), (2, 0, -3), (1, 2, 1), (0, 3, 2)]:
            theirs = cute.make_composed_layout(cute.make_swizzle(*arguments), 0, cute.make_layout(1024))
            assert [theirs(index) for index in range(1024)] == [Swizzle(*arguments)(index) for index in range(1024)]


@law
@given(swizzles(), st.integers(0, 7), st.sampled_from((row_major(8, 16), col_major(8, 16))))
def test_9_a_row_of_a_swizzled_layout_is_a_row_of_its_table(swizzle, row, layout):
    """Slicing the view first and swizzling absolute offsets is slicing the swizzled table."""
    table = [swizzle(offset) for offset in TileTensor(layout).offsets()]
    sliced = TileTensor(layout).slice(row, slice(None))
    assert [swizzle(offset) for offset in sliced.offsets()] == table[16 * row : 16 * row + 16]


# 10. Tiling


@law
@given(tiled_matrices())
def test_10_tiles_partition_the_tensor(case):
    layout, tile, counts = case
    view = TileTensor(layout)
    tiles = [view.tile(tile, coord).offsets() for coord in product(*map(range, counts))]
    assert sorted(chain(*tiles)) == sorted(view.offsets())


@law
@given(tiled_matrices(), st.booleans())
def test_10_fragments_partition_the_tensor(case, by_row):
    layout, threads, _ = case
    order = row_major(*threads) if by_row else col_major(*threads)
    fragments = [TileTensor(layout).distribute(order, tid).offsets() for tid in range(order.size)]
    assert sorted(chain(*fragments)) == sorted(TileTensor(layout).offsets())


@law
@given(tiled_matrices())
def test_10_another_thread_order_only_renames_threads(case):
    layout, threads, _ = case
    rows, columns = row_major(*threads), col_major(*threads)
    for coord in product(*map(range, threads)):
        left, right = (TileTensor(layout).distribute(order, order(coord)) for order in (rows, columns))
        assert left == right


def test_10_vectorize_and_distribute_is_cute_s_tiled_copy():
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
def test_10_transpose_and_reshape(case):
    layout, tile, counts = case
    view = TileTensor(layout)
    assert view.transpose().transpose() == view
    assert view.transpose().offsets() == [layout(i, j) for j in range(layout[1].size) for i in range(layout[0].size)]
    flat = TileTensor(row_major(*layout.shape))
    assert flat.reshape(*counts, *tile).offsets() == flat.offsets()


# 11. Scale factors


def repeated_scales(blocks, column_tiles, vector):
    """The scale-factor bytes over (row, element): each column of the byte layout `vector` times."""
    (rows, columns), (row_strides, column_strides) = atom_shape_stride(blocks, column_tiles)
    return Layout((rows, (vector, *columns)), (row_strides, (0, *column_strides)))


@settings(law, max_examples=12)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from((16, 32)))
def test_11_scale_bytes_are_a_bijection_constant_within_a_vector(blocks, column_tiles, vector):
    byte = Layout(*atom_shape_stride(blocks, column_tiles))
    assert sorted(offsets(byte)) == list(range(128 * blocks * 4 * column_tiles))
    repeated = repeated_scales(blocks, column_tiles, vector)
    for row, element in product((0, 31, 32, 127, 128 * blocks - 1), range(0, 4 * column_tiles * vector, 5)):
        assert repeated(row, element) == byte(row, element // vector)
    for block in range(blocks):
        corner = block * column_tiles * ATOM_BYTES
        rows = [byte(128 * block + row, column) for row in range(128) for column in range(4)]
        assert sorted(rows) == list(range(corner, corner + ATOM_BYTES))


@pytest.mark.parametrize("vector", [16, 32])
def test_11_scale_layout_is_cute_s(vector):
    blockscaled = pytest.importorskip("cutlass.utils.blockscaled_layout")
    with cute_context():
        theirs = blockscaled.tile_atom_to_shape_SF((256, 3 * 4 * vector, 1), vector)
        ours = repeated_scales(2, 3, vector)
        for row, element in product(range(0, 256, 5), range(0, 12 * vector, vector // 2)):
            assert theirs((row, element, 0)) == ours(row, element)


scale_bytes_of_a_row = st.integers(1, 40)
rows_of_scales = st.integers(1, 300)


@law
@given(scale_bytes_of_a_row, rows_of_scales)
def test_11_atom_words_are_the_bytes_of_the_atom(scale_bytes, rows):
    """Word (row, w) holds the bytes of columns 4 w .. 4 w + 3, in order."""
    places = scale_map(ATOM, scale_bytes, rows)
    byte = Layout(*atom_shape_stride(-(-rows // 128), places.words))
    for row, word, column in product(range(0, rows, 7), range(places.words), range(4)):
        assert 4 * places.at(row, word) + column == byte(row, 4 * word + column)


@law
@given(scale_bytes_of_a_row, rows_of_scales, st.sampled_from((ATOM, LINEAR, TRANSPOSED)))
def test_11_scale_words_are_places_in_a_tensor(layout_bytes, rows, layout):
    """Every word has a place of its own inside the tensor of `scale_shape`, at the coordinate that its axes say."""
    itemsize = 4 if layout == TRANSPOSED else 1
    places, words = scale_map(layout, layout_bytes, rows), -(-layout_bytes // 4)
    shape = scale_shape(layout, layout_bytes, itemsize, rows, groups=1)
    assert places.words == scale_words(layout_bytes) == words
    wanted = {
        ATOM: lambda row, word: ((row // 128 * words + word) * 32 + row % 32) * 4 + row % 128 // 32,
        LINEAR: lambda row, word: row * words + word,
        TRANSPOSED: lambda row, word: word * rows + row,
    }[layout]
    found = {(row, word): places.at(row, word) for row in range(rows) for word in range(words)}
    assert found == {(row, word): wanted(row, word) for row in range(rows) for word in range(words)}
    assert len(set(found.values())) == rows * words and max(found.values()) * 4 < prod(shape) * itemsize
    if layout != ATOM:
        assert prod(shape) * itemsize == rows * words * 4, "nothing but words"


@law
@given(scale_bytes_of_a_row, rows_of_scales, st.sampled_from((ATOM, LINEAR, TRANSPOSED)))
def test_11_scale_map_is_a_cute_layout(scale_bytes, rows, layout):
    """The strides are those of ((32, 4, blocks), words): kernels address scale factors with that layout."""
    places = scale_map(layout, scale_bytes, rows)
    shape = ((32, 4, -(-rows // 128)), places.words)
    cute_layout = Layout(shape, ((places.inner, places.middle, places.outer), places.step))
    for row, word in product(range(rows), range(places.words)):
        assert cute_layout(row, word) == places.at(row, word)


@law
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from((1, 4, 64, 128)))
def test_11_groups_own_disjoint_scale_rows(rows_of_group, scale_bytes, alignment):
    """Groups at multiples of `scale_row_alignment` share no word, and fit the tensor of all their padded rows."""
    padded = [-(-rows // alignment) * alignment for rows in rows_of_group]
    total, groups = sum(padded), len(rows_of_group)
    for layout in (ATOM, LINEAR, TRANSPOSED):
        step = scale_row_alignment(layout, alignment)
        assert step == (128 if layout == ATOM else alignment)
        places, used, first = scale_map(layout, scale_bytes, total), set(), 0
        for rows in rows_of_group:
            mine = {places.at(first + row, word) for row in range(rows) for word in range(places.words)}
            assert len(mine) == rows * places.words and not mine & used
            used |= mine
            first += -(-rows // step) * step
        shape = scale_shape(layout, scale_bytes, 4 if layout == TRANSPOSED else 1, total, groups)
        assert not used or max(used) * 4 < prod(shape) * (4 if layout == TRANSPOSED else 1)


# 12. Linear layouts: a layout of power-of-two extents and strides maps bits to bits


def bit_matrix(function, bits):
    """Column k is the image of bit k."""
    return [function(1 << bit) for bit in range(bits)]


def apply(matrix, index):
    result = 0
    for bit, column in enumerate(matrix):
        result ^= column if index >> bit & 1 else 0
    return result


def binary_rank(columns):
    """Rank over two elements: columns with a new leading bit."""
    basis = []
    for column in columns:
        for pivot in basis:
            column = min(column, column ^ pivot)
        if column:
            basis.append(column)
    return len(basis)


@law
@given(layouts("broadcast", POWERS))
def test_12_power_of_two_layouts_are_bit_matrices(layout):
    bits = layout.size.bit_length() - 1
    matrix = bit_matrix(layout, bits)
    assert offsets(layout) == [apply(matrix, index) for index in range(layout.size)]
    rank = binary_rank(matrix)
    assert is_injective(layout) == (rank == bits)
    assert len(set(offsets(layout))) == 2**rank


@law
@given(layouts("broadcast", POWERS), layouts("tractable", POWERS, largest=32))
def test_12_composition_is_the_matrix_product(outer, inner):
    assume(inner.cosize <= outer.size)
    left = bit_matrix(outer, outer.size.bit_length() - 1)
    right = bit_matrix(inner, inner.size.bit_length() - 1)
    result = composition(outer, inner)
    assert bit_matrix(result, inner.size.bit_length() - 1) == [apply(left, column) for column in right]


@law
@given(st.integers(5, 8).flatmap(lambda bits: st.permutations(range(bits))), swizzles())
def test_12_bank_conflicts_are_a_rank(order, swizzle):
    """32 lanes reading 4-byte words hit 2**rank distinct banks, rank taken over the five bank bits."""
    layout = Layout((2,) * len(order), tuple(1 << bit for bit in order))
    words = [swizzle(layout(lane)) for lane in range(32)]
    columns = [word % 32 for word in bit_matrix(lambda lane: swizzle(layout(lane)), 5)]
    assert len({word % 32 for word in words}) == 2 ** binary_rank(columns)


def test_12_the_128_byte_swizzle_has_no_conflicts_down_a_column():
    """Eight rows of 128 bytes, one 16-byte vector of each: all on the same banks, or on all of them."""
    tile = row_major(8, 64)
    column = [tile(row, 0) // 8 % 8 for row in range(8)]
    swizzled = [Swizzle(3, 3, 3)(tile(row, 0)) // 8 % 8 for row in range(8)]
    assert (column, sorted(swizzled)) == ([0] * 8, list(range(8)))
