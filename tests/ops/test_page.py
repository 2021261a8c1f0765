"""docs/ops.md: its script runs as printed, and what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_ep.ops
from tests.reference.test_processes import ROOT, ended

PAGE = (ROOT / "docs" / "ops.md").read_text()


@pytest.mark.slow
def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with ended([torchrun]):
        out, said = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 0, said[-4000:]
    wanted = r"rank \d: gradients of \[\(64, 512\), \(512, 8\), \(4, 512, 512\)\]"
    assert len(re.findall(wanted, out)) == 2, out


def test_it_names_every_function() -> None:
    named = set(re.findall(r"\b(?:cute_ep\.ops\.)?(\w+)\b", PAGE))
    assert set(cute_ep.ops.__all__) <= named
