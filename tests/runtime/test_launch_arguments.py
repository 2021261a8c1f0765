"""Which kernels a communicator on a GPU launches for a call, and with which arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import pack_returns
from cute_ep.layouts.maps.parameters import numbers
from cute_ep.layouts.maps.routing import OutputType, division_magic
from cute_ep.layouts.maps.variants import NO_HOOKS, Hooks
from cute_ep.runtime.communicator import Communicator
from cute_ep.tuning.builtin import built_in
from tests.fake_gpu import (
    CFG,
    HOOKS,
    MAX_CTAS,
    SHARED_EXPERT,
    SKIP_A2A,
    Launches,
    MakeRank,
    arena_address,
    expert_rows,
    inputs,
)

EXPERTS = ("group.experts", "group.first_expert", "group.all_experts", "group.local_experts")

LEFT_TO_THE_OTHER_HALF = {
    "dispatch_async": {"out", "scales"},
    "dispatch_wait": {"ids", "input"},
    "combine_async": {"shared", "ids", "sums"},
    "combine_wait": {"batch"},
}
"""Records that a half does not set, by the kernel's name without its mode."""


# ---- fused calls


def test_a_fused_call_is_one_launch_that_sets_every_record(make_rank: MakeRank, launches: Launches) -> None:
    rank, (x, ids, weights) = make_rank(SHARED_EXPERT), inputs()
    batch = rank.dispatch(x, ids, weights, torch.tensor([2.0]))
    for mode in ("exact", "partial"):
        assert rank.combine(expert_rows(batch), batch, mode=mode).shape == x.shape
    assert launches.kernels == ["dispatch", "combine_exact", "combine_partial"]
    assert [launch.empty_records for launch in launches] == [set()] * 3


def test_dispatch_passes_tokens_scale_and_output_buffers(rank: Communicator, launches: Launches) -> None:
    (x, ids, weights), scale, out = inputs(), torch.tensor([2.0]), rank.allocate()
    rank.dispatch(x, ids, weights, scale, out)
    sent = launches.only()
    assert sent.arguments["input.tokens"] == 5
    assert sent.values("input.x", "input.global_scale") == (x.data_ptr(), scale.data_ptr())
    assert sent.values("input.scales", "input.row_scales") == (0, 0)
    assert sent.arguments["scales.data"] == out.scales.data_ptr()
    assert sent.arguments["out.capacity"] == out.tokens.shape[0] == CFG.max_rows


def test_combine_passes_rows_weights_sums_and_the_batch(rank: Communicator, launches: Launches) -> None:
    (x, ids, weights), out = inputs(), rank.allocate()
    batch, rows = rank.dispatch(x, ids, weights, out=out), expert_rows(out)
    sums = rank.combine(rows, batch, mode="partial")
    combined = launches.last("combine")
    assert combined.values("batch.row_map", "batch.headers") == (out.row_map.data_ptr(), out.headers.data_ptr())
    assert combined.values("sums.tokens", "sums.return_slices_log2") == (5, batch.return_slices_log2)
    assert combined.values("batch.weights", "sums.router_weights") == (out.weights.data_ptr(), 0)
    assert combined.values("rows.data", "sums.out") == (rows.data_ptr(), sums.data_ptr())


def test_dispatch_decides_the_slices_of_messages_and_of_rows_that_return(rank: Communicator, launches: Launches):
    batch, tuning = rank.dispatch(*inputs()), built_in(CFG, MAX_CTAS)
    sent = launches.only().arguments
    wanted = [tuning.shape(name, 5, MAX_CTAS).slices for name in ("dispatch", "combine")]
    assert [1 << sent["input.message_slices_log2"], 1 << sent["input.returns"]] == wanted
    assert batch.return_slices_log2 == sent["input.returns"]


def test_kernels_get_the_map_of_the_arena_for_their_mode(rank: Communicator, launches: Launches) -> None:
    batch = rank.dispatch(*inputs())
    for mode in ("exact", "partial"):
        rank.combine(expert_rows(batch), batch, mode=mode)
    for launch, partial in zip(launches, (False, False, True), strict=True):
        assert launch.record("arena") == tuple(numbers(CFG.arena.arguments(partial=partial))), launch.kernel


