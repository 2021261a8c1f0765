"""Times of two checkouts in turns: which rows are compared, the table, and a run of both on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perf import adapters, turns
from perf.turns import medians, table


def row(us: float, *, adapter: str = "deepep_normal", how: str = "waited", tokens: int = 16) -> dict:
    about = {"adapter": adapter, "operation": "dispatch", "format": "bf16", "tokens": tokens, "how": how}
    return about | {"p50_us": us, "host_us": us / 2}


def test_medians_are_of_calls_that_wait() -> None:
    rows = [[row(10), row(1, how="graph")], [row(30)], [row(20), row(5, tokens=128)]]
    key = ("deepep_normal", "dispatch", "", "bf16")
    assert medians(rows, "p50_us") == {(*key, 16): 20, (*key, 128): 5}
    assert medians(rows, "host_us")[*key, 16] == 10


def test_a_table_has_ratios_of_the_other_checkout_and_of_deepep() -> None:
    other = row(300, adapter="sglang", tokens=128)
    run = {
        "here": [[row(200), row(150, tokens=128), other]],
        "there": [[row(800), {**other, "p50_us": 600}]],
        "deepep": [row(100) | {"peer": "deepep_normal"}],
    }
    assert table(run, "p50_us").splitlines() == [
        "| adapter | operation | format | 16 | 128 |",
        "|---|---|---|---|---|",
        "| DeepEP V1, normal | dispatch | bf16 | 200 / 800 (0.25; 100, 2.00) |  |",
        "| SGLang | dispatch | bf16 |  | 300 / 600 (0.50) |",
    ]


def test_checkouts_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    asked: list[tuple[Path | None, Path | None]] = []

    def run_adapters(*arguments: object, logs: Path, checkout: Path | None) -> dict:
        asked.append((checkout, logs))
        return {"rows": [row(100 if checkout is None else 200)], "notes": []}

    monkeypatch.setattr(adapters, "run_adapters", run_adapters)
    words = ["turns", "--against", str(tmp_path), "--turns", "2", "--adapters", "deepep_normal", "--logs", "logs"]
    monkeypatch.setattr(sys, "argv", words)
    assert turns.main() == 0
    order = [(None, "here0"), (tmp_path, "there0"), (None, "here1"), (tmp_path, "there1")]
    assert asked == [(checkout, Path("logs") / name) for checkout, name in order]
    assert "| DeepEP V1, normal | dispatch | bf16 | 100 / 200 (0.50) |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule"),
    [(["--adapters", "ops"], "adapters = ops: must be out of"), (["--turns", "0"], "turns = 0: must be at least 1")],
)
def test_wrong_words_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, words: list[str], rule: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["turns", "--against", ".", *words])
    with pytest.raises(SystemExit):
        turns.main()
    assert rule in capsys.readouterr().err
