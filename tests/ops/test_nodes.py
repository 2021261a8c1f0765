"""The ops over several nodes: on CPUs, and over the communicators of GPUs with emulated kernels between nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

import cute_ep.ops
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.types import CombineMode
from cute_ep.ops.registry import communicator_of
from cute_ep.testing.compare import assert_bits
from tests.reference.ranks import at_once
from tests.runtime.emulated_nccl import over_nccl

from .layer import check, given, gradients
from .ranks import CFG, on_all_ranks

NODES = replace(CFG, world_size=4, num_experts=12, ranks_per_node=2)
ALONE = replace(CFG, world_size=2, num_experts=6, ranks_per_node=1)
TOKENS = {NODES: (9, 0, 7, 2), ALONE: (9, 4)}
EACH = pytest.mark.parametrize("cfg", [NODES, ALONE], ids=["2 x 2", "2 x 1"])


def on_emulated_nodes(cfg: EPConfig, program: Any) -> list:
    """What program(rank, name of its communicator) returns on each rank."""
    with over_nccl(cfg) as (made, _):
        names = [cute_ep.ops.register(ep) for ep in made]
        results = at_once(range(len(made)), lambda rank: program(rank, names[rank]))
    for one in results:
        if isinstance(one, Exception):
            raise one
    return results


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated"])
@pytest.mark.parametrize("emulated", [False, True], ids=["CPUs", "emulated"])
@EACH
def test_gradients_are_those_of_a_dense_layer(cfg: EPConfig, emulated: bool, routing: str, mode: CombineMode) -> None:
    """Tokens', router weights' and experts'."""
    one = given(cfg, TOKENS[cfg], routing)

    def program(rank: int, comm: str) -> list[torch.Tensor]:
        return gradients(one, rank, comm, mode)

    made = on_emulated_nodes(cfg, program) if emulated else on_all_ranks(cfg, program)[0]
    for rank, parts in enumerate(made):
        check(one, rank, parts)


def frames_of(cfg: EPConfig, program: Callable[[int, str], Any], emulated: bool) -> list[list[int]]:
    """The frames of all ranks' dispatches in a program, of emulated nodes or on CPUs."""
    sent: list[list[int]] = [[] for _ in range(cfg.world_size)]

    def counting(rank: int, comm: str) -> None:
        communicator = communicator_of(comm)
        dispatch = communicator.dispatch

        def dispatched(*arguments: Any, frame: int | None = None, **named: Any) -> Any:
            sent[rank].append(cfg.frame_rows(frame))
            return dispatch(*arguments, frame=frame, **named)

        communicator.dispatch = dispatched  # type: ignore[method-assign]
        program(rank, comm)

    _ = on_emulated_nodes(cfg, counting) if emulated else on_all_ranks(cfg, counting)
    return sent


@pytest.mark.parametrize("emulated", [False, True], ids=["CPUs", "emulated"])
@EACH
def test_backward_passes_send_frames_of_their_forward_passes(cfg: EPConfig, emulated: bool) -> None:
    """Also where two batches of as many tokens have other frames, each of which has launch shapes of its own."""
    tokens = (3,) * cfg.world_size
    one = given(replace(cfg, max_tokens_per_rank=40), tokens, "masked")

    def program(rank: int, comm: str) -> None:
        x, weights = one.x[rank].bfloat16().requires_grad_(), one.weights[rank].clone().requires_grad_()
        experts = one.of_rank(rank).bfloat16().requires_grad_()
        batches = [cute_ep.ops.dispatch(x, one.ids[rank], weights, comm, frame=frame) for frame in (3, None, 7)]
        assert [len(batch.frame_ids) for batch in batches] == [cfg.nodes * frame for frame in (3, 40, 7)]
        for batch in batches:
            for part in (x, weights, experts):
                part.grad = None
            rows = grouped_mm(batch.tokens, experts, offs=batch.row_offsets[1:]).relu()
            out = cute_ep.ops.combine(rows, batch)
            out.backward(one.grads[rank].to(out.dtype))
            check(one, rank, [out.detach(), x.grad, weights.grad, experts.grad])

    assert frames_of(one.cfg, program, emulated) == [[3, 40, 7, 3, 40, 7]] * cfg.world_size


def test_slices_of_returned_rows_are_remembered_by_frames() -> None:
    """A node's launch shape depends on the rows of all frames, not on this rank's tokens."""
    one = given(NODES, (3,) * 4, "masked")

    def program(rank: int, comm: str) -> None:
        dispatch = communicator_of(comm).dispatch

        def dispatched(*arguments: Any, frame: int, **named: Any) -> Any:
            return replace(dispatch(*arguments, frame=frame, **named), return_slices_log2=frame % 4)

        communicator_of(comm).dispatch = dispatched  # type: ignore[method-assign]
        sent = one.x[rank].bfloat16(), one.ids[rank], one.weights[rank], comm
        batches = [cute_ep.ops.dispatch(*sent, frame=frame) for frame in (5, 3)]
        assert [batch.dispatched().return_slices_log2 for batch in batches] == [1, 3]

    on_all_ranks(NODES, program)


def test_batches_in_given_memory_have_frames() -> None:
    one = given(NODES, (3,) * 4, "masked")

    def program(rank: int, comm: str) -> None:
        sent, buffers = (one.x[rank].bfloat16(), one.ids[rank], one.weights[rank], comm), DispatchBuffers
        made = cute_ep.ops.dispatch_into(*sent, buffers.allocate(NODES, "cpu"), frame=3)
        own = cute_ep.ops.dispatch(*sent, frame=5)
        assert len(made.frame_ids) == 2 * 3 and made.dispatched().frame == 3
        out = torch.empty(3, NODES.hidden, dtype=torch.bfloat16)
        assert_bits(cute_ep.ops.combine_into(made.tokens, made, out), cute_ep.ops.combine(own.tokens, own), "out")

    assert frames_of(NODES, program, False) == [[3, 5]] * 4


def test_compiled_code_takes_other_frames() -> None:
    """Without compiling again, also where the number of tokens changes with them."""
    cfg = replace(ALONE, max_tokens_per_rank=40)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(comm: str, x: Tensor, ids: Tensor, weights: Tensor, frame: int) -> Tensor:
        batch = cute_ep.ops.dispatch(x, ids, weights, comm, frame=frame)
        return cute_ep.ops.combine(batch.tokens, batch)

    def program(rank: int, comm: str) -> None:
        call = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True) if rank == 0 else layer
        for tokens, frame in ((9, 12), (7, 30), (7, 7)):
            one = given(cfg, (tokens, tokens), "uniform")
            arguments = one.x[rank].bfloat16(), one.ids[rank], one.weights[rank]
            out = call(comm, *arguments, frame)
            assert_bits(out, layer(comm, *arguments, frame), f"{tokens} tokens")

    torch._dynamo.reset()
    frames_of(cfg, program, False)
    torch._dynamo.reset()
    assert len(graphs) == 1
