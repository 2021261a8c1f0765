"""Dispatch on few SMs, whose CTAs have twins, against the reference."""

from __future__ import annotations

from itertools import product

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.launch import RING_BYTES, WIDE_THREADS
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, RANK_MAJOR, RowOrder
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning

from .conftest import connected

MOST = LAMPORT_TOKENS + 150
ROUTINGS = ("uniform", "zipf", "one_expert", "masked", "one_rank", "repeated")
COUNTS = ([MOST, MOST], [MOST, 0], [LAMPORT_TOKENS, MOST], [40, 3], [1, 2], [MOST - 7, 64])
"""Tokens a rank: alike, of one rank alone, Lamport rows beside others, a few, too few for twins."""
PAIR = ["cuda:0"] * 2


def config(fmt: str, hidden: int = 2048, **options: object) -> EPConfig:
    return EPConfig(hidden, 48, 6, MOST, 2, fmt, 20, **options)


@pytest.mark.parametrize("order", [EXPERT_MAJOR, RANK_MAJOR])
@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_are_those_of_the_reference(fmt: str, order: RowOrder) -> None:
    """Of every format and order, fused and split, from encoded rows and from those that are."""
    with connected(config(fmt, row_order=order), PAIR, sms=7) as communicators:
        cache, tuning = communicators[0]._cache, communicators[0].tuning
        assert (
            cache.shape(tuning, "dispatch", MOST).threads == WIDE_THREADS != cache.shape(tuning, "dispatch", 3).threads
        )
        for seed, (split, counts) in enumerate(product((False, True), COUNTS)):
            inputs = make_inputs(communicators[0].cfg, counts, ROUTINGS[seed % len(ROUTINGS)], seed)
            options = RoundOptions(split, prequantized=fmt != "bf16" and seed % 3 == 1, seed=seed)
            check_round(communicators, inputs, options)


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize("options", [{"block_rows": 2432}, {"fused_shared_expert": True}], ids=["blocks", "shared"])
def test_blocks_and_a_shared_expert(fmt: str, options: dict[str, object]) -> None:
    with connected(config(fmt, **options), PAIR, sms=3) as communicators:
        for seed, counts in enumerate(COUNTS):
            check_round(communicators, make_inputs(communicators[0].cfg, counts, "zipf", seed), RoundOptions(seed=seed))


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("order", [EXPERT_MAJOR, RANK_MAJOR])
@pytest.mark.parametrize(
    ("senders", "joins", "slices", "sms"),
    [
        *((0, False, 1, 1), (0, False, 4, 2), (1 / 8, False, 2, 9), (1 / 2, False, 1, 1), (3 / 4, False, 4, 5)),
        *((1 / 8, True, 2, 9), (1 / 2, True, 1, 1), (3 / 4, True, 4, 5), (9 / 10, True, 1, 3)),
    ],
)
def test_launch_shapes_do_not_change_bytes(
    fmt: str, senders: float, joins: bool, slices: int, sms: int, order: RowOrder
) -> None:
    """Twins of one CTA may have unlike roles, and senders may receive when they have sent."""
    entry = Entry(MANY, MANY, senders, slices, packed=True, split_from=1, joins=joins)
    cfg = config(fmt, row_order=order)
    with connected(cfg, PAIR, sms=sms, tuning=Tuning((entry,), (entry,))) as communicators:
        for seed, counts in enumerate(COUNTS):
            options = RoundOptions(split=seed % 2 == 1)
            check_round(communicators, make_inputs(communicators[0].cfg, counts, "uniform", seed), options)


@pytest.mark.parametrize("order", [EXPERT_MAJOR, RANK_MAJOR])
@pytest.mark.parametrize(
    ("fmt", "hidden", "slices"),
    [
        pytest.param("bf16", 3584, 1, id="14 segments"),
        pytest.param("bf16", 7168, 2, id="halves of 14"),
        pytest.param("bf16", 6664, 2, id="of 14 and 13, the last one short"),
        pytest.param("fp8", 7168, 1, id="14 with scale factors"),
        pytest.param("mxfp6_e2m3", 9216, 1, id="14 with scale words of their own"),
        pytest.param("nvfp4_row", 14336, 1, id="14 with many scale factors and one of the row"),
        pytest.param("nvfp4", 7168, 1, id="7, taken whole"),
    ],
)
@pytest.mark.parametrize("sms", [2, 5])
def test_last_rows_are_drawn_in_parts(fmt: str, hidden: int, slices: int, sms: int, order: RowOrder) -> None:
    """Lamport rows and others, of ranks with more of them than warps or with fewer, beside one whose slices differ."""
    entry = Entry(MANY, MANY, 1 / 4, slices, split_from=1, joins=True)
    few = Entry(300, MANY, 1 / 4, 4 * slices, split_from=1, joins=True)
    assert entry_joins(Tuning((few, entry), (entry,)), sms)
    for table, rounds in (((few, entry), ([MOST, MOST - 7], [MOST, 0], [LAMPORT_TOKENS, 290])), ((entry,), ([40, 9],))):
        tuning = Tuning(table, table)
        with connected(config(fmt, hidden, row_order=order), PAIR, sms=sms, tuning=tuning) as communicators:
            for seed, counts in enumerate(rounds):
                inputs = make_inputs(communicators[0].cfg, counts, ROUTINGS[seed % len(ROUTINGS)], seed)
                check_round(communicators, inputs, RoundOptions(modes=("partial",), seed=seed))


def entry_joins(tuning: Tuning, sms: int) -> bool:
    """Whether senders join in calls of few tokens and of many."""
    return all(tuning.shape("dispatch", tokens, sms, ring_bytes=RING_BYTES).joins for tokens in (40, MOST))
