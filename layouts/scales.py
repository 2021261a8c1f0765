"""The 128x4 scale-factor atom that block-scaled grouped matmuls read.

A tile of 128 rows by 4 scale columns is 512 contiguous bytes; row r, column c of it is at
(r % 32) * 16 + (r // 32) * 4 + c. Tiles are row-major: column tiles of one 128-row block, then the next block.
As a CuTe layout over (row, column): ((32, 4, blocks), (4, k_tiles)) : ((16, 4, 512 * k_tiles), (1, 512)).
"""

from __future__ import annotations

from cute_ep.layouts.record import Int

ATOM_ROWS = 128
ATOM_COLUMNS = 4
ATOM_BYTES = ATOM_ROWS * ATOM_COLUMNS


def scale_columns(scale_bytes: Int) -> Int:
    """Column tiles of one row: scale factors rounded up to whole atoms."""
    return (scale_bytes + (ATOM_COLUMNS - 1)) // ATOM_COLUMNS


def atom_shape_stride(blocks: Int, column_tiles: Int) -> tuple[tuple, tuple]:
    """(shape, stride) of the byte layout over (row, column) of `blocks` 128-row blocks."""
    shape = ((32, 4, blocks), (ATOM_COLUMNS, column_tiles))
    stride = ((16, 4, ATOM_BYTES * column_tiles), (1, ATOM_BYTES))
    return shape, stride


def row_blocks(rows: Int) -> Int:
    """128-row blocks that an expert of `rows` rows owns."""
    return (rows + (ATOM_ROWS - 1)) // ATOM_ROWS


def scale_blocks(max_rows: int, local_experts: int) -> int:
    """Blocks to allocate for `max_rows` rows over `local_experts` experts, each of which may end in a part block."""
    return (max_rows + local_experts * ATOM_ROWS) // ATOM_ROWS
