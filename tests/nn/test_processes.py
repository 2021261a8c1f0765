"""The layer with one process per rank, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.test_processes import ROOT, ended

from .worker import CHECKS


def run_in_processes(world: int, check: str, folder: Path, **environment: str) -> None:
    """A check of `worker` in processes, which must end well on all of them."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.nn.worker", str(folder / "store"), str(rank), str(world), check],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(world)
    ]
    with ended(ranks):
        said = [one.communicate(timeout=300) for one in ranks]
    assert [one.returncode for one in ranks] == [0] * world, said
    assert [out for out, _ in said] == [f"rank {rank} ok\n" for rank in range(world)], said


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_three_processes(tmp_path: Path, check: str) -> None:
    """One of them has no tokens."""
    run_in_processes(3, check, tmp_path, CUDA_VISIBLE_DEVICES="")
