"""The reference backend in real processes, each a rank, over gloo."""

from __future__ import annotations

import fcntl
import re
import subprocess
import time
from pathlib import Path
from select import select

import pytest

from perf.peers import free_port
from tests.processes import ROOT, Program, ended, run_agents, run_ranks, script_of


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
@pytest.mark.parametrize(("ranks", "per_node"), [(3, 3), (4, 2)], ids=["one node", "two nodes"])
def test_real_processes_make_rounds_and_name_the_one_that_is_killed(ranks: int, per_node: int, tmp_path: Path) -> None:
    """Over gloo; the last of them is killed in the end."""
    where = ("tests.reference.process_worker", ranks, tmp_path / "store", str(per_node))
    run_ranks(*where, environment=[{"OMP_NUM_THREADS": "1"}] * ranks, timeout=120, killed=[ranks - 1])


@pytest.mark.slow
def test_the_page_about_nodes_runs_with_an_agent_a_node(tmp_path: Path) -> None:
    """docs/nodes.md: its commands, on one machine."""
    script = script_of("nodes.md", tmp_path)
    page = (ROOT / "docs" / "nodes.md").read_text()
    commands = [line.split() for line in page.splitlines() if line.startswith("    torchrun ")]
    assert len(commands) == 2 and {command[-1] for command in commands} == {script}
    port = free_port()
    said = run_agents([[str(port) if word == "29500" else word for word in one[1:]] for one in commands], tmp_path)
    for node, out in enumerate(said):
        lines = re.findall(r"rank (\d) of node (\d): every token came home", out)
        assert sorted(lines) == [(str(2 * node + one), str(node)) for one in range(2)], out
