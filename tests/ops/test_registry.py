"""Names stand for communicators that live and have their device to themselves."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from dataclasses import replace

import pytest
import torch

import cute_ep.ops
from cute_ep import connect_local
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.ops import registry
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import MakeRank

from .ranks import ALONE


def alone() -> ReferenceCommunicator:
    (ep,) = connect_local(ALONE, ["cpu"])
    assert isinstance(ep, ReferenceCommunicator)
    return ep


def tokens(count: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(2 * count, dtype=torch.int32).view(count, 2) % ALONE.num_experts
    return torch.ones(count, ALONE.hidden).bfloat16(), ids, torch.ones(count, 2)


def test_a_communicator_has_one_name() -> None:
    ep, other = alone(), alone()
    name = cute_ep.ops.register(ep)
    assert cute_ep.ops.register(ep) == name != cute_ep.ops.register(other)


def test_a_name_tells_configurations_apart() -> None:
    """A compiler's cache of another program would have other shapes under the same number."""
    digests = set()
    for cfg in (ALONE, replace(ALONE, row_alignment=16), replace(ALONE, hidden=64)):
        (ep,) = connect_local(cfg, ["cpu"])
        digests.add(cute_ep.ops.register(ep).partition("-")[2])
    assert len(digests) == 3 and all(re.fullmatch(r"[0-9a-f]{12}", one) for one in digests)


def test_a_module_with_a_name_can_be_copied_and_pickled() -> None:
    ep, module = alone(), torch.nn.Linear(1, 1)
    module.comm = cute_ep.ops.register(ep)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert len(cute_ep.ops.dispatch(*tokens(), other.comm).tokens) == ALONE.max_rows


def test_a_name_keeps_no_communicator() -> None:
    ep = alone()
    name = cute_ep.ops.register(ep)
    del ep
    gc.collect()
    with pytest.raises(EPInputError, match=rf"comm = '{name}': the communicator is gone"):
        cute_ep.ops.dispatch(*tokens(), name)


def test_a_collector_leaves_the_table_of_names_as_it_is() -> None:
    """A compiler may be iterating over it. The next name takes the place of those that are gone."""
    ep = alone()
    names = {cute_ep.ops.register(ep)}
    del ep
    gc.collect()
    assert names <= registry._BY_NAME.keys()
    kept = alone()
    names = {cute_ep.ops.register(kept)}
    assert all(one.communicator is not None for one in registry._BY_NAME.values()) and names <= registry._BY_NAME.keys()


def test_a_closed_communicator_is_refused() -> None:
    ep = alone()
    name = cute_ep.ops.register(ep)
    ep.close()
    with pytest.raises(EPError, match="closed"):
        cute_ep.ops.dispatch(*tokens(), name)
    with pytest.raises(EPInputError, match="must be open"):
        cute_ep.ops.register(ep)


def test_what_is_no_communicator_is_refused() -> None:
    with pytest.raises(EPInputError, match="communicator = str: must be what connect returned"):
        cute_ep.ops.register("0")  # type: ignore[arg-type]


def test_ranks_that_share_a_device_are_refused(make_rank: MakeRank) -> None:
    """Their results are not in place when a call returns."""
    ranks = [*connect_local(replace(ALONE, world_size=2), ["cpu"] * 2), make_rank(shared=True)]
    for ep in ranks:
        with pytest.raises(EPInputError, match="must have its device to itself in this process"):
            cute_ep.ops.register(ep)


def test_ranks_that_share_a_process_and_no_device_are_taken(rank: Communicator) -> None:
    """On GPUs, and where nothing travels."""
    both = connect_local(replace(ALONE, world_size=2, skip_a2a=True), ["cpu"] * 2)
    assert len({cute_ep.ops.register(ep) for ep in (*both, rank)}) == 3


def test_combine_takes_no_batch_of_a_communicator() -> None:
    (x, ids, weights), ep = tokens(), alone()
    batch, out = ep.dispatch(x, ids, weights), torch.empty_like(x)
    for call in (cute_ep.ops.combine, lambda rows, batch: cute_ep.ops.combine_into(rows, batch, out)):
        with pytest.raises(EPInputError, match=r"batch = \w*Dispatched: must be what dispatch of cute_ep\.ops ret"):
            call(batch.tokens, batch)


def test_combine_needs_a_dispatch_that_was_made_through_ops() -> None:
    """It would not know in which slices the rows travel."""
    (x, ids, weights), ep = tokens(), alone()
    name, batch = cute_ep.ops.register(ep), ep.dispatch(x, ids, weights)
    kept = ids, weights, batch.row_offsets, batch.row_map, batch.headers, batch.weights, batch.frame_ids
    with pytest.raises(EPInputError, match=r"topk_ids\.shape\[0\] = 2: must be that of a dispatch"):
        torch.ops.cute_ep.combine(batch.tokens, *kept, name, "exact", torch.bfloat16, torch.zeros(1).int())
