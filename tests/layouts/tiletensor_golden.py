"""Reads `tiletensor_golden.txt`: offsets printed by Mojo's TileTensor, and our answer to each case.

A case is `kind/parent/argument/...`. Parents: `rm8x12` row-major, `cm8x12` column-major, `pad8x12s16` rows of
stride 16, `dyn8x12` run-time extents (row-major), `rmn2.4x3.5` / `cmn...` nested modes (2,4) and (3,5).
"""

from pathlib import Path

from cute_ep.layouts.maps.scales import atom_shape_stride
from cute_ep.layouts.tiles.layout import Layout, Swizzle, row_major
from cute_ep.layouts.tiles.tile_tensor import TileTensor

CASES = dict(
    line.split("|")
    for line in (Path(__file__).parent / "tiletensor_golden.txt").read_text().splitlines()
    if not line.startswith("#")
)


def expected(case):
    """The recorded answer: a list of ints, or a string for the case that prints a layout."""
    if case.startswith("rmn/"):
        return CASES[case]
    return [int(item) for item in CASES[case].split(",") if item]


def ours(case):
    """This project's answer to `case`, in the same form."""
    kind, parent, *arguments = case.split("/")
    return KINDS[kind](parent, *arguments)


def _ints(text, separator):
    return tuple(int(item) for item in text.split(separator))


def _layout(text):
    if text.startswith("pad"):
        shape, row_stride = text[3:].split("s")
        return Layout(_ints(shape, "x"), (int(row_stride), 1))
    digits = text.lstrip("rmcndy")
    shape = tuple(_ints(mode, ".") for mode in digits.split("x")) if "." in digits else _ints(digits, "x")
    return Layout(shape) if text.startswith("cm") else row_major(*shape)


def _view(text):
    return TileTensor(_layout(text))


def _tile(parent, shape, coord):
    return _view(parent).tile(_ints(shape, "x"), _ints(coord, ",")).offsets()


def _nested_tile(parent, coord):
    view = _view(parent)
    return view.tile(tuple(inner for _, inner in view.shape), _ints(coord, ",")).offsets()


def _distribute(parent, threads, tid):
    return _view(parent).distribute(_layout(threads), int(tid)).offsets()


def _mojo_text(layout):
    """Mojo's spelling: spaces after commas, the whole in parentheses."""
    return f"({layout})".replace(",", ", ")


def _nested_row_major(modes):
    return _mojo_text(row_major(*(_ints(mode, ".") for mode in modes.split("x"))))


def _by_int(shape):
    """A row-major layout indexed by one int, leftmost-fastest: `4.(3,2)` is ((4), (3, 2))."""
    assert shape == "4.(3,2)"
    layout = row_major(4, (3, 2))
    return [layout(index) for index in range(layout.size)]


def _coordinates(parent):
    layout = _layout(parent)
    return [entry for offset in range(layout.size) for entry in layout.offset2crd(offset)]


def _swizzle(arguments):
    return [Swizzle(*_ints(arguments, ","))(index) for index in range(64)]


def _scale_factors(extents, vector):
    """Byte of the scale of (row, column) over every fifth row and each block of `vector` columns."""
    rows, columns = _ints(extents, "x")
    blocks, size = rows // 128, int(vector[1:])
    layout = Layout(*atom_shape_stride(blocks, columns // (4 * size)))
    return [layout(row, block) for row in range(0, rows, 5) for block in range(columns // size)]


KINDS = {
    "tile": _tile,
    "ntile": _nested_tile,
    "dist": _distribute,
    "rmn": _nested_row_major,
    "int": _by_int,
    "idx2crd": _coordinates,
    "swz": _swizzle,
    "sf": _scale_factors,
}
