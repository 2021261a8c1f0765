"""Fixtures of tests of tuning."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_ep.tuning import file as tuning_file


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's tables would be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tuning_file.tuning_file()
