"""The reference communicator: results in place after the last rank's call, rounds by call order, errors."""

import inspect
import re
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.distributed import DistributedEPCombine, DistributedEPDispatchNVFP4
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference.backend import ReferenceCommunicator, connect_reference
from cute_ep.reference.results import UNKNOWN
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import poison
from cute_ep.testing.workloads import make_inputs
from tests.cases import CASES, Case
from tests.reference.ranks import (
    FLOAT_POISON,
    check_filled,
    dispatch_all,
    expected,
    is_poison,
    poison_all,
    poisoned,
    rows_for,
    small,
)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case: Case, split: bool):
    cfg, inputs = case.cfg, case.inputs()
    scales = [1.5 + rank for rank in range(cfg.world_size)] if case.fmt == "nvfp4" else None
    want = expected(cfg, inputs, scales=scales)
    with ExitStack() as stack:
        communicators = [stack.enter_context(one) for one in connect_reference(cfg)]
        assert [one.rank for one in communicators] == list(range(cfg.world_size))
        calls = [
            (given.x, given.topk_ids, given.router_weights, scales and torch.tensor([scales[rank]]))
            for rank, given in enumerate(inputs)
        ]
        outs = [poisoned(one) for one in communicators]
        if split:
            pending = [one.dispatch_async(*call) for one, call in zip(communicators, calls, strict=True)]
            assert all(is_poison(out.row_map) for out in outs)
            batches = [one.dispatch_wait(p, o) for one, p, o in zip(communicators, pending, outs, strict=True)]
        else:
            batches = [one.dispatch(*call, out=o) for one, call, o in zip(communicators, calls, outs, strict=True)]
        for rank, batch in enumerate(batches):
            check_filled(cfg, batch, want[rank], f"rank {rank}")
            assert isinstance(batch, Dispatched) and batch.tokens is outs[rank].tokens
            assert batch.topk_ids is inputs[rank].topk_ids
            assert batch.router_weights is inputs[rank].router_weights
        rows = rows_for(batches, cfg)
        for mode, dtype in [("exact", torch.bfloat16), ("partial", torch.float16), ("unweighted", torch.float32)]:
            if mode == "unweighted" and case.shared:
                continue
            sums = reference.combine(cfg, rows, want, mode=mode, dtype=dtype)
            results = [torch.empty_like(value) for value in sums]
            if split:
                sent = [c.combine_async(r, b, mode) for c, r, b in zip(communicators, rows, batches, strict=True)]
                got = [c.combine_wait(p, out=out) for c, p, out in zip(communicators, sent, results, strict=True)]
            else:
                got = [
                    c.combine(r, b, mode=mode, out=out)
                    for c, r, b, out in zip(communicators, rows, batches, results, strict=True)
                ]
            made = [
                c.combine(r, b, mode=mode, dtype=dtype) for c, r, b in zip(communicators, rows, batches, strict=True)
            ]
            for rank, value in enumerate(sums):
                assert got[rank] is results[rank]
                assert_bits(got[rank], value, f"{mode} rank {rank}")
                assert_bits(made[rank], value, f"{mode} rank {rank}, allocated")
        for one in communicators:
            one.synchronize()


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


def test_a_sent_round_is_enough_for_the_others():
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


