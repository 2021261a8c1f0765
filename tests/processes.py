"""Tests in processes of their own: a process per rank, or torchrun. None is left when a test ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@contextmanager
def ended(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
    """None of these, which lead sessions, and none that they have started, is left afterwards."""
    try:
        yield
    finally:
        for one in processes:
            one.terminate()  # torchrun's workers lead sessions of their own: it ends them then
            with suppress(subprocess.TimeoutExpired):
                one.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def start(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Python with these arguments in a session of its own, in a folder, with more environment."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_ranks(
    module: str,
    world: int,
    store: Path,
    *arguments: str,
    environment: Sequence[Mapping[str, str]],
    folder: Path = ROOT,
    timeout: int = 300,
    killed: Sequence[int] = (),
) -> None:
    """Run `python -m module STORE RANK WORLD ARGUMENTS` for each rank, which must print "rank RANK ok" and end with 0.

    Args:
        environment: more of it, by rank.
        folder: where they run.
        timeout: seconds for each.
        killed: ranks that must have been killed (SIGKILL), without a word.
    """
    ranks = [
        start(["-m", module, str(store), str(rank), str(world), *arguments], folder, environment[rank])
        for rank in range(world)
    ]
    with ended(ranks):
        said = [one.communicate(timeout=timeout) for one in ranks]
    ends = [-signal.SIGKILL if rank in killed else 0 for rank in range(world)]
    assert [one.returncode for one in ranks] == ends, said
    assert [out for out, _ in said] == ["" if rank in killed else f"rank {rank} ok\n" for rank in range(world)], said


def run_torchrun(arguments: Sequence[str], folder: Path) -> str:
    """What `torchrun ARGUMENTS` prints in a folder, without a GPU; it must end with 0."""
    torchrun = start(["-m", "torch.distributed.run", *arguments], folder, WITHOUT_GPU)
    with ended([torchrun]):
        out, said = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 0, said[-4000:]
    return out


def run_page(page: str, folder: Path, containing: str = "") -> str:
    """What the only Python block of a page of docs/, or the only one that contains some text, prints as a script with
    two ranks."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    (script,) = (block for block in blocks if containing in block)
    (folder / "script.py").write_text(script)
    return run_torchrun(["--nproc-per-node", "2", "script.py"], folder)


def join_group(store: Path, rank: int, world: int) -> torch.device | None:
    """In a rank's process: one CPU thread, and the default process group, NCCL on GPU `rank` where there are GPUs.

    Returns:
        The GPU, the current one from now on; None without GPUs.
    """
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank) if torch.cuda.is_available() else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    rendezvous = {"init_method": f"file://{store}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo" if gpu is None else "nccl", rank=rank, world_size=world, device_id=gpu, **rendezvous)
    return gpu
