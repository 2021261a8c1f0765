"""transformers' expert parallel plan with the implementation "cute_ep", a process per rank over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from tests.integrations.models import build
from tests.reference.test_processes import ROOT, ended


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Each with a batch of its own (FSDP), and both with the same one (a TP group)."""
    models = tmp_path / "models"
    for kind in ("mixtral", "gpt_oss"):
        build(kind).save_pretrained(models / kind)
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.worker", str(tmp_path / "store"), str(rank), "2", str(models)],
            cwd=ROOT,
            env=os.environ | own,
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
