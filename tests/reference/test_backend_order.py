"""The reference communicator: for whom a rank waits, whom it names when it waits in vain, the order of halves."""

from __future__ import annotations

import re

import pytest
import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError, EPTimeout
from cute_ep.reference.backend import connect_reference
from cute_ep.reference.results import UNKNOWN
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.reference.ranks import (
    FLOAT_POISON,
    check_filled,
    dispatch_all,
    expected,
    is_poison,
    poisoned,
    rows_for,
    small,
)

# ---- waiting for peers


def test_nothing_is_filled_before_the_last_rank_has_called():
    """Nothing looks valid before either: rows are unknown, sums are NaN."""
    cfg = small()
    inputs = make_inputs(cfg, [5, 0, 3], "uniform", 0)
    want = expected(cfg, inputs)
    communicators = connect_reference(cfg)
    outs = [poisoned(one) for one in communicators]
    order = [2, 0, 1]
    batches: dict[int, Dispatched] = {}
    for position, rank in enumerate(order):
        given = inputs[rank]
        batches[rank] = communicators[rank].dispatch(given.x, given.topk_ids, given.router_weights, out=outs[rank])
        for earlier in order[: position + 1]:
            batch = batches[earlier]
            assert is_poison(batch.tokens) == is_poison(batch.row_map) == (position < 2)
            assert (batch.num_rows.item() == UNKNOWN) == (batch.row_offsets[0].item() == UNKNOWN) == (position < 2)
    rows = rows_for([batches[rank] for rank in range(3)], cfg)
    sums = {}
    for position, rank in enumerate(order):
        sums[rank] = torch.full((inputs[rank].x.shape[0], 32), FLOAT_POISON).bfloat16()
        communicators[rank].combine(rows[rank], batches[rank], out=sums[rank])
        assert position == 2 or sums[rank].isnan().all()
    for rank, value in enumerate(reference.combine(cfg, rows, want)):
        assert_bits(sums[rank], value, f"rank {rank}")


def test_a_rank_needs_that_the_others_have_sent_not_that_they_have_received():
    """Rank 1's buffers fill once everybody has sent, though ranks 0 and 2 have not received yet."""
    cfg = small()
    inputs = make_inputs(cfg, [1, 2, 3], "uniform", 0)
    communicators = connect_reference(cfg)
    pending = [one.dispatch_async(i.x, i.topk_ids) for one, i in zip(communicators, inputs, strict=True)]
    out = poisoned(communicators[1])
    batch = communicators[1].dispatch_wait(pending[1], out)
    communicators[1].synchronize()
    check_filled(cfg, batch, expected(cfg, inputs, weights=False)[1], "rank 1")
    for rank in (0, 2):
        communicators[rank].synchronize()  # has sent, waits for nothing
        check_filled(
            cfg,
            communicators[rank].dispatch_wait(pending[rank], poisoned(communicators[rank])),
            expected(cfg, inputs, weights=False)[rank],
            f"rank {rank}",
        )


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_with_skip_a2a_waits_for_nobody(shared):
    """Rank 1 makes two whole rounds alone; the other ranks' calls change nothing."""
    cfg = small(skip_a2a=True, fused_shared_expert=shared)
    communicators = connect_reference(cfg)
    for seed in range(2):
        inputs = make_inputs(cfg, [4, 4, 4], "uniform", seed)
        want = expected(cfg, inputs)
        given = inputs[1]
        batch = communicators[1].dispatch(given.x, given.topk_ids, given.router_weights, out=poisoned(communicators[1]))
        communicators[1].synchronize()
        check_filled(cfg, batch, want[1], f"round {seed}")
        rows = rows_for(want, cfg, seed)
        got = communicators[1].combine(rows[1], batch, dtype=torch.float32)
        communicators[1].synchronize()
        assert_bits(got, reference.combine(cfg, rows, want, dtype=torch.float32)[1], f"round {seed}")
    batch = communicators[0].dispatch(inputs[0].x, inputs[0].topk_ids, inputs[0].router_weights)
    communicators[0].synchronize()
    assert batch.num_rows.item() == want[0].num_rows.item()
    with pytest.raises(EPInputError, match="must be what a dispatch of this communicator, rank 0, returned"):
        communicators[0].combine(rows[1], communicators[1].dispatch(given.x, given.topk_ids))


