"""torch's own checks of every op: schema, shapes, gradients registered, the same when traced, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.library import opcheck

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.buffers import BUFFERS
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.ops import library
from cute_ep.testing.workloads import make_inputs

from .ranks import ALONE
from .test_memory import poisoned

TOKENS = 7
OPS = torch.ops.cute_ep


@pytest.fixture
def ep() -> EPCommunicator:
    (ep,) = connect_local(ALONE, ["cpu"])
    return ep


def inputs(ep: EPCommunicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (one,) = make_inputs(ep.cfg, (TOKENS,), "masked", 1)
    return one.x.to(ep.device), one.topk_ids.to(ep.device), one.router_weights.to(ep.device)


def kept(batch: cute_ep.ops.Batch) -> tuple[torch.Tensor | None, ...]:
    of_all = batch.row_map, batch.headers, batch.weights, batch.frame_ids
    return batch.topk_ids, batch.router_weights, batch.row_offsets, *of_all


def order(ep: EPCommunicator) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=ep.device)


def check_dispatch(ep: EPCommunicator, *, gradient: bool = False, capacity: int | None = None) -> None:
    x, ids, weights = inputs(ep)
    scale = torch.tensor([2.0]) if ep.cfg.dispatch_format == "nvfp4" else None
    given = x.requires_grad_(gradient), ids, weights, scale, cute_ep.ops.register(ep), capacity
    assert passes(OPS.dispatch, (*given, True, None, order(ep)))


def check_combine(ep: EPCommunicator, mode: str, *, gradient: bool = False) -> None:
    x, ids, weights = inputs(ep)
    batch = cute_ep.ops.dispatch(x, ids, weights.requires_grad_(gradient), cute_ep.ops.register(ep))
    rows = torch.randn_like(batch.tokens).requires_grad_(gradient)
    read = kept(batch if mode != "unweighted" else batch._replace(router_weights=None))
    assert passes(OPS.combine, (rows, *read, batch.comm, mode, torch.float32, order(ep)))


def check_backward(ep: EPCommunicator, wanted: str) -> None:
    x, ids, weights = inputs(ep)
    batch = cute_ep.ops.dispatch(x, ids, weights, cute_ep.ops.register(ep))
    rows = None if wanted == "rows" else torch.randn_like(batch.tokens)
    capacity = None if wanted == "weights" else 21
    assert passes(OPS.combine_backward, (torch.randn_like(x), rows, *kept(batch), batch.comm, capacity, order(ep)))


def check_given_memory(ep: EPCommunicator) -> None:
    (x, ids, weights), comm, buffers = inputs(ep), cute_ep.ops.register(ep), ep.allocate()
    tensors = [getattr(buffers, name) for name in BUFFERS]
    assert passes(OPS.dispatch_out, (x, ids, weights, None, comm, None, order(ep), *tensors))
    batch = cute_ep.ops.dispatch_into(x, ids, weights, comm, buffers)
    rows, out = torch.randn_like(batch.tokens), torch.empty_like(x)
    assert passes(OPS.combine_out, (rows, *kept(batch), comm, "partial", order(ep), out))


def passes(op: Any, arguments: tuple) -> bool:
    done = opcheck(op, arguments)
    return len(done) == 4 and set(done.values()) == {"SUCCESS"}


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of no known round: torch compares what several calls return, each of which is a round of its own."""
    dispatch = library.dispatch_into

    def dispatch_into(*arguments: Any) -> Dispatched:
        batch = dispatch(*arguments)
        batch.headers[:, HeaderWord.ROUND] = 0
        return batch

    monkeypatch.setattr(library, "dispatch_into", dispatch_into)


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize("capacity", [None, 37], ids=["largest", "37 rows"])
def test_dispatch(ep: EPCommunicator, gradient: bool, capacity: int | None) -> None:
    check_dispatch(ep, gradient=gradient, capacity=capacity)


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4", "nvfp4_row"])
def test_dispatch_in_other_formats(fmt: Any) -> None:
    (ep,) = connect_local(replace(ALONE, dispatch_format=fmt, hidden=128, row_alignment=None), ["cpu"])
    check_dispatch(ep)


@pytest.mark.parametrize(
    ("mode", "gradient"),
    [("exact", False), ("partial", False), ("unweighted", False), ("exact", True), ("partial", True)],
    ids=["exact", "partial", "unweighted", "exact with gradient", "partial with gradient"],
)
def test_combine(ep: EPCommunicator, mode: str, gradient: bool) -> None:
    check_combine(ep, mode, gradient=gradient)


@pytest.mark.parametrize("wanted", ["rows", "weights", "both"])
def test_combine_backward(ep: EPCommunicator, wanted: str) -> None:
    check_backward(ep, wanted)


@pytest.fixture
def defined_memory() -> Iterator[None]:
    """New tensors hold a number, so that what a call leaves alone is the same each time."""
    with poisoned(warn_only=False):
        yield


@pytest.mark.usefixtures("defined_memory", "uncounted")
def test_calls_into_given_memory(ep: EPCommunicator) -> None:
    check_given_memory(ep)
