"""docs/transformers.md: its script runs as printed, and its table names the models that are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from tests.integrations.models import MODELS
from tests.integrations.test_experts import classes
from tests.processes import ROOT, run_code

PAGE = (ROOT / "docs" / "transformers.md").read_text()


def test_the_script_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = run_code(script, tmp_path)
    assert done.returncode == 0 and done.stdout == "torch.Size([2, 20])\n", done.stderr


def test_the_table_and_the_number_of_classes_are_what_is_tested() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")][2:]
    assert sorted(name.strip() for row in rows for name in row.split(",")) == sorted(MODELS)
    assert f"{len(classes())} of {transformers.__version__}" in PAGE
