"""The exchange of counts, and what the host is told of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from cute_ep.api.errors import EPTimeout
from cute_ep.runtime.counts import Counting, counting_config

from .conftest import connected
from .mutants import ROOT


def exchange(ranks: int, per_node: int) -> None:
    """In a process of its own: each rank's stream needs a queue, and CUDA reads their number when a process begins."""
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    command = [sys.executable, "-m", "tests.gpu.many_counts", str(ranks), str(per_node)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_every_rank_gets_the_counts_of_all() -> None:
    exchange(30, 10)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="33 ranks need 33 queues, and a GPU has 32")
def test_counts_of_more_ranks_than_a_token_has_entries_on_two_gpus() -> None:
    exchange(33, 11)


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others() -> None:
    counts = torch.arange(16, dtype=torch.int32, device="cuda:0")
    cfg = counting_config(16, 3, 0.5)
    with connected(cfg, ["cuda:0"] * 3) as communicators:
        made = [Counting(communicator) for communicator in communicators]
        begun = [counting.exchange(counts, 6) for counting in made[:2]]
        for one in begun:
            with pytest.raises(EPTimeout, match=r"ROUTE_TABLE of rank 2"):
                one.wait()