def test_many_rounds_in_reused_buffers_and_ranks_that_run_ahead():
    cfg = small(top_k=3)
    communicators = connect_reference(cfg)
    outs = [one.allocate() for one in communicators]
    routings = ["uniform", "masked", "one_rank", "zipf"]
    for index in range(12):
        tokens = [(index + rank) % 6 for rank in range(3)]
        inputs = make_inputs(cfg, tokens, routings[index % 4], index)
        for out in outs:
            poison_all(out)
        batches = [
            one.dispatch(i.x, i.topk_ids, i.router_weights, out=out)
            for one, i, out in zip(communicators, inputs, outs, strict=True)
        ]
        want = expected(cfg, inputs)
        for rank, batch in enumerate(batches):
            check_filled(cfg, batch, want[rank], f"round {index} rank {rank}")
        rows = rows_for(batches, cfg, index)
        mode = "partial" if index % 3 else "exact"
        got = [c.combine(r, b, mode=mode) for c, r, b in zip(communicators, rows, batches, strict=True)]
        for rank, value in enumerate(reference.combine(cfg, rows, want, mode=mode)):
            assert_bits(got[rank], value, f"round {index} rank {rank}")
    # rank 0 is two rounds ahead of rank 1, which is one ahead of rank 2
    rounds = [make_inputs(cfg, [5, 4, 3], "uniform", 100 + index) for index in range(3)]
    batches = {}
    for rank, index in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (2, 2)]:
        given = rounds[index][rank]
        communicator = communicators[rank]
        batches[rank, index] = communicator.dispatch(given.x, given.topk_ids, out=poisoned(communicator))
    for (rank, index), batch in batches.items():
        check_filled(cfg, batch, expected(cfg, rounds[index], weights=False)[rank], f"round {index} rank {rank}")


def test_arguments_may_be_overwritten_after_the_call():
    cfg = small()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 3)
    want = expected(cfg, inputs)
    communicators = connect_reference(cfg)
    batches = []
    for communicator, given in zip(communicators, inputs, strict=True):
        x, ids, weights = given.x.clone(), given.topk_ids.clone(), given.router_weights.clone()
        batches.append(communicator.dispatch(x, ids, weights, out=poisoned(communicator)))
        x.zero_(), weights.zero_()
    for rank in range(3):
        check_filled(cfg, batches[rank], want[rank], f"rank {rank}")
    rows = rows_for(batches, cfg)
    sums = reference.combine(cfg, rows, want)
    got = []
    for rank, communicator in enumerate(communicators):
        weights, outputs = inputs[rank].router_weights.clone(), rows[rank].clone()
        got.append(communicator.combine(outputs, batches[rank], weights))
        outputs.zero_(), weights.zero_()
        poison_all(batches[rank])
    for rank in range(3):
        assert_bits(got[rank], sums[rank], f"rank {rank}")


def test_exact_weights_at_either_call_and_only_on_some_ranks():
    cfg = small(dispatch_format="bf16")
    inputs = make_inputs(cfg, [5, 5, 5], "masked", 3)
    communicators = connect_reference(cfg)
    given = [one.router_weights if rank == 1 else None for rank, one in enumerate(inputs)]
    batches = [one.dispatch(i.x, i.topk_ids, w) for one, i, w in zip(communicators, inputs, given, strict=True)]
    want = reference.dispatch(cfg, [i.x for i in inputs], [i.topk_ids for i in inputs], None, given)
    for rank in range(3):
        assert_bits(batches[rank].headers, want[rank].headers, "headers")
        assert_bits(batches[rank].weights, want[rank].weights, "weights")
    rows = rows_for(batches, cfg)
    other = [torch.randn(5, 2) for _ in range(3)]
    used = [other[0], None, other[2]]
    sums = reference.combine(cfg, rows, want, used)
    got = [c.combine(r, b, w) for c, r, b, w in zip(communicators, rows, batches, used, strict=True)]
    sums_other = reference.combine(cfg, rows, want, other)
    got_other = [c.combine(r, b, w) for c, r, b, w in zip(communicators, rows, batches, other, strict=True)]
    for rank in range(3):
        assert_bits(got[rank], sums[rank], "one argument")
        assert_bits(got_other[rank], sums_other[rank], "argument wins")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.fmt != "bf16" and case.hidden <= 384], ids=lambda c: c.id
)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_prequantized_tokens(case: Case, split: bool):
    cfg, inputs = case.cfg, case.inputs()
    ready = [reference.quantize(one.x, cfg.format) for one in inputs]
    communicators = connect_reference(cfg)
    outs = [poisoned(one) for one in communicators]
    batches = []
    for communicator, given, rows, out in zip(communicators, inputs, ready, outs, strict=True):
        copies = [None if one is None else one.clone() for one in rows]
        call = (copies[0], given.topk_ids, given.router_weights)
        named = {"scales": copies[1], "row_scales": copies[2]}
        if split:
            batches.append(communicator.dispatch_wait(communicator.dispatch_async(*call, **named), out))
        else:
            batches.append(communicator.dispatch(*call, out=out, **named))
        for one in filter(torch.is_tensor, copies):
            poison(one)
    for rank, want in enumerate(expected(cfg, inputs)):
        check_filled(cfg, batches[rank], want, f"rank {rank}")


