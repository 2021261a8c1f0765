"""The torch ops on GPUs: torch's checks, gradients, compiled code, graphs. `tests/ops` has them on the CPU."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.library import opcheck

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.ops.layer import check, given, gradients, layer
from tests.ops.ranks import ALONE
from tests.ops.test_memory import check_poisoned, check_poisoned_layer
from tests.ops.test_opcheck import (  # noqa: F401, two fixtures
    check_backward,
    check_combine,
    check_dispatch,
    check_given_memory,
    defined_memory,
    uncounted,
)
from tests.ops.test_processes import run_on_two
from tests.ops.worker import CHECKS

from .conftest import connected

STEPS = 20
OPS = torch.ops.cute_ep


@pytest.fixture
def ep() -> Iterator[EPCommunicator]:
    torch._dynamo.reset()
    with connected(ALONE, ["cuda:0"]) as (ep,):
        yield ep


def inputs(seed: int = 1, tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (one,) = make_inputs(ALONE, (tokens,), "masked", seed)
    return one.x.cuda(), one.topk_ids.cuda(), one.router_weights.cuda()


@pytest.mark.usefixtures("uncounted")
def test_opcheck(ep: EPCommunicator) -> None:
    check_dispatch(ep, gradient=True)
    for mode in ("exact", "partial", "unweighted"):
        check_combine(ep, mode)
    check_backward(ep, "both")


@pytest.mark.usefixtures("defined_memory", "uncounted")
def test_opcheck_of_calls_into_given_memory(ep: EPCommunicator) -> None:
    check_given_memory(ep)


def test_opcheck_of_fused_silu() -> None:
    x, offsets = torch.randn(9, 256, device="cuda").bfloat16(), torch.tensor([0, 4, 9], dtype=torch.int32).cuda()
    for fmt, layout in (("bf16", None), ("fp8", None), ("nvfp4", "linear")):
        given = x, offsets, None, None, None, fmt, False, layout, "silu", None, None, 0
        done = opcheck(OPS.fused_silu, given, test_utils=("test_schema", "test_faketensor"))
        assert set(done.values()) == {"SUCCESS"}, fmt


@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated", "one_expert"])
def test_gradients_are_those_of_a_dense_layer(ep: EPCommunicator, routing: str) -> None:
    one, comm = given(ALONE, (7,), routing), cute_ep.ops.register(ep)
    for mode in ("exact", "partial"):
        check(one, 0, gradients(one, 0, comm, mode))
    ep.synchronize()


def test_gradients_of_random_numbers_are_those_of_the_reference(ep: EPCommunicator) -> None:
    """Of rows and tokens bit for bit; of router weights but for the order of a sum of float32 products."""
    (other,) = connect_reference(ALONE)
    made = []
    for communicator in (ep, other):
        x, ids, weights = (part.to(communicator.device) for part in inputs())
        x.requires_grad_()
        weights.requires_grad_()
        batch = cute_ep.ops.dispatch(x, ids, weights, cute_ep.ops.register(communicator))
        batch.tokens.retain_grad()
        cute_ep.ops.combine(batch.tokens * 1.5, batch).backward(x.detach().flip(0))
        made.append([part.grad.cpu() for part in (batch.tokens, x, weights)])
    (of_rows, of_x, of_weights), want = made
    assert_bits(of_rows, want[0], "rows")
    assert_bits(of_x, want[1], "tokens")
    torch.testing.assert_close(of_weights, want[2], rtol=1e-5, atol=1e-5 * float(want[2].abs().max()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_gives_the_same_bits(ep: EPCommunicator, backend: str) -> None:
    one, comm = given(ALONE, (7,), "masked"), cute_ep.ops.register(ep)
    want = gradients(one, 0, comm)
    for got, wanted in zip(
        gradients(one, 0, comm, call=torch.compile(layer, backend=backend, fullgraph=True)), want, strict=True
    ):
        assert_bits(got, wanted, backend)


def test_reduced_overhead_with_changing_routing(ep: EPCommunicator) -> None:
    """Compiled code in CUDA graphs of inductor's: warm-up runs and replays are rounds like any other."""
    comm = cute_ep.ops.register(ep)

    def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        batch = cute_ep.ops.dispatch(x, ids, weights, comm)
        return cute_ep.ops.combine(batch.tokens * 2, batch)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad(), inductor_config.patch("triton.cudagraph_or_error", True):  # else it may leave them out
        for seed in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            arguments = inputs(seed)
            assert_bits(compiled(*arguments).clone(), step(*arguments), f"step {seed}")
    ep.synchronize()


@pytest.mark.parametrize("tokens", [7, 0])
def test_poisoned_memory_changes_no_output_and_no_gradient(ep: EPCommunicator, tokens: int) -> None:
    check_poisoned(ep, given(ALONE, (tokens,), "masked"))
    check_poisoned_layer(ep, tokens)


def replay_us(call: Callable[[], object]) -> float:
    """p50 of a call's replays from a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        call()
    for _ in range(200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def test_a_dispatch_of_few_tokens_clears_nothing() -> None:
    """It takes the time of one into given memory, though its buffers have room for the most tokens."""
    cfg = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=4096, world_size=1)
    with connected(cfg, ["cuda:0"]) as (ep,):
        (one,) = make_inputs(cfg, (16,), "uniform", 1)
        given = one.x.cuda(), one.topk_ids.cuda(), one.router_weights.cuda(), cute_ep.ops.register(ep)
        buffers = ep.allocate()
        new = replay_us(lambda: cute_ep.ops.dispatch(*given))
        into = replay_us(lambda: cute_ep.ops.dispatch_into(*given, buffers))
        cleared = replay_us(lambda: cute_ep.ops.dispatch(*given, clear=True))
        assert new <= 1.3 * into, f"new memory {new:.1f} us, given {into:.1f}, cleared {cleared:.1f}"
        warnings.warn(f"16 tokens: new memory {new:.1f} us, given {into:.1f}, cleared {cleared:.1f}", stacklevel=1)


def test_calls_into_given_memory_are_captured(ep: EPCommunicator) -> None:
    comm, buffers = cute_ep.ops.register(ep), ep.allocate()
    x, ids, weights = inputs()
    out = torch.empty_like(x)

    def step() -> None:
        batch = cute_ep.ops.dispatch_into(x, ids, weights, comm, buffers)
        cute_ep.ops.combine_into(batch.tokens, batch, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(STEPS):
        for part, new in zip((x, ids, weights), inputs(seed), strict=True):
            part.copy_(new)
        out.zero_()
        graph.replay()
        batch = cute_ep.ops.dispatch(x, ids, weights, comm)
        assert_bits(out, cute_ep.ops.combine(batch.tokens, batch), f"replay {seed}")
    ep.synchronize()


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(tmp_path: Path, name: str) -> None:
    """As `tests/ops/test_processes.py`, on two GPUs or sharing one."""
    run_on_two(name, tmp_path)
