"""An expert layer in numbers that are exact in bfloat16, and the same layer without dispatch, in float64.

Tokens, expert weights and gradients are -1, 0 and 1, router weights quarters: every product and every sum that a layer
or its gradient has is a small multiple of 1/4, which no rounding changes. So gradients are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.types import CombineMode
from cute_ep.ops.registry import communicator_of
from cute_ep.testing.workloads import make_inputs

NONZERO = 0.1
"""Part of the elements of an expert's weights that are not 0."""


@dataclass(frozen=True)
class Given:
    """Arguments of a layer. Of each rank: tokens [T, hidden], ids and router weights [T, top_k], gradient of the
    output [T, hidden]; of all: expert weights [groups of all ranks, hidden, hidden]."""

    cfg: EPConfig
    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    grads: list[Tensor]
    experts: Tensor

    def of_rank(self, rank: int) -> Tensor:
        """Expert weights of a rank."""
        groups = self.cfg.groups
        return self.experts[rank * groups : (rank + 1) * groups]


def signs(shape: tuple[int, ...], generator: torch.Generator, part: float = 2 / 3) -> Tensor:
    """-1, 0 and 1; `part` of them are not 0."""
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return sign.float() * (torch.rand(shape, generator=generator) < part)


@cache
def given(cfg: EPConfig, tokens: tuple[int, ...], routing: str) -> Given:
    inputs, generator = make_inputs(cfg, tokens, routing, 3), torch.Generator().manual_seed(4)
    x, grads, weights = [], [], []
    for count in tokens:
        x.append(signs((count, cfg.hidden), generator))
        grads.append(signs((count, cfg.hidden), generator))
        weights.append(torch.randint(1, 5, (count, cfg.top_k), generator=generator) / 4)
    if cfg.skip_a2a:  # every rank is given all tokens
        x, grads, weights = ([part[0]] * len(tokens) for part in (x, grads, weights))
    experts = signs((cfg.groups * cfg.world_size, cfg.hidden, cfg.hidden), generator, NONZERO)
    return Given(cfg, x, [one.topk_ids for one in inputs], weights, grads, experts)


def layer(comm: str, x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, mode: CombineMode = "exact") -> Tensor:
    """One rank's layer; differentiable in tokens, router weights and expert weights."""
    batch = cute_ep.ops.dispatch(x, ids, weights, comm)
    rows = grouped_mm(batch.tokens, experts, offs=batch.row_offsets[1:]).relu()
    return cute_ep.ops.combine(rows, batch, mode)


def gradients(
    one: Given, rank: int, comm: str, mode: CombineMode = "exact", *, call: object = layer, weighted: bool = True
) -> list[Tensor]:
    """[output, gradients of tokens, router weights and the rank's expert weights] of a layer on one rank, on the CPU.

    Args:
        weighted: whether router weights require a gradient; None instead of it if not.
    """
    device = communicator_of(comm).device
    x = one.x[rank].to(device, torch.bfloat16).requires_grad_()
    weights = one.weights[rank].to(device, copy=True).requires_grad_(weighted)
    experts = one.of_rank(rank).to(device, torch.bfloat16).requires_grad_()
    out = call(comm, x, one.ids[rank].to(device), weights, experts, mode)  # type: ignore[operator]
    out.backward(one.grads[rank].to(device, out.dtype))
    return [None if part is None else part.cpu() for part in (out.detach(), x.grad, weights.grad, experts.grad)]


def dense(one: Given) -> tuple[list[list[Tensor]], Tensor]:
    """([output, gradients of tokens and of router weights] of each rank, gradient of all expert weights)."""
    cfg, experts, made = one.cfg, one.experts.double().requires_grad_(), []
    for rank in range(cfg.world_size):
        x, weights = one.x[rank].double().requires_grad_(), one.weights[rank].double().requires_grad_()
        rows = []
        for token in range(len(x)):
            row = torch.zeros(cfg.hidden, dtype=torch.float64)
            for slot, expert in enumerate(one.ids[rank][token].tolist()):
                home = expert // cfg.local_experts
                if expert >= 0 and (not cfg.skip_a2a or home == rank):
                    group = home * cfg.groups + expert % cfg.local_experts + cfg.fused_shared_expert
                    row = row + weights[token, slot] * (x[token] @ experts[group]).relu()
            first, count = cfg.shared_slice(len(x), rank)
            if first <= token < first + count:
                row = row + (x[token] @ experts[rank * cfg.groups]).relu()
            rows.append(row)
        out = torch.stack(rows) if rows else torch.zeros(0, cfg.hidden, dtype=torch.float64) * experts.sum()
        out.backward(one.grads[rank].double())
        nothing = [torch.zeros_like(one) if one.grad is None else one.grad for one in (x, weights)]
        made.append([out.detach(), *nothing])
    assert experts.grad is not None
    return made, experts.grad


def check(one: Given, rank: int, made: list[Tensor], *, weighted: bool = True) -> None:
    """What `gradients` returned is what the dense layer has. `weighted`: as there."""
    ranks, experts = dense(one)
    (out, of_x, of_weights, of_experts), wanted, groups = made, ranks[rank], one.cfg.groups
    assert torch.equal(out.double(), wanted[0]), f"rank {rank}: output"
    assert torch.equal(of_x.double(), wanted[1]), f"rank {rank}: gradient of tokens"
    assert not weighted or torch.equal(of_weights.double(), wanted[2]), f"rank {rank}: gradient of router weights"
    own = experts[rank * groups : (rank + 1) * groups]
    assert torch.equal(of_experts.double(), own), f"rank {rank}: gradient of experts"
