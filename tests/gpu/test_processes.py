"""One process a rank, memory exchanged by CUDA IPC. Two processes at least: with one GPU they share it in time slices
(`tests.sharing`)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, run_ranks
from tests.sharing import FOLDER, needed

RANKS = max(2, torch.cuda.device_count())
SHIMS = ROOT / "cute_ep" / "integrations" / "shims"


def path_with(*folders: Path | None) -> str:
    """PYTHONPATH with these before what it has."""
    return os.pathsep.join([*(str(one) for one in folders if one), os.environ.get("PYTHONPATH", "")])


def run_torchrun(*words: str, path: str = os.environ.get("PYTHONPATH", "")) -> str:
    """What `torchrun WORDS` prints; it must end with 0."""
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": path}}
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_one_process_a_rank() -> None:
    said = run_torchrun("--nproc-per-node", str(RANKS), "-m", "tests.gpu.worker")
    assert [f"rank {rank} ok" in said for rank in range(RANKS)] == [True] * RANKS


ONE_GPU_EACH = path_with(FOLDER if needed(2) else None, ROOT)
"""PYTHONPATH of programs that name a GPU a rank."""


@pytest.mark.parametrize("example", sorted(file.stem for file in (ROOT / "examples").glob("*.py")))
def test_an_example_in_two_processes(example: str) -> None:
    (command,) = re.findall(r"^    torchrun (.*)$", (ROOT / "examples" / f"{example}.py").read_text(), re.MULTILINE)
    said = run_torchrun(*shlex.split(command), path=ONE_GPU_EACH)
    assert len(re.findall(r"rank \d: ", said)) == 2, said


@pytest.mark.parametrize("page", ["deep_ep", "flashinfer"])
def test_the_script_of_a_page_in_two_processes(page: str, tmp_path: Path) -> None:
    if page == "flashinfer":
        pytest.importorskip("flashinfer")
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    said = run_torchrun("--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py"), path=ONE_GPU_EACH)
    assert len(re.findall(r"rank \d: ", said)) == 2, said


# ---- adapters, in their frameworks where these are installed


def run_worker(worker: str, folder: Path, *arguments: str, path: Path | None = None) -> None:
    """A program of `tests.integrations` in two processes."""
    own = [{"PYTHONPATH": path_with(path, ROOT)}] * 2
    run_ranks(f"tests.integrations.{worker}", 2, folder / "store", *arguments, environment=own, folder=folder)


def test_processes_that_know_deep_ep_only(tmp_path: Path) -> None:
    run_worker("deep_ep_worker", tmp_path, path=SHIMS)


def test_processes_under_flashinfer(tmp_path: Path) -> None:
    """FlashInfer's own layer, or stubs."""
    run_worker("flashinfer_worker", tmp_path)


def test_processes_under_sglang(tmp_path: Path) -> None:
    """SGLang's own classes, or stubs."""
    run_worker("sglang_worker", tmp_path)


def test_processes_with_models_of_transformers(tmp_path: Path) -> None:
    """Its expert parallel plan."""
    pytest.importorskip("transformers", "5.23")
    from tests.integrations.models import build

    for kind in ("mixtral", "gpt_oss"):
        build(kind).save_pretrained(tmp_path / "models" / kind)
    run_worker("worker", tmp_path, str(tmp_path / "models"))
