"""Pictures of layouts: a table of offsets, as an SVG, and who owns which element after `distribute`.

Rank 1 is drawn as one row. A nested mode is one axis, walked leftmost-fastest.
"""

from __future__ import annotations

from html import escape
from math import ceil, sqrt
from typing import NamedTuple

from cute_ep.layouts.tiles.layout import Layout, LayoutError
from cute_ep.layouts.tiles.tile_tensor import TileTensor

MAX_CELLS = 16384
CELL_WIDTH, CELL_HEIGHT, MARGIN, HEADER = 60, 40, 16, 26
LONGEST, LONG = 1600, 3
"""A table of more than LONGEST pixels that is LONG times as high as wide, or as wide as high, is drawn in panels."""
PANEL = 8
"""The rows, or columns, of a panel are a multiple of this."""
FONT = "font-family='Inter, Helvetica Neue, Arial, sans-serif'"


class _Style(NamedTuple):
    """How a label looks."""

    size: int
    fill: str
    anchor: str = "middle"
    weight: int = 400


TITLE, CAPTION = _Style(16, "#1f2937", "start", 600), _Style(12, "#6b7280", "start")
INDEX = _Style(11, "#6b7280")
"""Of rows and columns."""
OFFSET, OWNER, OWNED_OFFSET = _Style(14, "#1f2937"), _Style(12, "#1f2937", weight=600), _Style(11, "#4b5563")
"""In a cell: its offset alone, or who owns it and the offset below."""


def layout_table(layout: Layout) -> list[list[int]]:
    """Offsets by row and column: `table[i][j] == layout(i, j)`; one row for rank 1.

    Raises LayoutError above rank 2 or above 16384 cells.
    """
    if layout.rank > 2 or layout.size > MAX_CELLS:
        raise LayoutError(
            f"cannot draw {layout}: rank {layout.rank} (limit 2), {layout.size} cells (limit {MAX_CELLS})"
        )
    if layout.rank == 1:
        return [[layout(index) for index in range(layout.size)]]
    return [[layout(row, column) for column in range(layout[1].size)] for row in range(layout[0].size)]


def owners(layout: Layout, threads: Layout) -> dict[int, tuple[int, int]]:
    """offset -> (thread, value) after `distribute(threads, thread)`.

    Values count a thread's elements in row-major order. Raises LayoutError as this verb does, and for a layout that
    repeats an offset, whose owner would be ambiguous.
    """
    view = TileTensor(layout)
    found: dict[int, tuple[int, int]] = {}
    for thread in range(threads.size):
        for value, offset in enumerate(view.distribute(threads, thread).offsets()):
            if offset in found:
                raise LayoutError(f"{layout} repeats offset {offset}: it has no single owner")
            found[offset] = (thread, value)
    return found


def layout_svg(
    layout: Layout,
    *,
    distribute: Layout | None = None,
    title: str | None = None,
) -> str:
    """A stand-alone SVG of a layout of rank <= 2, one cell per coordinate with its offset.

    A long table is cut into panels, which read from left to right, or from top to bottom where it is wide.

    With `distribute`, a thread layout, cells are coloured by thread and read `T3 V1`: value 1 of thread 3.
    Otherwise the colour follows the offset. Raises LayoutError as `layout_table` and `owners`.
    """
    table = layout_table(layout)
    rows, columns = len(table), len(table[0])
    owned = owners(layout, distribute) if distribute is not None else {}
    top = MARGIN + HEADER + (HEADER if title else 0)
    left = MARGIN + HEADER
    tall, wide = _panel(rows, columns)
    across, down = ceil(rows / tall), ceil(columns / wide)
    pitch_x, pitch_y = wide * CELL_WIDTH + MARGIN + HEADER, tall * CELL_HEIGHT + MARGIN + HEADER
    right, bottom = left + across * pitch_x - MARGIN - HEADER, top + down * pitch_y - MARGIN - HEADER
    width = max(right, left + 10 * len(title or str(layout))) + MARGIN
    height = bottom + HEADER + MARGIN
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
    ]
    if title:
        parts.append(_label(left, MARGIN + 14, title, TITLE))

    def corner(row: int, column: int) -> tuple[int, int]:
        """Where a cell begins: rows go on in the next panel to the right, columns in the one below."""
        x = left + row // tall * pitch_x + column % wide * CELL_WIDTH
        return x, top + column // wide * pitch_y + row % tall * CELL_HEIGHT

    for first in range(0, rows, tall):
        for column in range(columns):
            x, y = corner(first, column)
            parts.append(_label(x + CELL_WIDTH / 2, y - 8, column, INDEX))
    for first in range(0, columns, wide):
        for row in range(rows):
            x, y = corner(row, first)
            parts.append(_label(x - 12, y + CELL_HEIGHT / 2 + 4, row, INDEX))
    for row, cells in enumerate(table):
        for column, offset in enumerate(cells):
            x, y = corner(row, column)
            fill = _thread_colour(owned[offset][0]) if owned else _offset_colour(offset, layout)
            parts.append(
                f"<rect x='{x}' y='{y}' width='{CELL_WIDTH}' height='{CELL_HEIGHT}' fill='{fill}' "
                f"stroke='#ffffff' stroke-width='1.5'/>"
            )
            middle = x + CELL_WIDTH / 2
            if owned:
                thread, value = owned[offset]
                parts.append(_label(middle, y + 17, f"T{thread} V{value}", OWNER))
                parts.append(_label(middle, y + 32, offset, OWNED_OFFSET))
            else:
                parts.append(_label(middle, y + 25, offset, OFFSET))
    parts.append(_label(left, bottom + HEADER - 4, layout, CAPTION))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a panel; all of them where the table is not long. Panels together are about a square."""
    high, broad = rows * CELL_HEIGHT, columns * CELL_WIDTH
    if max(high, broad) <= LONGEST or max(high, broad) < LONG * min(high, broad):
        return rows, columns
    if high > broad:
        return min(rows, PANEL * ceil(rows / sqrt(high / broad) / PANEL)), columns
    return rows, min(columns, PANEL * ceil(columns / sqrt(broad / high) / PANEL))


def _label(x: float, y: float, content: object, style: _Style) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{style.size}' font-weight='{style.weight}' fill='{style.fill}' "
        f"text-anchor='{style.anchor}'>{escape(str(content))}</text>"
    )


def _thread_colour(thread: int) -> str:
    """A pastel; neighbours in number are far apart in hue (steps of the golden angle)."""
    return _pastel(210 + thread * 137.508, 0.62 if thread % 2 else 0.72, 0.84)


def _offset_colour(offset: int, layout: Layout) -> str:
    """Pale blue at offset 0 to pale rose at the largest."""
    return _pastel(210 + 130 * offset / max(layout.cosize - 1, 1), 0.65, 0.88)


def _pastel(hue: float, saturation: float, lightness: float) -> str:
    """#rrggbb of a hue in degrees (HSL); hexadecimal because not every SVG reader knows hsl()."""
    chroma = saturation * min(lightness, 1 - lightness)
    channels = []
    for shift in (0, 8, 4):
        position = (shift + hue / 30) % 12
        channels.append(round(255 * (lightness - chroma * max(-1, min(position - 3, 9 - position, 1)))))
    return "#{:02x}{:02x}{:02x}".format(*channels)
