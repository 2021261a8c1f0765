"""What the reference communicator refuses where it is given, and what survives an error or an interrupt."""

from __future__ import annotations

import copy
import time

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPConfigError, EPError, EPInputError, EPTimeout
from cute_ep.distributed import DistributedEPCombine, DistributedEPDispatchNVFP4
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference import backend as reference_backend
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.changed_batches import changed
from tests.reference.ranks import check_filled, dispatch_all, expected, poisoned, rows_for, small


def combine_all(communicators, batches, rows, **options) -> list[torch.Tensor]:
    return [c.combine(r, b, **options) for c, r, b in zip(communicators, rows, batches, strict=True)]


# ---- batches and buffers


def test_a_batch_whose_buffers_hold_a_later_one_is_refused():
    """Refused; the later one is right, and so is the batch of a rank that had buffers of its own."""
    cfg = small()
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 0)
    shared = communicators[0].allocate()
    rounds = []
    for _ in range(2):
        outs = [shared if one.rank == 0 else one.allocate() for one in communicators]
        calls = zip(communicators, inputs, outs, strict=True)
        rounds.append([c.dispatch(i.x, i.topk_ids, i.router_weights, out=out) for c, i, out in calls])
    first, second = rounds
    rows = rows_for(second, cfg)
    for call in (communicators[0].combine, communicators[0].combine_async, communicators[0].plan_combine):
        with pytest.raises(EPInputError, match="is not the batch that its buffers hold"):
            call(rows[0], first[0])
    want = reference.combine(cfg, rows, expected(cfg, inputs))
    for rank, got in enumerate(combine_all(communicators, second, rows)):
        assert_bits(got, want[rank], f"rank {rank}")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_buffers_that_two_ranks_share_hold_the_later_batch(order: tuple[int, int]):
    cfg = small(world_size=2)
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5], "uniform", 0)
    shared, batches = poisoned(communicators[0]), {}
    for rank in order:
        given = inputs[rank]
        batches[rank] = communicators[rank].dispatch(given.x, given.topk_ids, given.router_weights, out=shared)
    early, late = order
    rows = torch.zeros(cfg.max_rows, cfg.hidden).bfloat16()
    with pytest.raises(EPInputError, match="is not the batch that its buffers hold"):
        communicators[early].combine(rows, batches[early])
    assert_bits(batches[late].row_map, expected(cfg, inputs)[late].row_map, "the later batch")


def test_batches_of_others_are_refused():
    """Of another group of the same ranks, of another rank, and copies."""
    cfg = small()
    communicators, batches, _ = dispatch_all(cfg)
    _, foreign, _ = dispatch_all(cfg)
    _, of_less, _ = dispatch_all(small(num_experts=3))
    rows = rows_for(batches, cfg)
    for batch in (foreign[0], batches[1], of_less[0], copy.deepcopy(batches[0])):
        with pytest.raises(EPInputError, match="must be what a dispatch of this communicator, rank 0, returned"):
            communicators[0].combine(rows[0], batch)
    with pytest.raises(EPInputError, match="dispatched = tuple: must be what dispatch returned"):
        communicators[0].combine(rows[0], (1,))


@pytest.mark.parametrize("alone", [False, True])
def test_lists_of_ranks_that_are_not_connected_are_refused(alone: bool):
    """Equal numbers and configurations make no group, with nothing to exchange either."""
    cfg = small(skip_a2a=alone)
    one, other = connect_reference(cfg), connect_reference(cfg)
    for operation in (DistributedEPDispatchNVFP4, DistributedEPCombine):
        operation(one)
        with pytest.raises(EPConfigError, match="rank 1 is not connected with rank 0"):
            operation([one[0], other[1], one[2]])


@pytest.mark.parametrize("mode", ["exact", "partial", "unweighted"])
def test_ids_that_change_before_combine_are_noticed(mode: str):
    cfg = small()
    communicators, batches, inputs = dispatch_all(cfg)
    rows, ids = rows_for(batches, cfg), inputs[0].topk_ids
    before = ids.clone()
    ids[0] = ids[0].roll(1)
    with pytest.raises(EPInputError, match="topk_ids: changed since dispatch"):
        communicators[0].combine(rows[0], batches[0], mode=mode)
    ids.copy_(before)
    want = reference.combine(cfg, rows, expected(cfg, inputs), mode=mode)
    for rank, got in enumerate(combine_all(communicators, batches, rows, mode=mode)):
        assert_bits(got, want[rank], f"rank {rank}")


