"""The layer with one process per rank, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_ranks

from .worker import CHECKS


def run_in_processes(world: int, check: str, folder: Path, **environment: str) -> None:
    """A check of `worker` in processes, which must end well on all of them."""
    own = [{"OMP_NUM_THREADS": "1", **environment}] * world
    run_ranks("tests.nn.worker", world, folder / "store", check, environment=own)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_three_processes(tmp_path: Path, check: str) -> None:
    """One of them has no tokens."""
    run_in_processes(3, check, tmp_path, CUDA_VISIBLE_DEVICES="")
