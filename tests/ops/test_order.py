"""Compiled code makes the calls of eager code in its order, forward and backward, whatever the number of tokens.

Ranks have code of their own: torch compiles for none, for one, and for other numbers of tokens. On GPUs
`tests/gpu/test_order.py` runs the patterns in both backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cute_ep import connect_local
from cute_ep.api.interface import EPCommunicator
from tests.generated import no_arithmetic

from .patterns import OTHER, PATTERNS, SIZES, Rank, one_layer, run
from .ranks import ALONE


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Also without the caches of graphs, which would bring what another version of the ops has compiled. What inductor
    generates is called and computes nothing."""
    torch._dynamo.reset()
    caches = inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with caches[0], caches[1], no_arithmetic():
        yield
    torch._dynamo.reset()


@pytest.fixture
def communicators() -> list[EPCommunicator]:
    return [*connect_local(ALONE, ["cpu"]), *connect_local(OTHER, ["cpu"])]


@pytest.mark.parametrize("name", PATTERNS)
def test_compiled_calls_come_in_the_order_of_eager_ones(name: str, communicators: list[EPCommunicator]) -> None:
    want, _ = run(PATTERNS[name], SIZES[-1], communicators)
    compiled = torch.compile(PATTERNS[name], fullgraph=True)
    for tokens in SIZES:
        assert run(PATTERNS[name], tokens, communicators)[0] == want, f"eager, {tokens} tokens"
        assert run(compiled, tokens, communicators)[0] == want, f"compiled, {tokens} tokens"


# ---- what compilers make again


def keep_combines(context: object, op: object, *arguments: object, **named: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "combine" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def keeping_combines() -> tuple:
    return create_selective_checkpoint_contexts(keep_combines)


def first_half(rank: Rank, x: Tensor) -> Tensor:
    """Without a policy, in one of two layers."""
    x = x + checkpoint(one_layer, rank, x, use_reentrant=False)
    return x + one_layer(rank, x)


def second_half(rank: Rank, x: Tensor) -> Tensor:
    x = x + one_layer(rank, x)
    return x + checkpoint(one_layer, rank, x, use_reentrant=False)


def half_of_the_rounds(rank: Rank, x: Tensor) -> Tensor:
    """By a policy that would have dispatches made again, and combines not."""
    x = x + checkpoint(one_layer, rank, x, use_reentrant=False, context_fn=keeping_combines)
    return x + one_layer(rank, x)


def plain(rank: Rank, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + one_layer(rank, x).sin()
    return x


@pytest.mark.parametrize("pattern", [first_half, second_half, half_of_the_rounds, plain])
def test_compiled_backward_passes_make_no_round_again(
    pattern: Callable[[Rank, Tensor], Tensor], communicators: list[EPCommunicator]
) -> None:
    want, _ = run(plain, SIZES[-1], communicators)
    compiled = torch.compile(pattern, backend="aot_eager", fullgraph=True)
    for tokens in SIZES:
        assert run(compiled, tokens, communicators)[0] == want, f"{tokens} tokens"


@pytest.mark.parametrize("budget", [0.9, 0.0])
def test_budgets_of_memory_are_refused(budget: float, communicators: list[EPCommunicator]) -> None:
    """What torch makes again for them depends on the number of tokens."""
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    with functorch_config.patch(activation_memory_budget=budget):
        for tokens in SIZES:
            with pytest.raises(Exception, match=rf"activation_memory_budget = {budget}: must be 1"):
                run(compiled, tokens, communicators)
