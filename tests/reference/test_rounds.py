"""When the reference communicator reads what it is given, and how it fails when a peer does not come."""

from __future__ import annotations

import gc
import traceback
import weakref
from pathlib import Path

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.reference import backend as reference_backend
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.reference.ranks import check_filled, dispatch_all, expected, poisoned, rows_for, small

# ---- when arguments are read


def test_inputs_inside_the_output_are_refused():
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


def test_a_plan_whose_arguments_have_become_wrong_is_refused_when_launched():
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


def test_an_input_scale_on_another_device_is_refused():
    first, given = connect_reference(small())[0], make_inputs(small(), [5, 5, 5], "uniform", 0)[0]
    with pytest.raises(EPInputError, match=r"input_scale\.device = meta"):
        first.dispatch(given.x, given.topk_ids, input_scale=torch.ones(1, device="meta"))


# ---- peers that do not come


def test_a_rank_may_not_run_ahead_for_ever():
    """The call that would be too many names the rank that is behind; the others' error is their own."""
    guide = (Path(__file__).parents[2] / "docs" / "use.md").read_text()
    assert f"call {reference_backend.AHEAD} rounds ahead" in " ".join(guide.split())
    cfg = small(dispatch_format="bf16")
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [1, 1, 1], "uniform", 0)
    outs = [one.allocate() for one in communicators]
    for rank in (0, 1):
        for _ in range(reference_backend.AHEAD):
            communicators[rank].dispatch(inputs[rank].x, inputs[rank].topk_ids, out=outs[rank])
    for call in (communicators[0].dispatch, communicators[0].dispatch_async, communicators[0].plan_dispatch):
        with pytest.raises(EPTimeout) as caught:
            call(inputs[0].x, inputs[0].topk_ids)
        assert caught.value.details == ("rank 2: expected 1 dispatch calls, saw 0",)
    assert communicators[0].failed and not communicators[1].failed
    assert len(communicators[0]._exchange.dispatch._live) == reference_backend.AHEAD


def test_a_rank_that_has_closed_is_named():
    """What it has joined counts; a round that it can join no more is told by the next call, or `synchronize`."""
    cfg = small(dispatch_format="bf16")
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [1, 1, 1], "uniform", 0)
    want = expected(cfg, inputs)
    communicators[2].dispatch_async(inputs[2].x, inputs[2].topk_ids, inputs[2].router_weights)
    communicators[2].close()
    outs = [poisoned(one) for one in communicators[:2]]
    calls = list(zip(communicators, inputs, outs, strict=False))
    for rank, batch in enumerate([one.dispatch(i.x, i.topk_ids, i.router_weights, out=out) for one, i, out in calls]):
        check_filled(cfg, batch, want[rank], f"rank {rank}")
        communicators[rank].synchronize()
    for one, given, out in calls:
        one.dispatch(given.x, given.topk_ids, out=out)
    said = "rank 2: expected 2 dispatch calls, saw 1, has closed its communicator"
    with pytest.raises(EPTimeout, match=said):
        communicators[0].dispatch(inputs[0].x, inputs[0].topk_ids)
    with pytest.raises(EPTimeout, match=said):
        communicators[1].synchronize()


def test_a_timeout_that_is_raised_again_keeps_no_frames():
    """Each is an instance of its own, so tracebacks do not grow and locals of earlier callers are freed."""
    cfg = small()
    first, given = connect_reference(cfg)[0], make_inputs(cfg, [1, 1, 1], "uniform", 0)[0]
    first.dispatch(given.x, given.topk_ids)

    def layer() -> tuple[weakref.ref, int, str]:
        class Local:
            pass

        local = Local()
        try:
            first.synchronize()
        except EPTimeout as error:
            return weakref.ref(local), len(traceback.extract_tb(error.__traceback__)), str(error)

    seen = [layer() for _ in range(3)]
    gc.collect()
    assert all(local() is None for local, _, _ in seen)
    assert seen[1][1:] == seen[2][1:] and seen[0][2] == seen[1][2]


def test_a_call_interrupted_while_it_joins_ends_the_rank(monkeypatch: pytest.MonkeyPatch):
    """It is not known whether the round has this rank: the rank makes no further call, and the others name it."""
    cfg = small()
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 0)
    first, count = communicators[0], communicators[0]._dispatches.count_sent

    def interrupted(pending: object) -> None:
        count(pending)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first._dispatches, "count_sent", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.dispatch(inputs[0].x, inputs[0].topk_ids)
    for call in (first.dispatch_wait, first.synchronize, lambda: first.dispatch(inputs[0].x, inputs[0].topk_ids)):
        with pytest.raises(EPError, match="rank 0: a call was interrupted while it sent; close, and connect again"):
            call()
    for one, given in zip(communicators[1:], inputs[1:], strict=True):
        one.dispatch(given.x, given.topk_ids)
    with pytest.raises(EPTimeout) as caught:
        communicators[1].synchronize()
    assert caught.value.missing == (0,)
    first.close()