def test_a_rank_is_told_its_place_in_the_group_of_all_ranks(make_rank: MakeRank, launches: Launches) -> None:
    make_rank(rank=1).dispatch(*inputs())
    launch = launches.only()
    assert launch.values("group.rank", "group.ranks") == (1, 2)
    assert launch.values(*EXPERTS) == (8, 0, 8, 4)
    assert launch.values("group.top_k", "group.max_tokens", "group.hidden") == (2, 16, 128)
    assert launch.values("group.timeout_ns", "group.arena") == (60_000_000_000, arena_address(1))
    assert launch.record("arena") == tuple(numbers(CFG.arena.arguments()))
    for count in ("ranks", "local_experts", "top_k"):
        assert launch.arguments[f"group.{count}_magic"] == division_magic(launch.arguments[f"group.{count}"])


def test_addresses_of_peers_lie_in_the_arena_where_nothing_collects_them(rank: Communicator, launches: Launches):
    assert rank.arena.stored == {int(CFG.arena.peers.offset): [arena_address(0), arena_address(1)]}
    rank.dispatch(*inputs())
    tensors = [value for value in vars(rank).values() if isinstance(value, torch.Tensor)]
    assert not tensors and launches.only().arguments["arena.peers.at"] == CFG.arena.peers.offset


def test_a_call_without_tokens_is_launched_too(rank: Communicator, launches: Launches) -> None:
    batch = rank.dispatch(*inputs(0))
    assert rank.combine(torch.zeros(8, 128, dtype=torch.bfloat16), batch).shape == (0, 128)
    assert launches.first().arguments["input.tokens"] == 0 and launches.first().grid >= 1


# ---- halves


def test_the_two_halves_set_every_record_between_them(make_rank: MakeRank, launches: Launches) -> None:
    rank = make_rank(SHARED_EXPERT)
    sent = [rank.dispatch_async(*inputs()) for _ in range(2)]
    batch = rank.dispatch_wait(sent[0])
    rank.combine_wait(rank.combine_async(expert_rows(batch), batch, "partial"))
    rank.dispatch_wait(sent[1])
    assert launches.kernels == [
        *("dispatch_async", "dispatch_async", "dispatch_wait"),
        *("combine_async_partial", "combine_wait_partial", "dispatch_wait"),
    ]
    for half, left in LEFT_TO_THE_OTHER_HALF.items():
        assert launches.first(half).empty_records - {"grid"} == left, half


def test_rows_come_home_in_the_slices_that_the_sending_half_announced(rank: Communicator, launches: Launches) -> None:
    batch = rank.dispatch_wait(rank.dispatch_async(*inputs()))
    rank.combine_wait(rank.combine_async(expert_rows(batch), batch, "partial"))
    announced = launches.only("dispatch_async").arguments["input.returns"]
    sums = launches.only("combine_wait").arguments
    assert pack_returns(sums["sums.return_slices_log2"], sums["sums.flagged"]) == announced


# ---- rows and weights of combine


def test_without_rows_kernels_get_an_address_that_may_be_read(rank: Communicator, launches: Launches) -> None:
    """In both halves, since a sum of lost rows reads row 0."""
    batch = rank.dispatch(*inputs())
    none = expert_rows(batch)[:0]
    assert none.data_ptr() == 0
    rank.combine(none, batch, mode="partial")
    rank.combine_wait(rank.combine_async(none, batch, mode="partial"))
    assert [launch.arguments["rows.data"] for launch in launches.of("combine")] == [rank.arena.address] * 3
    assert all(launch.arguments["rows.capacity"] == 0 for launch in launches.of("combine"))


@pytest.mark.parametrize(("given", "read"), [(3, 3), (8, 8), (100, 8)])
def test_combine_reads_no_more_rows_than_dispatch_had_room_for(
    rank: Communicator, launches: Launches, given: int, read: int
) -> None:
    batch = rank.dispatch(*inputs(), out=rank.allocate(8))
    rank.combine(torch.zeros(given, 128, dtype=torch.bfloat16), batch)
    assert launches.last("combine").arguments["rows.capacity"] == read


