"""Calls that raise while a CUDA graph is captured: the capture goes on, and torch's random numbers work behind it (of a
capture that ended as invalid torch 2.11 goes on counting them)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from cute_ep.api.counts import HostCounts
from cute_ep.api.errors import EPError, EPTimeout
from cute_ep.api.host import host_list
from cute_ep.api.interface import EPCommunicator
from cute_ep.runtime import streams
from cute_ep.runtime.connection import connect_local

from .node_rounds import Rounds, config
from .test_nodes import connected

Call = Callable[[EPCommunicator, dict, torch.Tensor, object], object]
CALLS: dict[str, Call] = {
    "dispatch": lambda ep, given, rows, batch: ep.dispatch(**given),
    "combine": lambda ep, given, rows, batch: ep.combine(rows, batch),
    "dispatch_async": lambda ep, given, rows, batch: ep.dispatch_async(**given),
    "combine_async": lambda ep, given, rows, batch: ep.combine_async(rows, batch),
}
MODES = ("global", "thread_local", "relaxed")
CASES = {"one node": (1, 2), "two nodes": (2, 1)}
"""Nodes, and ranks of each."""


@contextmanager
def captured(mode: str) -> Iterator[None]:
    """A capture with an operation on either side of the body, whose replays then do both."""
    graph, sums = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        sums.add_(1)
        yield
        sums.add_(1)
    graph.replay()
    assert sums.item() == 2
    torch.rand(1, device="cuda")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_a_call_behind_a_timeout_raises_it_with_the_flags(case: str, call: str, mode: str) -> None:
    with connected(config(*CASES[case], timeout_s=1)) as made:
        rounds = Rounds(made, 1, [None])
        torch.cuda.synchronize()
        ep = made[0]
        batch = ep.dispatch(**rounds.given[0][0])
        with pytest.raises(EPTimeout):
            ep.synchronize()
        with captured(mode), pytest.raises(EPTimeout) as caught:
            CALLS[call](ep, rounds.given[0][0], rounds.rows[0][0], batch)
        assert caught.value.missing == (1,) and caught.value.flags is not None


WAITING: dict[str, Callable[[EPCommunicator, HostCounts], object]] = {
    "synchronize": lambda ep, counts: ep.synchronize(),
    "close": lambda ep, counts: ep.close(),
    "HostCounts.wait": lambda ep, counts: counts.wait(),
    "connect_local": lambda ep, counts: connect_local(replace(ep.cfg, timeout_s=3), [ep.device] * ep.cfg.world_size),
    "ones": lambda ep, counts: ep.ones,
    "numbers that the host reads": lambda ep, counts: host_list(torch.zeros(1, device=ep.device)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", WAITING)
@pytest.mark.parametrize("case", CASES)
def test_calls_that_wait_are_refused_and_work_behind_the_capture(case: str, call: str, mode: str) -> None:
    with connected(config(*CASES[case])) as made:
        rounds = Rounds(made, 1, [None])
        torch.cuda.synchronize()
        batches = [ep.dispatch(**given) for ep, given in zip(made, rounds.given[0], strict=True)]
        own = [ep.stream if ep.shares_device else None for ep in made]
        counts = [batch.counts_to_host(stream) for batch, stream in zip(batches, own, strict=True)]
        for ep, told in zip(made, counts, strict=True):
            with (
                captured(mode),
                pytest.raises(EPError, match=f"{call}: waits for the GPU, which no CUDA graph captures"),
            ):
                WAITING[call](ep, told)
            assert not ep.closed
        for ep, told, want in zip(made, counts, rounds.want[0], strict=True):
            assert told.wait().num_rows == int(want.num_rows) and ep.ones.min() == 1
        for number, ep in enumerate(made):
            ep.combine(rounds.rows[0][number], batches[number])
        for ep in made:
            ep.synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_flags_can_be_read(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a stream must be made for that."""
    with connected(config(2, 1)) as made, captured(mode):
        monkeypatch.setattr(streams, "_unused", {})
        assert not made[0].failed and made[0].flags().rank == 0
