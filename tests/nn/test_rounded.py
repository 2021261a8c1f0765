"""Outputs and gradients of whole layers, with their router, are near those of a dense layer in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_ep.nn import GatedMLP, Router
from tests.ops.ranks import on_all_ranks

from .layers import INNER, config, gradients_of, layer_of, random_experts, rounded
from .oracle import GATES, Experts, assert_close, assert_within, dense, output_bound

TOKENS = {1: (9,), 2: (5, 9), 3: (9, 0, 7)}
HIDDEN, EXPERTS, TOP_K = 32, 6, 3
STANDARD = {"renormalize": True}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "renormalised softmax with a bias": {"renormalize": True, "bias": True},
    "sigmoid in groups": {
        **{"score": "sigmoid", "renormalize": True, "correction": True, "scale": 2.5},
        **{"n_group": 3, "topk_group": 2},
    },
}


@cache
def router_state(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": rounded(torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5),
        "bias": rounded(torch.randn(EXPERTS, generator=generator)),
        "correction": torch.randn(EXPERTS, generator=generator) / 4,
    }


def route(x: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(ids, weights) of the formulas, in float64."""
    logits = x @ state["weight"].T + (state["bias"] if options.get("bias") else 0)
    if options.get("score") == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
    else:
        scores = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    rank_by = scores.detach() + (state["correction"].double() if options.get("correction") else 0)
    ids = []
    for row in rank_by:
        groups = row.view(options.get("n_group", 1), -1)
        best = [group.sort(descending=True).values[:2].sum().item() for group in groups]
        allowed = sorted(range(len(groups)), key=lambda g: -best[g])[: options.get("topk_group", 1)]
        known = [expert for expert in range(EXPERTS) if expert // groups.shape[1] in allowed]
        ids.append(sorted(known, key=lambda e: -row[e].item())[:TOP_K])
    chosen = torch.tensor(ids, dtype=torch.int64).view(-1, TOP_K)
    weights = scores.gather(1, chosen)
    if options.get("renormalize"):
        weights = weights / weights.sum(1, keepdim=True)
    return chosen, weights * options.get("scale", 1.0)


def tokens_and_gradient(count: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    draw = torch.randn(2, count, HIDDEN, generator=generator)
    return rounded(draw[0]), rounded(draw[1])


def check(world: int, gate: str, options: dict[str, Any], *, bias: bool = False, mode: str = "partial") -> None:
    cfg, tokens, experts = config(world), TOKENS[world], random_experts(config(world), gate, bias=bias)
    state = router_state()

    def program(rank: int, comm: str) -> tuple[Any, ...]:
        router = Router(HIDDEN, EXPERTS, TOP_K, **options)
        layer = layer_of(cfg, rank, comm, experts, router=router, mode=mode)
        router.load_state_dict({name: state[name].float() for name in router.state_dict()})
        x, grad = tokens_and_gradient(tokens[rank], rank)
        with torch.no_grad():
            inference = layer(x.bfloat16())
        given = x.bfloat16().requires_grad_()
        out = layer(given)
        out.backward(grad.bfloat16())
        routers = {name: one.grad for name, one in router.named_parameters()}
        return router(given).topk_ids, inference, out, given.grad, routers, gradients_of(layer)

    made, _ = on_all_ranks(cfg, program)
    for rank, (ids, inference, out, of_x, of_router, _) in enumerate(made):
        x, grad = tokens_and_gradient(tokens[rank], rank)
        own = {name: value.to(torch.float64, copy=True).requires_grad_() for name, value in state.items()}
        x.requires_grad_()
        chosen, weights = route(x, own, options)
        want = dense(x, chosen, weights, experts)
        want.backward(grad)
        assert torch.equal(ids, chosen), f"rank {rank}: experts"
        bound = output_bound(x.detach(), chosen, weights.detach(), experts)
        assert_within(inference, want, bound, f"rank {rank}: output without gradients")
        assert_within(out, want, bound, f"rank {rank}: output")
        if len(x):
            assert x.grad is not None
            assert_close(of_x, x.grad, f"rank {rank}: gradient of tokens")
        for name, got in of_router.items():
            wanted = own[name].grad
            assert_close(got, torch.zeros_like(got) if wanted is None else wanted, f"rank {rank}: router's {name}")
    for name, whole in experts.parameters().items():
        assert whole.grad is not None
        parts = torch.cat([gradients[name] for *_, gradients in made])
        for expert, (got, wanted) in enumerate(zip(parts, whole.grad, strict=True)):
            assert_close(got, wanted, f"gradient of {name}[{expert}]")


@pytest.mark.parametrize("world", TOKENS)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_on_any_number_of_ranks(gate: str, world: int) -> None:
    check(world, gate, STANDARD)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router(router: str) -> None:
    check(3, "swiglu", ROUTERS[router])


@pytest.mark.parametrize("gate", ["swiglu", "swiglu_clamped"])
def test_experts_with_biases(gate: str) -> None:
    check(2, gate, STANDARD, bias=True)


def test_exact_mode() -> None:
    check(3, "swiglu", STANDARD, mode="exact")


def test_a_shared_expert_is_added() -> None:
    """Its parameters get gradients, and so do tokens through it."""
    cfg, experts = config(1), random_experts(config(1), "swiglu")
    x, grad = (one.bfloat16() for one in tokens_and_gradient(9, 0))

    def program(rank: int, comm: str) -> None:
        torch.manual_seed(2)
        layer = layer_of(cfg, rank, comm, experts, shared=GatedMLP(HIDDEN, INNER))
        alone = layer_of(cfg, rank, comm, experts, router=layer.router)
        made = []
        for call in (layer, lambda x: alone(x) + layer.shared(x)):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            out = call(given)
            out.backward(grad)
            made.append((given.grad, [out, *(one.grad.clone() for one in layer.shared.parameters())]))
        (of_x, parts), (want_x, want_parts) = made
        assert all(part.any() and torch.equal(part, want) for part, want in zip(parts, want_parts, strict=True))
        assert_close(of_x, want_x.double(), "gradient of tokens, whose parts are added in another order")
        up, down = (one.detach().double() for one in (layer.shared.gate_up, layer.shared.down))
        dense_one = Experts("swiglu", up[None], down[None])
        ones = torch.ones(9, 1, dtype=torch.float64)
        want = dense(x.double(), torch.zeros(9, 1, dtype=torch.int64), ones, dense_one)
        bound = output_bound(x.double(), torch.zeros(9, 1, dtype=torch.int64), ones, dense_one)
        assert_within(layer.shared(x), want, bound, "shared expert")

    on_all_ranks(cfg, program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_outputs_and_gradients_have_the_type_and_shape_of_the_tokens(dtype: torch.dtype) -> None:
    cfg, experts = config(1), random_experts(config(1), "swiglu")

    def program(rank: int, comm: str) -> None:
        layer = layer_of(cfg, rank, comm, experts)
        x = torch.randn(2, 1, 4, HIDDEN, dtype=dtype).requires_grad_()
        out = layer(x)
        out.sum().backward()
        assert out.shape == x.shape and out.dtype == dtype and x.grad is not None and x.grad.any()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == dtype
        assert layer(x[:, :, :0]).shape == (2, 1, 0, HIDDEN)

    on_all_ranks(cfg, program)
