"""Tests about tests."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_test_file_is_longer_than_contributing_says() -> None:
    (most,) = re.findall(r"No test file\s+has more than (\d+) lines", (TESTS.parent / "CONTRIBUTING.md").read_text())
    lines = {path.relative_to(TESTS).as_posix(): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert len(lines) > 100
    assert {path: count for path, count in lines.items() if count > int(most)} == {}
