"""The reference backend in real processes, each a rank, over gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select

import pytest

ROOT = Path(__file__).parents[2]


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


def test_what_a_test_has_started_is_ended() -> None:
    """Also what has been started by what a test has started."""
    command = ["sh", "-c", "sleep 600 & sleep 600"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with pytest.raises(subprocess.TimeoutExpired), ended([leader]):
        leader.communicate(timeout=0.1)
    assert select([leader.stdout], [], [], 30)[0]  # the last that holds it has ended
    assert leader.stdout.read() == b""
    leader.stdout.close()


@pytest.mark.slow
def test_real_processes_make_rounds_and_name_the_one_that_is_killed(tmp_path: Path) -> None:
    """Over gloo; the last of them is killed in the end."""
    world = 3
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.reference.process_worker", str(tmp_path / "store"), str(rank), str(world)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(world)
    ]
    with ended(ranks):
        said = [one.communicate(timeout=120) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0, -9], said
    assert [out for out, _ in said] == ["rank 0 ok\n", "rank 1 ok\n", ""], said


@pytest.mark.slow
def test_the_script_of_the_guide_runs_without_a_gpu(tmp_path: Path) -> None:
    """docs/use.md's block, as printed, without a GPU."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.DOTALL)
    (script,) = (code for code in blocks if "LOCAL_RANK" in code)
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | hidden,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with ended([torchrun]):
        _, said = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 0, said[-4000:]
