"""Which batches combine takes: those of its own dispatch, for as long as their buffers hold them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.runtime.communicator import Communicator
from tests.changed_batches import changed
from tests.fake_gpu import CFG, Launches, MakeRank, expert_rows, inputs

USED_AGAIN = "a later dispatch was given them as `out`"


def refuses(rank: Communicator, rows: torch.Tensor, batch: object, rule: str) -> bool:
    """Whether combine and its sending half both refuse a batch by a rule."""
    for call in (rank.combine, rank.combine_async):
        with pytest.raises(EPInputError, match=rule):
            call(rows, batch)
    return True


# ---- batches of others


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        pytest.param({"max_tokens_per_rank": 8}, r"dispatched\.row_map\.shape", id="fewer tokens"),
        pytest.param({"num_experts": 16}, r"dispatched\.row_offsets\.shape", id="more experts"),
    ],
)
def test_a_batch_of_another_configuration_is_refused(
    make_rank: MakeRank, launches: Launches, change: dict, shape: str
) -> None:
    """By its origin, and without one by its shapes."""
    rank, other = make_rank(), make_rank(replace(CFG, **change))
    rows, theirs = expert_rows(rank.dispatch(*inputs())), other.dispatch(*inputs())
    with launches.forbidden():
        assert refuses(rank, rows, theirs, "batch of another communicator")
        assert refuses(rank, rows, replace(theirs, stamp=None), shape)


@pytest.mark.parametrize("change", [{"num_experts": 14, "fused_shared_expert": True}, {}], ids=["shared", "the same"])
def test_a_batch_of_another_communicator_is_refused_where_all_shapes_agree(make_rank: MakeRank, change: dict) -> None:
    """14 experts and a shared one make as many groups as 16."""
    other, here = make_rank(replace(CFG, **change)), make_rank(replace(CFG, num_experts=16 if change else 8))
    batch = other.dispatch(*inputs())
    with pytest.raises(EPInputError, match=r"batch of another communicator \(its rank 0\): must be what a dispatch of"):
        here.combine(expert_rows(batch), batch)


def test_a_batch_of_another_rank_is_refused(make_rank: MakeRank) -> None:
    """Its ids and weights are not those of the rows that this rank would find."""
    ranks = [make_rank(rank=0), make_rank(rank=1)]
    mine, theirs = (one.dispatch_wait(one.dispatch_async(*inputs())) for one in ranks)
    rows = expert_rows(mine)
    assert refuses(ranks[0], rows, theirs, r"batch of another communicator \(its rank 1\)")
    assert refuses(ranks[0], rows, replace(theirs, stamp=None), r"dispatched\.rank = 1: must be 0, the rank that combi")
    ranks[0].combine(rows, mine)


@pytest.mark.parametrize(
    ("not_a_batch", "rule"),
    [
        pytest.param(lambda batch: batch.tokens, "must be what dispatch returned", id="its tokens"),
        pytest.param(lambda batch: None, "dispatched = NoneType: must be what dispatch returned", id="None"),
    ],
)
def test_what_is_no_batch_is_refused(
    rank: Communicator, launches: Launches, not_a_batch: Callable[[Dispatched], Any], rule: str
) -> None:
    batch = rank.dispatch(*inputs())
    with launches.forbidden():
        assert refuses(rank, expert_rows(batch), not_a_batch(batch), rule)


def test_none_is_refused_when_the_latest_batch_is_gone(rank: Communicator) -> None:
    """A communicator keeps no batch alive, and takes nothing for the one that is gone."""
    batch = rank.dispatch(*inputs())
    rows, gone = expert_rows(batch), weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None
    assert refuses(rank, rows, None, "dispatched = NoneType: must be what dispatch returned")


# ---- copies


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))], ids=["deepcopy", "pickle"]
)
def test_a_copy_in_other_memory_is_refused(rank: Communicator, copied: Callable[[Dispatched], Dispatched]) -> None:
    """A batch is of a communicator's own rounds, in memory that the communicator knows."""
    batch = rank.dispatch(*inputs())
    with pytest.raises(EPInputError, match="dispatched"):
        rank.combine(expert_rows(batch), copied(batch))
    rank.combine(expert_rows(batch), batch)


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        pytest.param({"topk_ids": torch.zeros(16, 0)}, r"dispatched\.topk_ids\.shape", id="ids without slots"),
        pytest.param({"topk_ids": torch.zeros(5, 2)}, r"dispatched\.topk_ids\.dtype", id="type of ids"),
        pytest.param(
            {"topk_ids": torch.zeros(1000, 2, dtype=torch.int32)},
            r"dispatched\.topk_ids\.shape\[0\] = 1000: must not",
            id="too many tokens",
        ),
        pytest.param({"headers": torch.zeros(1, dtype=torch.uint8)}, r"dispatched\.headers\.shape", id="headers"),
        pytest.param({"weights": torch.zeros(2, 16, 2).double()}, r"dispatched\.weights\.dtype", id="weights"),
    ],
)
def test_a_batch_that_was_put_together_is_checked(
    rank: Communicator, launches: Launches, part: dict, rule: str
) -> None:
    """All that kernels form addresses from."""
    batch = rank.dispatch(*inputs())
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.combine(expert_rows(batch), changed(batch, stamp=None, **part))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(
            lambda batch: {"router_weights": batch.router_weights.double()}, r"router_weights\.dtype", id="weights"
        ),
        pytest.param(lambda batch: {"row_map": batch.row_map[:1]}, r"dispatched\.row_map\.shape", id="row_map"),
    ],
)
def test_a_batch_with_a_replaced_part_is_checked(
    rank: Communicator, change: Callable[[Dispatched], dict], rule: str
) -> None:
    batch = rank.dispatch(*inputs())
    with pytest.raises(EPInputError, match=rule):
        rank.combine(expert_rows(batch), changed(batch, **change(batch)), mode="exact")


