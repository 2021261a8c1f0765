"""Dispatch and combine against the reference, bit for bit, over formats, shapes, token counts and routings."""

from __future__ import annotations

from itertools import product

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, MAX_SLICES
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, RANK_MAJOR, RowOrder
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning, slices_for

from .conftest import connected

MAX_TOKENS = 4096
TOKENS = (0, 1, 7, 16, 128, 513, 4096)
ROUTINGS = ("uniform", "zipf", "one_expert", "masked", "one_rank")
# (hidden, experts, top_k): each of {2048, 2880, 4096, 7168}, {8, 128, 256, 384} and {1, 2, 4, 8} appears with two or
# three values of each of the other two, and no pair of values appears twice: 10 of the 16 pairs of any two.
SHAPES = (
    (2048, 8, 1),
    (2048, 128, 8),
    (2048, 256, 4),
    (2880, 128, 4),
    (2880, 384, 2),
    (4096, 8, 2),
    (4096, 256, 1),
    (4096, 384, 8),
    (7168, 256, 8),
    (7168, 384, 4),
)


def uneven(tokens: int, ranks: int, turn: int) -> list[int]:
    """Token counts a rank: the given one on rank `turn`, smaller and zero ones beside it."""
    counts = [max(0, tokens - tokens * step // 3) for step in range(ranks)]
    return counts[-(turn % ranks) :] + counts[: -(turn % ranks)] if turn % ranks else counts


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize(("hidden", "experts", "top_k"), SHAPES)
def test_bit_exact(devices: list[str], fmt: str, hidden: int, experts: int, top_k: int) -> None:
    """One group of communicators through all token counts and routings in a row, fused and split by turns."""
    cfg = EPConfig(hidden, experts, top_k, MAX_TOKENS, len(devices), fmt, timeout_s=20)
    with connected(cfg, devices) as communicators:
        turn = 0
        for tokens in TOKENS:
            for routing in ROUTINGS:
                if tokens == MAX_TOKENS and (turn + experts) % 3:
                    turn += 1
                    continue
                counts = uneven(tokens, len(devices), turn) if turn % 4 else [tokens] * len(devices)
                scales = [0.5 * (rank + 1) for rank in range(len(devices))] if fmt == "nvfp4" and turn % 2 else None
                try:
                    options = RoundOptions(turn % 2 == 1, ("exact", "partial"), input_scales=scales, seed=turn)
                    check_round(communicators, make_inputs(cfg, counts, routing, turn), options)
                except AssertionError as error:
                    raise AssertionError(f"tokens {counts}, {routing}, split={turn % 2 == 1}: {error}") from error
                turn += 1


@pytest.mark.parametrize("sms", [1, 3, 16])
def test_sm_budget_does_not_change_bytes(devices: list[str], sms: int) -> None:
    most = max(LAMPORT_TOKENS, 1000) + 76
    cfg = EPConfig(2048, 128, 8, most, len(devices), "nvfp4", timeout_s=20)
    with connected(cfg, devices, sms=sms) as communicators:
        assert all(communicator.max_ctas <= sms for communicator in communicators)
        for seed, (split, tokens) in enumerate(product((False, True), (most, 700, 15))):
            counts = [tokens - tokens // 10 * rank for rank in range(len(devices))]
            options = RoundOptions(split, ("exact", "partial"), seed=seed)
            check_round(communicators, make_inputs(cfg, counts, "zipf", seed), options)


ODD_SHAPES = ((1, 0, MAX_SLICES), (7, 0.9, 1), (33, 0.01, 2), (5, 0.3, 16), (MANY, 0.5, 4))
"""(CTAs at most, share of senders, slices while tokens are few); senders of every other table are packed,
those of every third one join."""


def odd_tuning(number: int) -> Tuning:
    """Unlike tables for both families, and unlike those of the next number."""
    tables = []
    for turn in (number, number + 2):
        grid, senders, slices = ODD_SHAPES[turn % len(ODD_SHAPES)]
        fewer = min(slices, max(slices_for(MANY)))
        others = {"packed": turn % 2 == 1, "joins": turn % 3 == 1}
        few = Entry(LAMPORT_TOKENS, grid, senders, slices, **others)
        tables.append((few, Entry(MANY, grid, senders, fewer, **others)))
    return Tuning(*tables)


@pytest.mark.parametrize("order", [EXPERT_MAJOR, RANK_MAJOR])
@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_numbers_of_ranks_that_are_no_power_of_two(ranks: int, fmt: str, order: RowOrder) -> None:
    """Where warps have many items, which ranks take turns at, each message is taken once; rows come quantised."""
    cfg = EPConfig(1024, 8 * ranks, 3, LAMPORT_TOKENS + 76, ranks, fmt, 10, row_order=order)
    for sms in (1, 2, 3):
        with connected(cfg, ["cuda:0"] * ranks, sms=sms) as communicators:
            for seed, tokens in enumerate((cfg.max_tokens_per_rank, 313, 64)):
                inputs = make_inputs(cfg, uneven(tokens, ranks, seed), "uniform", seed)
                check_round(communicators, inputs, RoundOptions(prequantized=fmt != "bf16", seed=seed))


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4", "nvfp4_row"])
def test_launch_shapes_do_not_change_bytes(devices: list[str], fmt: str) -> None:
    """Every rank has its own, and another one in the next round."""
    sizes = (1, 16, 512, LAMPORT_TOKENS, LAMPORT_TOKENS + 1)
    cfg = EPConfig(2880, 16 * len(devices), 4, max(sizes), len(devices), fmt, timeout_s=20)
    with connected(cfg, devices, tuning=odd_tuning(0)) as communicators:
        for turn, tokens in enumerate(sizes):
            for split in (False, True):
                inputs = make_inputs(cfg, uneven(tokens, len(devices), turn), "uniform", turn)
                check_round(communicators, inputs, RoundOptions(split, seed=turn))
                for rank, communicator in enumerate(communicators):
                    communicator.tuning = odd_tuning(rank + 2 * turn + split)


@pytest.mark.parametrize(("experts", "top_k"), [(1024, 32), (32, 32)])
def test_largest_routing(devices: list[str], experts: int, top_k: int) -> None:
    """The most experts and the largest top_k that a config allows."""
    cfg = EPConfig(2048, experts, top_k, 300, len(devices), "nvfp4", timeout_s=20)
    with connected(cfg, devices) as communicators:
        check_round(communicators, make_inputs(cfg, uneven(300, len(devices), 0), "uniform", 5))


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_beyond_four_gib(fmt: str) -> None:
    """Places in the arena, and with bf16 in the outputs, that 32 bits do not reach; in nvfp4 by tiles."""
    cfg = EPConfig(2112, 64, 32, 32768, 1, fmt, timeout_s=20)
    assert min(cfg.arena.messages.offset, cfg.arena.returns.stride[0], 2 * cfg.max_rows * cfg.hidden) > 1 << 32
    with connected(cfg, ["cuda:0"]) as communicators:
        inputs = make_inputs(cfg, [cfg.max_tokens_per_rank], "uniform", 1)
        check_round(communicators, inputs, RoundOptions(modes=("exact",)))


def test_one_rank_alone() -> None:
    cfg = EPConfig(4096, 8, 2, 256, 1, "nvfp4", timeout_s=20)
    with connected(cfg, ["cuda:0"]) as communicators:
        for seed, split in enumerate((False, True)):
            check_round(communicators, make_inputs(cfg, [200], "uniform", seed), RoundOptions(split))
