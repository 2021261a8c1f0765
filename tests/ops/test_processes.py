"""The ops with one process per rank, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.test_processes import ROOT, ended

from .worker import CHECKS


def run_on_two(check: str, folder: Path, **environment: str) -> None:
    """A check of `worker` in two processes, which must end well on both."""
    own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **environment}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ops.worker", str(folder / "store"), str(rank), "2", check],
            cwd=ROOT,
            env=os.environ | own | {"TORCHINDUCTOR_CACHE_DIR": str(folder / str(rank))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    with ended(ranks):
        said = [one.communicate(timeout=300) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], said
    assert [out for out, _ in said] == ["rank 0 ok\n", "rank 1 ok\n"], said


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(tmp_path: Path, check: str) -> None:
    """Gradients are those of a dense layer, training reaches the losses of a model without dispatch; compiled code, by
    inductor too, gives the same bits."""
    run_on_two(check, tmp_path, CUDA_VISIBLE_DEVICES="")