@pytest.mark.parametrize("shared", [False, True])
def test_skip_a2a_waits_for_nobody(shared):
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


# ---- errors


@pytest.mark.parametrize("absent", [(0,), (1, 2)])
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
        assert (caught.value.phase, caught.value.rank, caught.value.missing) == ("ROUTE", rank, absent)
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
    with pytest.raises(EPTimeout, match="RETURN") as caught:
        communicators[2].synchronize()
    assert (caught.value.phase, caught.value.rank, caught.value.missing) == ("RETURN", 2, (1,))
    communicators[1].synchronize()


def test_combine_before_the_dispatch_is_complete():
    """Rank by rank: refused, and all goes on once the others have dispatched."""
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


@pytest.mark.parametrize("some", [1, 0])
@pytest.mark.parametrize(
    ("fmt", "shared"), [("bf16", False), ("bf16", True), ("fp8", True), ("nvfp4", False), ("nvfp4_row", True)]
)
def test_rows_that_do_not_fit_are_lost(fmt: str, shared: bool, some: int):
    """As on a GPU (tests/gpu/test_protocol.py): one rank has room for all but one of its rows, or for some of its
    shared expert's, or for none. It alone reports that, once, and announces none; a token that lost a row comes home
    as NaN, all others right, and the next round is unharmed."""
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
    for name in ("expert_ids", "headers"):
        assert_bits(getattr(lost, name), getattr(want[short], name), name)
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
    with pytest.raises(EPInputError, match=rf"rank 1: topk_ids.flatten\(\)\[7\] = {bad}: must be -1 or in \[0, 6\)"):
        communicators[1].synchronize()
    for one in communicators:
        one.synchronize()


def test_exactly_enough_capacity():
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


def test_weights_rules():
    cfg = small()
    communicators = connect_reference(cfg)
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    bare = [one.dispatch(i.x, i.topk_ids) for one, i in zip(communicators, inputs, strict=True)]
    full = [one.dispatch(i.x, i.topk_ids, i.router_weights) for one, i in zip(communicators, inputs, strict=True)]
    rows, weights, first = rows_for(bare, cfg), inputs[0].router_weights, communicators[0]
    for match, call in (
        ("exact combine needs them", lambda: first.combine(rows[0], bare[0])),
        ("partial combine needs them", lambda: first.combine(rows[0], bare[0], mode="partial")),
        ("partial combine needs them", lambda: first.combine_async(rows[0], bare[0], "partial")),
        ("must be None in partial mode", lambda: first.combine(rows[0], full[0], weights, "partial")),
        ("router_weights.shape", lambda: first.combine(rows[0], full[0], weights[:1])),
        ("mode = 'mean'", lambda: first.combine(rows[0], full[0], weights, "mean")),
        ("mode = 'mean'", lambda: first.combine_async(rows[0], full[0], "mean")),
    ):
        with pytest.raises(EPInputError, match=match):
            call()
    # none of these joined a round
    got = [c.combine(r, b, i.router_weights) for c, r, b, i in zip(communicators, rows, bare, inputs, strict=True)]
    for rank, value in enumerate(reference.combine(cfg, rows, expected(cfg, inputs))):
        assert_bits(got[rank], value, f"rank {rank}")
    for match, call in (
        ("must be None in unweighted mode", lambda: first.combine(rows[0], bare[0], weights, "unweighted")),
        ("dtype = torch.float64: must be one of", lambda: first.combine(rows[0], full[0], dtype=torch.float64)),
        ("out.shape", lambda: first.combine(rows[0], bare[0], mode="unweighted", out=torch.empty(5, 32))),
        ("dtype = torch.int16", lambda: first.combine(rows[0], full[0], out=torch.empty(5, 32, dtype=torch.int16))),
    ):
        with pytest.raises(EPInputError, match=match):
            call()
    # a wait that was refused may be repeated
    sent = [c.combine_async(r, b) for c, r, b in zip(communicators, rows, bare, strict=True)]
    with pytest.raises(EPInputError, match="exact combine needs them"):
        first.combine_wait(sent[0])
    assert_bits(first.combine_wait(sent[0], weights), got[0], "second attempt")
    sent = [c.combine_async(r, b, "partial") for c, r, b in zip(communicators, rows, full, strict=True)]
    with pytest.raises(EPInputError, match="must be None in partial mode"):
        first.combine_wait(sent[0], weights)


