"""When the reference communicator reads what it is given."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.compare import assert_bits
from cute_ep.errors import EPInputError
from cute_ep.reference_backend import connect_reference
from cute_ep.workloads import make_inputs
from tests.reference.ranks import check_filled, dispatch_all, expected, poisoned, rows_for, small

# ---- when arguments are read


def test_router_weights_inside_the_output():
    """A fused dispatch is refused before it joins the round: the next one is right on all ranks."""
    cfg = small()
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 0)
    first, out = communicators[0], communicators[0].allocate()
    inside = out.weights[0, :5].copy_(inputs[0].router_weights)
    with pytest.raises(EPInputError, match=r"out\.weights: shares memory with router_weights"):
        first.dispatch(inputs[0].x, inputs[0].topk_ids, inside, out=out)
    ids = out.row_map[0, :5].copy_(inputs[0].topk_ids)
    with pytest.raises(EPInputError, match=r"out\.row_map: shares memory with topk_ids"):
        first.plan_dispatch(inputs[0].x, ids, out=out)
    calls = zip(communicators, inputs, strict=True)
    batches = [one.dispatch(i.x, i.topk_ids, i.router_weights, out=poisoned(one)) for one, i in calls]
    for rank, batch in enumerate(batches):
        check_filled(cfg, batch, expected(cfg, inputs)[rank], f"rank {rank}")


def test_plans_read_their_arguments_when_they_are_launched():
    """As kernels do: tokens, ids, weights, scale and rows that change in between count as they are at the launch."""
    cfg = small()
    communicators = connect_reference(cfg)
    inputs, planned = (make_inputs(cfg, [5, 5, 5], "uniform", seed) for seed in (0, 1))
    scales, given = [torch.tensor([1.5 + rank]) for rank in range(3)], [torch.ones(1) for _ in range(3)]
    outs = [poisoned(one) for one in communicators]
    plans = [
        one.plan_dispatch(i.x, i.topk_ids, i.router_weights, scale, out)
        for one, i, scale, out in zip(communicators, planned, given, outs, strict=True)
    ]
    for rank in range(3):
        given[rank].copy_(scales[rank])
        for name in ("x", "topk_ids", "router_weights"):
            getattr(planned[rank], name).copy_(getattr(inputs[rank], name))
    batches, want = [plan.launch() for plan in plans], expected(cfg, inputs, scales=scales)
    for rank, batch in enumerate(batches):
        check_filled(cfg, batch, want[rank], f"rank {rank}")
    rows, final = (rows_for(batches, cfg, seed) for seed in (0, 1))
    combines = [one.plan_combine(r, b) for one, r, b in zip(communicators, rows, batches, strict=True)]
    for one, other in zip(rows, final, strict=True):
        one.copy_(other)
    sums = reference.combine(cfg, final, want)
    for rank, got in enumerate([plan.launch() for plan in combines]):
        assert_bits(got, sums[rank], f"rank {rank}")
    for one in communicators:
        one.synchronize()


def test_a_plan_whose_arguments_have_become_wrong():
    """Refused when it is launched, and joins no round: a scale out of range, ids of the batch, the batch's buffers."""
    cfg = small()
    communicators, batches, inputs = dispatch_all(cfg)
    first, given, scale = communicators[0], inputs[0], torch.ones(1)
    plan = first.plan_dispatch(given.x, given.topk_ids, given.router_weights, scale)
    scale.zero_()
    with pytest.raises(EPInputError, match=r"input_scale = 0\.0: must be a number"):
        plan.launch()
    rows = rows_for(batches, cfg)
    plan = first.plan_combine(rows[0], batches[0])
    before = given.topk_ids.clone()
    given.topk_ids[0] = given.topk_ids[0].roll(1)
    with pytest.raises(EPInputError, match="topk_ids: changed since dispatch"):
        plan.launch()
    given.topk_ids.copy_(before)
    want = reference.combine(cfg, rows, expected(cfg, inputs))
    others = zip(communicators[1:], rows[1:], batches[1:], strict=True)
    for rank, got in enumerate([plan.launch(), *(one.combine(r, b) for one, r, b in others)]):
        assert_bits(got, want[rank], f"rank {rank}")
    plan = first.plan_combine(rows[0], batches[0])
    for one, i, batch in zip(communicators, inputs, batches, strict=True):
        one.dispatch(i.x, i.topk_ids, out=batch)
    with pytest.raises(EPInputError, match="is not the batch that its buffers hold"):
        plan.launch()


def test_an_input_scale_elsewhere():
    first, given = connect_reference(small())[0], make_inputs(small(), [5, 5, 5], "uniform", 0)[0]
    with pytest.raises(EPInputError, match=r"input_scale\.device = meta"):
        first.dispatch(given.x, given.topk_ids, input_scale=torch.ones(1, device="meta"))
