"""Where there is no gradient, a call that needs one is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import Hooks
from cute_ep.testing.workloads import make_inputs
from tests.fake_gpu import CFG as GPU_CFG
from tests.fake_gpu import Launches, MakeRank, inputs

from .ranks import ALONE, counted


def one_rank(cfg: EPConfig = ALONE) -> tuple[str, list[str], tuple[torch.Tensor, ...], Any]:
    """(name, its calls, arguments of a dispatch, what keeps it)."""
    (ep,), (one,) = connect_local(cfg, ["cpu"]), make_inputs(cfg, (5,), "uniform", 1)
    return cute_ep.ops.register(ep), counted(ep), (one.x, one.topk_ids, one.router_weights), ep


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "bf16"])
def test_formats_with_scale_factors_have_none(fmt: Any) -> None:
    """Neither of dispatch nor of combine, whose gradient would be sent in that format. Without gradients both go on."""
    comm, calls, (x, ids, weights), _ep = one_rank(replace(ALONE, dispatch_format=fmt, hidden=128, row_alignment=None))
    with pytest.raises(
        EPInputError, match=rf"x\.requires_grad = True: must be False with dispatch_format {fmt}, gradi"
    ):
        cute_ep.ops.dispatch(x.requires_grad_(), ids, weights, comm)
    batch = cute_ep.ops.dispatch(x.detach(), ids, weights, comm)
    rows = torch.zeros(len(batch.tokens), 128).bfloat16().requires_grad_()
    with pytest.raises(
        EPInputError, match=r"rows or router_weights\.requires_grad = True: must be False with dispatch"
    ):
        cute_ep.ops.combine(rows, batch)
    with torch.no_grad():
        cute_ep.ops.combine(rows, batch)
    assert calls == ["dispatch", "partial"]


def test_padding_that_holds_anything_has_none() -> None:
    """Gradients of experts' weights are sums over it. Rows without padding have them."""
    for alignment in (1, 8):
        cfg = replace(ALONE, dispatch_format="bf16", row_alignment=alignment, zero_padding=False)
        comm, calls, (x, ids, weights), _ep = one_rank(cfg)
        if alignment == 1:
            cute_ep.ops.dispatch(x.requires_grad_(), ids, weights, comm)
            continue
        with pytest.raises(EPInputError, match=r"must be False without zero_padding where row_alignment = 8, grad"):
            cute_ep.ops.dispatch(x.requires_grad_(), ids, weights, comm)
        assert not calls


def test_hooks_have_none(make_rank: MakeRank, launches: Launches) -> None:
    rank = make_rank(replace(GPU_CFG, dispatch_format="bf16"), hooks=Hooks(epilogue="a:epilogue"))
    x, ids, weights = inputs()
    with (
        launches.forbidden(),
        pytest.raises(EPInputError, match=r"must be False with hooks, whose gradient is unknown"),
    ):
        cute_ep.ops.dispatch(x.requires_grad_(), ids, weights, cute_ep.ops.register(rank))


def test_unweighted_mode_has_none() -> None:
    comm, calls, arguments, _ep = one_rank()
    batch = cute_ep.ops.dispatch(*arguments, comm)
    with pytest.raises(EPInputError, match=r"rows\.requires_grad = True: must be False in unweighted mode"):
        cute_ep.ops.combine(batch.tokens.requires_grad_(), batch, "unweighted")
    assert calls == ["dispatch"]


def test_router_weights_have_none_beside_a_shared_expert() -> None:
    comm, calls, (x, ids, weights), _ep = one_rank(replace(ALONE, fused_shared_expert=True))
    batch = cute_ep.ops.dispatch(x, ids, weights.requires_grad_(), comm)
    with pytest.raises(
        EPInputError, match=r"router_weights\.requires_grad = True: must be False with fused_shared_exp"
    ):
        cute_ep.ops.combine(batch.tokens, batch)
    assert calls == ["dispatch"]


@pytest.mark.parametrize("name", ["x", "router_weights", "rows"])
def test_calls_into_given_memory_have_none(name: str) -> None:
    comm, calls, (x, ids, weights), ep = one_rank()
    x.requires_grad_(name == "x")
    weights.requires_grad_(name == "router_weights")
    buffers = ep.allocate()

    def both() -> None:
        batch = cute_ep.ops.dispatch_into(x, ids, weights, comm, buffers)
        rows = torch.zeros(batch.tokens.shape).bfloat16().requires_grad_(name == "rows")
        cute_ep.ops.combine_into(rows, batch, torch.empty(x.shape).bfloat16())

    with pytest.raises(EPInputError, match=rf"{name}\.requires_grad = True: must be False, calls into given memory"):
        both()
    assert calls == ["dispatch"] * (name == "rows")
    with torch.no_grad():
        both()


