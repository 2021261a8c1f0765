"""Batches of callers that know how many rows come: the results and gradients of ops, also where only an op will do."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.record import align_up
from cute_ep.ops.batches import PlainBatch
from cute_ep.ops.calls import dispatch_rows
from cute_ep.ops.registry import communicator_of
from cute_ep.ops.row_weights import dispatch_weighted, weighted_rows

from .layer import Given, check, given, gradients
from .ranks import CFG, on_all_ranks

TOKENS = (9, 0, 7)
PADDED = replace(CFG, row_alignment=8)
BOTH = pytest.mark.parametrize("cfg", [CFG, PADDED], ids=["dense rows", "padded rows"])
MODES = pytest.mark.parametrize("mode", ["exact", "partial"])


def coming(one: Given, rank: int) -> int:
    """Rows of a rank, padding included."""
    ids, local = torch.cat([ids.flatten() for ids in one.ids]), one.cfg.local_experts
    counts = [int((ids == expert).sum()) for expert in range(rank * local, (rank + 1) * local)]
    return sum(align_up(count, one.cfg.alignment) for count in counts)


def layer_of(one: Given, *, modes: bool = False) -> Any:
    """A layer by `dispatch_rows`, with room for more than come."""

    def layer(comm: str, x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, mode: CombineMode) -> Tensor:
        own = communicator_of(comm)
        come = coming(one, own.rank)
        batch = dispatch_rows(x, ids, weights, own, come + 5, lambda: come)
        assert len(batch.tokens) == len(batch.row_weights) == come
        rows = grouped_mm(batch.tokens, experts, offs=batch.row_offsets[1:]).relu()
        with Seen() if modes else torch.enable_grad():
            return cute_ep.ops.combine(rows, batch, mode)

    return layer


class Seen(TorchDispatchMode):
    """Sees calls, and changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@BOTH
@MODES
@pytest.mark.parametrize("modes", [False, True], ids=["plainly", "in a mode"])
@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated", "one_rank"])
def test_gradients_are_those_of_a_dense_layer(cfg: EPConfig, routing: str, mode: CombineMode, modes: bool) -> None:
    one = given(cfg, TOKENS, routing)
    made, calls = on_all_ranks(
        cfg, lambda rank, comm: gradients(one, rank, comm, mode, call=layer_of(one, modes=modes))
    )
    for rank, parts in enumerate(made):
        check(one, rank, parts)
    assert calls == [["dispatch", mode, "dispatch", "unweighted", "partial"]] * 3


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_a_checkpoint_makes_the_rounds_again(reentrant: bool) -> None:
    one = given(CFG, TOKENS, "masked")

    def again(*arguments: Any) -> Tensor:
        return checkpoint(layer_of(one), *arguments, use_reentrant=reentrant)

    made, calls = on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm, call=again))
    for rank, parts in enumerate(made):
        check(one, rank, parts)
    assert calls == [["dispatch", "exact"] * 2 + ["dispatch", "unweighted", "partial"]] * 3


@pytest.mark.parametrize("seen", [0, 1], ids=["first", "recomputed"])
def test_a_mode_may_see_one_of_two_passes(seen: int) -> None:
    """A checkpoint compares what a call has saved with what the other kind of call saves."""
    one = given(CFG, TOKENS, "masked")

    def again(*arguments: Any) -> Tensor:
        passes = iter(range(2))

        def run(*arguments: Any) -> Tensor:
            with Seen() if next(passes) == seen else nullcontext():
                return layer_of(one)(*arguments)

        return checkpoint(run, *arguments, use_reentrant=False)

    made, _ = on_all_ranks(CFG, lambda rank, comm: gradients(one, rank, comm, call=again))
    for rank, parts in enumerate(made):
        check(one, rank, parts)


