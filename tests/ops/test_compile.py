"""Compiled code makes the same calls in the same order as eager code, and computes the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.interface import EPCommunicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs

from .layer import given, gradients, layer
from .ranks import ALONE, counted


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ep() -> EPCommunicator:
    (ep,) = connect_local(ALONE, ["cpu"])
    return ep


def compiled(function: Callable) -> Callable:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def inputs(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (one,) = make_inputs(ALONE, (tokens,), "masked", 1)
    return one.x, one.topk_ids, one.router_weights


@pytest.mark.parametrize("mode", ["exact", "partial"])
def test_a_compiled_layer_and_its_gradients_are_the_eager_ones(ep: EPCommunicator, mode: Any) -> None:
    one, comm, calls = given(ALONE, (7,), "masked"), cute_ep.ops.register(ep), counted(ep)
    want = gradients(one, 0, comm, mode)
    eager = calls.copy()
    calls.clear()
    for got, wanted in zip(gradients(one, 0, comm, mode, call=compiled(layer)), want, strict=True):
        assert_bits(got, wanted, "output or gradient")
    assert calls == eager == ["dispatch", mode, "dispatch", "unweighted", "partial"]


def test_numbers_of_tokens_may_change(ep: EPCommunicator) -> None:
    """Also to none and to one, for which torch compiles again."""
    comm = cute_ep.ops.register(ep)
    function = compiled(layer)
    for tokens in (7, 5, 0, 1, 8, 3):
        one = given(ALONE, (tokens,), "uniform")
        pairs = zip(gradients(one, 0, comm, call=function), gradients(one, 0, comm), strict=True)
        for got, wanted in pairs:
            assert_bits(got, wanted, f"{tokens} tokens")


def test_calls_whose_results_nobody_reads_are_made(ep: EPCommunicator) -> None:
    """Neither dropped nor merged with an equal one: other ranks wait for them."""
    comm, calls = cute_ep.ops.register(ep), counted(ep)

    def program(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        cute_ep.ops.dispatch(x, ids, weights, comm)
        batch = cute_ep.ops.dispatch(x, ids, weights, comm)
        cute_ep.ops.dispatch(x, ids, weights, comm)
        cute_ep.ops.combine(batch.tokens, batch, "unweighted")
        first = cute_ep.ops.combine(batch.tokens, batch, "partial")
        return first + cute_ep.ops.combine(batch.tokens, batch, "exact")

    want = program(*inputs())
    eager = calls.copy()
    calls.clear()
    assert_bits(compiled(program)(*inputs()), want, "sums")
    assert calls == eager == ["dispatch"] * 3 + ["unweighted", "partial", "exact"]


def test_unread_results_change_nothing_about_a_backward_pass(ep: EPCommunicator) -> None:
    """Two layers, the second of which nobody reads; and equal layers, which are not merged."""
    one, comm, calls = given(ALONE, (7,), "masked"), cute_ep.ops.register(ep), counted(ep)

    def program(comm: str, x: Any, ids: Any, weights: Any, experts: Any, mode: Any) -> torch.Tensor:
        first = layer(comm, x, ids, weights, experts)
        layer(comm, x, ids, weights, experts)
        return first + layer(comm, x, ids, weights, experts)

    want = gradients(one, 0, comm, call=program)
    eager = calls.copy()
    calls.clear()
    for got, wanted in zip(gradients(one, 0, comm, call=compiled(program)), want, strict=True):
        assert_bits(got, wanted, "output or gradient")
    assert calls == eager and len(calls) == 12


def test_equal_calls_of_a_backward_pass_are_not_merged(ep: EPCommunicator) -> None:
    one, comm, calls = given(ALONE, (7,), "masked"), cute_ep.ops.register(ep), counted(ep)

    def program(comm: str, x: Any, ids: Any, weights: Any, experts: Any, mode: Any) -> torch.Tensor:
        batch = cute_ep.ops.dispatch(x, ids, weights, comm)
        return cute_ep.ops.combine(batch.tokens, batch) + cute_ep.ops.combine(batch.tokens, batch)

    def backward(call: Callable) -> torch.Tensor:
        x, weights = one.x[0].bfloat16().requires_grad_(), one.weights[0].clone().requires_grad_()
        call(comm, x, one.ids[0], weights, None, None).backward(one.grads[0].bfloat16())
        assert x.grad is not None
        return x.grad

    want = backward(program)
    eager = calls.copy()
    calls.clear()
    assert_bits(backward(compiled(program)), want, "gradient of tokens")
    assert calls == eager and calls.count("unweighted") == 2


def test_calls_into_given_memory_are_all_made_in_their_order(ep: EPCommunicator) -> None:
    """Also one whose results the next call overwrites, and those of batches that have nothing in common."""
    comm, calls, buffers = cute_ep.ops.register(ep), counted(ep), [ep.allocate() for _ in range(2)]
    outs = [torch.empty(7, ALONE.hidden).bfloat16() for _ in range(2)]

    def program(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        cute_ep.ops.dispatch_into(-x, ids, weights, comm, buffers[0])
        first = cute_ep.ops.dispatch_into(x, ids, weights, comm, buffers[0])
        second = cute_ep.ops.dispatch_into(2 * x, ids, weights, comm, buffers[1])
        cute_ep.ops.combine_into(second.tokens, second, outs[1])
        cute_ep.ops.combine_into(second.tokens, second, outs[1], "exact")
        return cute_ep.ops.combine_into(first.tokens * 2, first, outs[0]) - outs[1]

    assert not program(*inputs()).any()
    eager, want = calls.copy(), outs[0].clone()
    calls.clear()
    outs[0].zero_()
    assert not compiled(program)(*inputs()).any()
    assert_bits(outs[0], want, "what was written")
    assert calls == eager == ["dispatch"] * 3 + ["partial", "exact", "partial"]


def test_each_call_into_given_memory_depends_on_the_one_before(ep: EPCommunicator) -> None:
    """In the graph that a compiler orders, also where batches have nothing in common."""
    comm, buffers, graphs = cute_ep.ops.register(ep), [ep.allocate() for _ in range(2)], []
    outs = [torch.empty(7, ALONE.hidden).bfloat16() for _ in range(2)]

    def program(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        batches = [cute_ep.ops.dispatch_into(x, ids, weights, comm, one) for one in buffers]
        for batch, out in zip(batches, outs, strict=True):
            cute_ep.ops.combine_into(batch.tokens, batch, out)

    def keep(graph: torch.fx.GraphModule, example: object) -> Callable:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch.compile(program, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs())
    (graph,) = graphs
    ours = [node for node in graph.nodes if any("cute_ep" in str(one) for one in (node.target, *node.args))]
    assert len(ours) == 4
    for before, after in pairwise(ours):
        reached, front = set(), [after]
        while front:
            node = front.pop()
            front += [one for one in node.all_input_nodes if one not in reached]
            reached.update(node.all_input_nodes)
        assert before in reached, (before, after)


def test_a_batch_may_leave_and_enter_compiled_code(ep: EPCommunicator) -> None:
    comm, arguments = cute_ep.ops.register(ep), inputs()
    batch = compiled(lambda *given: cute_ep.ops.dispatch(*given, comm))(*arguments)
    own = cute_ep.ops.dispatch(*arguments, comm)
    assert type(batch) is cute_ep.ops.Batch and batch.comm == comm
    want = cute_ep.ops.combine(own.tokens, own)
    assert_bits(cute_ep.ops.combine(batch.tokens, batch), want, "compiled, then eager")
    assert_bits(compiled(lambda batch: cute_ep.ops.combine(batch.tokens, batch))(own), want, "eager, then compiled")


def test_another_communicator_is_compiled_anew(ep: EPCommunicator) -> None:
    """A graph has its name as a constant."""
    (other,), function = connect_local(ALONE, ["cpu"]), compiled(layer)
    one, calls = given(ALONE, (7,), "masked"), [counted(ep), counted(other)]
    for communicator in (ep, other):
        gradients(one, 0, cute_ep.ops.register(communicator), call=function)
    assert calls[0] == calls[1] and len(calls[0]) == 5
