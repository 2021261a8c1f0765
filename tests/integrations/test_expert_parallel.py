"""transformers' expert parallel plan with the implementation "cute_ep", a process per rank over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.23", reason="needs transformers 5.23 or newer: pip install '.[transformers]'")

from cute_ep.api.errors import EPInputError
from cute_ep.integrations.transformers.expert_parallel import CuteEP
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


def test_tensors_of_different_tokens_are_refused_before_ranks_meet() -> None:
    nobody: Any = None  # no process group is looked at
    with pytest.raises(EPInputError, match=r"hidden_states\.shape = \(4, 64\): must be \[T, hidden\]"):
        CuteEP.__call__(nobody, torch.zeros(4, 64), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
