"""A small model with one expert layer, over the ops on several ranks or without dispatch in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, mse_loss, silu

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.ops.registry import communicator_of

CFG = EPConfig(hidden=64, num_experts=8, top_k=2, max_tokens_per_rank=48, world_size=2, timeout_s=60)
INNER, STEPS = 32, 30
TOKENS = (48, 31)
"""Tokens of each rank."""

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens, ids, router weights, up, down) -> [T, hidden]."""


class Model(torch.nn.Module):
    """x + experts(x) behind a linear layer.

    first, count: its experts. wanted: the ids that calls take in turn; without, those of the highest scores. `chosen`:
    the ids of each call.
    """

    def __init__(self, first: int, count: int, wanted: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.wanted = wanted
        self.chosen: list[Tensor] = []
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / shape[-2] ** 0.5

        hidden, experts = CFG.hidden, CFG.num_experts
        self.inlet, self.router = (torch.nn.Parameter(draw(hidden, width)) for width in (hidden, experts))
        up, down = draw(experts, hidden, 2 * INNER), draw(experts, INNER, hidden)
        self.up, self.down = (torch.nn.Parameter(one[first : first + count].clone()) for one in (up, down))

    def forward(self, x: Tensor, experts: Experts) -> Tensor:
        x = x @ self.inlet
        scores = (x @ self.router).softmax(1)
        ids = self.wanted[len(self.chosen)] if self.wanted else scores.topk(CFG.top_k).indices
        self.chosen.append(ids)
        weights = scores.gather(1, ids)
        return x + experts(x.bfloat16(), ids, weights, self.up.bfloat16(), self.down.bfloat16()).float()


def inner(gate_up: Tensor) -> Tensor:
    return silu(gate_up[..., :INNER]) * gate_up[..., INNER:]


def dispatched(comm: str, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    batch = cute_ep.ops.dispatch(x, ids, weights, comm)
    ends = batch.row_offsets[1:]
    return cute_ep.ops.combine(grouped_mm(inner(grouped_mm(batch.tokens, up, offs=ends)), down, offs=ends), batch)


def dense(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every expert computes every token."""
    rows = torch.stack([inner(x @ u) @ d for u, d in zip(up, down, strict=True)])  # [experts, T, hidden]
    chosen = rows[ids.t(), torch.arange(len(x), device=x.device)].float()  # [top_k, T, hidden]
    return (weights.t()[:, :, None] * chosen).sum(0).bfloat16()


def data(device: torch.device | str) -> list[tuple[Tensor, Tensor]]:
    """(inputs, targets) of every rank."""
    generator = torch.Generator().manual_seed(1)
    task = torch.randn(CFG.hidden, CFG.hidden, generator=generator) / CFG.hidden**0.5
    x = [torch.randn(count, CFG.hidden, generator=generator) for count in TOKENS]
    return [(one.to(device), (one @ task).tanh().to(device)) for one in x]


class Training(NamedTuple):
    """The loss of each step, and the expert ids of each call, [T, top_k]."""

    losses: list[float]
    ids: list[Tensor]


def train(
    model: Model, experts: Experts, given: list[tuple[Tensor, Tensor]], join: Callable[[Tensor], None]
) -> Training:
    """Train a model for STEPS steps.

    Args:
        given: (inputs, targets) that this process computes.
        join: replaces a tensor by its sum over all processes.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    total, losses = sum(TOKENS) * CFG.hidden, []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([mse_loss(model(x, experts), y, reduction="sum") / total for x, y in given]).sum()
        loss.backward()
        loss = loss.detach()
        for shared in (model.inlet.grad, model.router.grad, loss):
            assert shared is not None
            join(shared)
        losses.append(loss.item())
        optimizer.step()
    return Training(losses, model.chosen)


def train_over_ops(rank: int, comm: str, join: Callable[[Tensor], None], ids: Sequence[Tensor]) -> Training:
    """With one rank's share of the experts and of the tokens, on its device, and the ids of each step: where two
    experts score alike, a rounding would choose between them."""
    device = communicator_of(comm).device
    model = Model(rank * CFG.local_experts, CFG.local_experts, ids).to(device)
    return train(model, partial(dispatched, comm), [data(device)[rank]], join)


def train_dense(device: torch.device | str = "cpu") -> Training:
    """With all experts and all tokens in this process: each step calls once for each rank's."""
    return train(Model(0, CFG.num_experts).to(device), dense, data(device), lambda tensor: None)
