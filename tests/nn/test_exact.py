"""Outputs and gradients of the experts are those of a dense layer bit for bit, in numbers that no rounding changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_ep.api.config import EPConfig
from cute_ep.nn import Router
from cute_ep.testing.workloads import make_inputs
from tests.ops.layer import signs
from tests.ops.ranks import on_all_ranks

from .layers import INNER, config, gradients_of, layer_of, poison_new_buffers
from .oracle import Experts, dense

TOKENS = {1: (9,), 2: (7, 9), 3: (9, 0, 7)}
"""By number of ranks, the tokens of each: one has as many as it may, one of three has none."""
ROUTINGS = ("uniform", "masked", "repeated", "one_expert", "one_rank")


def small_experts(cfg: EPConfig) -> Experts:
    """Relu squared of sums of few terms -1 and 1: all results are small multiples of 1/4."""
    generator = torch.Generator().manual_seed(5)
    gate_up = signs((cfg.num_experts, INNER, cfg.hidden), generator, 0.1).double()
    down = signs((cfg.num_experts, cfg.hidden, INNER), generator, 0.1).double()
    return Experts("relu2", gate_up.requires_grad_(), down.requires_grad_())


def arguments(cfg: EPConfig, tokens: tuple[int, ...], routing: str) -> list[dict[str, Tensor]]:
    """Of each rank."""
    generator, made = torch.Generator().manual_seed(6), []
    for one in make_inputs(cfg, tokens, routing, 3):
        shape = (len(one.x), cfg.hidden)
        weights = torch.randint(1, 3, one.topk_ids.shape, generator=generator) / 2
        x, grad = signs(shape, generator, 0.3), signs(shape, generator, 0.3)
        made.append({"x": x, "ids": one.topk_ids, "weights": weights, "grad": grad})
    return made


def assert_exact(got: Tensor | None, want: Tensor | None, name: str) -> None:
    assert got is not None, name
    want = torch.zeros_like(got).double() if want is None else want.detach()
    assert torch.equal(want.to(got.dtype).double(), want), f"{name}: the case has numbers that are rounded"
    assert torch.equal(got.double(), want), name


def check(cfg: EPConfig, tokens: tuple[int, ...], routing: str, **options: Any) -> None:
    given, experts = arguments(cfg, tokens, routing), small_experts(cfg)

    def program(rank: int, comm: str) -> tuple:
        layer, own = layer_of(cfg, rank, comm, experts, **options), given[rank]
        x, weights = own["x"].bfloat16().requires_grad_(), own["weights"].clone().requires_grad_()
        out = layer.experts(x, own["ids"], weights)
        out.backward(own["grad"].bfloat16())
        with torch.no_grad():
            assert torch.equal(layer.experts(x, own["ids"], weights), out)
        return out, x.grad, weights.grad, gradients_of(layer)

    made, calls = on_all_ranks(cfg, program)
    forward = ["dispatch", options.get("mode", "partial")]
    assert calls == [[*forward, "dispatch", "unweighted", "partial", *forward]] * cfg.world_size
    for rank, (own, (out, of_x, of_weights, _)) in enumerate(zip(given, made, strict=True)):
        x, weights = (own[name].double().requires_grad_() for name in ("x", "weights"))
        want = dense(x, own["ids"], weights, experts)
        want.backward(own["grad"].double())
        assert_exact(out, want, f"rank {rank}: output")
        assert_exact(of_x, x.grad, f"rank {rank}: gradient of tokens")
        assert_exact(of_weights, weights.grad, f"rank {rank}: gradient of router weights")
    for name, whole in experts.parameters().items():
        parts = torch.cat([gradients[name] for *_, gradients in made])
        assert_exact(parts, whole.grad, f"gradient of {name}")
        assert parts.any(), "numbers that could tell nothing"


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("world", TOKENS)
def test_outputs_and_gradients_are_those_of_a_dense_layer(world: int, routing: str) -> None:
    """Also with a rank without tokens, with as many as it may have, and where all go to one expert or one rank."""
    check(config(world), TOKENS[world], routing)


@pytest.mark.parametrize(
    ("changes", "options"),
    [({}, {"mode": "exact"}), ({"row_alignment": 8}, {}), ({}, {"capacity": 40}), ({}, {"dtype": torch.float32})],
    ids=["exact", "padded rows", "small capacity", "float32 parameters"],
)
def test_options_change_no_exact_result(changes: dict, options: dict) -> None:
    check(config(3, **changes), TOKENS[3], "masked", **options)


class Repeating(torch.nn.Module):
    """A router of somebody's, whose tokens name their first expert three times."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(x), 3, dtype=torch.int64), torch.ones(len(x), 3)


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("repeats", "capacity", "rows"), [(False, None, 54), (True, None, 81), (False, 60, 60)], ids=str
)
def test_routers_that_repeat_no_expert_need_rows_for_the_experts_of_a_rank(
    repeats: bool, capacity: int | None, rows: int, gradients: bool
) -> None:
    """27 tokens with three experts each may bring rank 0 as many rows for its two experts, and do."""
    cfg = config(3)
    experts, x = small_experts(cfg), torch.ones(9, cfg.hidden).bfloat16()
    own = Router(cfg.hidden, cfg.num_experts, cfg.top_k, correction=True)
    own.correction[:2] = 100.0

    def program(rank: int, comm: str) -> int:
        options = {"router": Repeating() if repeats else own, "capacity": capacity}
        layer, seen = layer_of(cfg, rank, comm, experts, **options), []
        compute = layer.compute
        layer.compute = lambda rows, row_offsets: seen.append((rows, row_offsets)) or compute(rows, row_offsets)
        with torch.set_grad_enabled(gradients):
            assert layer(x).isfinite().all()
        layer.communicator.synchronize()
        ((found, offsets),) = seen
        assert rank or offsets[-1] == (81 if repeats else 54)
        return len(found)

    assert on_all_ranks(cfg, program)[0] == [rows] * 3


def test_rows_of_no_token_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in outputs nor in gradients: whatever dispatch and a grouped matmul leave in rows behind the last one."""
    grouped_mm = torch.nn.functional.grouped_mm

    def poisoned(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        behind = torch.arange(len(rows))[:, None] >= offs[-1]
        return grouped_mm(rows, weight, offs=offs).masked_fill(behind, torch.nan)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", poisoned)
    poison_new_buffers(monkeypatch)
    check(config(3), TOKENS[3], "masked")


@pytest.mark.parametrize("routing", ["uniform", "masked"])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_layers_over_nodes(ranks_per_node: int, routing: str) -> None:
    check(config(4, num_experts=12, ranks_per_node=ranks_per_node), (9, 0, 7, 2), routing)
