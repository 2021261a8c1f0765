"""Numbers of rows on the host, and the flag of lost rows, on the reference backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import READ_BY_COMBINE, Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.workloads import make_inputs

CFG = EPConfig(hidden=32, num_experts=6, top_k=2, max_tokens_per_rank=5, world_size=3)
IDS = torch.tensor([[0, 1], [0, 2], [-1, 0]], dtype=torch.int32)
"""Of every rank: rank 0 gets 3, 1 and rank 1 gets 1, 0 rows of each source for its two experts, rank 2 none."""


def batches_of(cfg: EPConfig, room: int | None = None) -> list[Dispatched]:
    ranks = connect_reference(cfg)
    x = torch.ones(len(IDS), cfg.hidden).bfloat16()
    batches = [ep.dispatch(x, IDS, out=ep.allocate(room)) for ep in ranks]
    for batch in batches:
        batch.row_map[:, len(IDS) :] = LOST_ROW  # kernels leave there what an earlier batch has left
    return batches


@pytest.mark.parametrize("alignment", [1, 16])
def test_counts_on_the_host_are_those_of_the_batch(alignment: int) -> None:
    for batch, want in zip(batches_of(replace(CFG, row_alignment=alignment)), ([9, 3], [3, 0], [0, 0]), strict=True):
        counts = batch.counts_to_host()
        batch.row_counts.fill_(-7)  # the copy is made by then
        assert counts.wait() is counts and counts.event is None
        assert counts.row_counts.tolist() == want and counts.row_counts.dtype == torch.int32
        assert counts.num_rows == sum(-(-rows // alignment) * alignment for rows in want)


def test_counts_are_refused_where_the_batch_is_not_there() -> None:
    ranks, (one, *_) = connect_reference(CFG), make_inputs(CFG, [5] * 3, "uniform", 1)
    early = ranks[0].dispatch(one.x, one.topk_ids)
    with pytest.raises(EPInputError, match="dispatched: all ranks must dispatch before rank 0 reads its counts"):
        early.counts_to_host()
    batch = batches_of(CFG)[0]
    own = {"rank": 0, "topk_ids": IDS, "router_weights": None, "return_slices_log2": 0}
    bare = Dispatched.of_tensors({name: getattr(batch, name) for name in READ_BY_COMBINE}, **own)
    with pytest.raises(EPInputError, match=r"dispatched\.row_counts = None: must be what dispatch wrote"):
        bare.counts_to_host()
    assert not bare.any_lost()


@pytest.mark.parametrize(("room", "lost"), [(None, [0, 0, 0]), (12, [0, 0, 0]), (11, [1, 0, 0]), (0, [1, 1, 0])])
def test_the_flag_says_whether_buffers_had_no_room(room: int | None, lost: list[int]) -> None:
    for batch, want in zip(batches_of(CFG, room), lost, strict=True):
        flag = batch.any_lost()
        assert (flag.shape, flag.dtype, flag.tolist()) == ((1,), torch.bool, [bool(want)])
        assert not want or batch.counts_to_host().wait().num_rows == 0


def test_the_flag_says_whether_a_block_had_no_room() -> None:
    cfg = EPConfig(hidden=32, num_experts=2, top_k=1, max_tokens_per_rank=200, world_size=1, block_rows=128)
    for first, want in ((128, False), (129, True), (72, False), (71, True)):
        (ep,) = connect_reference(cfg)
        ids = (torch.arange(200) >= first).int()[:, None]
        assert ep.dispatch(torch.zeros(200, 32).bfloat16(), ids).any_lost().tolist() == [want], first
