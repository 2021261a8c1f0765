"""The reference backend in real processes, each a rank, over gloo."""

from __future__ import annotations

import fcntl
import subprocess
import time
from pathlib import Path
from select import select

import pytest

from tests.processes import Program, ended, run_ranks


def test_what_a_test_has_started_is_ended() -> None:
    """Also what has been started by what a test has started."""
    command = ["sh", "-c", "sleep 600 & sleep 600"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with pytest.raises(subprocess.TimeoutExpired), ended([leader]):
        leader.communicate(timeout=0.1)
    assert select([leader.stdout], [], [], 30)[0]  # the last that holds it has ended
    assert leader.stdout.read() == b""
    leader.stdout.close()


def test_what_a_forked_program_has_started_is_ended(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, time; fcntl.flock(held := open('held', 'w'), fcntl.LOCK_EX)\nos.fork(); open('forked', 'w')"
    )
    program = Program(["-c", f"{code}\ntime.sleep(600)"], tmp_path, {})
    with ended([program]):
        while not (tmp_path / "forked").exists():
            assert program.returncode is None
            time.sleep(0.01)
    with (tmp_path / "held").open() as held:
        for _ in range(3000):
            try:
                return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
    pytest.fail("a process still holds the file")


@pytest.mark.slow
def test_real_processes_make_rounds_and_name_the_one_that_is_killed(tmp_path: Path) -> None:
    """Over gloo; the last of them is killed in the end."""
    own = [{"OMP_NUM_THREADS": "1"}] * 3
    run_ranks("tests.reference.process_worker", 3, tmp_path / "store", environment=own, timeout=120, killed=[2])
