"""Experts that multiply by the weights themselves have the gradients of a dense layer, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.types import CombineMode
from cute_ep.ops import library
from cute_ep.ops.registry import communicator_of
from cute_ep.ops.row_weights import SCALAR_HIDDEN, dispatch_weighted
from tests.ops.layer import check, given, gradients
from tests.ops.ranks import CFG, counted, on_all_ranks
from tests.reference.ranks import processes

TOKENS = (9, 0, 7)
PADDED = replace(CFG, row_alignment=8)
Scalars = tuple[list[str], list[list[str]]]


@pytest.fixture(params=[CFG, PADDED], ids=["dense rows", "padded rows"])
def cfg(request: pytest.FixtureRequest) -> EPConfig:
    return request.param


@pytest.fixture
def scalars(cfg: EPConfig) -> Iterator[Scalars]:
    """Names of the communicators for gradients of weights, and their calls."""
    with processes(replace(cfg, hidden=SCALAR_HIDDEN)) as ranks:
        calls = [counted(one) for one in ranks]
        yield [cute_ep.ops.register(one) for one in ranks], calls


def layer_with(scalars: list[str], *, without: int | None = None) -> Any:
    """A layer, and the rank that has no use for the weights."""

    def layer(comm: str, x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, mode: CombineMode) -> Tensor:
        own = communicator_of(comm)
        rows = dispatch_weighted(x, ids, weights, comm, scalars[own.rank], own.cfg.max_rows)
        out = grouped_mm(rows.tokens, experts, offs=rows.batch.row_offsets[1:]).relu()
        factors = torch.ones_like(rows.weights) if own.rank == without else rows.weights
        return cute_ep.ops.combine((out * factors[:, None]).bfloat16(), rows.batch, mode)

    return layer


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("routing", ["uniform", "masked", "repeated", "one_expert", "one_rank"])
def test_gradients_are_those_of_a_dense_layer(cfg: EPConfig, scalars: Scalars, routing: str, mode: CombineMode) -> None:
    """Also with a rank without tokens, masked ids, an expert twice in a token, and experts without rows."""
    names, returned = scalars
    one = given(cfg, TOKENS, routing)
    made, calls = on_all_ranks(cfg, lambda rank, comm: gradients(one, rank, comm, mode, call=layer_with(names)))
    for rank, parts in enumerate(made):
        check(one, rank, parts)
    assert all(part.count_nonzero() > 9 for part in made[2]), "numbers that could tell nothing"
    assert calls == [["dispatch", mode, "dispatch", "partial"]] * 3
    assert returned == [["dispatch", "unweighted"]] * 3


def test_ranks_that_need_no_gradient_of_weights_make_the_same_calls(cfg: EPConfig, scalars: Scalars) -> None:
    """A rank whose rows do not use them; tokens alone have one on all ranks."""
    names, returned = scalars
    one = given(cfg, TOKENS, "uniform")
    on_all_ranks(cfg, lambda rank, comm: gradients(one, rank, comm, "partial", call=layer_with(names, without=1)))
    assert returned == [["dispatch", "unweighted"]] * 3
    made, calls = on_all_ranks(
        cfg, lambda rank, comm: gradients(one, rank, comm, "partial", call=layer_with(names), weighted=False)
    )
    for rank, parts in enumerate(made):
        check(one, rank, parts, weighted=False)
    assert calls == [["dispatch", "partial", "dispatch", "partial"]] * 3
    assert returned == [["dispatch", "unweighted"]] * 3


def test_rows_are_not_cleared_before_a_dispatch(
    cfg: EPConfig, scalars: Scalars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes all that is read."""
    cleared, new_buffers = [], library.new_buffers
    monkeypatch.setattr(library, "new_buffers", lambda *given: (cleared.append(given), new_buffers(*given))[1])
    one = given(cfg, TOKENS, "uniform")
    on_all_ranks(cfg, lambda rank, comm: gradients(one, rank, comm, "partial", call=layer_with(scalars[0])))
    assert not cleared
