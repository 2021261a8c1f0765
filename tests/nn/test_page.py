"""docs/layer.md and its page of the API reference: the code runs as printed, and every public name is there."""

from __future__ import annotations

import re
from pathlib import Path

import cute_ep.nn
from tests.processes import run_code
from tests.project.test_readme import DOCS, ROOT

PAGE = (DOCS / "layer.md").read_text()


def test_the_code_runs_without_a_gpu(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = run_code(script, tmp_path)
    assert done.stdout == "(4, 16, 256), and gradients of 5 parameters\n", done.stderr


def test_it_is_short_and_names_what_is_public() -> None:
    assert len(PAGE.split()) <= 600
    named = set(re.findall(r"\w+", PAGE))
    assert set(cute_ep.nn.__all__) - {"Connections", "Routing"} <= named


def test_the_reference_has_every_public_name_once() -> None:
    found = re.findall(r"^\.\. auto\w+:: cute_ep\.nn\.(\w+)", (DOCS / "api" / "nn.rst").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(cute_ep.nn.__all__)


def test_gates_and_examples_that_it_names_exist() -> None:
    assert all(f"`{name}`" in PAGE for name in cute_ep.nn.gates.GATES)
    assert (ROOT / "examples").is_dir()
