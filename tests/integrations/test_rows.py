"""Rows in other shapes than dispatch returns, against loops over (source, token, slot) that know no batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched, QuantizedRows
from cute_ep.api.errors import EPInputError
from cute_ep.integrations.rows import RankRows, rank_major
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.reference.backend import ReferenceCommunicator, connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs
from tests.reference.ranks import poisoned

CFG = EPConfig(hidden=128, num_experts=6, top_k=3, max_tokens_per_rank=9, world_size=3)
TOKENS = (9, 0, 7)
SLOTS = CFG.peers * CFG.max_tokens_per_rank
LAYOUTS = [(name, layout) for name, fmt in FORMATS.items() for layout in fmt.scale_layouts or (None,)]
READABLE = [(name, layout) for name, layout in LAYOUTS if layout != "atom128x4"]

Round = tuple[list[ReferenceCommunicator], list[Dispatched], list[RankInputs]]


def round_of(routing: str, cfg: EPConfig = CFG, tokens: tuple[int, ...] = TOKENS) -> Round:
    """(communicators, batches in poisoned memory, inputs); entries of tokens that do not exist are stale, as GPUs leave
    them."""
    ranks, given = connect_reference(cfg), make_inputs(cfg, tokens, routing, 3)
    batches = [
        ep.dispatch(one.x, one.topk_ids, one.router_weights, out=poisoned(ep))
        for ep, one in zip(ranks, given, strict=True)
    ]
    for batch in batches:
        for source, count in enumerate(tokens):
            batch.row_map[source, count:] = 1
            batch.weights[source, count:] = torch.nan
    return ranks, batches, given


def entries(cfg: EPConfig, rank: int, given: list[RankInputs]) -> list[tuple[int, int, dict[int, int]]]:
    """(source, token, {slot: local expert}) of each token that has experts of `rank`, by source, then token."""
    found = []
    for source, one in enumerate(given):
        for token, ids in enumerate(one.topk_ids.tolist()):
            own = {k: e - rank * cfg.local_experts for k, e in enumerate(ids) if e // cfg.local_experts == rank}
            if own:
                found.append((source, token, own))
    return found


def encoded(cfg: EPConfig, given: list[RankInputs], places: list[tuple[int, int]]) -> QuantizedRows:
    """The rows of tokens (source, token) as they travel."""
    x = torch.stack([given[source].x[token] for source, token in places]) if places else given[0].x[:0]
    return reference.quantize(x, cfg.dispatch_format)


def check_rows(got: RankRows, want: QuantizedRows, at: object, name: str) -> None:
    """The rows at an index, bit for bit; whole words of scale factors may be wider."""
    assert_bits(got.tokens[at], want.payload, f"{name} tokens")
    assert (got.scales is None) == (want.scales is None) and (got.row_scales is None) == (want.row_scales is None)
    if want.scales is not None:
        assert_bits(got.scales[at][:, : want.scales.shape[1]].contiguous(), want.scales, f"{name} scales")
    if want.row_scales is not None:
        assert_bits(got.row_scales[at], want.row_scales, f"{name} row scales")


def random_rows(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---- one row per (token, rank)


@pytest.mark.parametrize(("fmt", "layout"), READABLE)
@pytest.mark.parametrize("routing", ["masked", "repeated"])
def test_rank_major_has_each_token_once_in_every_format(fmt: str, layout: str | None, routing: str) -> None:
    check_rank_major(replace(CFG, dispatch_format=fmt, scale_layout=layout), routing)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("alignment", [1, 8])
def test_rank_major_has_each_token_once_in_every_routing(routing: str, alignment: int) -> None:
    check_rank_major(replace(CFG, row_alignment=alignment), routing)


def check_rank_major(cfg: EPConfig, routing: str) -> None:
    _, batches, given = round_of(routing, cfg)
    for rank, batch in enumerate(batches):
        got, wanted = rank_major(cfg, batch), entries(cfg, rank, given)
        count, room = len(wanted), got.tokens.shape[0]
        assert room == SLOTS
        check_rows(got, encoded(cfg, given, [place[:2] for place in wanted]), slice(count), f"rank {rank}")
        ids, weights = torch.full((room, cfg.top_k), -1), torch.zeros(room, cfg.top_k)
        for row, (source, token, own) in enumerate(wanted):
            for slot, expert in own.items():
                ids[row, slot], weights[row, slot] = expert, given[source].router_weights[token, slot]
        assert_bits(got.expert_ids, ids, "ids")
        assert_bits(got.weights, weights, "weights")
        ends = [sum(source <= last for source, _, _ in wanted) for last in range(cfg.world_size)]
        assert got.source_ends.dtype == torch.int32 and got.source_ends.tolist() == ends


def places(found: list[tuple[int, int, dict[int, int]]], stride: int | None) -> list[int]:
    """The row of each of a rank's `entries`."""
    before = [sum(source == one[0] for source, _, _ in found[:number]) for number, one in enumerate(found)]
    return [number if stride is None else one[0] * stride + before[number] for number, one in enumerate(found)]