def test_combine_multiplies_by_what_dispatch_wrote_if_no_mode_is_named(rank: Communicator, launches: Launches) -> None:
    """Fused and split: by the weights that travelled, not by those of its own tokens."""
    x, ids, weights = inputs()
    batch = rank.dispatch(x, ids, weights)
    rank.combine(expert_rows(batch), batch)
    rank.combine_wait(rank.combine_async(expert_rows(batch), batch))
    assert launches.first().arguments["input.router_weights"] == weights.data_ptr()
    assert launches.kernels[1:] == ["combine_partial", "combine_async_partial", "combine_wait_partial"]
    for kernel in ("combine_partial", "combine_async_partial"):
        told = launches.only(kernel)
        assert told.values("batch.weights", "batch.headers") == (batch.weights.data_ptr(), batch.headers.data_ptr())
    for kernel in ("combine_partial", "combine_wait_partial"):
        assert launches.only(kernel).arguments["sums.router_weights"] == 0


@pytest.mark.parametrize("at_combine", [False, True], ids=["of dispatch", "of combine"])
def test_weights_of_combine_replace_those_of_dispatch(rank: Communicator, launches: Launches, at_combine: bool) -> None:
    """Fused and split."""
    x, ids, weights = inputs()
    batch, other = rank.dispatch(x, ids, weights), torch.rand(5, 2)
    given, used = (other, other) if at_combine else (None, weights)
    rows = expert_rows(batch)
    rank.combine(rows, batch, given, "exact")
    rank.combine_wait(rank.combine_async(rows, batch, "exact"), given)
    for kernel in ("combine_exact", "combine_wait_exact"):
        assert launches.only(kernel).arguments["sums.router_weights"] == used.data_ptr(), kernel


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.bfloat16, OutputType.BF16), (torch.float16, OutputType.FP16), (torch.float32, OutputType.F32)],
    ids=str,
)
def test_sums_have_the_type_that_is_asked_for_or_that_of_out(
    rank: Communicator, launches: Launches, dtype: torch.dtype, number: OutputType
) -> None:
    batch = rank.dispatch(*inputs())
    rows, out = expert_rows(batch), torch.empty(5, 128, dtype=dtype)
    assert rank.combine(rows, batch, dtype=dtype).dtype == dtype
    assert launches.last().arguments["sums.out_type"] == number
    assert rank.combine_wait(rank.combine_async(rows, batch), out=out) is out
    assert launches.last("combine_wait").arguments["sums.out_type"] == number
    assert launches.last("combine_wait").arguments["sums.out"] == out.data_ptr()


def test_unweighted_combine_returns_a_row_for_each_entry(rank: Communicator, launches: Launches) -> None:
    """They are sent as in exact mode, and nobody needs weights."""
    x, ids, _ = inputs()
    batch = rank.dispatch(x, ids)
    rows = expert_rows(batch)
    assert rank.combine(rows, batch, mode="unweighted").shape == (5, 2, 128)
    out = rank.combine_wait(rank.combine_async(rows, batch, "unweighted"), dtype=torch.float32)
    assert (out.shape, out.dtype) == ((5, 2, 128), torch.float32)
    assert launches.kernels[1:] == ["combine_unweighted", "combine_async_exact", "combine_wait_unweighted"]
    for kernel in ("combine_unweighted", "combine_wait_unweighted"):
        assert launches.only(kernel).arguments["sums.router_weights"] == 0, kernel


# ---- options


def test_a_shared_expert_takes_all_tokens_of_its_rank(make_rank: MakeRank, launches: Launches) -> None:
    rank = make_rank(SHARED_EXPERT)
    batch = rank.dispatch(*inputs(5))
    rank.combine(expert_rows(batch), batch, mode="exact")
    later = rank.dispatch_wait(rank.dispatch_async(*inputs(3)))
    rank.combine_wait(rank.combine_async(expert_rows(later), later, "exact"))
    names = ("shared.groups", "shared.first", "shared.rows")
    assert {launch.kernel: tuple(launch.arguments[name] for name in names) for launch in launches} == {
        "dispatch": (1, 0, 5),
        "combine_exact": (1, 0, 5),
        "dispatch_async": (1, 0, 3),
        "dispatch_wait": (1, 0, 3),
        "combine_async_exact": (0, 0, 0),  # a shared row does not travel
        "combine_wait_exact": (1, 0, 3),
    }
    assert batch.row_counts.shape == (5,) and batch.row_offsets.shape == (6,)


