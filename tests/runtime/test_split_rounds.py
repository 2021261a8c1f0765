"""The halves of a call: how many sends may be outstanding, in which order they are received, and what a pending is."""

from __future__ import annotations

import gc
import weakref

import pytest

from cute_ep.api.errors import EPInputError
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import Launches, MakeRank, expert_rows, inputs


def test_a_third_send_and_a_fused_call_wait_for_the_two_rounds_that_are_outstanding(rank: Communicator) -> None:
    sent = [rank.dispatch_async(*inputs()) for _ in range(2)]
    with pytest.raises(EPInputError, match="2 are outstanding"):
        rank.dispatch_async(*inputs())
    with pytest.raises(EPInputError, match=r"2 split round\(s\) outstanding; receive them first with dispatch_wait"):
        rank.dispatch(*inputs())
    batch = rank.dispatch_wait(sent[0])
    rows = expert_rows(batch)
    for _ in range(2):
        rank.combine_async(rows, batch)
    with pytest.raises(EPInputError, match="2 are outstanding"):
        rank.combine_async(rows, batch)
    with pytest.raises(EPInputError, match="2 split round"):
        rank.plan_combine(rows, batch)


def test_rounds_are_received_in_the_order_of_sending(rank: Communicator) -> None:
    first, second = (rank.dispatch_async(*inputs()) for _ in range(2))
    with pytest.raises(EPInputError, match="round 2 of dispatch: must be round 1, the oldest"):
        rank.dispatch_wait(second)
    batch = rank.dispatch_wait(first)
    first, second = (rank.combine_async(expert_rows(batch), batch) for _ in range(2))
    with pytest.raises(EPInputError, match="round 2 of combine: must be round 1, the oldest"):
        rank.combine_wait(second)
    rank.combine_wait(first)


def test_a_round_is_received_once(rank: Communicator) -> None:
    sent = rank.dispatch_async(*inputs())
    rank.dispatch_wait(sent)
    with pytest.raises(EPInputError, match="and not received before"):
        rank.dispatch_wait(sent)


def test_wait_without_argument_takes_the_oldest_round(rank: Communicator, launches: Launches) -> None:
    """Of dispatch and of combine, also one whose pending was lost; afterwards fused calls go on."""
    given = [inputs(3), inputs(5)]
    for one in given:
        rank.dispatch_async(*one)
    batches = [rank.dispatch_wait() for _ in given]
    assert [batch.topk_ids for batch in batches] == [ids for _, ids, _ in given]
    rank.combine_async(expert_rows(batches[0]), batches[0], "partial")
    assert rank.combine_wait().shape == (3, 128)
    assert launches.kernels[-2:] == ["combine_async_partial", "combine_wait_partial"]
    rank.dispatch(*inputs())
    for wait in (rank.dispatch_wait, rank.combine_wait):
        with pytest.raises(EPInputError, match="no round is outstanding"):
            wait()


def test_a_pending_of_another_rank_or_phase_is_refused(make_rank: MakeRank) -> None:
    ranks = [make_rank(rank=0), make_rank(rank=1)]
    sent = [rank.dispatch_async(*inputs()) for rank in ranks]
    with pytest.raises(EPInputError, match="must be what dispatch_async of this communicator, rank 0, returned"):
        ranks[0].dispatch_wait(sent[1])
    with pytest.raises(EPInputError, match="pending = PendingDispatch: must be what combine_async of this"):
        ranks[0].combine_wait(sent[0])
    for rank, pending in zip(ranks, sent, strict=True):
        rank.dispatch_wait(pending)


def test_a_pending_of_another_communicator_is_refused_though_of_the_same_rank_and_round(make_rank: MakeRank) -> None:
    here, there = make_rank(), make_rank()
    mine, theirs = here.dispatch_async(*inputs()), there.dispatch_async(*inputs())
    with pytest.raises(EPInputError, match="must be what dispatch_async of this communicator"):
        here.dispatch_wait(theirs)
    mine, theirs = here.dispatch_wait(mine), there.dispatch_wait(theirs)
    mine, theirs = (one.combine_async(expert_rows(b), b) for one, b in ((here, mine), (there, theirs)))
    with pytest.raises(EPInputError, match="must be what combine_async of this communicator"):
        here.combine_wait(theirs)
    here.combine_wait(mine)


def test_tensors_of_a_round_live_until_it_is_received_and_no_longer(rank: Communicator) -> None:
    x, ids, weights = inputs()
    kept = weakref.ref(x)
    rank.dispatch_async(x, ids, weights)
    del x
    gc.collect()
    assert kept() is not None
    rank.dispatch_wait()
    gc.collect()
    assert kept() is None
