"""Calls that the compiled launcher makes on a GPU: the bytes of Python's, in graphs, on other streams and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.launcher import missing
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.launches import by_python
from cute_ep.testing.workloads import make_rank_inputs

from .conftest import connected

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"there is no compiled launcher: {missing()}")
TOKENS = (1, 16, 100)


class Counted:
    """`Calls`, and how many launches they have made."""

    def __init__(self, calls: Any) -> None:
        self.calls, self.count, self.add = calls, 0, calls.add

    def launch(self, *given: object) -> object:
        made = self.calls.launch(*given)
        self.count += made is not None
        return made


class Alone:
    """The only rank of a group, whose launches by the launcher are counted, and its inputs."""

    def __init__(self, ep: Communicator) -> None:
        assert ep._repeats is not None
        self.ep = ep
        ep._repeats.calls = {name: Counted(calls) for name, calls in ep._repeats.calls.items()}

    def inputs(self, tokens: int, number: int) -> tuple[torch.Tensor, ...]:
        made = make_rank_inputs(self.ep.cfg, 0, tokens, "masked", number)
        return tuple(one.to(self.ep.device) for one in (made.x, made.topk_ids, made.router_weights))

    @property
    def count(self) -> int:
        """How many launches it has made."""
        assert self.ep._repeats is not None
        return sum(one.count for one in self.ep._repeats.calls.values())


@pytest.fixture(params=["bf16", "fp8", "nvfp4"])
def alone(request: pytest.FixtureRequest) -> Iterator[Alone]:
    cfg = EPConfig(1024, 8, 2, 128, 1, request.param, 30)
    with connected(cfg, ["cuda:0"]) as (ep,):
        yield Alone(ep)


def pair(ep: Communicator, given: tuple[torch.Tensor, ...], out: Any, mode: Any) -> tuple[Dispatched, torch.Tensor]:
    batch = ep.dispatch(*given, out=out)
    rows = torch.ones(ep.cfg.max_rows, ep.cfg.hidden, dtype=torch.bfloat16, device=ep.device)
    return batch, ep.combine(rows * given[0][0], batch, mode=mode)


@pytest.mark.parametrize("output", ["given", "carved", "new"])
@pytest.mark.parametrize("mode", ["partial", "exact", "unweighted"])
def test_a_repeated_pair_has_the_bytes_of_python(alone: Alone, mode: str, output: str) -> None:
    """Whatever was launched in between, with tensors that no call was given before, into buffers that were given to the
    calls before, too, or were not."""
    ep, buffers = alone.ep, [alone.ep.allocate() if output == "given" else None for _ in range(2)]
    for number in range(12):
        if output == "carved":
            buffers = [DispatchBuffers.carve(ep.cfg, ep.device) for _ in range(2)]
        for tokens in TOKENS:
            given, before = alone.inputs(tokens, number), alone.count
            batch, got = pair(ep, given, buffers[0], mode)
            assert number < 2 or alone.count == before + 2, "launched by Python"
            with by_python(ep):
                want_batch, want = pair(ep, given, buffers[1], mode)
            ep.synchronize()
            rows = int(want_batch.num_rows)
            assert_bits(got, want, "sums")
            assert_bits(batch.tokens[:rows], want_batch.tokens[:rows], "rows")
            assert_bits(batch.row_offsets, want_batch.row_offsets, "offsets")


def test_graphs_streams_and_threads(alone: Alone) -> None:
    """A thread that has used no GPU has no context: Python makes its first launch."""
    ep, out = alone.ep, alone.ep.allocate()
    given = alone.inputs(16, 1)
    rows = torch.ones(ep.cfg.max_rows, ep.cfg.hidden, dtype=torch.bfloat16, device=ep.device)
    result, want = torch.empty_like(given[0]), torch.empty_like(given[0])

    def work(into: torch.Tensor) -> None:
        ep.combine(rows, ep.dispatch(*given, out=out), mode="partial", out=into)

    for _ in range(4):
        work(want)
    before, graph = alone.count, torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work(result)
    assert alone.count == before + 2
    graph.replay()
    ep.synchronize()
    assert_bits(result, want, "graph")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(result.zero_())
    stream.synchronize()
    assert_bits(result, want, "stream")
    thread = threading.Thread(target=lambda: [work(result) for _ in range(3)])
    result.zero_()
    torch.cuda.synchronize()
    thread.start()
    thread.join()
    ep.synchronize()
    assert_bits(result, want, "thread")
    assert alone.count >= before + 4 + 4


def test_tensors_on_the_cpu_are_refused_in_the_words_of_python(alone: Alone) -> None:
    ep, (x, ids, weights) = alone.ep, alone.inputs(16, 1)
    for _ in range(3):
        batch = ep.dispatch(x, ids, weights)
        result = ep.combine(torch.ones_like(x), batch, mode="partial")
    before = alone.count
    for wrong in ((x.cpu(), ids, weights), (x, ids.cpu(), weights), (x, ids, weights.cpu().pin_memory())):
        with pytest.raises(EPInputError, match=r"device = c.*: must be cuda:0") as raised:
            ep.dispatch(*wrong)
        with by_python(ep), pytest.raises(EPInputError) as again:
            ep.dispatch(*wrong)
        assert str(raised.value) == str(again.value)
    with pytest.raises(EPInputError, match=r"out\.device = cpu: must be cuda:0"):
        ep.combine(torch.ones_like(x), batch, mode="partial", out=result.cpu())
    assert alone.count == before