@pytest.mark.parametrize(("number", "first_shared", "shared"), [(0, 0, 3), (1, 3, 2)])
def test_with_skip_a2a_every_rank_is_a_group_of_its_own(
    make_rank: MakeRank, launches: Launches, number: int, first_shared: int, shared: int
) -> None:
    """It has one peer, its own experts, and its share of the shared expert's tokens."""
    rank = make_rank(replace(SKIP_A2A, fused_shared_expert=True), number)
    batch = rank.dispatch(*inputs(5))
    launch = launches.only()
    assert launch.values("group.rank", "group.ranks", "group.ranks_magic") == (0, 1, 0)
    assert launch.record("arena") == tuple(numbers(rank.cfg.arena.arguments()))
    assert launch.values(*EXPERTS) == (4, 4 * number, 8, 4)
    assert launch.record("shared") == (1, first_shared, shared)
    assert batch.row_map.shape == (1, 16, 2) and batch.headers.shape == (1, 4)
    assert rank.arena.stored == {launch.arguments["arena.peers.at"]: [launch.arguments["group.arena"]]}
    assert len(rank._status.memory.words) == 12


def test_kernels_have_the_hooks_that_they_call(make_rank: MakeRank, launches: Launches) -> None:
    rank, (x, ids, weights) = make_rank(hooks=HOOKS), inputs()
    batch = rank.dispatch(x, ids, weights)
    rows = expert_rows(batch)
    for mode in ("exact", "partial", "unweighted"):
        rank.combine(rows, batch, mode=mode)
    rank.combine_wait(rank.combine_async(rows, batch, "exact"))
    assert {launch.kernel: launch.variant.hooks for launch in launches} == {
        "dispatch": replace(HOOKS, epilogue=None),
        "combine_exact": replace(HOOKS, input_scale=None),
        "combine_partial": Hooks(epilogue=HOOKS.epilogue),
        "combine_unweighted": NO_HOOKS,
        "combine_async_exact": NO_HOOKS,
        "combine_wait_exact": replace(HOOKS, input_scale=None),
    }


def test_with_hooks_weights_scales_and_epilogue_data_have_any_type(make_rank: MakeRank, launches: Launches) -> None:
    rank, (x, ids, weights) = make_rank(hooks=HOOKS), inputs()
    weights, scale, residual = weights.bfloat16(), torch.tensor([7], dtype=torch.int64), torch.ones(5, 128)
    batch = rank.dispatch(x, ids, weights, scale)
    rows = expert_rows(batch)
    rank.combine(rows, batch, mode="exact", epilogue_data=residual)
    rank.combine_wait(rank.combine_async(rows, batch, "exact"), epilogue_data=residual)
    assert launches.only("dispatch").values("input.router_weights", "input.global_scale") == (
        weights.data_ptr(),
        scale.data_ptr(),
    )
    assert launches.only("combine_exact").arguments["sums.router_weights"] == weights.data_ptr() != 0
    for kernel in ("combine_exact", "combine_wait_exact"):
        assert launches.only(kernel).arguments["sums.epilogue_data"] == residual.data_ptr(), kernel


def test_without_hooks_weights_and_scales_are_float32(rank: Communicator, launches: Launches) -> None:
    x, ids, weights = inputs()
    rule = r"router_weights\.dtype = torch.bfloat16: must be torch.float32; use router_weights\.float\(\)"
    with launches.forbidden(), pytest.raises(EPInputError, match=rule):
        rank.dispatch(x, ids, weights.bfloat16())
    with launches.forbidden(), pytest.raises(EPInputError, match=r"input_scale = torch.int64 tensor"):
        rank.dispatch(x, ids, weights, torch.tensor([7], dtype=torch.int64))
