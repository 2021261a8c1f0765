"""Ranks that share a process and a GPU: what one thread waits in holds up no launch of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPTimeout
from cute_ep.api.host import host_list
from cute_ep.testing.workloads import make_inputs

from .conftest import connected


@pytest.mark.parametrize(("read", "holds_up"), [(host_list, False), (torch.Tensor.tolist, True)], ids=["ours", "torch"])
def test_a_thread_that_waits_for_numbers_holds_up_no_other(read: Callable[[torch.Tensor], Any], holds_up: bool) -> None:
    """It waits behind the dispatch of rank 0, which waits for rank 1, which another thread launches then. Torch's copy
    to pageable memory keeps that launch from starting until rank 0 gives up."""
    cfg = EPConfig(256, 8, 2, 16, 2, "bf16", timeout_s=3)
    given = [
        (one.x.to("cuda:0"), one.topk_ids.to("cuda:0"), one.router_weights.to("cuda:0"))
        for one in make_inputs(cfg, [16, 16], "uniform", 3)
    ]
    with connected(cfg, ["cuda:0"] * 2) as communicators:
        buffers, found = [one.allocate() for one in communicators], []

        def wait() -> None:
            with torch.cuda.stream(communicators[0].stream):
                found.append(read(buffers[0].row_counts))

        def dispatch(rank: int) -> None:
            communicators[rank].dispatch(*given[rank], out=buffers[rank])

        dispatch(0)
        dispatch(1)
        wait()  # all modules are loaded now
        torch.cuda.synchronize()
        dispatch(0)
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        dispatch(1)
        waiting.join()
        gave_up = False
        for communicator in communicators:
            try:
                communicator.synchronize()
            except EPTimeout:
                gave_up = True
        assert gave_up == holds_up
        assert holds_up or (found[0] == found[1] and sum(found[1]))