# ---- peers that do not come


@pytest.mark.parametrize("absent", [(0,), (1, 2)], ids=str)
def test_synchronize_names_the_missing_ranks_of_a_dispatch(absent):
    cfg = small()
    communicators = connect_reference(cfg)
    for rank, given in enumerate(make_inputs(cfg, [1, 1, 1], "uniform", 0)):
        if rank not in absent:
            communicators[rank].dispatch(given.x, given.topk_ids)
    for rank in range(3):
        if rank in absent:
            communicators[rank].synchronize()
            continue
        with pytest.raises(EPTimeout) as caught:
            communicators[rank].synchronize()
        assert (caught.value.phase, caught.value.rank, caught.value.missing) == ("ROUTE_TABLE", rank, absent)
        assert len(caught.value.details) == len(absent)
        with pytest.raises(EPTimeout):  # unusable from now on
            communicators[rank].allocate()
    assert [one.failed for one in communicators] == [rank not in absent for rank in range(3)]


def test_synchronize_names_the_missing_ranks_of_a_combine():
    cfg = small()
    communicators, batches, _ = dispatch_all(cfg)
    for one in communicators:
        one.synchronize()
    for rank in (0, 2):
        communicators[rank].combine(rows_for(batches, cfg)[rank], batches[rank])
    with pytest.raises(EPTimeout, match="RETURN_ROUND") as caught:
        communicators[2].synchronize()
    assert (caught.value.phase, caught.value.rank, caught.value.missing) == ("RETURN_ROUND", 2, (1,))
    communicators[1].synchronize()


def test_combine_is_refused_until_all_ranks_have_dispatched():
    """Then all goes on."""
    cfg = small()
    communicators = connect_reference(cfg)
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    want = expected(cfg, inputs)
    rows, batches = rows_for(want, cfg), []
    for rank, (one, given) in enumerate(zip(communicators, inputs, strict=True)):
        batches.append(one.dispatch(given.x, given.topk_ids, given.router_weights, out=poisoned(one)))
        for call in (one.combine, one.plan_combine, one.combine_async) if rank < 2 else ():
            rule = f"dispatched = round 1: rank(s) {[1, 2][rank:]} must dispatch before rank {rank} combines"
            with pytest.raises(EPInputError, match=re.escape(rule)):
                call(rows[rank], batches[rank])
    got = [c.combine(r, b) for c, r, b in zip(communicators, rows, batches, strict=True)]
    for rank, value in enumerate(reference.combine(cfg, rows, want)):
        communicators[rank].synchronize()
        check_filled(cfg, batches[rank], want[rank], f"rank {rank}")
        assert_bits(got[rank], value, f"rank {rank}")


# ---- the order of halves and modes


def test_all_ranks_combine_the_same_round_in_the_same_mode():
    cfg = small()
    communicators, first, inputs = dispatch_all(cfg)
    second = [one.dispatch(i.x, i.topk_ids, i.router_weights) for one, i in zip(communicators, inputs, strict=True)]
    rows = rows_for(first, cfg)
    communicators[2].combine(rows[2], first[2], mode="partial")
    with pytest.raises(EPInputError, match="mode = 'exact': must be 'partial', as in the combine of rank 2"):
        communicators[0].combine(rows[0], first[0], mode="exact")
    with pytest.raises(EPInputError, match="of dispatch round 2: must be that of round 1, as in the combine of rank 2"):
        communicators[0].combine(rows[0], second[0], mode="partial")
    communicators[0].combine(rows[0], first[0], mode="partial")
