"""Combine is launched again whatever the number of experts' rows, of which the kernel is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.runtime.communicator import Communicator
from tests.compiled_launches import compiled
from tests.fake_gpu import CFG, Launches, MakeRank, inputs

BF16 = replace(CFG, dispatch_format="bf16")
ROOM = 20


@pytest.fixture
def rank(make_rank: MakeRank) -> Communicator:
    return make_rank(BF16)


def dispatched(rank: Communicator) -> Dispatched:
    return rank.dispatch(*inputs(), out=DispatchBuffers.carve(rank.cfg, rank.device, ROOM))


def rows_of(count: int) -> torch.Tensor:
    return torch.zeros(count, BF16.hidden, dtype=torch.bfloat16)


@pytest.mark.parametrize("out", [None, torch.empty(5, BF16.hidden, dtype=torch.bfloat16)], ids=["new", "given"])
def test_other_numbers_are_launched_again(rank: Communicator, launches: Launches, out: torch.Tensor | None) -> None:
    for count in (3, 4):
        rank.combine(rows_of(count), dispatched(rank), out=out)
    for count in (5, 17, 2, ROOM, ROOM + 3):
        batch, rows = dispatched(rank), rows_of(count)
        with compiled(launches):
            rank.combine(rows, batch, out=out)
        assert launches.last().values("rows.data", "rows.capacity") == (rows.data_ptr(), min(count, ROOM))
        left = batch.row_map.data_ptr(), batch.headers.data_ptr(), batch.weights.data_ptr()
        assert launches.last().values("batch.row_map", "batch.headers", "batch.weights") == left


def test_without_rows_and_with_other_weights(rank: Communicator, launches: Launches) -> None:
    ones = torch.ones_like(dispatched(rank).weights)
    for count in (3, 4, 5):
        before = launches.compiled.count
        kept = dispatched(rank).without_rows(ones)
        rank.combine(rows_of(count), kept)
        assert launches.last("combine").values("rows.capacity", "batch.weights") == (count, ones.data_ptr())
    assert launches.compiled.count == before + 2, "the dispatch and the combine"


NAMES = {False: ["combine"], True: ["combine_async", "combine_wait"]}


@pytest.mark.parametrize("halves", [False, True], ids=["combine", "halves"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_kernel_is_told_how_many_rows_there_are(
    rank: Communicator, launches: Launches, count: int, halves: bool
) -> None:
    """Whatever calls there were before."""
    for rows in (*[rows_of(4)] * 3, *[rows_of(count)] * 3):
        if halves:
            rank.combine_wait(rank.combine_async(rows, dispatched(rank)))
        else:
            rank.combine(rows, dispatched(rank))
    told = [launches.last(name).arguments["rows.capacity"] for name in NAMES[halves]]
    assert told == [count] * len(told)


@pytest.mark.parametrize("stride", [0, 1, 2 * BF16.hidden])
def test_one_row_says_nothing_of_the_strides_of_more(rank: Communicator, stride: int) -> None:
    memory = torch.zeros(16 * BF16.hidden, dtype=torch.bfloat16)
    for _ in range(3):
        rank.combine(memory.as_strided((1, BF16.hidden), (stride, 1)), dispatched(rank))
    with pytest.raises(EPInputError, match="contiguous"):
        rank.combine(memory.as_strided((4, BF16.hidden), (stride, 1)), dispatched(rank))


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "another type": lambda: rows_of(4).float(),
    "another width": lambda: torch.zeros(4, BF16.hidden * 2, dtype=torch.bfloat16),
    "strided": lambda: torch.zeros(4, BF16.hidden * 2, dtype=torch.bfloat16)[:, ::2],
    "off a vector": lambda: torch.zeros(4 * BF16.hidden + 1, dtype=torch.bfloat16)[1:].view(4, -1),
    "one dimension": lambda: torch.zeros(4 * BF16.hidden, dtype=torch.bfloat16),
    "a gradient": lambda: rows_of(4).requires_grad_(),
    "the output": lambda: OUT[:4],
}
OUT = torch.zeros(5, BF16.hidden, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_rows_are_refused_behind_right_ones(rank: Communicator, name: str) -> None:
    for _ in range(3):
        rank.combine(rows_of(4), dispatched(rank), out=OUT)
    with pytest.raises(EPInputError, match=r"rows|out"):
        rank.combine(REFUSED[name](), dispatched(rank), out=OUT)
