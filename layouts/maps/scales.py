"""Where the scale factors of a ragged, expert-major output lie.

Scale factors move in words of 4 bytes: four one-byte factors or one float32. Word (row, column) of an output is at word

    row % 32 * inner + row % 128 // 32 * middle + row // 128 * outer + column * step

which as a CuTe layout is ((32, 4, blocks), words) : ((inner, middle, outer), step). The three layouts that matmuls
read are three choices of these strides:

| layout      | strides                               | tensor                       | rows of an expert start at |
| ----------- | ------------------------------------- | ---------------------------- | -------------------------- |
| atom128x4   | (4, 1, 128 * words), 128              | [blocks, words, 32, 4, 4] u8 | a multiple of 128          |
| linear      | (words, 32 * words, 128 * words), 1   | [rows, 4 * words] u8 or      | its first output row       |
|             |                                       | [rows, words] f32            |                            |
| transposed  | (1, 32, 128), rows                    | [words, rows] f32            | its first output row       |

With blocks of a fixed number of rows, the transposed scale factors of each expert are a matrix of their own, of step
rows of a block: [experts, words, rows of a block].

In the 128x4 atom, which block-scaled tensor cores read, a tile of 128 rows by 4 one-byte factors is 512 contiguous
bytes. One-byte factors are padded with zeros to whole words.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.layouts.maps.record import Int

ATOM_ROWS = 128
ATOM_COLUMNS = 4
ATOM_BYTES = ATOM_ROWS * ATOM_COLUMNS
WORD_BYTES = 4
LANE_ROWS = 4
"""Rows whose words of one column are 16 contiguous bytes, where `has_tiles`."""
SCATTERED_WORDS = 160
"""Scale words that a rank stores for each token that some rank sends, beyond which it stores them by tiles. The stores
of fewer words, one by one, take no longer than the link does. By tiles 4096 NVFP4 tokens take 184 us instead of 201,
FP8 281 instead of 276 (4 x H200, 2026-11-21; `docs/lessons.md`, "Write many scale words in a second pass, behind a grid
barrier")."""
SCATTERED_LAMPORT_WORDS = 320
"""The same where some source's rows are Lamport rows: those words are set aside first."""
SCATTERED_RANK_MAJOR_WORDS = 40
"""The same for rank-major rows: by tiles 4096 NVFP4 tokens take 362 us instead of 461 (four ranks on one H200,
2026-11-23)."""
FEW_WORDS = 1 << 18
"""Scale words that a rank stores one by one in any case where some source's rows are Lamport rows."""
ATOM = "atom128x4"
LINEAR = "linear"
TRANSPOSED = "transposed"


@dataclass(frozen=True)
class ScaleMap:
    """Strides in words; `words` is the number of words of one row."""

    words: int
    inner: int
    middle: int
    outer: int
    step: int

    def at(self, row: int, column: int) -> int:
        """Word offset of one row's scale word."""
        in_block = row % ATOM_ROWS
        return (
            in_block % 32 * self.inner
            + in_block // 32 * self.middle
            + row // ATOM_ROWS * self.outer
            + (column * self.step)
        )


def atom_shape_stride(blocks: int, column_tiles: int) -> tuple[tuple, tuple]:
    """(shape, stride) of the atom's byte layout over (row, column) of `blocks` 128-row blocks."""
    shape = ((32, 4, blocks), (ATOM_COLUMNS, column_tiles))
    stride = ((16, 4, ATOM_BYTES * column_tiles), (1, ATOM_BYTES))
    return shape, stride


def scale_words(scale_bytes: Int) -> Int:
    """Words of one row: its scale bytes rounded up."""
    return (scale_bytes + (WORD_BYTES - 1)) // WORD_BYTES


def scale_map(layout: str, scale_bytes: int, rows: int) -> ScaleMap:
    """The strides of a layout for outputs with room for `rows` rows."""
    words = scale_words(scale_bytes)
    if layout == ATOM:
        _, (rows_stride, (_, tile_stride)) = atom_shape_stride(1, words)
        return ScaleMap(words, *(stride // WORD_BYTES for stride in (*rows_stride, tile_stride)))
    if layout == LINEAR:
        return ScaleMap(words, words, 32 * words, ATOM_ROWS * words, 1)
    return ScaleMap(words, 1, 32, ATOM_ROWS, rows)


def has_tiles(layout: str | None, rows: int, row_alignment: int) -> bool:
    """Whether words of LANE_ROWS rows of one expert can be stored together, in outputs with room for `rows` rows."""
    return layout == ATOM or (layout == TRANSPOSED and rows % LANE_ROWS == 0 and row_alignment % LANE_ROWS == 0)


def tile_row(lane: Int, part: Int, is_atom: Int) -> Int:
    """Row `part` of the LANE_ROWS that one of 32 lanes takes of ATOM_ROWS rows: every 32nd one of an atom (is_atom 1),
    neighbours of the transposed layout (0). Lanes' words of a column are neighbours too."""
    return lane * (LANE_ROWS - (LANE_ROWS - 1) * is_atom) + part * (1 + (ATOM_ROWS // LANE_ROWS - 1) * is_atom)


def scale_row_alignment(layout: str | None, row_alignment: int) -> int:
    """Multiple at which an expert's scale rows start: atoms own whole 128-row blocks, others follow the rows, as does
    None where there are none."""
    return ATOM_ROWS if layout == ATOM else row_alignment


def scale_block(layout: str | None, scale_bytes: int, rows: int) -> int:
    """Scale rows from one expert's block of `rows` rows to the next one's."""
    return rows * scale_words(scale_bytes) if layout == TRANSPOSED else rows


def block_scale_shape(layout: str, scale_bytes: int, itemsize: int, rows: int, groups: int) -> tuple[int, ...]:
    """`scale_shape` for blocks of `rows` rows, of each of `groups` experts; in the atom layout a multiple of 128."""
    words = scale_words(scale_bytes)
    if layout == ATOM:
        return (groups * rows // ATOM_ROWS, words, 32, ATOM_ROWS // 32, WORD_BYTES)
    if layout == LINEAR:
        return (groups * rows, words * WORD_BYTES // itemsize)
    return (groups, words, rows)


def scale_shape(layout: str, scale_bytes: int, itemsize: int, rows: int, groups: int) -> tuple[int, ...]:
    """Shape of the tensor of scale factors of `itemsize` bytes for `rows` rows of `groups` experts, each of which may
    end in a part block."""
    words = scale_words(scale_bytes)
    if layout == ATOM:
        return ((rows + groups * ATOM_ROWS) // ATOM_ROWS, words, 32, ATOM_ROWS // 32, WORD_BYTES)
    if layout == LINEAR:
        return (rows, words * WORD_BYTES // itemsize)
    return (words, rows)
