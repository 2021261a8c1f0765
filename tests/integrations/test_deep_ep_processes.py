"""The folder in which `import deep_ep` finds the adapter: from real processes over gloo, and for DeepEP's own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from tests.processes import ROOT, WITHOUT_GPU, run_code, run_page, run_ranks


@cache
def shims() -> str:
    command = [sys.executable, "-m", "cute_ep.integrations.deep_ep"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_program_that_knows_deep_ep_only_runs_in_real_processes(tmp_path: Path, world: int) -> None:
    own = [WITHOUT_GPU | {"PYTHONPATH": os.pathsep.join([shims(), str(ROOT)])}] * world
    module = "tests.integrations.deep_ep_worker"
    run_ranks(module, world, tmp_path / "store", environment=own, folder=tmp_path, timeout=120)


@pytest.mark.slow
def test_the_script_of_the_page_runs_without_a_gpu(tmp_path: Path) -> None:
    out = run_page("deep_ep.md", tmp_path)
    assert len(re.findall(r"rank \d: \d+ rows", out)) == 2, out


def test_the_page_says_what_memory_normal_mode_takes() -> None:
    page, sizes = (ROOT / "docs" / "deep_ep.md").read_text(), []
    for fmt, layout in (("bf16", None), ("fp8", "linear")):
        cfg = EPConfig(7168, 8, 8, 4096, 8, dispatch_format=fmt, scale_layout=layout)  # type: ignore[arg-type]
        sizes.append(memory_bytes(cfg) // 2**20)
    assert f"{sizes[0]} MiB" in page and f"{sizes[1]} MiB" in page


@pytest.mark.slow
def test_modules_that_the_folder_has_not_come_from_a_checkout(tmp_path: Path) -> None:
    """Those of `deep_ep.utils`, which import names of the extension module."""
    utils = tmp_path / "deep_ep" / "utils"
    utils.mkdir(parents=True)
    (utils / "envs.py").write_text("import deep_ep._C as _C\nfrom .event import EventOverlap\nfound = _C.EventHandle\n")
    for name in ("event", "testing"):
        (utils / f"{name}.py").write_text("raise ImportError('must not hide what the folder and our tests have')\n")
    code = "import deep_ep, deep_ep.utils.envs as envs, deep_ep.utils.testing as testing\n"
    code += "print(envs.found is deep_ep.EventHandle and bool(testing.bench_kineto), deep_ep.__file__)"
    source = os.pathsep.join(
        [str(ROOT / "tests" / "integrations" / "upstream"), str(tmp_path)]
    )  # as `make test-upstream`
    done = run_code(code, ROOT, PYTHONPATH=shims(), DEEPEP_SOURCE=source)
    assert done.returncode == 0, done.stderr
    found, where = done.stdout.split()
    assert found == "True" and Path(where).parents[1] == Path(shims())


def test_nobody_gets_the_adapter_unasked() -> None:
    code = "import importlib.util, cute_ep; print(importlib.util.find_spec('deep_ep'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
