"""`cute-ep tune --beside` on GPUs: a matmul runs beside rounds of ranks that are threads of one process."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.errors import EPError
from cute_ep.bench import measure
from cute_ep.cli import tune_beside
from cute_ep.cli.main import main

SHAPE = ["--hidden", "512", "--experts", "8", "--top-k", "2", "--tokens", "64"]
MATMUL = "64x512x2048"
"""Six of it are a layer, with the preset's experts of 2048."""


def tune() -> int:
    """The exit code, with a rank on each GPU."""
    devices = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return main(["tune", "--beside", MATMUL, *SHAPE, "--devices", devices])


def test_a_budget_is_found_on_all_gpus(capsys: pytest.CaptureFixture) -> None:
    assert tune() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("sms=") and "at once a layer takes " in lines[-1]
    rows = [line.split()[1] for line in lines if line.startswith("│")]
    assert rows == ["all", *map(str, tune_beside.BUDGETS)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the other rank gives up")
def test_a_rank_that_fails_is_named_and_leaves_gpus_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """While the other one captures a graph, or waits in a round: its own error comes later."""
    run_round = measure.run_round

    def fail(communicator, batch, operation) -> None:
        if communicator.rank == 1:
            raise EPError("rank 1 has no memory")
        run_round(communicator, batch, operation)

    monkeypatch.setattr(tune_beside, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(measure, "run_round", fail)
    assert tune() == 2
    assert "rank 1 has no memory" in capsys.readouterr().err
    monkeypatch.setattr(measure, "run_round", run_round)
    assert tune() == 0
