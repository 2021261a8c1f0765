"""The operations on lists of all ranks: `DistributedEPDispatch` and its formats, `DistributedEPCombine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep import connect_local, reference
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.distributed import (
    DistributedEPCombine,
    DistributedEPDispatch,
    DistributedEPDispatchFP8,
    DistributedEPDispatchMXFP4,
    DistributedEPDispatchNVFP4,
)
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference.backend import connect_reference
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.fake_gpu import CFG, HOOKS, Launches, MakeRank, expert_rows, inputs
from tests.reference.ranks import expected, rows_for, small

COUNTS = (5, 3)
"""Tokens of the two ranks."""
ONE_RANK = replace(CFG, world_size=1, dispatch_format="bf16")


def columns() -> list[list[torch.Tensor]]:
    """x, topk_ids and router_weights, each of both ranks."""
    return [list(column) for column in zip(*(inputs(count) for count in COUNTS), strict=True)]


def pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


# ---- calls


def test_a_list_launches_rank_by_rank(make_rank: MakeRank, launches: Launches) -> None:
    ranks = [make_rank(rank=0), make_rank(rank=1)]
    scales, outs = [torch.tensor([2.0]), torch.tensor([3.0])], [one.allocate() for one in ranks]
    batches = DistributedEPDispatchNVFP4(ranks)(*columns(), scales, outs)
    assert launches.values("group.rank") == [0, 1]
    assert launches.values("input.global_scale") == pointers(scales)
    assert [batch.tokens is out.tokens for batch, out in zip(batches, outs, strict=True)] == [True] * 2
    sums = DistributedEPCombine(ranks)([expert_rows(batch) for batch in batches], batches, dtype=torch.float32)
    assert [one.shape for one in sums] == [(5, 128), (3, 128)]
    assert launches.kernels[2:] == ["combine_partial"] * 2


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(
            lambda ids: {"topk_ids": ids[:1]}, r"len\(topk_ids\) = 1: must be the number of ranks, 2", id="too short"
        ),
        pytest.param(lambda ids: {"topk_ids": [ids[0]] * 2}, r"topk_ids\.shape", id="wrong on one rank"),
        pytest.param(lambda ids: {"outs": [None]}, r"len\(outs\) = 1", id="too few outputs"),
    ],
)
def test_lists_launch_when_all_arguments_are_good(
    make_rank: MakeRank, launches: Launches, change: Callable[[list], dict], rule: str
) -> None:
    operation = DistributedEPDispatchNVFP4([make_rank(rank=0), make_rank(rank=1)])
    given = dict(zip(("input_tokens", "topk_ids", "router_weights"), columns(), strict=True))
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        operation(**given | change(given["topk_ids"]))


def quantised(ranks: list[Communicator]) -> tuple[DistributedEPDispatchNVFP4, list, dict[str, list[torch.Tensor]]]:
    """The operation, its arguments by place, and those by name, for rows that are quantised already."""
    payloads, scales = ([torch.zeros(n, width, dtype=torch.uint8) for n in COUNTS] for width in (64, 8))
    row_scales = [torch.ones(count, dtype=torch.bfloat16) for count in COUNTS]
    places = [payloads, *columns()[1:]]
    return DistributedEPDispatchNVFP4(ranks), places, {"scales": scales, "row_scales": row_scales}


@pytest.fixture
def hooked(make_rank: MakeRank) -> list[Communicator]:
    """Two ranks with hooks whose rows have scales."""
    return [make_rank(replace(CFG, dispatch_format="nvfp4_row"), rank, HOOKS) for rank in range(2)]


def test_lists_of_scales_and_of_what_hooks_read_reach_their_ranks(
    hooked: list[Communicator], launches: Launches
) -> None:
    operation, places, named = quantised(hooked)
    batches = operation(*places, **named)
    data = [torch.zeros(count, 128) for count in COUNTS]
    DistributedEPCombine(hooked)([expert_rows(batch) for batch in batches], batches, epilogue_data=data)
    sent, summed = launches.of("dispatch"), launches.of("combine")
    assert [launch.arguments["input.scales"] for launch in sent] == pointers(named["scales"])
    assert [launch.arguments["input.row_scales"] for launch in sent] == pointers(named["row_scales"])
    assert [launch.arguments["sums.epilogue_data"] for launch in summed] == pointers(data)
    assert len(launches) == 4


def test_lists_of_scales_and_of_what_hooks_read_have_an_entry_for_each_rank(
    hooked: list[Communicator], launches: Launches
) -> None:
    operation, places, named = quantised(hooked)
    for short, rule in (
        ({"scales": named["scales"][:1]}, r"len\(scales\)"),
        ({"row_scales": [None]}, r"len\(row_scales\)"),
    ):
        with launches.forbidden(), pytest.raises(EPInputError, match=f"{rule} = 1: must be the number of ranks, 2"):
            operation(*places, **named | short)
    batches = operation(*places, **named)
    with launches.forbidden(), pytest.raises(EPInputError, match=r"len\(epilogue_data\) = 1"):
        DistributedEPCombine(hooked)(
            [expert_rows(batch) for batch in batches], batches, epilogue_data=[torch.zeros(5, 128)]
        )


def test_arguments_are_lists_with_an_entry_for_each_rank() -> None:
    ranks = connect_local(ONE_RANK, ["cpu"])
    (x, ids, weights), dispatch, combine = inputs(), DistributedEPDispatch(ranks), DistributedEPCombine(ranks)
    with pytest.raises(EPInputError, match=r"input_tokens = Tensor: must be a list with one entry per rank"):
        dispatch(x, [ids], [weights])
    with pytest.raises(EPInputError, match=r"len\(input_scales\) = 2: must be the number of ranks, 1"):
        dispatch([x], [ids], [weights], [1.0, 1.0])
    with pytest.raises(EPInputError, match=r"outs = Tensor: must be a list"):
        combine([x], dispatch([x], [ids], [weights]), outs=x)


# ---- results, on the reference backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_a_list_combines_as_its_ranks_do(mode: str, dtype: torch.dtype) -> None:
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


def test_a_refused_list_joins_no_round() -> None:
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


# ---- the ranks that an operation is made of


SERVES = {
    DistributedEPDispatch: {"bf16"},
    DistributedEPDispatchFP8: {"fp8", "fp8_pow2"},
    DistributedEPDispatchMXFP4: {"mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8"},
    DistributedEPDispatchNVFP4: {"nvfp4", "nvfp4_row", "mxfp4", "mxfp8"},
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("operation", SERVES, ids=lambda operation: operation.__name__)
def test_an_operation_serves_its_formats_only(make_rank: MakeRank, operation: type, fmt: str) -> None:
    ranks = [make_rank(replace(CFG, dispatch_format=fmt), rank) for rank in range(2)]
    if fmt in SERVES[operation]:
        operation(ranks)
    else:
        with pytest.raises(EPConfigError, match=f"dispatch_format = '{fmt}': {operation.__name__} serves"):
            operation(ranks)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("choose", "rule"),
    [
        pytest.param(lambda ranks, other: [], "communicators = no ranks: must be a list", id="none"),
        pytest.param(lambda ranks, other: ranks[:1], "communicators = 1: must be world_size = 2", id="too few"),
        pytest.param(
            lambda ranks, other: ranks[::-1],
            r"communicators of ranks \[1, 0\]: must be all ranks of one group, in order",
            id="another order",
        ),
        pytest.param(
            lambda ranks, other: [ranks[0], other],
            r"top_k = 2 on rank\(s\) \[0\], 1 on rank\(s\) \[1\]: must",
            id="of two groups",
        ),
    ],
)
def test_an_operation_takes_all_ranks_of_one_group_in_order(
    make_rank: MakeRank, fmt: str, choose: Callable, rule: str
) -> None:
    cfg = replace(CFG, dispatch_format=fmt)
    ranks, other = [make_rank(cfg, rank) for rank in range(2)], make_rank(replace(cfg, top_k=1), 1)
    with pytest.raises(EPConfigError, match=rule):
        DistributedEPCombine(choose(ranks, other))


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        pytest.param(lambda ranks: None, r"communicators = NoneType: must be a list of all ranks", id="None"),
        pytest.param(lambda ranks: [], r"communicators = no ranks", id="no ranks"),
        pytest.param(lambda ranks: ranks[0], r"communicators = ReferenceCommunicator: must be a list", id="a rank"),
        pytest.param(lambda ranks: iter(ranks), r"communicators = list_iterator: must be a list", id="an iterator"),
        pytest.param(
            lambda ranks: [ONE_RANK], r"communicators\[0\] = EPConfig: must be a communicator", id="a configuration"
        ),
    ],
)
def test_an_operation_is_made_of_a_list_of_communicators(choose: Callable[[Sequence[Any]], Any], message: str) -> None:
    with pytest.raises(EPConfigError, match=message):
        DistributedEPDispatch(choose(connect_local(ONE_RANK, ["cpu"])))