def test_a_batch_without_rows_keeps_neither_rows_nor_weights(rank: Communicator) -> None:
    x, ids, weights = inputs()
    batch = rank.dispatch(x, ids, weights)
    gone = [weakref.ref(one) for one in (batch.tokens, batch.scales, weights)]
    kept = batch.without_rows()
    del batch, weights
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert kept.topk_ids is ids


# ---- buffers that are used again


def test_a_batch_is_an_output_buffer_for_the_next_one(rank: Communicator) -> None:
    first = rank.dispatch(*inputs())
    again = rank.dispatch(*inputs(), out=first)
    assert again.tokens is first.tokens and again.topk_ids is not first.topk_ids


def test_a_batch_whose_buffers_hold_a_later_one_is_refused(rank: Communicator) -> None:
    """A later one in other buffers is in nobody's way."""
    buffers = rank.allocate()
    first = rank.dispatch(*inputs(5), out=buffers)
    rank.dispatch(*inputs(3))
    rank.combine(expert_rows(first), first)
    second = rank.dispatch(*inputs(3), out=buffers)
    assert refuses(rank, expert_rows(first), first, USED_AGAIN)
    rank.combine(expert_rows(second), second)


def test_a_batch_is_refused_also_when_the_later_one_is_gone(rank: Communicator) -> None:
    first = rank.dispatch(*inputs(5))
    later = rank.dispatch(*inputs(3), out=first)
    assert later.tokens is first.tokens
    del later
    with pytest.raises(EPInputError, match=USED_AGAIN):
        rank.combine(expert_rows(first), first)


def test_a_batch_is_refused_also_when_an_interrupt_lost_the_later_one(
    rank: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers hold it, whoever has it: what they held before is gone."""
    buffers = rank.allocate()
    first = rank.dispatch(*inputs(5), out=buffers)

    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Dispatched, "received", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank.dispatch(*inputs(3), out=buffers)
    with pytest.raises(EPInputError, match=USED_AGAIN):
        rank.combine(expert_rows(first), first)


def test_buffers_that_two_ranks_share_hold_the_batch_of_the_later_call(make_rank: MakeRank) -> None:
    ranks = [make_rank(rank=number) for number in range(2)]
    shared = ranks[0].allocate()
    batches = [one.dispatch(*inputs(), out=shared) for one in ranks]
    with pytest.raises(EPInputError, match=USED_AGAIN):
        ranks[0].combine(expert_rows(batches[0]), batches[0])
    ranks[1].combine(expert_rows(batches[1]), batches[1])


def test_a_copy_is_as_old_as_its_buffers(rank: Communicator) -> None:
    """`dataclasses.replace` makes no batch young: its buffers may hold another one by then."""
    buffers = rank.allocate()
    first = rank.dispatch(*inputs(5), out=buffers)
    early = replace(first, router_weights=first.router_weights * 2)
    rank.combine(expert_rows(early), early)
    rank.dispatch(*inputs(3), out=buffers)
    for stale in (early, replace(first), copy.copy(first)):
        with pytest.raises(EPInputError, match=USED_AGAIN):
            rank.combine(expert_rows(first), stale)