def test_weights_that_change_before_combine_are_noticed_where_it_reads_them_again():
    """Refused where combine reads them again; partial combine has those that travelled."""
    cfg = small()
    communicators, batches, inputs = dispatch_all(cfg)
    rows, weights = rows_for(batches, cfg), inputs[0].router_weights
    want = reference.combine(cfg, rows, expected(cfg, inputs), mode="partial")
    weights.fill_(torch.nan)
    with pytest.raises(EPInputError, match="router_weights: changed since dispatch"):
        communicators[0].combine(rows[0], batches[0], mode="exact")
    for rank, got in enumerate(combine_all(communicators, batches, rows, mode="partial")):
        assert_bits(got, want[rank], f"rank {rank}")
    pending = communicators[0].combine_async(rows[0], batches[0], "exact")
    with pytest.raises(EPInputError, match="router_weights: changed since dispatch"):
        communicators[0].combine_wait(pending)
    communicators[0].combine_wait(pending, torch.zeros(5, 2))


def test_outputs_over_what_is_read_are_refused():
    """A GPU would write them while it still reads."""
    cfg = small(dispatch_format="bf16")
    communicators, batches, inputs = dispatch_all(cfg)
    first, batch = communicators[0], batches[0]
    rows = rows_for(batches, cfg)[0]
    for out in (rows[:5], rows.flatten()[32:192].view(5, 32)):
        with pytest.raises(EPInputError, match="out: shares memory with rows"):
            first.combine(rows, batch, out=out)
    with pytest.raises(EPInputError, match="out: shares memory with rows"):
        first.combine(batch.tokens, batch, out=batch.tokens[:5])
    sent = first.combine_async(rows, batch)
    with pytest.raises(EPInputError, match="out: shares memory with rows"):
        first.combine_wait(sent, out=rows[:5])
    first.combine_wait(sent)
    with pytest.raises(EPInputError, match=r"out\.tokens: shares memory with x"):
        first.dispatch(batch.tokens[:5], inputs[0].topk_ids, out=batch)
    first.dispatch(batch.tokens[:5], inputs[0].topk_ids, out=first.allocate())


# ---- lost halves, errors and interrupts


def test_a_lost_half_can_be_received():
    cfg = small()
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 0)
    want = expected(cfg, inputs)
    for one, given in zip(communicators, inputs, strict=True):
        one.dispatch_async(given.x, given.topk_ids, given.router_weights)
    with pytest.raises(EPInputError, match=r"1 split round\(s\) outstanding"):
        communicators[0].dispatch(inputs[0].x, inputs[0].topk_ids)
    batches = [one.dispatch_wait(out=poisoned(one)) for one in communicators]
    for rank, batch in enumerate(batches):
        check_filled(cfg, batch, want[rank], f"rank {rank}")
    rows = rows_for(batches, cfg)
    for one, batch, given in zip(communicators, batches, rows, strict=True):
        one.combine_async(given, batch)
    sums = reference.combine(cfg, rows, want)
    for rank, one in enumerate(communicators):
        assert_bits(one.combine_wait(), sums[rank], f"rank {rank}")
    for call in (communicators[0].dispatch_wait, communicators[0].combine_wait):
        with pytest.raises(EPInputError, match="no round is outstanding"):
            call()


def test_rounds_that_all_have_been_given_are_dropped():
    """So `synchronize` does not slow down, and memory does not grow."""
    cfg = small(dispatch_format="bf16")
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [1, 1, 1], "uniform", 0)
    outs = [one.allocate() for one in communicators]
    for _ in range(50):
        calls = list(zip(communicators, inputs, outs, strict=True))
        batches = [one.dispatch(i.x, i.topk_ids, i.router_weights, out=out) for one, i, out in calls]
        combine_all(communicators, batches, [batch.tokens for batch in batches])
    exchange = communicators[0]._exchange
    assert not exchange.dispatch._live and not exchange.combine._live


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_cannot_be_written_is_an_error_of_its_rank(monkeypatch: pytest.MonkeyPatch, error: BaseException):
    """Rank 0's results fail in the call of rank 2, which completes the round: rank 0 is told, once, by its next call;
    all ranks go on."""
    cfg = small()
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 0)
    want = expected(cfg, inputs)
    fill = reference_backend.fill

    def broken(cfg, rank, sources, out):
        if rank == 0:
            raise error
        return fill(cfg, rank, sources, out)

    monkeypatch.setattr(reference_backend, "fill", broken)
    outs = [poisoned(one) for one in communicators]
    batches = [c.dispatch(i.x, i.topk_ids, out=o) for c, i, o in zip(communicators[:2], inputs, outs, strict=False)]
    last = communicators[2]
    if isinstance(error, Exception):
        batches.append(last.dispatch(inputs[2].x, inputs[2].topk_ids, out=outs[2]))
        check_filled(cfg, batches[1], expected(cfg, inputs, weights=False)[1], "rank 1")
        check_filled(cfg, batches[2], expected(cfg, inputs, weights=False)[2], "rank 2")
    else:
        with pytest.raises(KeyboardInterrupt):
            last.dispatch(inputs[2].x, inputs[2].topk_ids, out=outs[2])
    monkeypatch.setattr(reference_backend, "fill", fill)
    with pytest.raises(EPError, match=f"rank 0: dispatch round 1 has no results, {type(error).__name__}"):
        communicators[0].synchronize()
    communicators[0].synchronize()
    if not isinstance(error, Exception):
        last.dispatch_wait(out=outs[2])
        check_filled(cfg, batches[1], expected(cfg, inputs, weights=False)[1], "rank 1")
    calls = zip(communicators, inputs, strict=True)
    batches = [one.dispatch(i.x, i.topk_ids, i.router_weights, out=poisoned(one)) for one, i in calls]
    for rank, batch in enumerate(batches):
        check_filled(cfg, batch, want[rank], f"rank {rank}")