def test_refused_arguments_do_not_join_the_round():
    cfg = small()
    communicators = connect_reference(cfg)
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    first, given = communicators[0], inputs[0]
    buffers = first.allocate(3)
    ready = reference.quantize(given.x, "nvfp4")
    for match, call in (
        ("x.dtype", lambda: first.dispatch(given.x.float(), given.topk_ids)),
        ("input_scale = 0.0: must be a number", lambda: first.dispatch(given.x, given.topk_ids, input_scale=0.0)),
        ("x.shape", lambda: first.dispatch(given.x, given.topk_ids, scales=torch.zeros(5, 2, dtype=torch.uint8))),
        (
            "scales.shape",
            lambda: first.dispatch(ready.payload, given.topk_ids, scales=torch.zeros(5, 3, dtype=torch.uint8)),
        ),
        ("must be None", lambda: first.dispatch(ready.payload, given.topk_ids, None, 2.0, scales=ready.scales)),
        ("row_scales", lambda: first.dispatch(ready.payload, given.topk_ids, scales=ready.scales, row_scales=given.x)),
        (
            "input_scale = 0.0: must be a number",
            lambda: first.dispatch(given.x, given.topk_ids, input_scale=torch.zeros(1)),
        ),
        ("input_scale", lambda: first.dispatch(given.x, given.topk_ids, input_scale=torch.zeros(2))),
        ("out = tuple", lambda: first.dispatch(given.x, given.topk_ids, out=(1,))),
        (
            "out.src_info.shape",
            lambda: first.dispatch(
                given.x,
                given.topk_ids,
                out=replace(buffers, **{"src_info": torch.zeros(4, 2).int()}),
            ),
        ),
        (
            "out.scales.shape",
            lambda: first.dispatch(
                given.x,
                given.topk_ids,
                out=replace(buffers, **{"scales": buffers.scales[:1]}),
            ),
        ),
    ):
        with pytest.raises(EPInputError, match=match):
            call()
    first.synchronize()
    batches = [
        one.dispatch(i.x, i.topk_ids, i.router_weights, out=poisoned(one))
        for one, i in zip(communicators, inputs, strict=True)
    ]
    for rank, batch in enumerate(batches):
        check_filled(cfg, batch, expected(cfg, inputs)[rank], f"rank {rank}")
    rows = rows_for(batches, cfg)
    need = batches[0].num_rows.item()
    for match, call in (
        ("at least num_rows", lambda: first.combine(rows[0][: need - 1], batches[0])),
        ("rows.dtype", lambda: first.combine(rows[0].float(), batches[0])),
        ("out.shape", lambda: first.combine(rows[0], batches[0], out=torch.empty(4, 32).bfloat16())),
        ("exact combine has no epilogue here", lambda: first.combine(rows[0], batches[0], epilogue_data=rows[0])),
        ("dispatched.rank = 1: must be 0", lambda: first.combine(rows[0], expected(cfg, inputs)[1])),
    ):
        with pytest.raises(EPInputError, match=match):
            call()
    sent = [c.combine_async(r, b) for c, r, b in zip(communicators, rows, batches, strict=True)]
    with pytest.raises(EPInputError, match="exact combine has no epilogue here"):
        first.combine_wait(sent[0], epilogue_data=rows[0])
    assert_bits(first.combine_wait(sent[0]), reference.combine(cfg, rows, expected(cfg, inputs))[0], "rank 0")


