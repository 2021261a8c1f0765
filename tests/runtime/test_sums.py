"""Sums of a token's rows on the CPU, against loops over entries; `tests/gpu/test_sums.py` has the kernel."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.runtime.sums import slices_log2, sum_rows
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, make_inputs

CFG = EPConfig(hidden=136, num_experts=9, top_k=5, max_tokens_per_rank=11, world_size=3)
TOKENS = (11, 0, 7)


def batches(routing: str, capacity: int | None = None) -> list[Dispatched]:
    """Of all ranks of CFG; with less room than rows, the last rows are lost."""
    inputs = make_inputs(CFG, TOKENS, routing, 3)
    given = [[one.x for one in inputs], [one.topk_ids for one in inputs]]
    made = reference.dispatch(CFG, *given)
    return made if capacity is None else [without_room(one, capacity) for one in made]


def without_room(batch: Dispatched, capacity: int) -> Dispatched:
    row_map = torch.where(batch.row_map >= capacity, LOST_ROW, batch.row_map)
    return batch.derived(row_map=row_map, tokens=batch.tokens[:capacity])


def check(sums: torch.Tensor, derived: Dispatched, rows: torch.Tensor, batch: Dispatched) -> int:
    """By loops over tokens and entries; returns how many sums there are."""
    found, row_map, by_token = 0, batch.row_map.cpu(), len(sums) < len(rows)
    sums, last_map, rows = sums.cpu(), derived.row_map.cpu(), rows.cpu()
    for source, count in enumerate(batch.headers[:, HeaderWord.TOKENS].tolist()):
        for token in range(count):
            entries = [(slot, row) for slot, row in enumerate(row_map[source, token].tolist()) if row >= 0]
            want = [-1] * row_map.shape[2]
            if entries:
                slot, to = entries[-1]
                to = source * row_map.shape[1] + token if by_token else to
                want[slot] = to
                if to < len(sums):
                    total = torch.zeros(rows.shape[1])
                    for _, row in entries:
                        total = total + (rows[row].float() if row < len(rows) else torch.nan)
                    assert_bits(sums[to], reference.round_to(total, torch.bfloat16), f"token {token} of {source}")
                    found += 1
            assert last_map[source, token].tolist() == want
    return found


def random_rows(count: int, hidden: int, seed: int) -> torch.Tensor:
    """Any bits: numbers of all sizes, NaN, infinities; and every third row -0."""
    bits = torch.randint(-(1 << 15), 1 << 15, (count, hidden), generator=torch.Generator().manual_seed(seed))
    bits[::3] = -(1 << 15)
    return bits.short().view(torch.bfloat16)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", [None, 8])
def test_sums_are_those_of_a_loop(routing: str, capacity: int | None) -> None:
    found, by_token = 0, set()
    for rank, batch in enumerate(batches(routing, capacity)):
        rows = random_rows(len(batch.tokens), CFG.hidden, rank)
        by_token.add(len(rows) > CFG.world_size * CFG.max_tokens_per_rank)
        kept = rows.clone()
        found += check(*sum_rows(rows, batch), rows, batch)
        assert_bits(rows, kept, "rows")
    assert found
    if capacity is None and routing in ("uniform", "masked"):  # both forms of sums
        assert (True in by_token) == (routing == "uniform")


def test_combine_returns_the_sums_at_the_last_entries() -> None:
    """Where partial mode adds the same sums by rank, unweighted mode hands them out."""
    made = batches("uniform")
    rows = [torch.randn(len(one.tokens), CFG.hidden).bfloat16() for one in made]
    summed, derived = zip(*(sum_rows(one, batch) for one, batch in zip(rows, made, strict=True)), strict=True)
    last = [reference.count_routes(one.topk_ids, CFG.num_experts, CFG.world_size)[3] for one in made]
    derived = [one.derived(topk_ids=ids) for one, ids in zip(derived, last, strict=True)]
    ones = [torch.ones(one.topk_ids.shape) for one in made]
    want = reference.combine(CFG, rows, made, ones, mode="partial", dtype=torch.float32)
    outputs = reference.ExpertOutputs(CFG, summed, derived)
    for rank, other in enumerate(want):
        home = reference.unweighted_source(outputs, rank, torch.float32)
        torch.testing.assert_close(home.sum(1), other, rtol=2**-20, atol=2**-18)  # in another order


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: torch.zeros(4, 136), "rows.dtype = torch.float32"),
        (lambda: torch.zeros(4, 12).bfloat16(), "rows.shape[1] = 12: must be a positive multiple of 8"),
        (lambda: torch.zeros(8, 136).bfloat16()[:, ::2], "rows"),
    ],
    ids=["type", "width", "strides"],
)
def test_rows_that_break_a_rule_are_refused(make: Callable[[], torch.Tensor], rule: str) -> None:
    with pytest.raises(EPInputError, match=re.escape(rule)):
        sum_rows(make(), batches("uniform")[0])


def test_slices_are_enough_for_all_warps_or_as_short_as_they_may() -> None:
    assert slices_log2(1 << 15, 14336, 2112) == 0
    assert slices_log2(1024, 14336, 2112) == 2
    assert slices_log2(8, 14336, 2112) == 5 and slices_log2(8, 1024, 2112) == 1 and slices_log2(8, 512, 2112) == 0