@pytest.mark.parametrize("stride", [9, 11])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_rank_major_rows_of_a_source_begin_at_a_multiple_of_the_stride(routing: str, stride: int) -> None:
    _, batches, given = round_of(routing)
    for rank, batch in enumerate(batches):
        got, dense, found = rank_major(CFG, batch, stride=stride), rank_major(CFG, batch), entries(CFG, rank, given)
        at = places(found, stride)
        assert got.tokens.shape[0] == 3 * stride
        assert got.source_ends.tolist() == [s * stride + sum(s == one[0] for one in found) for s in range(3)]
        for name in ("tokens", "expert_ids", "weights"):
            assert_bits(getattr(got, name)[at], getattr(dense, name)[: len(at)], name)
        empty = [row for row in range(3 * stride) if row not in at]
        assert (got.expert_ids[empty] == -1).all() and not got.weights[empty].any()


@pytest.mark.parametrize("stride", [None, 9, 11])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_combine_adds_rank_major_rows_over_ranks(routing: str, stride: int | None) -> None:
    ranks, batches, given = round_of(routing)
    views = [rank_major(CFG, batch, stride=stride) for batch in batches]
    rows = [random_rows((3 * (stride or 9), CFG.hidden), rank) for rank in range(3)]
    out = [ep.combine(row, one.batch, mode="partial") for ep, row, one in zip(ranks, rows, views, strict=True)]
    want = [torch.zeros(count, CFG.hidden) for count in TOKENS]
    for rank in range(3):
        found = entries(CFG, rank, given)
        for row, (source, token, _) in zip(places(found, stride), found, strict=True):
            want[source][token] += rows[rank][row].float()
    for rank, total in enumerate(out):
        assert_bits(total, want[rank].bfloat16(), f"rank {rank}")


def test_rank_major_leaves_the_batch_to_combine() -> None:
    ranks, batches, _ = round_of("masked")
    before = [ep.combine(batch.tokens, batch) for ep, batch in zip(ranks, batches, strict=True)]
    for batch in batches:
        rank_major(CFG, batch)
    after = [ep.combine(batch.tokens, batch) for ep, batch in zip(ranks, batches, strict=True)]
    for rank in range(3):
        assert_bits(after[rank], before[rank], f"rank {rank}")