def test_calls_are_those_of_a_gpu():
    def public(kind: type) -> dict[str, object]:
        return {name: value for name, value in vars(kind).items() if not name.startswith("_") and name != "free"}

    own, other = public(ReferenceCommunicator), public(Communicator)
    assert own.keys() == other.keys()
    for name, call in own.items():
        if inspect.isfunction(call):
            one, two = (inspect.signature(made).parameters.values() for made in (call, other[name]))
            assert [(p.name, p.kind, p.default) for p in one] == [(p.name, p.kind, p.default) for p in two], name


def test_peers_must_agree_on_mode_and_round():
    cfg = small()
    communicators, first, inputs = dispatch_all(cfg)
    second = [one.dispatch(i.x, i.topk_ids, i.router_weights) for one, i in zip(communicators, inputs, strict=True)]
    rows = rows_for(first, cfg)
    communicators[2].combine(rows[2], first[2], mode="partial")
    with pytest.raises(EPInputError, match="'exact' of dispatch round 1: must match rank 2's combine, 'partial'"):
        communicators[0].combine(rows[0], first[0])
    with pytest.raises(EPInputError, match="dispatch round 2: must match rank 2's combine"):
        communicators[0].combine(rows[0], second[0], mode="partial")
    communicators[0].combine(rows[0], first[0], mode="partial")


