"""Adapters on GPUs, against the same calls on the CPU, which `tests/integrations` checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEVICE = torch.device("cuda:0")


def test_ranks_of_one_gpu_with_a_buffer_of_deep_ep() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/deep_ep_ranks.py"]
    options = {"cwd": Path(__file__).parents[2], "env": os.environ | {"CUDA_MODULE_LOADING": "EAGER"}}
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


# ---- transformers


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_a_model_of_transformers(kind: str) -> None:
    """Logits and gradients, and tokens that it generates, are those of its experts with the same roundings."""
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {transformers.__version__}: must be 5.23 or newer")
    from cute_ep.integrations.transformers import attach
    from tests.integrations.models import build, text, trained
    from tests.integrations.test_models import check

    model, ids = build(kind).to(DEVICE), text().to(DEVICE)
    model.set_experts_implementation("rounded")
    want = trained(model, ids)
    said = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.set_experts_implementation("eager")
    for ranks in (1, 2, 4):
        with attach(model, devices=[str(DEVICE)] * ranks, max_tokens=ids.numel()):
            check(trained(model, ids), want, 1e-4)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), said)
