"""Layouts of scale factors, against the strides that `cute_ep.layouts.maps.scales` gives to kernels."""

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.scales import (
    ATOM,
    ATOM_BYTES,
    ATOM_ROWS,
    LANE_ROWS,
    LINEAR,
    TRANSPOSED,
    atom_shape_stride,
    has_tiles,
    scale_map,
    scale_shape,
    tile_row,
)
from cute_ep.testing.compare import assert_bits


@pytest.mark.parametrize("columns", [1, 2, 4, 6, 180])
@pytest.mark.parametrize("counts", [[0], [1], [128], [129, 0, 127, 128, 300], [0, 0, 5]], ids=str)
def test_swizzle_is_the_atom_layout(counts, columns):
    rows = sum(counts)
    scales = torch.randint(1, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    atoms = reference.swizzle_scales(scales, counts)
    blocks, tiles = sum(-(-count // 128) for count in counts), (columns + 3) // 4
    assert atoms.shape == (blocks, tiles, 32, 4, 4) and atoms.dtype == torch.uint8

    (_, ((row_low, row_high, block_stride), (column_low, column_high))) = atom_shape_stride(blocks, tiles)
    flat, seen = atoms.flatten(), torch.zeros(blocks * tiles * ATOM_BYTES, dtype=torch.bool)
    block, row = 0, 0
    for count in counts:
        for local in range(count):
            at = local % 32 * row_low + local % 128 // 32 * row_high + (block + local // 128) * block_stride
            addresses = [at + c % 4 * column_low + c // 4 * column_high for c in range(columns)]
            assert_bits(flat[addresses], scales[row], f"row {row}")
            seen[addresses] = True
            row += 1
        block += -(-count // 128)
    assert not flat[~seen].any(), "padding must be zero"
    assert int(seen.sum()) == rows * columns
    assert_bits(reference.unswizzle_scales(atoms, counts, columns), scales, "unswizzled")


def test_swizzle_by_hand():
    """Row 33, column 5 of the second expert, whose block is 2: the first's 200 rows own blocks 0 and 1."""
    scales = torch.zeros(250, 6, dtype=torch.uint8)
    scales[200 + 33, 5] = 77
    atoms = reference.swizzle_scales(scales, [200, 50])
    assert atoms.shape == (3, 2, 32, 4, 4)
    assert atoms.flatten().nonzero().flatten().tolist() == [(2 * 2 + 1) * 512 + 1 * 16 + 1 * 4 + 1]
    assert atoms[2, 1, 1, 1, 1] == 77


def test_swizzle_refuses_other_shapes():
    with pytest.raises(EPInputError, match="shape"):
        reference.swizzle_scales(torch.zeros(3, 4, dtype=torch.uint8), [2])
    with pytest.raises(EPInputError, match="blocks"):
        reference.unswizzle_scales(torch.zeros(1, 1, 32, 4, 4, dtype=torch.uint8), [1, 1], 4)


@pytest.mark.parametrize("layout, dtype, columns", [
    (LINEAR, torch.uint8, 1), (LINEAR, torch.uint8, 6), (LINEAR, torch.uint8, 180), (LINEAR, torch.float32, 1),
    (LINEAR, torch.float32, 23), (TRANSPOSED, torch.float32, 1), (TRANSPOSED, torch.float32, 23),
])  # fmt: skip
@pytest.mark.parametrize("counts", [[0], [4], [132, 0, 8]], ids=str)
def test_linear_and_transposed_words_are_where_the_map_says(layout, dtype, columns, counts):
    """Each scale word is where `ScaleMap` puts it, and the rest is zero."""
    rows = sum(counts)
    scales = torch.randint(1, 250, (rows, columns), generator=torch.Generator().manual_seed(0)).to(dtype)
    got = reference.arrange_scales(scales, layout, counts)
    assert got.dtype == dtype and got.is_contiguous()
    nbytes = columns * dtype.itemsize
    assert tuple(got.shape) == scale_shape(layout, nbytes, dtype.itemsize, rows, len(counts))
    places = scale_map(layout, nbytes, rows)
    words = got.flatten().view(torch.int32).tolist()
    padded = torch.zeros(rows, places.words * 4, dtype=torch.uint8)
    padded[:, :nbytes] = scales.view(torch.uint8).view(rows, nbytes) if rows else scales.view(torch.uint8)
    want = padded.flatten().view(torch.int32).view(rows, places.words).tolist()
    for row in range(rows):
        assert [words[places.at(row, column)] for column in range(places.words)] == want[row]


@pytest.mark.parametrize("layout", [ATOM, TRANSPOSED])
def test_a_tile_has_all_rows_once_and_aligned_words(layout):
    """Lanes' rows are all of a tile, each once; their words of a column are neighbours, aligned to 16 bytes."""
    places, is_atom, first, columns = scale_map(layout, 20, 388), int(layout == ATOM), 2 * ATOM_ROWS, range(5)
    rows = [[first + tile_row(lane, part, is_atom) for part in range(LANE_ROWS)] for lane in range(32)]
    assert sorted(row for lane in rows for row in lane) == list(range(first, first + ATOM_ROWS))
    for column in columns:
        words = [places.at(row, column) for lane in rows for row in lane]
        assert words == list(range(words[0], words[0] + ATOM_ROWS)) and words[0] % LANE_ROWS == 0


@pytest.mark.parametrize("layout, rows, alignment, tiled", [
    (None, 128, 128, False), (LINEAR, 128, 128, False), (ATOM, 5, 1, True), (TRANSPOSED, 128, 4, True),
    (TRANSPOSED, 130, 4, False), (TRANSPOSED, 128, 1, False),
])  # fmt: skip
def test_outputs_have_tiles_in_atoms_and_where_transposed_rows_come_in_fours(layout, rows, alignment, tiled):
    assert has_tiles(layout, rows, alignment) == tiled