def test_modes_of_the_caller_change_nothing():
    """One rank's calls under autocast, another's in inference mode, a third's with gradients enabled."""
    cfg = small(dispatch_format="fp8", hidden=128)
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 0)
    modes = [torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.enable_grad()]
    want, batches, got = expected(cfg, inputs), [], []
    for mode, one, given in zip(modes, communicators, inputs, strict=True):
        with mode:
            batches.append(one.dispatch(given.x, given.topk_ids, given.router_weights, out=None))
    rows = rows_for(want, cfg)
    for mode, one, given, batch in zip(modes[::-1], communicators, rows, batches, strict=True):
        with mode:
            got.append(one.combine(given, batch, mode="partial"))
    sums = reference.combine(cfg, rows, want, mode="partial")
    for rank in range(3):
        assert_bits(batches[rank].row_map, want[rank].row_map, f"rank {rank}")
        assert_bits(got[rank], sums[rank], f"rank {rank}")
        assert not got[rank].requires_grad


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_the_default_type_changes_nothing(fmt, mode):
    """Programs set it to that of their model."""
    cfg = small(dispatch_format=fmt, hidden=128)
    inputs = make_inputs(cfg, [5, 5, 5], "masked", 0)
    want = expected(cfg, inputs)
    rows = rows_for(want, cfg)
    sums = reference.combine(cfg, rows, want, mode=mode)
    torch.set_default_dtype(torch.bfloat16)
    try:
        communicators = connect_reference(cfg)
        calls = zip(communicators, inputs, strict=True)
        batches = [one.dispatch(i.x, i.topk_ids, i.router_weights, out=poisoned(one)) for one, i in calls]
        got = combine_all(communicators, batches, rows, mode=mode)
    finally:
        torch.set_default_dtype(torch.float32)
    for rank in range(3):
        check_filled(cfg, batches[rank], want[rank], f"rank {rank}")
        assert_bits(got[rank], sums[rank], f"rank {rank}")


def test_a_late_rank_in_one_process_is_an_error_at_once():
    cfg = small(timeout_s=60)
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [1, 1, 1], "uniform", 0)
    for _ in range(2):
        communicators[0].dispatch(inputs[0].x, inputs[0].topk_ids)
    communicators[1].dispatch(inputs[1].x, inputs[1].topk_ids)
    communicators[2].dispatch(inputs[2].x, inputs[2].topk_ids)
    communicators[1].dispatch(inputs[1].x, inputs[1].topk_ids)
    begin = time.monotonic()
    with pytest.raises(EPTimeout) as caught:
        communicators[0].synchronize()
    assert time.monotonic() - begin < 10
    assert caught.value.details == ("rank 2: expected 2 dispatch calls, saw 1",)


@pytest.mark.parametrize("place", ["replaced", "reference"])
def test_a_batch_that_was_put_together_is_taken_as_what_its_tensors_say(place: str):
    """A batch with other tensors in place of its own, or from elsewhere: taken as what its tensors say."""
    cfg = small(dispatch_format="bf16")
    communicators, batches, inputs = dispatch_all(cfg)
    rows, own = rows_for(batches, cfg), expected(cfg, inputs)
    if place == "replaced":
        own = [changed(batch, tokens=batch.tokens.clone()) for batch in batches]
    want = reference.combine(cfg, rows, expected(cfg, inputs))
    for rank, got in enumerate(combine_all(communicators, own, rows)):
        assert_bits(got, want[rank], f"rank {rank}")
