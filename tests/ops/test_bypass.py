"""Calls go through torch's dispatcher where something there looks at them, and only there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.interface import EPCommunicator
from cute_ep.testing.workloads import make_inputs

from .ranks import ALONE, counted


@pytest.fixture
def ep() -> EPCommunicator:
    (ep,) = connect_local(ALONE, ["cpu"])
    return ep


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (one,) = make_inputs(ALONE, (5,), "masked", 1)
    return one.x, one.topk_ids, one.router_weights


def ops_of(program: Callable, *arguments: Any) -> list[str]:
    """The ops of cute_ep that torch's profiler sees."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        program(*arguments)
    return [event.name.partition("::")[2] for event in profile.events() if event.name.startswith("cute_ep::")]


def round_of(comm: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    batch = cute_ep.ops.dispatch(x, ids, weights, comm)
    return cute_ep.ops.combine(batch.tokens, batch)


def gated_round(comm: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    batch = cute_ep.ops.dispatch(x, ids, weights, comm)
    rows = cute_ep.ops.fused_silu(torch.cat([batch.tokens, batch.tokens], dim=1), batch.row_offsets)
    return cute_ep.ops.combine(rows, batch)


def test_the_library_is_called_directly(ep: EPCommunicator) -> None:
    """With gradients, too."""
    comm, (x, ids, weights) = cute_ep.ops.register(ep), inputs()
    assert ops_of(gated_round, comm, x, ids, weights) == []
    with torch.no_grad():
        assert ops_of(round_of, comm, x.requires_grad_(), ids, weights.requires_grad_()) == []
        assert not round_of(comm, x, ids, weights).requires_grad
    assert ops_of(round_of, comm, x, ids, weights) == []
    assert round_of(comm, x, ids, weights).requires_grad


def test_only_combine_needs_a_gradient_of_the_router_weights(ep: EPCommunicator) -> None:
    comm, (x, ids, weights) = cute_ep.ops.register(ep), inputs()
    batch = cute_ep.ops.dispatch(x, ids, weights.requires_grad_(), comm)
    assert not batch.tokens.requires_grad and cute_ep.ops.combine(batch.tokens, batch).requires_grad


class Seen(TorchDispatchMode):
    """The ops of cute_ep that a mode is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cute_ep":
            self.ops.append(func.__name__)
        return func(*args, **kwargs or {})


def test_a_mode_sees_every_call(ep: EPCommunicator) -> None:
    comm, (x, ids, weights), buffers = cute_ep.ops.register(ep), inputs(), ep.allocate()
    with Seen() as seen:
        round_of(comm, x, ids, weights)
        batch = cute_ep.ops.dispatch_into(x, ids, weights, comm, buffers)
        cute_ep.ops.combine_into(batch.tokens, batch, torch.empty_like(x))
        cute_ep.ops.fused_silu(x)
    want = ["dispatch", "combine", "dispatch_out", "combine_out", "fused_silu"]
    assert seen.ops == [f"{name}.default" for name in want]


@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "after the mode"])
def test_fake_tensors_are_never_sent(ep: EPCommunicator, inside: bool) -> None:
    comm, calls, mode = cute_ep.ops.register(ep), counted(ep), FakeTensorMode()
    fakes = [mode.from_tensor(one) for one in inputs()]
    with mode if inside else nullcontext():
        assert round_of(comm, *fakes).shape == (5, ALONE.hidden)
        offsets = mode.from_tensor(torch.tensor([0, 5], dtype=torch.int32))
        assert cute_ep.ops.fused_silu(fakes[0], offsets).shape == (5, ALONE.hidden // 2)
    assert calls == []


def test_make_fx_records_the_calls(ep: EPCommunicator) -> None:
    comm = cute_ep.ops.register(ep)
    graph = make_fx(lambda *arguments: gated_round(comm, *arguments))(*inputs()).graph
    targets = [str(node.target) for node in graph.nodes if "cute_ep" in str(node.target)]
    assert targets == [f"cute_ep.{name}.default" for name in ("dispatch", "fused_silu", "combine")]


def test_a_default_device_and_autocast_are_no_reason_for_an_op(ep: EPCommunicator) -> None:
    comm, arguments = cute_ep.ops.register(ep), inputs()
    want = round_of(comm, *arguments)
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(round_of(comm, *arguments), want)
