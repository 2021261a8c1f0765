"""Layers in processes of their own, over gloo: on stubs, and in vLLM where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import WITHOUT_GPU, run_ranks

IN_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: pip install vllm==0.33.0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stubs", pytest.param("vllm", marks=IN_VLLM)])
def test_a_layer_runs_in_real_processes(tmp_path: Path, kind: str) -> None:
    environment = [WITHOUT_GPU] * 2
    run_ranks("tests.integrations.vllm_worker", 2, tmp_path / "store", kind, environment=environment, timeout=200)
