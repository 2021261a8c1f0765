"""Which addresses a combine on a GPU gets of a batch that was put together from tensors, or derived from another."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.dispatched import READ_BY_COMBINE, Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import CFG, Launches, expert_rows, inputs


def from_tensors(batch: Dispatched) -> Dispatched:
    return Dispatched.of_tensors(
        {name: getattr(batch, name) for name in (*READ_BY_COMBINE, "weights")},
        rank=batch.rank,
        topk_ids=batch.topk_ids,
        router_weights=batch.router_weights,
        return_slices_log2=batch.return_slices_log2,
    )


@pytest.mark.parametrize("mode", ["exact", "partial", "unweighted"])
def test_a_batch_of_tensors_is_launched_as_the_batch_itself(rank: Communicator, launches: Launches, mode: str) -> None:
    batch = rank.dispatch(*inputs())
    rows, out = expert_rows(batch), None
    for one in (batch, from_tensors(batch)):
        out = rank.combine(rows, one, mode=mode, out=out)
    first, second = launches.of("combine")
    changed = {name for name, value in second.arguments.items() if first.arguments.get(name) != value}
    assert first.kernel == second.kernel and changed == set()


def test_a_derived_batch_gives_its_own_tensors(rank: Communicator, launches: Launches) -> None:
    """And `capacity` is what both `rows` and its `tokens` have."""
    batch = rank.dispatch(*inputs())
    given = {
        "row_map": batch.row_map.clone(),
        "topk_ids": batch.topk_ids.clone(),
        "weights": torch.ones_like(batch.weights),
        "router_weights": torch.ones(batch.topk_ids.shape),
    }
    blocks = torch.zeros(1000, CFG.hidden).bfloat16()
    names = ("batch.row_map", "ids.data", "batch.weights", "sums.router_weights")
    for mode, own in (("exact", given["router_weights"].data_ptr()), ("partial", 0)):
        rank.combine(blocks, batch.derived(**given, tokens=blocks), mode=mode)
        launch = launches.last(f"combine_{mode}")
        assert launch.values(*names) == (*(tensor.data_ptr() for tensor in list(given.values())[:3]), own)
        assert launch.values("rows.data", "rows.capacity") == (blocks.data_ptr(), 1000)


def test_a_derived_batch_whose_buffers_hold_a_later_one_is_refused(rank: Communicator, launches: Launches) -> None:
    batch = rank.dispatch(*inputs())
    derived, rows = batch.derived(weights=torch.ones_like(batch.weights)), expert_rows(batch)
    rank.combine(rows, derived)
    rank.dispatch(*inputs(), out=batch)
    with launches.forbidden(), pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        rank.combine(rows, derived)


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        pytest.param({"weights": torch.zeros(2, 16, 2).int()}, r"dispatched\.weights\.dtype", id="weights"),
        pytest.param({"row_map": torch.zeros(2, 16, 2)}, r"dispatched\.row_map\.dtype", id="row_map"),
        pytest.param({"tokens": torch.zeros(())}, r"dispatched\.tokens\.shape = \(\)", id="tokens"),
    ],
)
def test_a_derived_batch_is_checked(rank: Communicator, launches: Launches, part: dict, rule: str) -> None:
    batch = rank.dispatch(*inputs())
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.combine(expert_rows(batch), batch.derived(**part))


def test_partial_combine_needs_the_weights_that_travelled(rank: Communicator, launches: Launches) -> None:
    """A kernel would read them at address 0."""
    batch = rank.dispatch(*inputs())
    own = {"rank": 0, "topk_ids": batch.topk_ids, "router_weights": batch.router_weights, "return_slices_log2": 0}
    without = Dispatched.of_tensors({name: getattr(batch, name) for name in READ_BY_COMBINE}, **own)
    with launches.forbidden(), pytest.raises(EPInputError, match=r"dispatched\.weights = None"):
        rank.combine(expert_rows(batch), without, mode="partial")
