"""The table is the layout, the SVG shows the table, and colours follow the owners."""

import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest

from cute_ep.layouts.draw import layout_svg, layout_table, owners
from cute_ep.layouts.tiles.layout import Layout, LayoutError, row_major
from cute_ep.layouts.tiles.tile_tensor import TileTensor

SVG = "{http://www.w3.org/2000/svg}"


def cells_of(svg):
    """(texts, fill colours of the cells) of a picture."""
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    fills = [element.get("fill") for element in root.iter(f"{SVG}rect")][1:]
    return texts, fills


@pytest.mark.parametrize("text", ["(8,12):(12,1)", "((2,4),(3,2)):((1,6),(2,48))", "6:2", "(4):(0)"])
def test_table_is_the_layout(text):
    layout = Layout.parse(text)
    table = layout_table(layout)
    rows, columns = (1, layout.size) if layout.rank == 1 else (layout[0].size, layout[1].size)
    assert [len(row) for row in table] == [columns] * rows
    assert [offset for row in table for offset in row] == TileTensor(layout).offsets()


def test_svg_shows_every_offset_and_escapes_the_title():
    texts, fills = cells_of(layout_svg(Layout.parse("(3,4):(4,1)"), title="a < b & c"))
    assert texts[0] == "a < b & c"
    assert texts[1:8] == ["0", "1", "2", "3", "0", "1", "2"], "axes: columns, then rows"
    assert texts[8:] == [str(offset) for offset in range(12)] + ["(3,4):(4,1)"]
    assert all(re.fullmatch("#[0-9a-f]{6}", fill) for fill in fills)


def test_svg_labels_and_colours_follow_distribute():
    layout, threads = row_major(8, 16), row_major(4, 2)
    owned = owners(layout, threads)
    for tid in range(8):
        fragment = TileTensor(layout).distribute(threads, tid).offsets()
        assert [owned[offset] for offset in fragment] == [(tid, value) for value in range(16)]
    texts, fills = cells_of(layout_svg(layout, distribute=threads))
    labels = [text for text in texts if text.startswith("T")]
    assert labels == ["T{} V{}".format(*owned[offset]) for offset in range(128)]
    colours = defaultdict(set)
    for label, fill in zip(labels, fills, strict=True):
        colours[label.split()[0]].add(fill)
    assert all(len(fill) == 1 for fill in colours.values())
    assert len(set.union(*colours.values())) == 8


@pytest.mark.parametrize("text", ["((32,4),4):((16,4),1)", "(4,200):(200,1)", "300:1"])
def test_long_layouts_are_drawn_in_panels(text):
    """The picture is no strip, no two cells overlap, all lie inside, and axes are numbered in every panel."""
    layout = Layout.parse(text)
    root = ElementTree.fromstring(layout_svg(layout))
    frame, *cells = [
        {key: float(box.get(key, 0)) for key in ("x", "y", "width", "height")} for box in root.iter(f"{SVG}rect")
    ]
    assert frame["width"] < 3 * frame["height"] and frame["height"] < 3 * frame["width"]
    assert len({(box["x"], box["y"]) for box in cells}) == len(cells) == layout.size
    for box in cells:
        assert 0 < box["x"] < frame["width"] - box["width"] and 0 < box["y"] < frame["height"] - box["height"]
        others = [one for one in cells if one is not box and abs(one["x"] - box["x"]) < box["width"]]
        assert all(abs(one["y"] - box["y"]) >= box["height"] for one in others)
    texts, _ = cells_of(layout_svg(layout))
    offsets = [str(offset) for row in layout_table(layout) for offset in row]
    assert texts[-1 - len(offsets) : -1] == offsets
    rows, columns = len(layout_table(layout)), len(layout_table(layout)[0])
    panels = (len(texts) - 1 - len(offsets) - max(rows, columns)) / min(rows, columns)
    assert panels == int(panels) > 1


def test_what_cannot_be_drawn_is_refused():
    for text in ["(2,2,2):(4,2,1)", "(1024,1024):(1024,1)"]:
        with pytest.raises(LayoutError, match="cannot draw"):
            layout_svg(Layout.parse(text))
    with pytest.raises(LayoutError, match="repeats offset"):
        layout_svg(Layout.parse("(4,4):(0,1)"), distribute=row_major(2, 2))
    with pytest.raises(LayoutError, match="does not divide"):
        layout_svg(row_major(6, 6), distribute=row_major(4, 4))