def tangent_of(call: Callable[[torch.Tensor], torch.Tensor], one: torch.Tensor) -> torch.Tensor | None:
    """Of what a function returns, in forward mode."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(one, torch.ones_like(one)))).tangent


TRANSFORMS: dict[str, Callable[[Callable, torch.Tensor], Any]] = {
    "vmap": lambda call, one: torch.vmap(call)(torch.stack([one, one])),
    "grad": lambda call, one: torch.func.grad(lambda x: call(x).float().sum())(one),
    "jvp": lambda call, one: torch.func.jvp(call, (one,), (torch.ones_like(one),)),
    "forward mode": tangent_of,
}


@pytest.mark.parametrize("name", ["x", "router_weights", "rows"])
@pytest.mark.parametrize("into", [False, True], ids=["new", "into"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_and_forward_mode_are_refused(transform: str, into: bool, name: str) -> None:
    """torch has no rules for the ops in them, and takes tangents to be zero where nothing says so."""
    comm, calls, (x, ids, weights), ep = one_rank()
    given, buffers = {"x": x, "router_weights": weights}, ep.allocate()
    batch, out = cute_ep.ops.dispatch(x, ids, weights, comm), torch.empty_like(x)

    def call(one: torch.Tensor) -> torch.Tensor:
        if name == "rows":
            return cute_ep.ops.combine_into(one, batch, out) if into else cute_ep.ops.combine(one, batch)
        changed = given | {name: one}
        if into:
            return cute_ep.ops.dispatch_into(changed["x"], ids, changed["router_weights"], comm, buffers).tokens
        return cute_ep.ops.dispatch(changed["x"], ids, changed["router_weights"], comm).tokens

    one = batch.tokens if name == "rows" else given[name]
    kind = "forward-mode differentiation" if transform == "forward mode" else "a transform of torch.func"
    refused = rf"{name}\.requires_grad = True" if into and transform == "grad" else f" = tensor in {kind}: must be out"
    with pytest.raises(EPInputError, match=refused):
        TRANSFORMS[transform](call, one)
    assert calls == ["dispatch"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_gate_in_a_transform_is_refused(transform: str) -> None:
    with pytest.raises(EPInputError, match=r"x = tensor in .*: must be outside"):
        TRANSFORMS[transform](cute_ep.ops.fused_silu, torch.randn(3, 512).bfloat16())


def test_weights_with_a_tangent_are_refused_by_combine() -> None:
    comm, calls, (x, ids, weights), _ep = one_rank()
    batch = cute_ep.ops.dispatch(x, ids, weights, comm)
    with pytest.raises(EPInputError, match="router_weights = tensor in forward-mode differentiation: must be outside"):
        tangent_of(lambda one: cute_ep.ops.combine(batch.tokens, batch._replace(router_weights=one)), weights)
    assert calls == ["dispatch"]
    with forward_ad.dual_level():
        cute_ep.ops.combine(batch.tokens, batch)


def test_combine_has_no_second_derivative() -> None:
    comm, _, (x, ids, weights), _ep = one_rank()
    x.requires_grad_()
    batch = cute_ep.ops.dispatch(x, ids, weights, comm)
    (first,) = torch.autograd.grad(
        cute_ep.ops.combine(batch.tokens * batch.tokens, batch).float().pow(2).sum(), x, create_graph=True
    )
    with pytest.raises(EPError, match="no second derivative: call backward without create_graph"):
        first.sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda comm, x, ids, weights: cute_ep.ops.dispatch(x, ids, weights, comm).tokens, id="dispatch"),
        pytest.param(
            lambda comm, x, ids, weights: cute_ep.ops.combine(x, cute_ep.ops.dispatch(x.detach(), ids, weights, comm)),
            id="combine",
        ),
    ],
)
def test_what_is_refused_in_eager_code_is_refused_when_it_is_compiled(call: Callable) -> None:
    """Before any call."""
    cfg = replace(ALONE, dispatch_format="fp8", hidden=128, row_alignment=None)
    comm, calls, (x, ids, weights), _ep = one_rank(cfg)
    compiled = torch.compile(lambda x, ids, weights: call(comm, x, ids, weights), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="must be False with dispatch_format fp8"):
        compiled(x.requires_grad_(), ids, weights)
    assert calls == []
