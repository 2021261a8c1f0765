"""docs/ops.md: its script runs as printed, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cute_ep.ops
from tests.processes import ROOT, run_page

PAGE = (ROOT / "docs" / "ops.md").read_text()


@pytest.mark.slow
def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    out = run_page("ops.md", tmp_path)
    wanted = r"rank \d: gradients of \[\(64, 512\), \(512, 8\), \(4, 512, 512\)\]"
    assert len(re.findall(wanted, out)) == 2, out


def test_it_names_every_function() -> None:
    named = set(re.findall(r"\b(?:cute_ep\.ops\.)?(\w+)\b", PAGE))
    assert set(cute_ep.ops.__all__) <= named
