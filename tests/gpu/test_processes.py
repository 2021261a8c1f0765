"""One process a rank, memory exchanged by CUDA IPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="processes on one GPU run in time slices, not side by side")
def test_one_process_a_rank() -> None:
    ranks = torch.cuda.device_count()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "tests.gpu.worker"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert [f"rank {rank} ok" in result.stdout for rank in range(ranks)] == [True] * ranks
