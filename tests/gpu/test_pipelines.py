"""Combine of many tokens within a budget of SMs, whose rows come through shared memory, against the reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.launch import LEAST_STAGES, PIPELINES
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, RANK_MAJOR, RowOrder
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs
from cute_ep.tuning.launch_shape import MANY, PIPED_TOKENS, Entry, Tuning

from .conftest import connected

MOST = LAMPORT_TOKENS + 300
ROUTINGS = ("uniform", "zipf", "one_expert", "masked", "one_rank", "repeated")
PAIR = ["cuda:0"] * 2


def counts_of(sms: int) -> list[list[int]]:
    """Tokens of two ranks: alike, of one rank alone, Lamport rows beside others, hardly more than these, none."""
    few = PIPED_TOKENS * sms
    beside = [few, MOST], [few + 1, 3], [MOST - 7, few + 17]
    return [[MOST, MOST], [MOST, 0], *beside, [LAMPORT_TOKENS, LAMPORT_TOKENS - 1], [0, few]]


def config(hidden: int, top_k: int = 8, ranks: int = 2, **options: object) -> EPConfig:
    return EPConfig(hidden, 48, top_k, MOST, ranks, "bf16", 20, **options)


@pytest.mark.parametrize("sms", [1, 2, 5, 16])
@pytest.mark.parametrize("hidden", [128, 512, 2880, 6656, 7168])
def test_bytes_are_those_of_the_reference(hidden: int, sms: int) -> None:
    """In all modes, fused and split, with a stage for each row length."""
    with connected(config(hidden), PAIR, sms=sms) as communicators:
        assert all(one._cache._pipelines for one in communicators), "they have pipelines"
        for seed, (routing, split) in enumerate(product(ROUTINGS, (False, True))):
            counts = counts_of(sms)
            inputs = make_inputs(communicators[0].cfg, counts[seed % len(counts)], routing, seed)
            check_round(communicators, inputs, RoundOptions(split, seed=seed))


@pytest.mark.parametrize(
    ("ranks", "sms", "hidden", "top_k"),
    [(1, 20, 1280, 6), (3, 5, 7168, 6), (8, 4, 1280, 6), (3, 5, 512, 1), (4, 3, 6656, 20), (4, 3, 256, 32)]
    + [(1, 109, 7168, 8), (1, 124, 512, 8), (2, 62, 7168, 8), (8, 15, 2048, 6)],
)
def test_own_sums_have_their_place_among_those_of_other_ranks(ranks: int, sms: int, hidden: int, top_k: int) -> None:
    """The rows of a rank's own tokens are added up before what others send, and count behind that of lower ranks."""
    cfg = EPConfig(hidden, 8 * ranks, top_k, MOST, ranks, "bf16", 20)
    with connected(cfg, ["cuda:0"] * ranks, sms=sms) as communicators:
        assert all(one._cache._pipelines for one in communicators)
        for seed, routing in enumerate(ROUTINGS):
            counts = [MOST - 5 * rank for rank in range(ranks)]
            if seed % 2:
                counts[seed % ranks] = (0, 40, min(PIPED_TOKENS * sms, LAMPORT_TOKENS))[seed // 2]
            inputs = make_inputs(cfg, counts, routing, seed)
            check_round(communicators, inputs, RoundOptions(seed=seed, dtype=(torch.bfloat16, torch.float32)[seed % 2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("order", [EXPERT_MAJOR, RANK_MAJOR])
def test_other_outputs_orders_and_a_shared_expert(order: RowOrder, dtype: torch.dtype) -> None:
    cfg = config(1024, 3, row_order=order, fused_shared_expert=order == EXPERT_MAJOR)
    with connected(cfg, PAIR, sms=4) as communicators:
        for seed, counts in enumerate(counts_of(4)):
            inputs = make_inputs(cfg, counts, "uniform", seed)
            check_round(communicators, inputs, RoundOptions(dtype=dtype, seed=seed))


@pytest.mark.parametrize(("senders", "slices"), [(0, 2), (0, 4), (0, 8), (1 / 2, 1), (3 / 4, 4)])
def test_launch_shapes_do_not_change_bytes(senders: float, slices: int) -> None:
    """Pipelines add up what comes home only where every CTA sends and receives."""
    entry = Entry(MANY, 12, senders, slices, split_from=1)
    with connected(config(2048), PAIR, sms=12, tuning=Tuning((entry,), (entry,))) as communicators:
        for seed, counts in enumerate(counts_of(12)):
            check_round(communicators, make_inputs(communicators[0].cfg, counts, "zipf", seed))


@pytest.mark.parametrize("hidden", [1280, 7168])
def test_the_least_stages_are_enough(hidden: int) -> None:
    """Two of them, and a row that is put aside, or three where none is."""
    with connected(config(hidden, ranks=3), ["cuda:0"] * 3, sms=3) as communicators:
        for one in communicators:
            one._cache.ring_bytes = (LEAST_STAGES + 1) * PIPELINES * 2 * hidden
        for seed, routing in enumerate(ROUTINGS):
            inputs = make_inputs(communicators[0].cfg, [MOST, MOST - 9, 3 * PIPED_TOKENS + 1], routing, seed)
            check_round(communicators, inputs, RoundOptions(seed=seed))


def test_each_rank_says_how_its_rows_come_home() -> None:
    """One has no pipelines, so that up to LAMPORT_TOKENS it gets Lamport rows back, where the other one gets flags."""
    with connected(config(2048), PAIR, sms=4) as communicators:
        communicators[1]._cache._pipelines = False
        for seed, (counts, split) in enumerate(product(counts_of(4), (False, True))):
            check_round(communicators, make_inputs(communicators[0].cfg, counts, "zipf", seed), RoundOptions(split))


def test_rows_that_are_too_long_for_pipelines_are_sent_without() -> None:
    with connected(config(8192), PAIR, sms=4) as communicators:
        assert not any(one._cache._pipelines for one in communicators)
        check_round(communicators, make_inputs(communicators[0].cfg, [MOST, MOST], "uniform", 1))
