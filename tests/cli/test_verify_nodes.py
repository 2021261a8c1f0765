"""`cute-ep verify --nodes`: a process per rank, a torchrun per node."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_ep.cli.main import FAILURE, main
from perf.peers import free_port
from tests.processes import run_agents

SCRIPT = """
import os, sys
from cute_ep.cli import verify
from cute_ep.cli.main import main
from cute_ep.testing import verify as rounds

verify.QUICK_SHAPES, verify.QUICK_TOKENS, verify.OPTION_TOKENS = ((128, 12, 3),), (0, 5), 7
compare, seen = rounds.assert_bits, []

def wrong_once(*arguments):
    seen.append(arguments)
    if len(seen) == 20:
        raise AssertionError("one byte differs")
    compare(*arguments)

if {broken}:
    verify.TIMEOUT_S = 10.0  # which the others wait for rank 3's combine
    if os.environ["RANK"] == "3":
        rounds.assert_bits = wrong_once
code = main(["verify", "--nodes"])
if os.environ["RANK"] == "0":
    print("code", code)
"""


def run(broken: bool, folder: Path) -> list[str]:
    """What each of two nodes of two ranks prints."""
    (folder / "script.py").write_text(SCRIPT.format(broken=broken))
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return run_agents([[*words, "--node-rank", str(node), "script.py"] for node in range(2)], folder)


@pytest.mark.slow
def test_ranks_of_two_agents_are_two_nodes(tmp_path: Path) -> None:
    first, second = run(False, tmp_path)
    assert "4 ranks of the reference backend, 2 of each node" in first
    assert "cases are bit-exact" in first and "FAIL" not in first and "code 0" in first
    assert "cases" not in second, "only rank 0 prints"


@pytest.mark.slow
def test_rank_0_tells_what_differs_on_another_one_and_goes_on(tmp_path: Path) -> None:
    first, _ = run(True, tmp_path)
    assert first.count("FAIL") == 1 and "code 1" in first
    assert "rank 3: AssertionError: one byte differs" in first and "1 of " in first


def test_without_torchrun_it_says_how_to_run_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["verify", "--nodes"]) == FAILURE
    assert "--nodes: RANK" in capsys.readouterr().err
