"""Gradients are refused before anything is sent, and torch's modes change nothing, on both backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

import cute_ep
from cute_ep import EPCommunicator, connect_local, fused_silu, quantize
from cute_ep.api.buffers import tensors_of
from cute_ep.api.calls import DispatchInput
from cute_ep.api.errors import EPInputError
from cute_ep.api.types import FormatName, SwigluFormat
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference.dispatch import dispatch, encode_source, receive

from .one_rank import ONE_RANK, inputs_of, random

GRADIENT = r"\.requires_grad = True: must be False while gradients are enabled.*torch\.no_grad\(\)"
TWO_RANKS = replace(ONE_RANK, world_size=2)


def rows_of(batch: Any) -> torch.Tensor:
    return torch.zeros(batch.src_info.shape[0], ONE_RANK.hidden).bfloat16()


# ---- gradients


@pytest.mark.parametrize("name", ["x", "router_weights"])
@pytest.mark.parametrize("call", ["dispatch", "dispatch_async", "plan_dispatch"])
def test_dispatch_refuses_what_requires_a_gradient(lone_rank: EPCommunicator, call: str, name: str) -> None:
    """Before anything is sent: the rank is usable afterwards."""
    given = dict(zip(("x", "topk_ids", "router_weights"), inputs_of(), strict=True))
    given[name].requires_grad_()
    with pytest.raises(EPInputError, match=name + GRADIENT):
        getattr(lone_rank, call)(**given)
    given[name].requires_grad_(False)
    batch = lone_rank.dispatch(**given)
    assert lone_rank.combine(rows_of(batch), batch).shape == given["x"].shape


def test_combine_refuses_what_requires_a_gradient(lone_rank: EPCommunicator) -> None:
    """Rows, weights that it is given, and weights that dispatch was given."""
    x, ids, weights = inputs_of()
    batch = lone_rank.dispatch(x, ids, weights)
    rows = rows_of(batch)
    with pytest.raises(EPInputError, match="rows" + GRADIENT):
        lone_rank.combine(rows.clone().requires_grad_(), batch)
    with pytest.raises(EPInputError, match="router_weights" + GRADIENT):
        lone_rank.combine(rows, batch, weights.clone().requires_grad_(), "exact")
    weights.requires_grad_()
    with pytest.raises(EPInputError, match="router_weights" + GRADIENT):
        lone_rank.combine(rows, batch, mode="exact")


def test_without_gradients_what_would_require_one_is_taken(lone_rank: EPCommunicator) -> None:
    x, ids, weights = inputs_of()
    with torch.no_grad():
        batch = lone_rank.dispatch(x.requires_grad_(), ids, weights.requires_grad_())
        sums = lone_rank.combine(rows_of(batch), batch)
    assert not sums.requires_grad and sums.shape == x.shape


@pytest.mark.parametrize(
    "call",
    [lambda x: quantize(x, "fp8"), fused_silu, lambda x: fused_silu(x, fmt="fp8")],
    ids=["quantize", "fused_silu", "fused_silu in fp8"],
)
def test_local_operations_refuse_what_requires_a_gradient(call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(4, 256).bfloat16().requires_grad_()
    with pytest.raises(EPInputError, match=r"x\.requires_grad = True.*torch\.no_grad\(\)"):
        call(x)
    with torch.no_grad():
        call(x)
    with torch.inference_mode():
        call(x)


def test_quantize_refuses_a_scale_that_requires_a_gradient() -> None:
    with pytest.raises(EPInputError, match=r"input_scale\.requires_grad"):
        quantize(random(4, 256), "nvfp4", torch.ones(1, requires_grad=True))


# ---- outputs that may not be overwritten


def in_new_object(buffers: Any) -> Any:
    """The same tensors in another object, which no communicator has seen."""
    return replace(buffers)


def test_buffers_of_inference_mode_are_refused_outside_of_it(lone_rank: EPCommunicator) -> None:
    given = inputs_of()
    with torch.inference_mode():
        buffers = lone_rank.allocate()
        lone_rank.dispatch(*given, out=buffers)
    with pytest.raises(EPInputError, match=r"out\.tokens\.is_inference\(\) = True: must be False outside of"):
        lone_rank.dispatch(*given, out=in_new_object(buffers))


def inference_tensor(like: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.empty_like(like)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    ("make_out", "message"),
    [
        pytest.param(
            lambda x: torch.nn.Parameter(torch.empty_like(x)),
            r"out = Parameter: must be a tensor of its own",
            id="parameter",
        ),
        pytest.param(
            lambda x: torch.nn.Parameter(torch.empty_like(x), requires_grad=False),
            r"out = Parameter",
            id="parameter without gradient",
        ),
        pytest.param(
            lambda x: torch.empty_like(x).requires_grad_(),
            r"out\.requires_grad = True: must be False, the call overwrites it",
            id="requires a gradient",
        ),
        pytest.param(inference_tensor, r"out\.is_inference\(\) = True", id="of inference mode"),
    ],
)
def test_combine_overwrites_no_tensor_that_autograd_knows(
    lone_rank: EPCommunicator, make_out: Callable[[torch.Tensor], torch.Tensor], message: str, mode: Callable
) -> None:
    x, ids, weights = inputs_of()
    batch, out = lone_rank.dispatch(x, ids, weights), make_out(x)
    with mode(), pytest.raises(EPInputError, match=message):
        lone_rank.combine(rows_of(batch), batch, out=out)


def test_in_inference_mode_its_own_tensors_are_outputs(lone_rank: EPCommunicator) -> None:
    x, ids, weights = inputs_of()
    batch, out = lone_rank.dispatch(x, ids, weights), inference_tensor(x)
    with torch.inference_mode():
        assert lone_rank.combine(rows_of(batch), batch, out=out) is out


def test_fused_silu_overwrites_no_parameter() -> None:
    with pytest.raises(EPInputError, match="out = Parameter"):
        fused_silu(random(4, 256), out=torch.nn.Parameter(torch.empty(4, 128).bfloat16()))


# ---- ranks with each other


def is_weighted(total: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """What comes home of experts that return their rows: each token times the sum of its weights."""
    torch.testing.assert_close(total.float(), x.float() * weights.sum(1, keepdim=True), rtol=2**-7, atol=1e-5)


def test_an_out_that_one_rank_may_not_overwrite_stops_no_other_rank() -> None:
    """The call that gave it raises; then the round goes on."""
    ranks = connect_local(TWO_RANKS, ["cpu"] * 2)
    given = [inputs_of(TWO_RANKS) for _ in ranks]
    with torch.inference_mode():
        buffers = ranks[0].allocate()
    with pytest.raises(EPInputError, match=r"out\.tokens\.is_inference"):
        ranks[0].dispatch(*given[0], out=buffers)
    batches = [ep.dispatch(*one) for ep, one in zip(ranks, given, strict=True)]
    rows = [batch.tokens[: int(batch.num_rows)].clone() for batch in batches]
    with pytest.raises(EPInputError, match="out = Parameter"):
        ranks[0].combine(rows[0], batches[0], out=torch.nn.Parameter(torch.empty_like(given[0][0])))
    sums = [ep.combine(row, batch) for ep, row, batch in zip(ranks, rows, batches, strict=True)]
    for ep, total, (x, _, weights) in zip(ranks, sums, given, strict=True):
        ep.synchronize()
        is_weighted(total, x, weights)


def test_a_rank_in_inference_mode_gets_its_rows_from_one_that_is_not() -> None:
    ranks, given = connect_local(TWO_RANKS, ["cpu"] * 2), [inputs_of(TWO_RANKS) for _ in range(2)]
    with torch.inference_mode():
        first = ranks[0].dispatch(*given[0])
    batches = [first, ranks[1].dispatch(*given[1])]
    rows = [batch.tokens[: int(batch.num_rows)].clone() for batch in batches]
    with torch.inference_mode():
        total = ranks[0].combine(rows[0], batches[0])
    assert not ranks[1].combine(rows[1], batches[1]).is_inference() and total.is_inference()
    x, _, weights = given[0]
    is_weighted(total, x, weights)


# ---- modes


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "another device": lambda: torch.device("meta"),
}


def assert_same(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Types and bits, and that nothing requires a gradient."""
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype and not one.requires_grad
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def everything(fmt: FormatName) -> list[torch.Tensor]:
    """All that a round of two ranks in a format, `quantize` and `fused_silu` compute from the same random numbers."""
    torch.manual_seed(3)
    cfg = replace(TWO_RANKS, dispatch_format=fmt)
    given = [inputs_of(cfg) for _ in range(2)]
    ranks = connect_local(cfg, ["cpu"] * 2)
    batches = [ep.dispatch(*one) for ep, one in zip(ranks, given, strict=True)]
    rows = [random(int(batch.num_rows), cfg.hidden) for batch in batches]
    made = []
    for combine in COMBINE_MODES:
        made += [ep.combine(row, b, mode=combine) for ep, row, b in zip(ranks, rows, batches, strict=True)]
    for batch in batches:
        made += [batch.tokens[: int(batch.num_rows)].view(torch.uint8), batch.row_map, batch.src_info[:1]]
    if fmt != "bf16":
        made += [part for part in quantize(given[0][0], fmt) if part is not None]
    if fmt in get_args(SwigluFormat):
        made += list(fused_silu(random(4, 256), fmt=fmt))
    for batch in batches:
        made.append(cute_ep.dequantize(batch, fmt)[: int(batch.num_rows)])
    return [*made, fused_silu(random(4, 256))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "mxfp8", "nvfp4_row"])
def test_modes_change_neither_bytes_nor_types_on_the_cpu(mode: str, fmt: FormatName) -> None:
    wanted = everything(fmt)
    with MODES[mode]():
        got = everything(fmt)
    assert_same(got, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", ["bf16", "nvfp4_row"])
def test_functions_of_the_reference_compute_the_same_in_any_mode(mode: str, fmt: FormatName) -> None:
    """Called as they are, without a communicator that hides the mode from them."""
    cfg = replace(TWO_RANKS, dispatch_format=fmt)
    given = [DispatchInput(*inputs_of(cfg)) for _ in range(2)]

    def everything() -> list[torch.Tensor]:
        sources = [encode_source(cfg, one) for one in given]
        every = [receive(cfg, 0, dict(enumerate(sources)))]
        xs, ids, weights = ([getattr(one, name) for one in given] for name in ("x", "topk_ids", "router_weights"))
        every += dispatch(cfg, xs, ids, router_weights=weights)
        made = [sources[0].rows.payload, *(one for batch in every for one in tensors_of(batch.buffers).values())]
        return [one for one in made if one is not None]

    wanted = everything()
    with MODES[mode]():
        got = everything()
    assert_same(got, wanted)
