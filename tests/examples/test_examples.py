"""The programs in examples/ run over gloo by the command that each of them states, and say on each rank how it went."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.processes import ROOT, run_torchrun

SAID = {
    "torchrun_inference": r"rank \d: 4[08] tokens over 2 ranks as in one process, in mxfp8 off by [1-9]\.\d%",
    "training_step": r"rank \d: loss \d\.\d+ -> 0\.\d+ in 40 steps",
    "cuda_graph_decode": r"rank \d: 16 steps without a graph, on the CPU, \d+ us each",
    "gather_matmul": r"rank \d: 7[01] rows came for 1\d\d rows of experts, off by 0\.\d\d% from a dense layer",
    "two_micro_batches": r"rank \d: two micro-batches in flight, the same bits as one after the other",
}


def test_all_of_them_are_here_and_short() -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    assert [file.stem for file in files] == sorted(SAID)
    assert all(len(file.read_text().splitlines()) < 100 for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_it_runs_without_a_gpu(name: str) -> None:
    (command,) = re.findall(r"^    torchrun (.*)$", (ROOT / "examples" / f"{name}.py").read_text(), re.MULTILINE)
    assert command.endswith(f" examples/{name}.py")
    out = run_torchrun(shlex.split(command), ROOT)
    assert len(re.findall(SAID[name], out)) == 2, out
