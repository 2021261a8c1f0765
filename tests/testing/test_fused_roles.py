"""What role tests of fused launches write before a launch, and expect of it (`tests.gpu.role_fused`), without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, message_of
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import POISON
from cute_ep.testing.workloads import make_inputs
from tests.fake_gpu import Launches
from tests.gpu.arena_images import Image
from tests.gpu.role_cases import BUDGET, COMBINES, DISPATCHES, MANY, TILED, Case, fused_turns, tiled_config
from tests.gpu.role_fused import combine_fused, dispatch_fused
from tests.gpu.role_given import Returned, Slots, slots_of
from tests.gpu.role_launch import Launch, Turn, in_a_row
from tests.gpu.role_model import Home, send_combine
from tests.gpu.role_stage import expert_rows

from .paper_stage import PaperStage, own_messages


def some_turns(case: Case) -> list[Turn]:
    """All, or of many tokens two."""
    turns = fused_turns(case)
    return turns[::3] if case.cfg.max_tokens_per_rank == MANY else turns


def check_launch(stage: PaperStage, launch: Launch, *numbers: int) -> None:
    stage.launch = launch
    stage.numbers += numbers
    launch.start()
    assert not stage.numbers
    launch.finish()
    launch.check()


@pytest.mark.parametrize("name", DISPATCHES)
def test_a_dispatch_finds_all_that_it_needs(name: str, make_stage: Any) -> None:
    """And rows that are encoded by nobody leave nothing in the own rank's arena."""
    case = DISPATCHES[name]
    stage = make_stage(case)
    for turn in some_turns(case):
        launch = dispatch_fused(stage, turn, case.schedule)
        check_launch(stage, launch, turn.number)
        if case.cfg.format.scale is None or turn.index % 2:
            assert (own_messages(launch.own, turn.number) == POISON).all()


@pytest.mark.parametrize("tokens", [LAMPORT_TOKENS, LAMPORT_TOKENS + 1])
def test_scale_factors_of_own_tokens_are_set_aside(tokens: int, make_stage: Any) -> None:
    """Where kernels look for them: of few tokens beside the messages, of many in these, which hold nothing else."""
    case = Case(tiled_config(tokens), BUDGET)
    stage = make_stage(case)
    turn = TILED._replace(tokens=(tokens, tokens), index=3)
    launch = dispatch_fused(stage, turn, BUDGET, tiled=True)
    check_launch(stage, launch, turn.number)
    cfg, own = case.cfg, launch.own
    own_scales = launch.sent[case.me].rows.scales
    assert own_scales is not None
    if tokens <= LAMPORT_TOKENS:
        pitch = cfg.arena.staged_scales.shape[-1]
        found = own.span(cfg.arena.staged_scales.at(case.me), tokens * pitch).view(tokens, pitch)
        assert (own_messages(own, turn.number) == POISON).all()
    else:
        found, _ = own.messages(turn.number, case.me, tokens)
        assert (found[:, : message_of(cfg.format, cfg.hidden).scales.offset] == POISON).all()
        found = found[:, message_of(cfg.format, cfg.hidden).scales.offset :]
    assert_bits(found[:, : own_scales.shape[1]], own_scales, "set aside")
    assert (found[:, own_scales.shape[1] :] == POISON).all()


# ---- combine


@pytest.mark.parametrize("mode", ["exact", "partial", "unweighted"])
@pytest.mark.parametrize("name", COMBINES)
def test_a_combine_finds_all_that_it_needs(name: str, mode: CombineMode, make_stage: Any, launches: Launches) -> None:
    """And where pipelines add up, rows of own tokens leave nothing in the own rank's arena."""
    case = COMBINES[name]
    stage = make_stage(case)
    for turn in some_turns(case):
        launch = combine_fused(stage, turn, mode, case.schedule)
        check_launch(stage, launch, turn.number)
        made = launches.last("combine")
        every = made.values("grid.send_ctas", "grid.receive_from") == (made.grid, 0)
        adds_up = made.kernel.endswith("piped") and every and stage.sums.flagged and mode != "unweighted"
        for slot in stage.sums.own_slots(mode == "partial"):
            assert (slot == POISON).all() == adds_up


def test_two_rounds_find_what_is_theirs(make_stage: Any) -> None:
    """On the same images, which hold both before either is launched."""
    case = Case(DISPATCHES["own tokens stay"].cfg, BUDGET)
    stage = make_stage(case)
    for one, other in pairwise(fused_turns(case)):
        other = other._replace(number=one.number + 1)
        first = dispatch_fused(stage, one, BUDGET)
        check_launch(stage, in_a_row(first, dispatch_fused(stage, other, BUDGET, first)), one.number, other.number)
        first = combine_fused(stage, one, "exact", BUDGET)
        second = combine_fused(stage, other, "partial", BUDGET, first)
        check_launch(stage, in_a_row(first, second), one.number, other.number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", ["exact", "partial", "unweighted"])
def test_what_ranks_return_makes_the_sums_of_the_reference(mode: CombineMode, dtype: torch.dtype) -> None:
    """Of all ranks, each of which returns rows of its own batch: the other ranks' through the arena, its own beside
    it."""
    cfg, partial, number = EPConfig(256, 12, 4, 17, 3, "bf16"), mode == "partial", 6
    inputs = make_inputs(cfg, (9, 17, 11), "repeated", 3)
    ids, weights = [one.topk_ids for one in inputs], [one.router_weights for one in inputs]
    batches = reference.dispatch(cfg, [one.x for one in inputs], ids, None, weights)
    generator = torch.Generator().manual_seed(2)
    rows = [expert_rows(int(batch.num_rows), cfg.hidden, generator) for batch in batches]
    returned = [
        Returned(cfg, rank, own, batch.row_map, batch.weights)
        for rank, (own, batch) in enumerate(zip(rows, batches, strict=True))
    ]
    bits = [own.view(torch.bfloat16) for own in rows]
    expected = reference.combine(cfg, bits, batches, None if mode == "unweighted" else weights, mode, dtype)
    for me, own_ids in enumerate(ids):
        image, home = Image(cfg, me, [0, 0, 0]), Home(len(own_ids), 1, False)
        for rank, one in enumerate(returned):
            how: dict[str, Any] = {"dispatch_round": 1, "partial": partial, "spans": False, "stays": True}
            send_combine(image, rank, home, number, slots=one.slots(me, home.tokens, partial=partial), **how)
        where, whose = slots_of(cfg, own_ids, partial=partial)
        content = image.slots(number, home.tokens, flagged=False, partial=partial)[:, : where.shape[1]]
        mine = where & (whose == me)
        assert mine.any() and (content[mine] == POISON).all() and (content[~where] == POISON).all()
        filled, own = returned[me].slots(me, home.tokens, partial=partial)
        assert (filled == mine).all()
        slots = Slots(where, whose, torch.where(mine[:, :, None], own, content.contiguous().view(torch.int16)))
        assert_bits(slots.result(mode, weights[me], dtype), expected[me], f"{mode} of rank {me}")
