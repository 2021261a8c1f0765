"""Print the offsets of a CuTe layout such as "(8,12):(12,1)", and who owns them when it is dealt out to threads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cute_ep.api.errors import EPInputError
from cute_ep.cli.common import print_table, write_file
from cute_ep.layouts import Layout, LayoutError, TileTensor, layout_svg, layout_table
from cute_ep.layouts.draw import owners

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow", "bright_green")
MAX_COLUMNS = 64
MAX_ROWS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `cute-ep layout`."""
    parser.add_argument("spec", metavar="SPEC", help='shape:stride, e.g. "(8,12):(12,1)" or "((32,4),4):((16,4),1)"')
    parser.add_argument("--tile", metavar="T", help='cut into tiles, e.g. "4x4", list them and show the first')
    parser.add_argument("--distribute", metavar="THR", help='thread layout, e.g. "(4,2):(2,1)"; T3 V1 is its value 1')
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it as an SVG file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print one layout. Returns 0; EPInputError for what is no layout or cannot be tiled, dealt out or drawn."""
    try:
        layout = Layout.parse(args.spec)
        threads = Layout.parse(args.distribute) if args.distribute else None
        console.print(f"{layout}", style="bold", highlight=False)
        console.print(
            f"size {layout.size} elements, cosize {layout.cosize} elements, rank {layout.rank}", highlight=False
        )
        shown = layout
        if args.tile:
            shown = print_tiles(layout, parse_extents(args.tile), console)
        if threads:
            values = shown.size // threads.size
            console.print(f"dealt out to {threads.size} threads, {values} values each: {threads}", highlight=False)
        print_offsets(shown, threads, console)
        if args.svg:
            drawing = layout_svg(shown, distribute=threads, title=args.spec)
            write_file("svg", args.svg, drawing)
            console.print(f"wrote {args.svg} ({len(drawing)} bytes)", highlight=False, soft_wrap=True)
    except LayoutError as error:
        raise EPInputError(str(error)) from error
    return 0


def parse_extents(text: str) -> tuple[int, ...]:
    """(4, 8) from "4x8", "4,8" or "(4,8)"; EPInputError otherwise."""
    words = text.strip().removeprefix("(").removesuffix(")").replace("x", ",").split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise EPInputError(f"tile = {text!r}: must be positive extents such as 4x8, one per mode of SPEC")
    return tuple(int(word) for word in words)


def print_tiles(layout: Layout, shape: tuple[int, ...], console: Console) -> Layout:
    """List the first offset of every tile; returns the layout of a tile. LayoutError when tiles do not divide."""
    view = TileTensor(layout)
    first = view.tile(shape, (0,) * len(shape))
    nested = any(isinstance(extent, tuple) for extent in view.shape)
    counts = tuple(
        mode[0].size if nested else mode.size // extent for mode, extent in zip(view.layout, shape, strict=True)
    )
    number = 1
    for count in counts:
        number *= count
    console.print(f"{number} tiles of {'x'.join(map(str, shape))}, each {first.layout}", highlight=False)
    corners = [
        f"{','.join(map(str, coord))} at {view.tile(shape, coord).base}" for coord in product(*map(range, counts))
    ]
    more = ", ..." if len(corners) > MAX_COLUMNS else ""
    console.print(f"first offsets: {'; '.join(corners[:MAX_COLUMNS])}{more}", highlight=False)
    return first.layout


def print_offsets(layout: Layout, threads: Layout | None, console: Console) -> None:
    """Offsets by row and column, with owner and colour where `threads` is given; columns that do not fit beside the
    others in a table of their own. LayoutError as the drawing."""
    offsets = layout_table(layout)
    rows, columns = offsets[:MAX_ROWS], min(len(offsets[0]), MAX_COLUMNS)
    owned = owners(layout, threads) if threads is not None else {}
    cut = len(offsets) > MAX_ROWS or len(offsets[0]) > MAX_COLUMNS
    caption = f"first {len(rows)} rows and {columns} columns of {len(offsets)} x {len(offsets[0])}" if cut else None
    cells = [[offset_cell(offset, owned) for offset in row[:columns]] for row in rows]
    widest = max(len(str(columns - 1)), *(len(cell) for row in cells for cell in row))
    at_once = max(1, (console.width - len(str(len(rows))) - 2) // (widest + 2))
    for first in range(0, columns, at_once):
        here = range(first, min(first + at_once, columns))
        which = f"columns {first} to {here[-1]}" if len(here) > 1 else f"column {first}"
        title = "offsets (elements)" if len(here) == columns else f"offsets (elements), {which}"
        table = Table(title=title, caption=caption if here[-1] == columns - 1 else None, box=None, padding=(0, 1))
        table.add_column("", justify="right", style="dim")
        for column in here:
            table.add_column(str(column), justify="right", no_wrap=True)
        for index, row in enumerate(cells):
            table.add_row(str(index), *(row[column] for column in here))
        print_table(console, table)


def offset_cell(offset: int, owned: Mapping[int, tuple[int, int]]) -> Text:
    """An offset, and which value of which thread it is."""
    if offset not in owned:
        return Text(str(offset))
    thread, value = owned[offset]
    return Text(f"{offset} T{thread}V{value}", style=COLOURS[thread % len(COLOURS)])