@BOTH
@MODES
@pytest.mark.parametrize("modes", [False, True], ids=["plainly", "in a mode"])
def test_without_gradients_the_bits_are_those_of_the_ops(cfg: EPConfig, mode: CombineMode, modes: bool) -> None:
    """Of sums with weights, and of sums without."""
    one = given(cfg, TOKENS, "masked")

    def program(rank: int, comm: str) -> tuple[Tensor, ...]:
        own, come = communicator_of(comm), coming(one, rank)
        sent = one.x[rank].bfloat16(), one.ids[rank], one.weights[rank]
        with torch.no_grad():
            want = cute_ep.ops.dispatch(*sent, comm, capacity=come)
            got = dispatch_rows(*sent, own, come, lambda: come)
            sums = weighted_rows(got)
            with Seen() if modes else torch.no_grad():
                got_sum = cute_ep.ops.combine(got.tokens, got, mode)
                plain_sum = cute_ep.ops.combine(got.tokens, sums.batch, mode)
            want_sum = cute_ep.ops.combine(want.tokens, want, mode)
            ones = want._replace(
                router_weights=torch.ones_like(one.weights[rank]), weights=torch.ones_like(want.weights)
            )
            want_plain = cute_ep.ops.combine(want.tokens, ones, mode)
        for name in ("tokens", "row_weights", "row_offsets", "row_counts"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert sums.weights is not None and torch.equal(sums.weights, want.row_weights)
        return got_sum, want_sum, plain_sum, want_plain

    for got_sum, want_sum, plain_sum, want_plain in on_all_ranks(cfg, program)[0]:
        assert torch.equal(got_sum, want_sum) and torch.equal(plain_sum, want_plain)
        assert not len(got_sum) or not torch.equal(want_sum, want_plain), "numbers that could tell nothing"


@BOTH
@MODES
def test_experts_that_multiply_have_the_gradients_of_a_dense_layer(cfg: EPConfig, mode: CombineMode) -> None:
    one = given(cfg, TOKENS, "uniform")

    def layer(comm: str, x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, mode: CombineMode) -> Tensor:
        come = coming(one, communicator_of(comm).rank)
        # weights need no gradient, so nothing is sent on the second communicator
        rows = dispatch_weighted(x, ids, weights, comm, "", come + 3, rows=come)
        out = grouped_mm(rows.tokens, experts, offs=rows.batch.row_offsets[1:]).relu()
        return cute_ep.ops.combine((out * rows.weights[:, None]).bfloat16(), rows.batch, mode)

    made, calls = on_all_ranks(cfg, lambda rank, comm: gradients(one, rank, comm, mode, call=layer, weighted=False))
    for rank, parts in enumerate(made):
        check(one, rank, parts, weighted=False)
    assert calls == [["dispatch", mode, "dispatch", "partial"]] * 3


def test_a_mode_sees_a_dispatch_as_an_op() -> None:
    one = given(CFG, TOKENS, "uniform")

    def program(rank: int, comm: str) -> Tensor:
        own, come = communicator_of(comm), coming(one, rank)
        with Seen(), torch.no_grad():
            batch = dispatch_rows(one.x[rank].bfloat16(), one.ids[rank], one.weights[rank], own, come + 5, lambda: come)
            assert isinstance(batch, cute_ep.ops.Batch)
            return cute_ep.ops.combine(batch.tokens, batch)

    for rank, out in enumerate(on_all_ranks(CFG, program)[0]):
        assert out.shape == one.x[rank].shape


def test_ones_are_made_once_and_outside_of_inference_mode() -> None:
    def program(rank: int, comm: str) -> None:
        own = communicator_of(comm)
        with torch.inference_mode():
            made = own.ones
        assert own.ones is made and not made.is_inference() and (made == 1).all()

    on_all_ranks(CFG, program)


def test_a_batch_of_a_closed_communicator_is_refused() -> None:
    def program(rank: int, comm: str) -> tuple[PlainBatch, Tensor]:
        one, own = given(CFG, TOKENS, "uniform"), communicator_of(comm)
        come = coming(one, rank)
        with torch.no_grad():
            batch = dispatch_rows(one.x[rank].bfloat16(), one.ids[rank], one.weights[rank], own, come, lambda: come)
        assert isinstance(batch, PlainBatch)
        return batch, batch.tokens

    batch, rows = on_all_ranks(CFG, program)[0][0]
    with pytest.raises((cute_ep.EPError, EPInputError), match="closed"):
        cute_ep.ops.combine(rows, batch)
