"""Compiled layers and checkpointed ones compute the bits of eager ones, with the same rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_ep import connect_local
from cute_ep.nn import GatedMLP, MoELayer, Router
from cute_ep.testing.compare import assert_bits
from tests.ops.ranks import counted, on_all_ranks

from .layers import INNER, config, gradients_of, layer_of, random_experts

CFG = config(1)
FORWARD, BACKWARD = ["dispatch", "partial"], ["dispatch", "unweighted", "partial"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def connected(**options: Any) -> MoELayer:
    torch.manual_seed(0)
    (ep,) = connect_local(CFG, ["cpu"])
    layer = MoELayer(CFG, INNER, **options)
    layer.attach(ep)
    layer.kept, layer.calls = ep, counted(ep)
    return layer


def tokens(count: int = 7) -> torch.Tensor:
    return torch.randn(count, CFG.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()


def trained(layer: MoELayer, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """[output, gradients of tokens and parameters]."""
    layer.zero_grad()
    given = x.clone().requires_grad_()
    out = call(given)
    out.backward(x)
    return [out.detach(), given.grad, *(one.grad.clone() for one in layer.parameters())]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for number, pair in enumerate(zip(got, want, strict=True)):
        assert_bits(*pair, f"part {number}")


DEEPSEEK = dict(score="sigmoid", correction=True, renormalize=True, n_group=3, topk_group=2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "swiglu_clamped", "bias": True},
        {"gate": "relu2", "mode": "exact", "capacity": 24},
        {"router": Router(32, 6, 3, **DEEPSEEK), "shared": GatedMLP(32, INNER), "dtype": torch.float32},
    ],
    ids=["plain", "gpt-oss", "relu2", "deepseek"],
)
def test_compiled_layers_compute_the_bits_of_eager_ones(options: dict[str, Any]) -> None:
    layer = connected(**options)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want = trained(layer, layer, tokens())
    eager = layer.calls.copy()
    layer.calls.clear()
    assert_same(trained(layer, compiled, tokens()), want)
    assert layer.calls == eager
    with torch.no_grad():
        assert_bits(compiled(tokens()), layer(tokens()), "without gradients")


@pytest.mark.slow
def test_inductor_computes_the_bits_of_inference_behind_the_router() -> None:
    """Its routers' float32 may differ in the last bits, and so do gates in training, which it rounds less often."""
    layer = connected()
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        routing = layer.router(tokens())
        experts = torch.compile(layer.experts, fullgraph=True)
        assert_bits(experts(tokens(), *routing), layer.experts(tokens(), *routing), "without gradients")
    for got, want in zip(trained(layer, compiled, tokens()), trained(layer, layer, tokens()), strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05 * want.float().abs().max().item())


def test_numbers_of_tokens_may_change() -> None:
    layer = connected()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for count in (7, 5, 0, 1, 9, 3):
        assert_same(trained(layer, compiled, tokens(count)), trained(layer, layer, tokens(count)))


def test_a_layer_with_another_communicator_is_compiled_anew() -> None:
    layer = connected()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        want = compiled(tokens())
        (other,) = connect_local(CFG, ["cpu"])
        calls = counted(other)
        layer.attach(other)
        assert_bits(compiled(tokens()), want, "output")
    assert calls == FORWARD


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_computes_the_same_bits_however_gradients_are_refused(mode: Any) -> None:
    """Eager and compiled; and afterwards the layer trains."""
    layer = connected()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with mode():
        want = layer(tokens())
        assert_bits(compiled(tokens()), want, "compiled")
    layer.requires_grad_(False)
    assert_bits(layer(tokens()), want, "without gradients")
    layer.requires_grad_(True)
    assert all(one.any() for one in trained(layer, layer, tokens()))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpointed_layer_has_the_same_gradients(world: int, reentrant: bool) -> None:
    """Its rounds are made again, on all ranks, also on one without tokens."""
    cfg, counts, experts = config(world), [9, 0, 7][:world], random_experts(config(world), "swiglu")

    def program(rank: int, comm: str) -> list[list[torch.Tensor]]:
        made = []
        router = Router(32, 6, 3)
        router.load_state_dict({"weight": experts.gate_up[:, 0].detach()})
        layer = layer_of(cfg, rank, comm, experts, router=router)
        for again in (False, True):
            layer.zero_grad()
            x = tokens(counts[rank]).requires_grad_()
            out = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
            out.backward(x.detach())
            made.append([x.grad, router.weight.grad, *gradients_of(layer).values()])
        return made

    ranks, calls = on_all_ranks(cfg, program)
    for plain, again in ranks:
        assert_same(again, plain)
    once = FORWARD + BACKWARD
    assert calls == [once + FORWARD + once] * world
