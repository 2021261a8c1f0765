"""The exchange of counts, and what the host is told of it."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.errors import EPTimeout
from cute_ep.runtime.counts import Counting, counting_config

from .conftest import connected
from .queues import run_with_queues


def test_every_rank_gets_the_counts_of_all() -> None:
    run_with_queues("many_counts", 30, 10)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="33 ranks need 33 queues, and a GPU has 32")
def test_counts_of_more_ranks_than_a_token_has_entries_on_two_gpus() -> None:
    run_with_queues("many_counts", 33, 11)


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others() -> None:
    counts = torch.arange(16, dtype=torch.int32, device="cuda:0")
    cfg = counting_config(16, 3, 0.5)
    with connected(cfg, ["cuda:0"] * 3) as communicators:
        made = [Counting(communicator) for communicator in communicators]
        begun = [counting.exchange(counts, 6) for counting in made[:2]]
        for one in begun:
            with pytest.raises(EPTimeout, match=r"ROUTE_TABLE of rank 2"):
                one.wait()
