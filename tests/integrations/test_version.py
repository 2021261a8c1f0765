"""Without transformers, or with an old one, importing the adapter says what is needed; cute_ep itself needs none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_ep.integrations.versions import require

ROOT = Path(__file__).parents[2]
NEED = "must be 5.23 or newer: pip install 'transformers>=5.23'"


def import_beside(folder: Path, module: str) -> subprocess.CompletedProcess[str]:
    """Import a module in a process whose modules in `folder` hide installed ones."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__version__ = '5.22.2'", f"transformers = 5.22.2: {NEED}"),
        ("__version__ = '4.57.6'", f"transformers = 4.57.6: {NEED}"),
        ("raise ModuleNotFoundError('gone')", f"transformers = not installed: {NEED}"),
    ],
)
def test_an_old_or_missing_transformers_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "transformers.py").write_text(text)
    done = import_beside(tmp_path, "cute_ep.integrations.transformers")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ImportError: {message}"
    assert import_beside(tmp_path, "cute_ep, cute_ep.distributed, cute_ep.integrations.exchange").returncode == 0


@pytest.mark.parametrize(
    ("found", "taken"),
    [("1.2.9", False), ("1.3", False), ("1.3.0", True), ("1.3.7.post1", True), ("1.4.0rc1", False), ("2.0", False)],
)
def test_versions_can_have_an_upper_bound(found: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adapted", SimpleNamespace(__version__=found))  # type: ignore[arg-type]
    if taken:
        require("adapted", (1, 3, 0), (1, 4), package="adapted-python")
        return
    rule = f"adapted = {found}: must be at least 1.3.0 and below 1.4: pip install 'adapted-python>=1.3.0,<1.4'"
    with pytest.raises(ImportError, match=re.escape(rule)):
        require("adapted", (1, 3, 0), (1, 4), package="adapted-python")


@pytest.mark.parametrize("found", ["5.23.0", "5.23.0.dev0", "5.100.1", "6.0"])
def test_newer_versions_are_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adapted", SimpleNamespace(__version__=found))  # type: ignore[arg-type]
    require("adapted", (5, 23))
