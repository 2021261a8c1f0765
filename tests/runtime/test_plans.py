"""A plan is a call that was checked and is not launched yet; a CUDA graph is many of them."""

from __future__ import annotations

import gc
import re
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_ep.api.buffers import tensors_of
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.runtime import communicator as communicator_module
from cute_ep.runtime import launching
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import Launches, expert_rows, inputs

GUIDE = Path(__file__).parents[2] / "docs" / "use.md"


def test_a_plan_checks_now_and_launches_later(rank: Communicator, launches: Launches) -> None:
    x, ids, weights = inputs()
    with pytest.raises(EPInputError, match="topk_ids"):
        rank.plan_dispatch(x, ids[:2])
    plan = rank.plan_dispatch(x, ids, weights)
    assert launches.kernels == []
    batch = plan.launch()
    assert launches.kernels == ["dispatch"]
    with pytest.raises(EPInputError, match="mode = 'sum'"):
        rank.plan_combine(expert_rows(batch), batch, mode="sum")
    combine = rank.plan_combine(expert_rows(batch), batch, mode="partial")
    assert len(launches) == 1
    assert combine.launch().shape == (5, 128)
    assert launches.kernels == ["dispatch", "combine_partial"]


def test_no_plan_is_made_while_a_split_round_is_outstanding(rank: Communicator) -> None:
    x, ids, _ = inputs()
    rank.dispatch_async(x, ids)
    with pytest.raises(EPInputError, match="1 split round"):
        rank.plan_dispatch(x, ids)


def test_no_plan_is_launched_while_a_split_round_is_outstanding(rank: Communicator, launches: Launches) -> None:
    """A fused launch would receive the round that was sent before."""
    batch = rank.dispatch(*inputs())
    plans = rank.plan_dispatch(*inputs()), rank.plan_combine(expert_rows(batch), batch)
    sent = rank.dispatch_async(*inputs()), rank.combine_async(expert_rows(batch), batch)
    for plan in plans:
        with launches.forbidden(), pytest.raises(EPInputError, match="outstanding"):
            plan.launch()
    rank.dispatch_wait(sent[0])
    rank.combine_wait(sent[1])
    assert [type(plan.launch()) for plan in plans] == [Dispatched, torch.Tensor]


def test_a_plan_belongs_to_the_stream_on_which_it_was_made(
    rank: Communicator, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There its scale was filled and its output allocated."""
    stream = SimpleNamespace(raw=1)
    for module in (communicator_module, launching):
        monkeypatch.setattr(module, "current_stream", lambda ordinal: stream.raw)
    batch = rank.dispatch(*inputs())
    plans = [rank.plan_dispatch(*inputs(), input_scale=2.0), rank.plan_combine(expert_rows(batch), batch)]
    stream.raw = 2
    for plan in plans:
        rule = "the current stream is 0x2: must be 0x1, on which the call was planned"
        with launches.forbidden(), pytest.raises(EPInputError, match=rule):
            plan.launch()
    stream.raw = 1
    for plan in plans:
        plan.launch()
    assert [launch.stream for launch in launches] == [1, 1, 1]


def test_a_plan_keeps_alive_what_only_its_addresses_name(rank: Communicator, launches: Launches) -> None:
    batch = rank.dispatch(*inputs())
    needed = [weakref.ref(getattr(batch, name)) for name in ("topk_ids", "row_map", "headers", "weights")]
    plan = rank.plan_combine(expert_rows(batch), batch, mode="partial")
    row_map = batch.row_map.data_ptr()
    del batch
    gc.collect()
    assert all(tensor() is not None for tensor in needed)
    plan.launch()
    assert launches.last("combine").arguments["batch.row_map"] == row_map


def test_a_plan_is_refused_when_its_buffers_hold_a_later_batch(rank: Communicator, launches: Launches) -> None:
    buffers = rank.allocate()
    first = rank.dispatch(*inputs(5), out=buffers)
    plan = rank.plan_combine(expert_rows(first), first)
    rank.dispatch(*inputs(3), out=buffers)
    with launches.forbidden(), pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        plan.launch()


def test_the_guides_capture_owns_all_memory_that_its_graph_names(rank: Communicator, launches: Launches) -> None:
    """The block of docs/use.md as printed. A graph holds addresses only: what `capture` returns must own all that its
    launches name, and nobody else may."""
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "def capture" in one]
    cuda = SimpleNamespace(synchronize=lambda: None, CUDAGraph=object, graph=lambda graph: nullcontext())
    scope: dict = {"torch": SimpleNamespace(empty_like=torch.empty_like, cuda=cuda)}
    exec(block, scope)
    x, ids, weights = inputs()
    made = []
    allocate = rank.allocate
    rank.allocate = lambda: made.append(allocate()) or made[-1]
    owners = {tensor.data_ptr(): weakref.ref(tensor) for tensor in (x, ids, weights)}
    kept = scope["capture"](rank, x, ids, weights, expert_rows)
    for tensor in (*tensors_of(made.pop()).values(), kept[1]):
        if tensor is not None:
            owners[tensor.data_ptr()] = weakref.ref(tensor)
    del x, ids, weights, tensor, rank.allocate
    gc.collect()
    given = {"input.x", "ids.data", "input.router_weights"}
    tensors = ("tokens", "row_offsets", "row_map", "headers", "num_rows", "src_info", "weights")
    named = {*launches.last("dispatch").values(*given, "scales.data", *(f"out.{name}" for name in tensors))}
    read = ("ids.data", "batch.weights", "batch.row_map", "batch.headers")
    named |= {*launches.last("combine").values("sums.out", *read)}
    assert named <= owners.keys() and all(owners[address]() is not None for address in named)
    del kept
    gc.collect()
    assert not any(owners[address]() is not None for address in named), "somebody else owns them"