def test_pending_is_used_once_in_order_and_by_its_rank():
    cfg = small()
    communicators = connect_reference(cfg)
    given = make_inputs(cfg, [1, 1, 1], "uniform", 0)
    first, other = communicators[0], communicators[1]
    a, b = (first.dispatch_async(given[0].x, given[0].topk_ids) for _ in range(2))
    for match, call in (
        ("pending = round 2 of dispatch: must be round 1", lambda: first.dispatch_wait(b)),
        ("dispatch_async of this communicator, rank 1", lambda: other.dispatch_wait(a)),
        ("dispatch_async of this communicator, rank 0", lambda: first.dispatch_wait(1)),
        ("dispatch_async of this communicator, rank 0", lambda: connect_reference(cfg)[0].dispatch_wait(a)),
        ("combine_async of this communicator, rank 0", lambda: first.combine_wait(a)),
    ):
        with pytest.raises(EPInputError, match=match):
            call()
    for match, call in (
        ("2 are outstanding", lambda: first.dispatch_async(given[0].x, given[0].topk_ids)),
        ("2 split round", lambda: first.dispatch(given[0].x, given[0].topk_ids)),
    ):
        with pytest.raises(EPInputError, match=match):
            call()
    first.dispatch_wait(a)
    with pytest.raises(EPInputError, match="rank 0, returned, and not received before"):
        first.dispatch_wait(a)
    first.dispatch_wait(b)
    communicators, batches, _ = dispatch_all(cfg)
    sent = communicators[0].combine_async(rows_for(batches, cfg)[0], batches[0])
    communicators[0].combine_wait(sent)
    with pytest.raises(EPInputError, match="rank 0, returned, and not received before"):
        communicators[0].combine_wait(sent)
    with pytest.raises(EPInputError, match="dispatch_async of this communicator, rank 0"):
        communicators[0].dispatch_wait(sent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_a_list_combines_as_its_ranks_do(mode: str, dtype: torch.dtype):
    """In every mode, into memory of the caller or new one, with weights of its own where the mode takes them."""
    cfg = small()
    communicators = connect_reference(cfg)
    inputs = make_inputs(cfg, [5, 3, 4], "masked", 0)
    xs, ids, weights = ([getattr(one, name) for one in inputs] for name in ("x", "topk_ids", "router_weights"))
    batches = DistributedEPDispatchNVFP4(communicators)(xs, ids, weights)
    combine, want, rows = DistributedEPCombine(communicators), expected(cfg, inputs), rows_for(batches, cfg)
    outs = [torch.full_like(one, 7) for one in reference.combine(cfg, rows, want, mode=mode, dtype=dtype)]
    for given in (None, [one.flip(0) for one in weights])[: 2 if mode == "exact" else 1]:
        sums = reference.combine(cfg, rows, want, given, mode, dtype)
        got = combine(rows, batches, given, mode, outs)
        made = combine(rows, batches, given, mode, dtype=dtype)
        for rank, value in enumerate(sums):
            assert got[rank] is outs[rank]
            assert_bits(got[rank], value, f"rank {rank}")
            assert_bits(made[rank], value, f"rank {rank}, allocated")


def test_a_refused_list_joins_no_round():
    """One rank's bad argument leaves all ranks where they were, and so does a plan that is not launched."""
    cfg = small()
    communicators = connect_reference(cfg)
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    dispatch, combine = DistributedEPDispatchNVFP4(communicators), DistributedEPCombine(communicators)
    xs, ids, weights = ([getattr(one, name) for one in inputs] for name in ("x", "topk_ids", "router_weights"))
    with pytest.raises(EPInputError, match=r"x\.dtype"):
        dispatch([*xs[:2], xs[2].float()], ids, weights)
    communicators[0].plan_dispatch(xs[0], ids[0])
    batches = dispatch(xs, ids, weights)
    want = expected(cfg, inputs)
    for rank, batch in enumerate(batches):
        assert_bits(batch.num_rows, want[rank].num_rows, f"rank {rank}")
    rows = rows_for(batches, cfg)
    with pytest.raises(EPInputError, match=r"rows\.dtype"):
        combine([*rows[:2], rows[2].float()], batches)
    communicators[0].plan_combine(rows[0], batches[0])
    for rank, (got, sums) in enumerate(zip(combine(rows, batches), reference.combine(cfg, rows, want), strict=True)):
        assert_bits(got, sums, f"rank {rank}")


def test_close():
    cfg = small()
    communicators, batches, inputs = dispatch_all(cfg)
    with communicators[0] as first:
        assert first is communicators[0]
    first.close()
    for call in (
        first.synchronize,
        first.allocate,
        lambda: first.dispatch(inputs[0].x, inputs[0].topk_ids),
        lambda: first.combine(rows_for(batches, cfg)[0], batches[0]),
    ):
        with pytest.raises(EPError, match="rank 0: the communicator is closed"):
            call()
    communicators[1].synchronize()


def test_bf16_refuses_a_global_scale():
    first = connect_reference(small(dispatch_format="bf16"))[0]
    with pytest.raises(EPInputError, match="no global scale"):
        first.dispatch(torch.zeros(1, 32).bfloat16(), torch.zeros(1, 2).int(), input_scale=1.0)


def test_a_shared_expert_has_no_unweighted_rows():
    cfg = small(fused_shared_expert=True)
    communicators, batches, _ = dispatch_all(cfg)
    rows = rows_for(batches, cfg)
    for call in (communicators[0].combine, communicators[0].combine_async):
        with pytest.raises(EPInputError, match="shared expert"):
            call(rows[0], batches[0], mode="unweighted")
    communicators[0].synchronize()
