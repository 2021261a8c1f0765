"""The reference communicator with input that only kernels see: rows that do not fit and expert ids out of range."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.routing import LOST_ROW, Phase
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.reference.ranks import check_filled, expected, is_poison, poisoned, rows_for, small, without_round


@pytest.mark.parametrize("some", [1, 0])
@pytest.mark.parametrize(
    ("fmt", "shared"), [("bf16", False), ("bf16", True), ("fp8", True), ("nvfp4", False), ("nvfp4_row", True)]
)
def test_rows_that_do_not_fit_are_reported_and_lost_and_the_next_round_is_unharmed(fmt: str, shared: bool, some: int):
    """As on a GPU (tests/gpu/test_protocol_errors.py): one rank has room for all but one of its rows, or for some of
    its shared expert's, or for none. It alone reports that, once, and publishes none; a token that lost a row comes
    home as NaN, all others right, and the next round is unharmed."""
    cfg, short = small(hidden=128, dispatch_format=fmt, fused_shared_expert=shared), 1
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 1)
    want = expected(cfg, inputs)
    outs = [poisoned(one) for one in communicators]
    outs[short] = poisoned(communicators[short], (2 if shared else int(want[short].num_rows) - 1) * some)
    room = outs[short].tokens.shape[0]

    def dispatch() -> list[Dispatched]:
        calls = zip(communicators, inputs, outs, strict=True)
        return [one.dispatch(i.x, i.topk_ids, i.router_weights, out=out) for one, i, out in calls]

    batches = dispatch()
    lost, entries = batches[short], want[short].row_map >= 0
    assert_bits(lost.row_map, torch.where(entries, LOST_ROW, -1).int(), "row_map")
    for name in ("num_rows", "row_offsets", "row_counts", "scales_offsets"):
        assert getattr(lost, name) is None or not getattr(lost, name).view(torch.int32).any(), name
    for name in ("tokens", "scales", "row_scales", "src_info"):
        assert getattr(lost, name) is None or is_poison(getattr(lost, name)), name
    assert_bits(lost.expert_ids, want[short].expert_ids, "expert_ids")
    assert_bits(without_round(lost.headers), without_round(want[short].headers), "headers")
    rows = rows_for(want, cfg)
    for mode in COMBINE_MODES:
        if mode == "unweighted" and shared:
            continue
        sums = reference.combine(cfg, rows, want, mode=mode)
        got = [c.combine(r, b, mode=mode) for c, r, b in zip(communicators, rows, batches, strict=True)]
        for rank, value in enumerate(sums):
            gone = entries[rank] if mode == "unweighted" else entries[rank].any(dim=1)
            if shared and rank == short:
                gone[room:] = True
            assert gone.any() and gone.all() == (shared and rank == short and room == 0)
            assert (got[rank][gone].view(torch.int16) == 0x7FFF).all(), (mode, rank)
            assert_bits(got[rank][~gone], value[~gone], f"{mode} rank {rank}")
    with pytest.raises(EPInputError, match=f"rank 1: out holds {room} rows, but those that arrived take"):
        communicators[short].synchronize()
    outs = [poisoned(one) for one in communicators]
    for rank, batch in enumerate(dispatch()):
        communicators[rank].synchronize()
        check_filled(cfg, batch, want[rank], f"rank {rank}")


def test_buffers_that_just_fit_are_enough():
    cfg = small(num_experts=3, top_k=1)
    communicators = connect_reference(cfg)
    inputs = make_inputs(cfg, [5, 5, 5], "one_expert", 0)
    capacities = [15, 0, 0]
    batches = [
        one.dispatch(i.x, i.topk_ids, out=poisoned(one, capacity))
        for one, i, capacity in zip(communicators, inputs, capacities, strict=True)
    ]
    for rank, batch in enumerate(batches):
        communicators[rank].synchronize()
        check_filled(cfg, batch, expected(cfg, inputs, weights=False)[rank], f"rank {rank}")


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("bad", [6, -2, 2**31 - 1])
def test_an_expert_id_out_of_range_is_masked_and_reported(bad: int, split: bool):
    cfg = small()
    communicators, inputs = connect_reference(cfg), make_inputs(cfg, [5, 5, 5], "uniform", 0)
    inputs[1].topk_ids[3, 1] = -1
    want = expected(cfg, inputs)
    inputs[1].topk_ids[3, 1] = bad
    communicators[1].plan_dispatch(inputs[1].x, inputs[1].topk_ids)
    communicators[1].synchronize()
    batches = []
    for one, given in zip(communicators, inputs, strict=True):
        call, out = (given.x, given.topk_ids, given.router_weights), poisoned(one)
        batches.append(one.dispatch_wait(one.dispatch_async(*call), out) if split else one.dispatch(*call, out=out))
    rows = rows_for(want, cfg)
    for mode in COMBINE_MODES:
        got = [c.combine(r, b, mode=mode) for c, r, b in zip(communicators, rows, batches, strict=True)]
        for rank, value in enumerate(reference.combine(cfg, rows, want, mode=mode)):
            check_filled(cfg, batches[rank], want[rank], f"rank {rank}")
            assert_bits(got[rank], value, f"{mode} rank {rank}")
    if split:
        assert communicators[1].take_input_errors() == {Phase.EXPERT_ID: (7, 6, bad)}
    else:
        rule = rf"rank 1: topk_ids.flatten\(\)\[7\] = {bad}: must be -1 or in \[0, 6\)"
        with pytest.raises(EPInputError, match=rule):
            communicators[1].synchronize()
    for one in communicators:
        one.synchronize()