@pytest.mark.parametrize("stride", [None, 3])
def test_rank_major_rows_without_room_come_home_as_nan(stride: int | None) -> None:
    ranks, batches, given = round_of("uniform")
    room = 5 if stride is None else 3 * stride
    views = [rank_major(CFG, batch, room, stride=stride) for batch in batches]
    ones = torch.ones(room, CFG.hidden).bfloat16()
    lost: list[set[int]] = [set(), set(), set()]
    for rank in range(3):
        found = entries(CFG, rank, given)
        for (source, token, _), row in zip(found, places(found, stride), strict=True):
            if row >= (room if stride is None else (source + 1) * stride):
                lost[source].add(token)
    for rank, (ep, one) in enumerate(zip(ranks, views, strict=True)):
        assert one.tokens.shape[0] == room
        views[rank] = one._replace(tokens=ep.combine(ones, one.batch, mode="partial"))
    for rank, one in enumerate(views):
        assert {token for token in range(TOKENS[rank]) if one.tokens[token].isnan().all()} == lost[rank]
    assert any(lost)


def test_rows_that_dispatch_lost_stay_lost() -> None:
    """Their batch has no row, and combine returns NaN rather than waiting for one."""
    ranks, given = connect_reference(CFG), make_inputs(CFG, TOKENS, "uniform", 3)
    batches = [
        ep.dispatch(one.x, one.topk_ids, one.router_weights, out=poisoned(ep, capacity=2 if ep.rank == 0 else None))
        for ep, one in zip(ranks, given, strict=True)
    ]
    views = [rank_major(CFG, batch) for batch in batches]
    assert views[0].tokens.shape[0] == 2 and (views[0].expert_ids == -1).all() and not views[0].source_ends.any()
    assert set(views[0].batch.row_map.unique().tolist()) == {-1, LOST_ROW}
    rows = [torch.ones(one.tokens.shape[0], CFG.hidden).bfloat16() for one in views]
    out = [ep.combine(row, one.batch, mode="partial") for ep, row, one in zip(ranks, rows, views, strict=True)]
    for one, total in zip(given, out, strict=True):
        needed = (one.topk_ids // CFG.local_experts == 0).any(1)
        assert torch.equal(total.isnan().all(1), needed)


# ---- all


@pytest.mark.parametrize("tokens", [(0, 0, 0), (0, 9, 0)], ids=["no token at all", "one rank has tokens"])
def test_ranks_without_tokens(tokens: tuple[int, ...]) -> None:
    _, batches, given = round_of("one_rank", tokens=tokens)
    for rank, batch in enumerate(batches):
        view = rank_major(CFG, batch)
        count = len(entries(CFG, rank, given))
        assert view.source_ends[-1] == count and (view.expert_ids[count:] == -1).all()


def test_each_rank_of_its_own_group_has_all_tokens() -> None:
    """With skip_a2a nothing travels: one source."""
    cfg = replace(CFG, skip_a2a=True)
    ranks, given = connect_reference(cfg), make_inputs(cfg, (9, 9, 9), "masked", 3)
    for ep, one in zip(ranks, given, strict=True):
        view = rank_major(cfg, ep.dispatch(one.x, one.topk_ids, one.router_weights))
        own = (one.topk_ids >= 0) & (one.topk_ids // cfg.local_experts == ep.rank)
        assert torch.equal(view.tokens[: view.source_ends[-1]], one.x[own.any(1)])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param({"fused_shared_expert": True}, "fused_shared_expert = True", id="shared expert"),
        pytest.param({"dispatch_format": "nvfp4"}, "scale_layout = 'atom128x4': must be 'linear'", id="tiles"),
        pytest.param({"block_rows": 27}, "block_rows = 27: must be None", id="blocks"),
    ],
)
def test_other_shapes_are_refused(change: dict, rule: str) -> None:
    cfg = replace(CFG, **change)
    (batch, *_) = round_of("uniform", cfg)[1]
    with pytest.raises(EPInputError, match=rule):
        rank_major(cfg, batch)


def test_default_device_and_type_change_nothing() -> None:
    """DeepEP's tests set both."""
    _, batches, _ = round_of("masked")
    want = rank_major(CFG, batches[0])
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        got = rank_major(CFG, batches[0])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for name in ("expert_ids", "weights", "source_ends"):
        assert_bits(getattr(got, name), getattr(want, name), name)
    assert got.batch.row_map.device.type == "cpu"
