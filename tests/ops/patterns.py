"""Programs of several calls, and in which order a process makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cute_ep.ops
from cute_ep.api.interface import EPCommunicator
from cute_ep.testing.workloads import make_inputs

from .ranks import ALONE, keep_rounds


class Rank(NamedTuple):
    """What a pattern has: names of two communicators, ids and router weights of a rank's tokens, and parameters."""

    names: tuple[str, str]
    ids: Tensor
    weights: Tensor
    experts: Tensor


def scaled(rank: Rank, batch: cute_ep.ops.Batch) -> Tensor:
    """Rows times parameters of all experts, whose gradient is a sum over rows: those behind the last are left out."""
    rows = torch.arange(batch.tokens.shape[0], dtype=torch.int32, device=batch.tokens.device)
    tokens = torch.where((rows < batch.num_rows)[:, None], batch.tokens, 0.0)
    return tokens * rank.experts


def one_layer(rank: Rank, x: Tensor, comm: int = 0) -> Tensor:
    batch = cute_ep.ops.dispatch(x, rank.ids, rank.weights, rank.names[comm])
    return cute_ep.ops.combine(torch.tanh(scaled(rank, batch)), batch)


def chain(rank: Rank, x: Tensor) -> Tensor:
    return one_layer(rank, one_layer(rank, x))


def parallel(rank: Rank, x: Tensor) -> Tensor:
    return x + one_layer(rank, x) + one_layer(rank, x.relu())


def micro_batches(rank: Rank, x: Tensor) -> Tensor:
    """Both are sent before the first comes home; the second comes home first."""
    given = rank.ids, rank.weights, rank.names[0]
    first = cute_ep.ops.dispatch(x, *given)
    second = cute_ep.ops.dispatch(x * 0.5, *given)
    home = cute_ep.ops.combine(scaled(rank, second), second)
    return home + cute_ep.ops.combine(scaled(rank, first), first)


def communicators(rank: Rank, x: Tensor) -> Tensor:
    """Two in turn, which have nothing to do with each other."""
    ours, other = (cute_ep.ops.dispatch(x, rank.ids, rank.weights, name) for name in rank.names)
    home = cute_ep.ops.combine(scaled(rank, other), other)
    return home + cute_ep.ops.combine(ours.tokens, ours) + one_layer(rank, x.relu(), 1)


def equal(rank: Rank, x: Tensor) -> Tensor:
    """Equal calls are not merged, and calls that nobody reads are made."""
    one_layer(rank, x)
    batch = cute_ep.ops.dispatch(x, rank.ids, rank.weights, rank.names[0])
    rows = scaled(rank, batch)
    return cute_ep.ops.combine(rows, batch) + cute_ep.ops.combine(rows, batch)


def matmul_between(rank: Rank, x: Tensor) -> Tensor:
    """Much memory and time between the calls, which a scheduler for either moves."""
    wide = torch.cat([x] * 64, dim=1)
    first = one_layer(rank, x)
    large = (wide.t() @ wide).sum(0)
    return first + one_layer(rank, x + large[: x.shape[1]]) + (wide @ wide.t()).sum(1, keepdim=True)


def keeping_rounds() -> tuple:
    return create_selective_checkpoint_contexts(keep_rounds)


def checkpointed(rank: Rank, x: Tensor) -> Tensor:
    """What a policy keeps is not recomputed; the experts are."""
    for _ in range(2):
        x = x + checkpoint(one_layer, rank, x, use_reentrant=False, context_fn=keeping_rounds)
    return x


PATTERNS: dict[str, Callable[[Rank, Tensor], Tensor]] = {
    one.__name__: one for one in (chain, parallel, micro_batches, communicators, equal, matmul_between, checkpointed)
}


SIZES = (0, 1, 2, 7)
"""Numbers of tokens: torch compiles for none, for one, and for the rest."""
OTHER = replace(ALONE, row_alignment=16)
"""Of the second communicator."""


def run(
    pattern: Callable[[Rank, Tensor], Tensor], tokens: int, communicators: Sequence[EPCommunicator]
) -> tuple[list[str], list[Tensor]]:
    """(the calls that a pattern makes on one rank, forward, "backward", backward; output and gradients of tokens,
    router weights and parameters, on the CPU)."""
    device, cfg = communicators[0].device, communicators[0].cfg
    (one,) = make_inputs(replace(cfg, world_size=1), (tokens,), "uniform", 1 + communicators[0].rank)
    experts = torch.linspace(-1, 1, cfg.hidden, device=device).bfloat16().requires_grad_()
    weights = one.router_weights.to(device).requires_grad_()
    first, second = (cute_ep.ops.register(ep) for ep in communicators)
    x = one.x.to(device).requires_grad_()
    with recorded(communicators) as calls:
        out = pattern(Rank((first, second), one.topk_ids.to(device), weights, experts), x)
        calls.append("backward")
        out.backward(torch.ones_like(out))
    made = [out.detach(), x.grad, weights.grad, experts.grad]
    assert all(part is not None for part in made)
    return calls, [part.cpu() for part in made if part is not None]


@contextmanager
def recorded(communicators: Sequence[EPCommunicator]) -> Iterator[list[str]]:
    """The calls that a process makes meanwhile: of which communicator, and of a combine which batch, by the number of
    its dispatch, and the mode."""
    calls: list[str] = []
    batches: dict[int, int] = {}

    def record(number: int, communicator: EPCommunicator) -> None:
        dispatch, combine = communicator.dispatch, communicator.combine

        def dispatched(*arguments: Any, **named: Any) -> Any:
            batch = dispatch(*arguments, **named)
            batches[batch.row_map.data_ptr()] = len(calls)
            calls.append(f"dispatch to {number}")
            return batch

        def combined(rows: Tensor, batch: Any, *arguments: Any, mode: Any, **named: Any) -> Any:
            calls.append(f"{mode} combine of call {batches[batch.row_map.data_ptr()]} to {number}")
            return combine(rows, batch, *arguments, mode=mode, **named)

        communicator.dispatch, communicator.combine = dispatched, combined  # type: ignore[method-assign]

    for number, communicator in enumerate(communicators):
        record(number, communicator)
    try:
        yield calls
    finally:
        for communicator in communicators:
            del communicator.dispatch, communicator.combine  # those of the class again
