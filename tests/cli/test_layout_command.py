"""`cute-ep layout`: layouts as text at any width, and as a drawing."""

from __future__ import annotations

import pytest

from cute_ep.api.errors import EPInputError
from cute_ep.cli.layout import parse_extents
from cute_ep.cli.main import main


def test_layout_prints_and_draws_tiles_and_owners_and_refuses_what_does_not_fit(
    tmp_path, capsys: pytest.CaptureFixture
) -> None:
    drawing = tmp_path / "drawings" / "row.svg"
    assert main(["layout", "(4,6):(6,1)", "--tile", "2x3", "--distribute", "(2,1):(1,1)", "--svg", str(drawing)]) == 0
    out = capsys.readouterr().out
    assert "size 24 elements" in out and "4 tiles of 2x3, each (2,3):(6,1)" in out and "1,1 at 15" in out
    assert "8 T1V2" in out
    assert drawing.read_text().startswith("<svg")
    for words in (["(4,6"], ["(4,6):(6,1)", "--tile", "3x3"], ["(4,6):(6,1)", "--tile", "no"]):
        assert main(["layout", *words]) == 2
    with pytest.raises(EPInputError, match="must be positive extents such as 4x8, one per mode"):
        parse_extents("4x0")
    assert parse_extents("(4, 8)") == parse_extents("4x8") == (4, 8)


@pytest.mark.parametrize("width", [10, 40, 80, 160])
def test_layout_shows_every_cell_at_any_width(width: int, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("cute_ep.cli.main.PIPE_WIDTH", width)
    assert main(["layout", "(4,40):(40,1)", "--distribute", "(2,8):(8,1)"]) == 0
    lines = capsys.readouterr().out.partition("offsets (elements)")[2].splitlines()
    rows = [line.split() for line in lines if line.startswith(" ") and "T" in line]
    assert all(len(line) <= width or len(line.split()) == 3 for line in lines if "T" in line)
    seen = {int(cell): (int(row[0]), owner) for row in rows for cell, owner in zip(row[1::2], row[2::2], strict=True)}
    assert seen == {n: (n // 40, f"T{n % 8 + 8 * (n // 40 % 2)}V{n % 40 // 8 + 5 * (n // 80)}") for n in range(160)}
