"""Servers of frameworks with cute_ep under load, on two GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import LIBRARY
from tests.integrations.server_models import MODELS
from tests.integrations.server_plan import Plan
from tests.integrations.vllm_worker import missing


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a server has a GPU for each data parallel rank")
@pytest.mark.skipif(
    "vllm._C_stable_libtorch" in missing() or find_spec("uvicorn") is None,
    reason="needs vLLM: pip install vllm==0.33.0",
)
@pytest.mark.parametrize("kind", MODELS)
def test_servers_of_vllm_say_the_same_with_each_exchange(tmp_path: Path, kind: str) -> None:
    """Eagerly and with CUDA graphs, up to rounding; every request is answered or aborted, also after a pause."""
    from tests.integrations.vllm_server import run

    made = run(Plan(kind, tmp_path, LIBRARY, idle=5))
    assert not made["wrong"], made
