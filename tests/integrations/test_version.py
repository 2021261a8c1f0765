"""Without its library, or with another version, importing an adapter says what is needed; cute_ep itself needs none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_ep.integrations.common.versions import require
from tests.processes import ROOT, run_code

NEED = "must be 5.17 or newer: pip install 'transformers>=5.17'"


def beside(folder: Path) -> dict[str, str]:
    """The environment of a process in which modules in `folder` hide installed ones."""
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def import_beside(folder: Path, module: str) -> subprocess.CompletedProcess[str]:
    """Import an adapter in such a process."""
    return run_code(f"import {module}", folder, **beside(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__version__ = '5.16.4'", f"transformers = 5.16.4: {NEED}"),
        ("__version__ = '4.57.6'", f"transformers = 4.57.6: {NEED}"),
        ("raise ModuleNotFoundError('gone')", f"transformers = not installed: {NEED}"),
    ],
)
def test_an_old_or_missing_transformers_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "transformers.py").write_text(text)
    done = import_beside(tmp_path, "cute_ep.integrations.transformers")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ImportError: {message}"


@pytest.mark.parametrize("found", ["5.17.0", "5.22.2"])
def test_a_transformers_that_is_too_old_for_the_plan_is_named_when_that_is_imported(tmp_path: Path, found: str) -> None:
    """Ranks of one process work with it."""
    (tmp_path / "transformers" / "integrations").mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text(f"__version__ = {found!r}\nPreTrainedModel = object\n")
    moe = "class ALL_EXPERTS_FUNCTIONS:\n    register = print\n"
    (tmp_path / "transformers" / "integrations" / "moe.py").write_text(moe)
    module = "cute_ep.integrations.transformers"
    done = run_code(f"from {module} import *\nassert attach\nfrom {module} import CuteEP", tmp_path, **beside(tmp_path))
    assert done.returncode == 1 and done.stdout.startswith("cute_ep <function experts_forward")
    need = "must be 5.23 or newer: pip install 'transformers>=5.23'"
    assert done.stderr.splitlines()[-1] == f"ImportError: transformers = {found}: {need}"


@pytest.mark.parametrize(
    ("adapter", "file", "text", "message"),
    [
        (
            "megatron",
            "megatron/core.py",
            "__version__ = '0.17.0'",
            "megatron-core = 0.17.0: must be at least 0.16 and below 0.17",
        ),
        ("megatron", "megatron/core.py", "raise ModuleNotFoundError('gone')", "megatron-core = not installed"),
        ("torchtitan", "torchtitan.py", "__version__ = '0.4.0'", "pip install 'torchtitan>=0.3,<0.4'"),
    ],
)
def test_a_version_that_was_not_checked_is_refused(
    tmp_path: Path, adapter: str, file: str, text: str, message: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    done = import_beside(tmp_path, f"cute_ep.integrations.{adapter}")
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]
    assert "ImportError: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("found", ["5.23.0", "5.23.0.dev0", "5.100.1", "6.0"])
def test_newer_versions_are_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adapted", SimpleNamespace(__version__=found))  # type: ignore[arg-type]
    require("adapted", (5, 23))


@pytest.mark.parametrize("found", ["0.5.23", "0.5.23.post1", "0.5.22", "0.5.24", "0.6", "1.0.0", "unknown"])
def test_a_range_has_an_end(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adapted", SimpleNamespace(__version__=found))  # type: ignore[arg-type]
    if found.startswith("0.5.23"):
        require("adapted", (0, 5, 23), (0, 5, 24))
        return
    need = f"own-name = {found}: must be at least 0.5.23 and below 0.5.24: pip install 'own-name>=0.5.23,<0.5.24'"
    with pytest.raises(ImportError, match=re.escape(need)):
        require("adapted", (0, 5, 23), (0, 5, 24), package="own-name")
