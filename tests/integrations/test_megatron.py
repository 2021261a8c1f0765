"""Megatron-core's dispatchers and MoE layer over cute_ep, against its own all-to-all, in processes over gloo."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import ROOT, WITHOUT_GPU, run_ranks

SHIMS = ROOT / "cute_ep" / "integrations" / "deep_ep" / "shims"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-core: pip install megatron-core==0.16.1")
def test_megatron_gets_the_bits_of_its_own_dispatcher(tmp_path: Path) -> None:
    """By DeepEP's manager over the folder `shims`, and by cute_ep's."""
    path = {"PYTHONPATH": os.pathsep.join([str(SHIMS), str(ROOT)])}
    own = [WITHOUT_GPU | path] * 2
    run_ranks("tests.integrations.megatron_worker", 2, tmp_path / "store", environment=own, folder=tmp_path)
