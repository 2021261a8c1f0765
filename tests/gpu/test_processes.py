"""One process a rank, memory shared by file descriptors where nothing else is said. Two processes at least: with one
GPU they share it in time slices (`tests.sharing`)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cute_ep.api.errors import EPConfigError
from cute_ep.runtime.rails.shmem_library import ShmemLibrary
from cute_ep.runtime.symmetric import Kind, refusal
from tests.integrations import vllm_engine
from tests.integrations.vllm_worker import missing
from tests.processes import ROOT, run_ranks
from tests.sharing import FOLDER, needed

RANKS = max(2, torch.cuda.device_count())
SHIMS = ROOT / "cute_ep" / "integrations" / "deep_ep" / "shims"


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
    said = run_torchrun("--standalone", "--nproc-per-node", str(RANKS), "-m", "tests.gpu.worker")
    assert [f"rank {rank} ok" in said for rank in range(RANKS)] == [True] * RANKS


@pytest.mark.parametrize("program", ["rounds", "connects", "killed"])
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_one_process_a_rank_by_each_kind_of_symmetric_memory(kind: Kind, program: str, tmp_path: Path) -> None:
    """The same bytes; a hundred connects leave no descriptor; who survives a killed rank names it."""
    if why := refusal(kind, torch.device("cuda", 0)):
        pytest.skip(f"{kind}: {why}")
    killed = [RANKS - 1] if program == "killed" else []
    where = ("tests.gpu.sharing_worker", RANKS, tmp_path / "store", program, kind.name)
    run_ranks(*where, environment=[{}] * RANKS, killed=killed)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="kernels of two processes on one GPU do not run side by side")
def test_nccl_kernels_of_another_stream_end_beside_a_call_that_waits() -> None:
    """With the SMs that adapters take by default, in clusters; with all of them, or without clusters, both wait. By two
    ranks: of four, NCCL's kernels started beside 124 SMs without clusters, too (4 x H200, NCCL 2.28.9, 2026-11-26)."""
    said = run_torchrun("--standalone", "--nproc-per-node", "2", "-m", "tests.gpu.nccl_worker")
    assert said.count(" ok") == 2


def has_nvshmem() -> bool:
    try:
        ShmemLibrary.load()
    except EPConfigError:
        return False
    return True


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank a GPU")
@pytest.mark.parametrize("network", ["nccl", "tcp", "nvshmem"])
def test_one_process_a_rank_of_several_nodes(network: str) -> None:
    """Nodes of one rank, and of two where there are four GPUs."""
    if network == "nvshmem" and not has_nvshmem():
        pytest.skip("needs NVSHMEM: pip install nvidia-nvshmem-cu13")
    for ranks in (1, 2)[: RANKS // 2]:
        words = ["-m", "tests.gpu.nodes_worker", str(ranks), network]
        said = run_torchrun("--standalone", "--nproc-per-node", str(RANKS), *words)
        assert said.count(" ok") == RANKS, said


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

    for kind in ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe"):
        build(kind).save_pretrained(tmp_path / "models" / kind)
    run_worker("worker", tmp_path, str(tmp_path / "models"))


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-core: pip install megatron-core==0.16.1")
def test_processes_under_megatron(tmp_path: Path) -> None:
    run_worker("megatron_worker", tmp_path, path=SHIMS)


@pytest.mark.parametrize("kind", ["stubs", "vllm", "triton"])
def test_processes_under_vllm(tmp_path: Path, kind: str) -> None:
    """On stubs; in vLLM's kernel, with experts of ours and with its own in Triton."""
    if kind != "stubs" and find_spec("vllm") is None:
        pytest.skip("needs vLLM: pip install vllm==0.33.0")
    run_worker("vllm_worker", tmp_path, kind)


@pytest.mark.skipif("vllm._C_stable_libtorch" in missing(), reason="needs vLLM's operations: pip install vllm==0.33.0")
@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize("backend", ["cute_ep", "cute_ep_batched"])
def test_a_model_in_the_engine_of_vllm(tmp_path: Path, backend: str, mode: str) -> None:
    """Two data parallel ranks say of tokens what transformers' model says."""
    model = tmp_path / "model"
    vllm_engine.save_model(model)
    run_worker("vllm_engine", tmp_path, str(model), backend, mode)
    vllm_engine.check(model, tmp_path, 2)


@pytest.mark.parametrize("worker", ["titan_worker", "titan_training"])
def test_processes_under_torchtitan(tmp_path: Path, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dispatcher, on a stub where it is not installed, and a model's training."""
    real = find_spec("torchtitan") is not None
    if worker == "titan_training" and not real:
        pytest.skip("needs torchtitan: pip install torchtitan==0.3.0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # training compares bits
    run_worker(worker, tmp_path, path=None if real else ROOT / "tests" / "integrations" / "stubs")
