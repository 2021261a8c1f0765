"""What command lines of measurements refuse."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from perf import host_times, kernel_turns, sharing_times, turns

AGAINST = ["--against", "elsewhere"]
NUMBERS = [
    (kernel_turns, AGAINST, "turns"),
    (kernel_turns, AGAINST, "samples"),
    (turns, AGAINST, "turns"),
    (host_times, [], "turns"),
    (sharing_times, [], "turns"),
]


@pytest.mark.parametrize(("command", "words", "option"), NUMBERS, ids=lambda value: getattr(value, "__name__", None))
def test_numbers_below_one_are_refused(
    command: ModuleType,
    words: list[str],
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *words, f"--{option}", "0"])
    with pytest.raises(SystemExit):
        command.main()
    assert f"{option} = 0: must be at least 1" in capsys.readouterr().err


def test_exact_sums_alone_are_refused_where_rows_are_by_source_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There sums are partial, so nothing would be measured."""
    words = [*AGAINST, "--order", "rank_major", "--operations", "combine_exact,pair_exact"]
    monkeypatch.setattr(sys, "argv", ["command", *words])
    with pytest.raises(SystemExit):
        kernel_turns.main()
    assert "operations = combine_exact,pair_exact: must have one without exact sums" in capsys.readouterr().err
