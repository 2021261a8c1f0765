"""Expert ids that are no expert's, through every adapter: the first later call that finds the status record set tells
them, names the entry, and can be made again. Ranks are in threads, on the CPU, where the record is set at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.integrations.common.pools import Words
from cute_ep.layouts.maps.routing import Phase
from cute_ep.reference.backend import ReferenceCommunicator, connect_reference
from tests.integrations.groups import ThreadGroup, on_groups

from .rigs import EXPERTS, HIDDEN, RANKS, RIGS, SLOTS, Given, Rig

WRONG = {
    "E": EXPERTS,
    "E + 1": EXPERTS + 1,
    "-2": -2,
    "beyond 16 bits": 1 << 16,
    "largest of 32 bits": 2**31 - 1,
    "smallest of 32 bits": -(2**31),
    "2^32 + 3": 2**32 + 3,
    "largest of 64 bits": 2**63 - 1,
    "smallest of 64 bits": -(2**63),
}
PLACE = 2, 1
"""The wrong entry's token and slot."""


def tokens(rank: int, wrong: int | None = None) -> Given:
    """Small integers and weights that are powers of two: sums in any order are exact."""
    generator = torch.Generator().manual_seed(rank)
    count = 5 - rank
    x = torch.randint(-8, 9, (count, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand(count, EXPERTS, generator=generator).topk(SLOTS).indices
    ids[0, 2] = -1
    if wrong is not None:
        ids[PLACE] = wrong
    return x, ids, 2.0 ** torch.randint(-1, 2, ids.shape, generator=generator)


def expected(rig: Rig, given: Given) -> torch.Tensor:
    """Sums, where wrong entries count as masked, or those beyond 32 bits as their lower halves."""
    x, ids, weights = given
    lower = ids.to(torch.int32).long() if rig.lower_half else ids
    good = (lower >= 0) & (lower < EXPERTS)
    if rig.lower_half == "positive":
        good &= ids >= 0
    if rig.sums == "ranks":
        ranks = [(good & (lower // (EXPERTS // RANKS) == rank)).any(1, keepdim=True) for rank in range(RANKS)]
        return x * torch.stack(ranks).sum(0) + 0.0
    return x * (good * (weights if rig.sums == "weighted" else 1)).sum(1, keepdim=True).bfloat16() + 0.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", RIGS)
def test_wrong_ids_are_told_by_the_next_call(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """On one rank; the other notices nothing. Then the round is finished, and so is one with good ids."""
    framework, make = RIGS[name]
    info = torch.iinfo(dtype)
    wrong = {case: value for case, value in WRONG.items() if info.min <= value <= info.max}
    if name.startswith("DeepEP elastic") and dtype == torch.int32:
        pytest.skip("takes int64 only")

    def program(group: ThreadGroup) -> list[tuple[Rig, Given, torch.Tensor]]:
        rig, done = make(group), []
        try:
            for case, value in [*wrong.items(), ("none", None)]:
                given: Any = tokens(group.rank(), value if group.rank() == 0 else None)
                given = given[0], given[1].to(dtype), given[2]
                sent = rig.dispatch(given)
                if group.rank() == 0 and value is not None:
                    with pytest.raises(EPInputError) as told:
                        rig.combine(given, sent)
                    check_told(str(told.value), rig, case, value)
                done.append((rig, given, rig.combine(given, sent)))
        finally:
            rig.close()
        return done

    with framework(monkeypatch):
        for rank, rounds in enumerate(on_groups(monkeypatch, RANKS, program)):
            for number, (rig, given, out) in enumerate(rounds):
                assert torch.equal(out.nan_to_num(99), expected(rig, given)), f"rank {rank}, round {number}"


def check_told(text: str, rig: Rig, case: str, value: int) -> None:
    token, slot = PLACE
    said = [str(value)]
    if not -(2**31) < value < 2**31 - 1:
        limits = [value] if value in (-(2**31), 2**31 - 1) else [-(2**31), 2**31 - 1]
        said = [f"{limit} or beyond 32 bits" for limit in limits]
    start, end = f"{rig.ids}[{token}, {slot}] = ", f": must be -1 or in [0, {EXPERTS})"
    assert any(start + one + end in text for one in said), f"{case}: {text}"
    assert text.startswith("rank 0: ") and "this one has sent nothing, make it again" in text, text


@pytest.mark.parametrize("name", RIGS)
def test_any_call_tells_what_is_found_late(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As on a GPU, where a call may return before its kernel has run: dispatch as well as combine, before either sends
    anything."""
    framework, make = RIGS[name]
    late: dict[int, Any] = {}
    monkeypatch.setattr(ReferenceCommunicator, "take_input_errors", lambda self: late.pop(self.rank, {}))
    found = {Phase.EXPERT_ID: (0, EXPERTS, EXPERTS + 1)}

    def program(group: ThreadGroup) -> tuple[Rig, Given, torch.Tensor]:
        rig, given, told = make(group), tokens(group.rank()), []

        def late_for(call: Any, *arguments: Any) -> Any:
            if group.rank() == 0:
                late[0] = found
                with pytest.raises(EPInputError, match=r"\[0, 0\] = .*this one has sent nothing") as error:
                    call(*arguments)
                told.append(str(error.value))
            return call(*arguments)

        try:
            rig.combine(given, rig.dispatch(given))
            sent = late_for(rig.dispatch, given)
            out = late_for(rig.combine, given, sent)
        finally:
            rig.close()
        assert all(f"{rig.ids}[0, 0]" in one for one in told) and len(told) == 2 * (group.rank() == 0)
        return rig, given, out

    with framework(monkeypatch):
        for rig, given, out in on_groups(monkeypatch, RANKS, program):
            assert torch.equal(out, expected(rig, given))


BLOCKS = EPConfig(8, 4, 2, 4, 2, block_rows=8)


@pytest.mark.parametrize(
    ("cfg", "index", "words"),
    [
        (EPConfig(8, 4, 2, 4, 2), 0, "most: left room for 8 rows, but 9 came, and all are lost"),
        (
            BLOCKS,
            2,
            "ids: brought 9 rows to local expert 1, whose block has room for 8, as where tokens name an expert tw",
        ),
        (replace(BLOCKS, row_order="rank_major"), 2, "most: left room for 8 rows of a rank, but 9 came from rank 1"),
    ],
    ids=["rows", "blocks of experts", "blocks of ranks"],
)
def test_rows_without_room_are_told_with_what_says_how_many_there_may_be(cfg: EPConfig, index: int, words: str) -> None:
    one = connect_reference(cfg)[1]
    one.take_input_errors = lambda: {Phase.ROW_CAPACITY: (index, 8, 9)}  # type: ignore[method-assign]
    pool = SimpleNamespace(communicators=[one])
    with pytest.raises(EPInputError) as told:
        Words("ids", "most").raise_found(pool)  # type: ignore[arg-type]
    assert str(told.value).startswith(f"rank 1: {words}")
