"""Numbers on command lines that must be positive."""

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
