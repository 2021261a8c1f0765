"""The layer on GPUs: outputs and gradients, compiled code, graphs. `tests/nn` has it on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_ep.api.interface import EPCommunicator
from cute_ep.nn import GatedMLP, MoELayer, Router
from cute_ep.ops import register
from cute_ep.testing.compare import assert_bits
from tests.nn.layers import INNER, config, layer_of, poison_new_buffers, random_experts
from tests.nn.oracle import GATES, assert_within, dense, output_bound
from tests.nn.test_formats import QUANTISED, arrived, formatted, in_bf16, scale_of
from tests.nn.test_processes import run_in_processes
from tests.nn.worker import CHECKS, assert_dense, layer_here, made

from .conftest import connected

CFG = config(1)
DEVICE = torch.device("cuda:0")
DEEPSEEK = dict(score="sigmoid", correction=True, renormalize=True, n_group=3, topk_group=2)
STEPS = 20


@pytest.fixture
def ep() -> Iterator[EPCommunicator]:
    torch._dynamo.reset()
    with connected(CFG, ["cuda:0"]) as (ep,):
        yield ep
        ep.synchronize()


def tokens(seed: int = 1, count: int = 7) -> torch.Tensor:
    return torch.randn(count, CFG.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def deepseek(ep: EPCommunicator) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(CFG, INNER, router=Router(32, 6, 3, **DEEPSEEK), shared=GatedMLP(32, INNER)).to(DEVICE)
    layer.attach(ep)
    return layer


def test_outputs_and_gradients_are_those_of_a_dense_layer(ep: EPCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows behind the last one hold."""
    poison_new_buffers(monkeypatch)
    layer = layer_here(0, 1, DEVICE)
    layer.attach(ep)
    assert_dense(made(layer, layer.experts, 0), 0, 1)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(ep: EPCommunicator, gate: str, bias: bool) -> None:
    experts = random_experts(CFG, gate, bias=bias)
    layer = layer_of(CFG, 0, register(ep), experts, device=DEVICE)
    x = tokens()
    ids, weights = (part.cpu() for part in layer.router(x))
    wide = x.cpu().double()
    want = dense(wide, ids, weights.double(), experts)
    bound = output_bound(wide, ids, weights.double(), experts)
    assert_within(layer(x).cpu(), want, bound, "with gradients")
    with torch.no_grad():
        assert_within(layer(x).cpu(), want, bound, "without gradients")


def test_compiled_layers_compute_the_bits_of_eager_ones(ep: EPCommunicator) -> None:
    layer = deepseek(ep)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    parts = []
    for call in (layer, compiled):
        layer.zero_grad()
        x = tokens().requires_grad_()
        out = call(x)
        out.backward(x.detach())
        parts.append([out, x.grad, *(one.grad.clone() for one in layer.parameters())])
    for number, pair in enumerate(zip(*parts, strict=True)):
        assert_bits(pair[0].detach().cpu(), pair[1].detach().cpu(), f"part {number}")
    with torch.no_grad():
        routing = layer.router(tokens())
        got = torch.compile(layer.experts, fullgraph=True)(tokens(), *routing)
        assert_bits(got.cpu(), layer.experts(tokens(), *routing).cpu(), "inductor, inference")


def test_a_captured_layer_computes_the_bits_of_an_eager_one(ep: EPCommunicator) -> None:
    layer, x = deepseek(ep), tokens()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for seed in range(STEPS):
            x.copy_(tokens(seed))
            graph.replay()
            got = out.clone()
            assert_bits(got.cpu(), layer(x).cpu(), f"step {seed}")


@pytest.mark.parametrize("fmt", QUANTISED)
def test_quantised_tokens_give_the_bits_of_those_that_the_reference_quantises(fmt: str) -> None:
    """Eager, compiled by inductor, and in a graph."""
    torch._dynamo.reset()
    cfg = replace(formatted(1, fmt), scale_layout="linear")
    experts, x = random_experts(cfg, "swiglu"), torch.empty(9, cfg.hidden, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad(), connected(cfg, ["cuda:0"]) as (ep,), connected(in_bf16(cfg), ["cuda:0"]) as (other,):
        layer = layer_of(cfg, 0, register(ep), experts, device=DEVICE, **scale_of(fmt))
        plain = layer_of(in_bf16(cfg), 0, register(other), experts, device=DEVICE)
        routing = layer.router(torch.randn(x.shape, device=DEVICE))
        calls = {"eager": layer.experts, "inductor": torch.compile(layer.experts, fullgraph=True)}
        for call in calls.values():
            call(x.normal_(), *routing)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.experts(x, *routing)
        for seed in range(STEPS):
            x.normal_()
            graph.replay()
            want = plain.experts(arrived(x, fmt), *routing)
            for name, got in {
                "replayed": out,
                **{name: call(x, *routing) for name, call in calls.items()},
            }.items():
                assert_bits(got.cpu(), want.cpu(), f"step {seed}, {name}")
        ep.synchronize()


@pytest.mark.parametrize("check", [name for name in CHECKS if "group" not in name])
def test_two_processes(tmp_path: Path, check: str) -> None:
    """As `tests/nn/test_processes.py`, on two GPUs or sharing one."""
    run_in_processes(2, check, tmp_path)
