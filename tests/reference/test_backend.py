"""The reference communicator's results: those of the reference, in place after the last rank's call."""

from contextlib import ExitStack

import pytest
import torch

from cute_ep import reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import poison
from cute_ep.testing.workloads import make_inputs
from tests.cases import CASES, Case
from tests.reference.ranks import (
    check_filled,
    expected,
    is_poison,
    poison_all,
    poisoned,
    rows_for,
    small,
    without_round,
)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fused_and_split_rounds_give_the_results_of_the_reference(case: Case, split: bool):
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


def test_many_rounds_in_the_same_buffers_also_when_ranks_run_ahead():
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
    sums = reference.combine(cfg, rows, want, mode="exact")
    got = []
    for rank, communicator in enumerate(communicators):
        weights, outputs = inputs[rank].router_weights.clone(), rows[rank].clone()
        got.append(communicator.combine(outputs, batches[rank], weights, mode="exact"))
        outputs.zero_(), weights.zero_()
        poison_all(batches[rank])
    for rank in range(3):
        assert_bits(got[rank], sums[rank], f"rank {rank}")


def test_weights_of_exact_sums_may_be_given_at_either_call_and_by_some_ranks_only():
    cfg = small(dispatch_format="bf16")
    inputs = make_inputs(cfg, [5, 5, 5], "masked", 3)
    communicators = connect_reference(cfg)
    given = [one.router_weights if rank == 1 else None for rank, one in enumerate(inputs)]
    batches = [one.dispatch(i.x, i.topk_ids, w) for one, i, w in zip(communicators, inputs, given, strict=True)]
    want = reference.dispatch(cfg, [i.x for i in inputs], [i.topk_ids for i in inputs], None, given)
    for rank in range(3):
        assert_bits(*(without_round(one.headers) for one in (batches[rank], want[rank])), "headers")
        assert_bits(batches[rank].weights, want[rank].weights, "weights")
    rows = rows_for(batches, cfg)
    other = [torch.randn(5, 2) for _ in range(3)]
    used = [other[0], None, other[2]]
    sums, sums_other = (reference.combine(cfg, rows, want, weights, "exact") for weights in (used, other))
    got, got_other = (
        [c.combine(r, b, w, "exact") for c, r, b, w in zip(communicators, rows, batches, weights, strict=True)]
        for weights in (used, other)
    )
    for rank in range(3):
        assert_bits(got[rank], sums[rank], "one argument")
        assert_bits(got_other[rank], sums_other[rank], "argument wins")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.fmt != "bf16" and case.hidden <= 384], ids=lambda c: c.id
)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_tokens_that_are_quantised_give_the_same_results(case: Case, split: bool):
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
