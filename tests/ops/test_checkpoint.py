"""`torch.utils.checkpoint` computes a layer again in the backward pass, on every rank in the same order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.testing.compare import assert_bits

from .layer import given, gradients, layer
from .ranks import ALONE, CFG, counted, keep_rounds, on_all_ranks

TOKENS = (9, 0, 7)
FORWARD, BACKWARD = ["dispatch", "exact"], ["dispatch", "unweighted", "partial"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_a_checkpointed_layer_has_the_same_gradients_and_makes_its_rounds_again(reentrant: bool) -> None:
    one = given(CFG, TOKENS, "masked")

    def again(*arguments: Any) -> torch.Tensor:
        return checkpoint(layer, *arguments, use_reentrant=reentrant)

    made, calls = on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm, call=again))
    wanted, _ = on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm))
    for got, want in zip(made, wanted, strict=True):
        for part, own in zip(got, want, strict=True):
            assert_bits(part, own, "output or gradient")
    assert calls == [FORWARD + FORWARD + BACKWARD] * 3


def contexts() -> tuple:
    return create_selective_checkpoint_contexts(keep_rounds)


def keeping(*arguments: Any) -> torch.Tensor:
    return checkpoint(layer, *arguments, use_reentrant=False, context_fn=contexts)


def test_a_policy_can_keep_what_rounds_returned() -> None:
    """Then only the experts are computed again, and no round is made twice."""
    one = given(CFG, TOKENS, "uniform")
    made, calls = on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm, call=keeping))
    wanted, _ = on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm))
    for got, want in zip(made, wanted, strict=True):
        for part, own in zip(got, want, strict=True):
            assert_bits(part, own, "output or gradient")
    assert calls == [FORWARD + BACKWARD] * 3


def test_layers_in_a_row_are_computed_again_one_by_one() -> None:
    one = given(CFG, TOKENS, "uniform")

    def program(rank: int, comm: str) -> torch.Tensor:
        x = one.x[rank].bfloat16().requires_grad_()
        arguments = one.ids[rank], one.weights[rank].clone().requires_grad_(), one.of_rank(rank).bfloat16()
        out = x
        for _ in range(3):
            out = checkpoint(layer, comm, out, *arguments, use_reentrant=False).clamp(-1, 1)
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    made, calls = on_all_ranks(CFG, program)
    assert all(grad.isfinite().all() for grad in made)
    assert calls == [3 * FORWARD + 3 * (FORWARD + BACKWARD[:2] + BACKWARD[2:])] * 3


# ---- with torch.compile


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("call", [keeping, partial(checkpoint, layer, use_reentrant=False)], ids=["policy", "none"])
def test_a_checkpoint_in_compiled_code_makes_no_round_again(call: Callable) -> None:
    (ep,), one = connect_local(ALONE, ["cpu"]), given(ALONE, (7,), "masked")
    comm, calls = cute_ep.ops.register(ep), counted(ep)
    want = gradients(one, 0, comm)
    calls.clear()
    for part, own in zip(gradients(one, 0, comm, call=compiled(call)), want, strict=True):
        assert_bits(part, own, "output or gradient")
    assert calls == FORWARD + BACKWARD


def test_a_checkpoint_around_compiled_code_makes_its_rounds_again() -> None:
    (ep,), one = connect_local(ALONE, ["cpu"]), given(ALONE, (7,), "masked")
    comm, calls = cute_ep.ops.register(ep), counted(ep)
    want = gradients(one, 0, comm)
    calls.clear()
    call = partial(checkpoint, compiled(layer), use_reentrant=False)
    for part, own in zip(gradients(one, 0, comm, call=call), want, strict=True):
        assert_bits(part, own, "output or gradient")
    assert calls == FORWARD + FORWARD + BACKWARD
