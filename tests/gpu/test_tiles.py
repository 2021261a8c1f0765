"""Scale factors that are written by tiles, behind a meeting of the receiving CTAs, against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import (
    ATOM,
    FEW_WORDS,
    SCATTERED_LAMPORT_WORDS,
    SCATTERED_WORDS,
    TRANSPOSED,
    has_tiles,
    scale_words,
)
from cute_ep.testing.verify import POISON, RoundOptions, check_round, poisoned_buffers
from cute_ep.testing.workloads import RankInputs, make_inputs
from cute_ep.tuning.launch_shape import MANY as EVERY
from cute_ep.tuning.launch_shape import Entry, Tuning

from .conftest import connected

MANY = LAMPORT_TOKENS + 1
HIDDEN = 4096
CASES = [
    (name, layout)
    for name, record in FORMATS.items()
    for layout in record.scale_layouts
    if layout in (ATOM, TRANSPOSED)
]


def config(ranks: int, fmt: str, layout: str, **options: object) -> EPConfig:
    return EPConfig(HIDDEN, 16 * ranks, 8, MANY + 200, ranks, fmt, 20, layout, **options)


def counts_of(ranks: int, turn: int) -> list[int]:
    """Many tokens a rank, and none on some."""
    return [0 if ranks > 2 and (rank + turn) % 4 == 3 else MANY + 30 * ((rank + turn) % 5) for rank in range(ranks)]


def words_of(cfg: EPConfig, inputs: list[RankInputs], rank: int) -> int:
    """Scale words that a rank has to store."""
    first = rank * cfg.local_experts
    rows = sum(int(((one.topk_ids >= first) & (one.topk_ids < first + cfg.local_experts)).sum()) for one in inputs)
    return rows * scale_words(cfg.format.scale_bytes(cfg.hidden))


def check_tiled(cfg: EPConfig, inputs: list[RankInputs], rank: int) -> None:
    """That a rank has words enough: otherwise these tests would test something else."""
    counts = [one.topk_ids.shape[0] for one in inputs]
    lamport = any(0 < tokens <= LAMPORT_TOKENS for tokens in counts)
    scattered = SCATTERED_LAMPORT_WORDS if lamport else SCATTERED_WORDS
    assert has_tiles(cfg.scales_as, cfg.alignment, cfg.alignment)
    assert words_of(cfg, inputs, rank) > max(scattered * sum(counts), FEW_WORDS if lamport else 0)


@pytest.mark.parametrize(("fmt", "layout"), CASES)
def test_every_format(devices: list[str], fmt: str, layout: str) -> None:
    """Fused and split, made here and given, round after round; the other ranks have no rows, or few."""
    cfg = config(len(devices), fmt, layout)
    with connected(cfg, devices) as communicators:
        for turn, (split, given) in enumerate(product((False, True), repeat=2)):
            inputs = make_inputs(cfg, counts_of(len(devices), turn), "one_rank", turn)
            check_tiled(cfg, inputs, len(devices) - 1)
            check_round(communicators, inputs, RoundOptions(split, ("partial",), prequantized=given, seed=turn))


@pytest.mark.parametrize(("fmt", "layout"), CASES)
def test_padded_groups_and_shared_expert(devices: list[str], fmt: str, layout: str) -> None:
    """Padding inside tiles is zero, what lies behind the last group is not touched."""
    for turn, (alignment, shared) in enumerate(((4, True), (16, False), (128, True))):
        cfg = config(len(devices), fmt, layout, row_alignment=alignment, fused_shared_expert=shared)
        inputs = make_inputs(cfg, counts_of(len(devices), turn), "one_rank", turn)
        check_tiled(cfg, inputs, len(devices) - 1)
        with connected(cfg, devices) as communicators:
            check_round(communicators, inputs, RoundOptions(turn == 1, ("partial",), seed=turn))


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_row"])
def test_lamport_sources(devices: list[str], fmt: str) -> None:
    """Of ranks with few tokens, all or some; rows that are their own flags and rows that hold words of all ones."""
    cfg = replace(config(len(devices), fmt, ATOM), hidden=7168)
    few = [LAMPORT_TOKENS - 100 * (rank % 2) for rank in range(len(devices))]
    mixed = [tokens if rank % 2 else MANY + rank for rank, tokens in enumerate(few)]
    with connected(cfg, devices) as communicators:
        for turn, (counts, split, given) in enumerate(product((few, mixed, few), (False, True), (False, True))):
            inputs = make_inputs(cfg, counts, "one_rank", turn)
            check_tiled(cfg, inputs, len(devices) - 1)
            for one in inputs:
                one.x[turn % 3 :: 3] = -1.5  # as e2m1 all ones
            check_round(communicators, inputs, RoundOptions(split, ("partial",), prequantized=given, seed=turn))


def test_turns_with_rows_that_are_not_tiled(devices: list[str]) -> None:
    """Tiled and not, by turns and by rank, on few CTAs; the count of the meeting begins anew each time."""
    cfg = config(len(devices), "nvfp4", ATOM)
    for sms in (1, 3, None):
        with connected(cfg, devices, sms=sms) as communicators:
            for turn, routing in enumerate(("one_rank", "uniform", "zipf", "one_rank", "masked", "one_expert")):
                counts = counts_of(len(devices), turn) if turn != 3 else [MANY - 1] * len(devices)
                inputs = make_inputs(cfg, counts, routing, turn)
                check_round(communicators, inputs, RoundOptions(turn % 2 == 1, ("partial",), seed=turn))


@pytest.mark.parametrize("senders", [1 / 4, 3 / 4])
def test_senders_that_join_meet_the_others(devices: list[str], senders: float) -> None:
    """All CTAs come to the meeting, those that send later, with twins or without."""
    cfg = config(len(devices), "nvfp4", ATOM)
    entry = Entry(EVERY, EVERY, senders, 2, split_from=2, joins=True)
    for sms in (2, 5, None):
        with connected(cfg, devices, sms=sms, tuning=Tuning((entry,), (entry,))) as communicators:
            for turn in range(3):
                inputs = make_inputs(cfg, counts_of(len(devices), turn), "one_rank", turn)
                check_tiled(cfg, inputs, len(devices) - 1)
                check_round(communicators, inputs, RoundOptions(modes=("partial",), prequantized=turn == 1, seed=turn))


def test_rows_that_do_not_fit(devices: list[str]) -> None:
    """A tiled receive without room publishes nothing, writes no scale factors, and the next one is whole."""
    cfg = config(len(devices), "nvfp4", ATOM)
    last = len(devices) - 1
    inputs = make_inputs(cfg, counts_of(len(devices), 0), "one_rank", 0)
    check_tiled(cfg, inputs, last)
    with connected(cfg, devices) as communicators:
        small = [poisoned_buffers(communicator, 64) for communicator in communicators]
        arguments = [
            [tensor.to(communicator.device) for tensor in vars(one).values()]
            for communicator, one in zip(communicators, inputs, strict=True)
        ]
        for communicator in communicators:
            torch.cuda.synchronize(communicator.device)
        for communicator, given, buffers in zip(communicators, arguments, small, strict=True):
            communicator.dispatch(*given, out=buffers)
        for communicator in communicators[:last]:
            communicator.synchronize()
        with pytest.raises(EPInputError, match="those that arrived take"):
            communicators[last].synchronize()
        assert int(small[last].num_rows) == 0
        assert (small[last].scales.view(torch.uint8) == POISON).all()
        check_round(communicators, inputs, RoundOptions(seed=1))
