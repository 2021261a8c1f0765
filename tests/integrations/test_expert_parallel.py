"""transformers' expert parallel plan with the implementation "cute_ep", a process per rank over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", "5.23", reason="needs transformers 5.23 or newer: pip install '.[transformers]'")

from tests.integrations.models import build
from tests.processes import WITHOUT_GPU, run_ranks


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Each with a batch of its own (FSDP), and both with the same one (a TP group)."""
    models = tmp_path / "models"
    for kind in ("mixtral", "gpt_oss"):
        build(kind).save_pretrained(models / kind)
    own = [WITHOUT_GPU] * 2
    run_ranks("tests.integrations.worker", 2, tmp_path / "store", str(models), environment=own)
