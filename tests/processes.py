"""Tests in processes of their own: a process per rank, or torchrun. None is left when a test ends.

They are forked from a server that has imported torch: a fresh interpreter takes three seconds for that."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.sharing import needed, share_gpu

ROOT = Path(__file__).parents[1]
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._dynamo", "cute_ep.nn"])  # these start no thread of torch's, ask no GPU


class Program:
    """What `python -m MODULE ARGUMENTS` or `python -c CODE` runs, in a session of its own, in a folder, with more
    environment.

    It has the interface of `subprocess.Popen`, but the environment comes too late for what torch, torch._dynamo and
    cute_ep.nn read when they are imported.
    """

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._said = [tempfile.NamedTemporaryFile("r") for _ in range(2)]
        arguments = (words, folder, os.environ | environment, [file.name for file in self._said])
        self._process = SERVER.Process(target=_run_program, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid, self.terminate = self._process.pid, self._process.terminate

    @property
    def returncode(self) -> int | None:
        """Exit status, minus a signal's number; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        """Until it ends, at most `timeout` seconds."""
        self._process.join(timeout)
        if timeout is not None and self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """(stdout, stderr) when it has ended."""
        self.wait(timeout)
        out, err = (file.read() for file in self._said)
        return out, err


def _run_program(words: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it: tests may be one
    for number, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    torch.set_num_threads(1)  # libgomp has read OMP_NUM_THREADS
    module, *sys.argv[1:] = words
    if module == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def ended(processes: Sequence[subprocess.Popen | Program]) -> Iterator[None]:
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
        Program([module, str(store), str(rank), str(world), *arguments], folder, environment[rank])
        for rank in range(world)
    ]
    with ended(ranks):
        said = [one.communicate(timeout=timeout) for one in ranks]
    ends = [-signal.SIGKILL if rank in killed else 0 for rank in range(world)]
    assert [one.returncode for one in ranks] == ends, said
    ours = [re.sub(r"^\[Gloo\] .*\n", "", out, flags=re.MULTILINE) for out, _ in said]  # torch 2.10 prints such lines
    assert ours == ["" if rank in killed else f"rank {rank} ok\n" for rank in range(world)], said


def run_code(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What came of `python -c CODE` in a folder, without a GPU and with more environment."""
    one = Program(["-c", code], folder, WITHOUT_GPU | environment)
    with ended([one]):
        out, said = one.communicate(timeout=120)
    return subprocess.CompletedProcess(code, one.returncode or 0, out, said)


FORKED = ("torch.distributed.run", "--run-path", "--start-method", "fork")
"""`torchrun` whose workers are forked."""


def run_torchrun(arguments: Sequence[str], folder: Path) -> str:
    """What `torchrun ARGUMENTS` prints in a folder, without a GPU; it must end with 0."""
    return run_agents([arguments], folder)[0]


def run_agents(agents: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """What each `torchrun ARGUMENTS` prints, all at once, in a folder, without a GPU; all must end with 0."""
    programs = [Program([*FORKED, *arguments], folder, WITHOUT_GPU) for arguments in agents]
    with ended(programs):
        said = [program.communicate(timeout=120) for program in programs]
    for program, (_, errors) in zip(programs, said, strict=True):
        assert program.returncode == 0, errors[-4000:]
    return [out for out, _ in said]


def script_of(page: str, folder: Path) -> str:
    """The name of a script in a folder: the only Python block of a page of docs/."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    (folder / "script.py").write_text(script)
    return "script.py"


def run_page(page: str, folder: Path) -> str:
    """What the only Python block of a page of docs/ prints as a script with two ranks."""
    return run_torchrun(["--nproc-per-node", "2", script_of(page, folder)], folder)


def join_group(store: Path, rank: int, world: int) -> torch.device | None:
    """In a rank's process: one CPU thread, and the default process group, NCCL on GPU `rank` where there are GPUs; with
    fewer of them than ranks all share the first.

    Returns:
        The GPU, the current one from now on; None without GPUs.
    """
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank) if torch.cuda.is_available() else None
    if needed(world):
        gpu = share_gpu()
    if gpu is not None:
        torch.cuda.set_device(gpu)
    rendezvous = {"init_method": f"file://{store}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo" if gpu is None else "nccl", rank=rank, world_size=world, device_id=gpu, **rendezvous)
    return gpu
