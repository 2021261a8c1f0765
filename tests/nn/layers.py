"""Layers on the ranks of a group, in threads as their processes would run, and what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.nn import MoELayer, shard_state_dict
from cute_ep.ops.registry import communicator_of

from .oracle import GATES, Experts

INNER = 16


def config(world: int, **changes: Any) -> EPConfig:
    values = dict(hidden=32, num_experts=6, top_k=3, max_tokens_per_rank=9, world_size=world, timeout_s=30)
    return EPConfig(**(values | changes))


def rounded(tensor: Tensor) -> Tensor:
    """In float64, as bfloat16 holds it."""
    return tensor.bfloat16().double()


def random_experts(cfg: EPConfig, gate: str, *, bias: bool = False, seed: int = 0) -> Experts:
    generator, columns = torch.Generator().manual_seed(seed), GATES[gate][0] * INNER

    def draw(*shape: int) -> Tensor:
        return rounded(torch.randn(cfg.num_experts, *shape, generator=generator) * shape[-1] ** -0.5).requires_grad_()

    gate_up, down = draw(columns, cfg.hidden), draw(cfg.hidden, INNER)
    return Experts(gate, gate_up, down, draw(columns) if bias else None, draw(cfg.hidden) if bias else None)


def layer_of(cfg: EPConfig, rank: int, comm: str, experts: Experts, **options: Any) -> MoELayer:
    """One rank's layer, connected, with its part of these experts."""
    layer = MoELayer(cfg, INNER, gate=experts.gate, bias=experts.down_bias is not None, **options)
    layer.attach(communicator_of(comm))
    state = {name: value.detach().bfloat16() for name, value in experts.parameters().items()}
    layer.load_state_dict(shard_state_dict(layer, state, rank), strict=False)
    return layer


def poison_new_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows of new output memory hold NaN, as memory may."""
    allocate = DispatchBuffers.allocate

    def filled(*arguments: Any) -> DispatchBuffers:
        buffers = allocate(*arguments)
        buffers.tokens.fill_(torch.nan)
        return buffers

    monkeypatch.setattr(DispatchBuffers, "allocate", filled)


def gradients_of(layer: MoELayer) -> dict[str, Tensor]:
    """Of the experts' parameters, by their names."""
    return {name: getattr(layer, name).grad for name in layer.expert_names()}
