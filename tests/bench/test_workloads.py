"""Inputs for measurements and tests: the same for the same seed, and routings that keep what their names promise."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from cute_ep import reference
from cute_ep.api.calls import DispatchInput
from cute_ep.api.errors import EPInputError
from cute_ep.api.validate import check_tokens
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, make_inputs, make_rank_inputs
from tests.reference.dispatch_model import small


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_ranks_inputs_do_not_depend_on_the_others(routing):
    cfg = small(num_experts=16, world_size=4, top_k=3, max_tokens_per_rank=64)
    every = make_inputs(cfg, [64, 0, 7, 33], routing, seed=9)
    alone = make_rank_inputs(cfg, 3, 33, routing, seed=9)
    for field in fields(alone):
        assert_bits(getattr(alone, field.name), getattr(every[3], field.name), field.name)
    assert not torch.equal(every[3].x, make_rank_inputs(cfg, 3, 33, routing, seed=10).x)
    assert not torch.equal(every[3].x, make_rank_inputs(cfg, 2, 33, routing, seed=9).x)
    for tokens, one in zip([64, 0, 7, 33], every, strict=True):
        check_tokens(cfg, DispatchInput(one.x, one.topk_ids, one.router_weights))
        reference.check_expert_ids(cfg, one.topk_ids)
        assert one.x.shape[0] == tokens
        for token in one.topk_ids.tolist():
            chosen = [expert for expert in token if expert >= 0]
            assert routing == "repeated" or len(set(chosen)) == len(chosen)
            assert routing == "masked" or len(chosen) == 3


def test_routings_keep_their_promise():
    cfg = small(num_experts=32, world_size=4, top_k=4, max_tokens_per_rank=2000)
    ids = {routing: make_rank_inputs(cfg, 1, 2000, routing, 0).topk_ids for routing in ROUTINGS}
    counts = {routing: one[one >= 0].long().bincount(minlength=32) for routing, one in ids.items()}
    assert counts["uniform"].min() > 150 and counts["uniform"].max() < 350
    assert counts["zipf"][0] > 5 * counts["zipf"][31] and counts["zipf"].argmax() == 0
    assert (ids["one_expert"][:, 0] == 0).all() and (ids["one_expert"][:, 1:] > 0).all()
    assert (ids["one_rank"] >= 24).all() and counts["one_rank"][24:].min() > 500
    masked = ids["masked"] == -1
    assert masked[1::5].all() and 0.4 < masked.float().mean() < 0.53
    assert not masked.all(dim=1)[0::5].all()
    repeated = ids["repeated"]
    assert (repeated[0::3, 0] == repeated[0::3, -1]).all() and (repeated[1::6] == repeated[1::6, :1]).all()
    assert all(len(set(token)) == 4 for token in repeated[2::3].tolist())
    wide = make_rank_inputs(small(num_experts=8, world_size=4, top_k=5), 0, 3, "one_rank", 0).topk_ids
    assert all({6, 7} < set(token) for token in wide.tolist())
    alone = make_rank_inputs(small(top_k=1), 0, 3, "one_expert", 0).topk_ids
    assert alone.tolist() == [[0], [0], [0]]
    assert make_rank_inputs(small(num_experts=1, world_size=1, top_k=1), 0, 3, "one_expert", 0).topk_ids.sum() == 0


def test_with_skip_a2a_all_ranks_have_the_same_tokens():
    cfg = small(skip_a2a=True)
    first, second = make_inputs(cfg, [3, 3], "uniform", 5)
    for field in fields(first):
        assert_bits(getattr(second, field.name), getattr(first, field.name), field.name)
    with pytest.raises(EPInputError, match="must be the same on all ranks"):
        make_inputs(cfg, [3, 2], "uniform", 5)


def test_workloads_refuse_other_routings_and_sizes():
    cfg = small()
    with pytest.raises(EPInputError, match="routing"):
        make_inputs(cfg, [1, 1], "round_robin", 0)
    with pytest.raises(EPInputError, match="world_size"):
        make_inputs(cfg, [1], "uniform", 0)
    with pytest.raises(EPInputError, match="max_tokens_per_rank"):
        make_inputs(cfg, [1, 4], "uniform", 0)
