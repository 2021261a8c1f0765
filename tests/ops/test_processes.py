"""The ops with one process per rank, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_ranks

from .worker import CHECKS


def run_on_two(check: str, folder: Path, **environment: str) -> None:
    """A check of `worker` in two processes, which must end well on both."""
    own = [environment | {"TORCHINDUCTOR_CACHE_DIR": str(folder / str(rank))} for rank in range(2)]
    run_ranks("tests.ops.worker", 2, folder / "store", check, environment=own)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(tmp_path: Path, check: str) -> None:
    """Gradients are those of a dense layer, training reaches the losses of a model without dispatch; compiled code, by
    inductor too, gives the same bits."""
    run_on_two(check, tmp_path, CUDA_VISIBLE_DEVICES="")
