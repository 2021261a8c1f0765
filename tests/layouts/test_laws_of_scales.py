"""Layouts of scale factors: where the bytes and words of a row are, in every layout."""

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import cute_context, law, offsets

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
from cute_ep.layouts.tiles.layout import Layout


def repeated_scales(blocks, column_tiles, vector):
    """The scale-factor bytes over (row, element): each column of the byte layout `vector` times."""
    (rows, columns), (row_strides, column_strides) = atom_shape_stride(blocks, column_tiles)
    return Layout((rows, (vector, *columns)), (row_strides, (0, *column_strides)))


@settings(law, max_examples=12)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from((16, 32)))
def test_scale_bytes_are_a_bijection_constant_within_a_vector(blocks, column_tiles, vector):
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
def test_the_atom_layout_is_that_of_cute(vector):
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
def test_atom_words_are_the_bytes_of_the_atom(scale_bytes, rows):
    """Word (row, w) holds the bytes of columns 4 w .. 4 w + 3, in order."""
    places = scale_map(ATOM, scale_bytes, rows)
    byte = Layout(*atom_shape_stride(-(-rows // 128), places.words))
    for row, word, column in product(range(0, rows, 7), range(places.words), range(4)):
        assert 4 * places.at(row, word) + column == byte(row, 4 * word + column)


@law
@given(scale_bytes_of_a_row, rows_of_scales, st.sampled_from((ATOM, LINEAR, TRANSPOSED)))
def test_scale_words_are_places_in_a_tensor(layout_bytes, rows, layout):
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
def test_the_scale_map_is_a_layout_with_the_strides_that_kernels_are_given(scale_bytes, rows, layout):
    """The strides are those of ((32, 4, blocks), words): kernels address scale factors with that layout."""
    places = scale_map(layout, scale_bytes, rows)
    shape = ((32, 4, -(-rows // 128)), places.words)
    cute_layout = Layout(shape, ((places.inner, places.middle, places.outer), places.step))
    for row, word in product(range(rows), range(places.words)):
        assert cute_layout(row, word) == places.at(row, word)


@law
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from((1, 4, 64, 128)))
def test_groups_own_disjoint_scale_rows(rows_of_group, scale_bytes, alignment):
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
