"""What adapters share: sizes of communicators, and counts of rows."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import LEAST_TOKENS, alignment_for, room_for
from cute_ep.integrations.common.constants import Constant
from cute_ep.integrations.common.pools import room_of
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK
from cute_ep.runtime.counts import ReceiveCounts


@pytest.mark.parametrize(
    ("tokens", "room"),
    [
        (0, LEAST_TOKENS),
        (LEAST_TOKENS, LEAST_TOKENS),
        (LEAST_TOKENS + 1, 2 * LEAST_TOKENS),
        (4096, 4096),
        (MAX_TOKENS_PER_RANK - 1, MAX_TOKENS_PER_RANK),
        (MAX_TOKENS_PER_RANK, MAX_TOKENS_PER_RANK),
    ],
)
def test_room_is_a_power_of_two(tokens: int, room: int) -> None:
    assert room_for(tokens) == room


def test_too_many_tokens_stay_too_many() -> None:
    """`EPConfig` then says so."""
    assert room_for(MAX_TOKENS_PER_RANK + 1) > MAX_TOKENS_PER_RANK


def test_too_many_tokens_are_refused_with_what_to_do() -> None:
    checks.most("x.shape[0]", MAX_TOKENS_PER_RANK, "raise --context-parallel-size")
    with pytest.raises(
        EPInputError, match=r"x.shape\[0\] = 32769: must not exceed 32768 .*; raise --context-parallel-size"
    ):
        checks.most("x.shape[0]", MAX_TOKENS_PER_RANK + 1, "raise --context-parallel-size")


def test_rows_have_room_of_few_sizes() -> None:
    """At least one row, and less than a sixteenth more than come."""
    assert [room_of(rows) for rows in (0, 1, 31, 33, 4095, 4096, 4097)] == [1, 1, 31, 34, 4096, 4096, 4352]
    assert all(rows <= room_of(rows) < rows * 17 / 16 for rows in range(1, 5000))
    assert len({room_of(rows) for rows in range(1 << 15, 1 << 16)}) == 16 + 1


@pytest.mark.parametrize(("multiple", "alignment"), [(1, 1), (16, 16), (32, 64), (128, 128)])
def test_the_alignment_is_the_least_that_pads_enough(multiple: int, alignment: int) -> None:
    assert alignment_for(multiple) == alignment


def test_an_alignment_that_there_is_not_is_refused() -> None:
    with pytest.raises(EPConfigError, match="padding = 24: must be a divisor of 128"):
        alignment_for(24)


@pytest.mark.parametrize(("alignment", "rows"), [(1, [0, 1, 8, 9]), (8, [0, 8, 8, 16])])
def test_rows_of_experts_are_padded_each(alignment: int, rows: list[int]) -> None:
    assert ReceiveCounts([0, 1, 8, 9], 3, 5).padded(alignment) == rows


def test_constants_share_memory_until_more_is_needed() -> None:
    """Calls of inference mode and others have the same ones."""
    asked: list[int] = []

    def make(rows: int, device: torch.device) -> torch.Tensor:
        asked.append(rows)
        return torch.arange(rows, device=device)

    constant, place = Constant(make), torch.device("cpu")
    with torch.inference_mode():
        first = constant.first(5, place)
    assert first.tolist() == [0, 1, 2, 3, 4] and not first.is_inference()
    assert constant.first(8, place).data_ptr() == first.data_ptr() and asked == [8]
    assert constant.first(9, place).tolist() == list(range(9)) and asked == [8, 16]
    assert constant.first(0, place).tolist() == []
    assert first.tolist() == [0, 1, 2, 3, 4] and len(constant._made[place]) == 2, "streams may still read the smaller"


def test_constants_of_a_mode_are_not_kept() -> None:
    constant, place = Constant(lambda rows, device: torch.ones(rows, device=device)), torch.device("cpu")
    with FakeTensorMode():
        assert type(constant.first(3, place)) is FakeTensor
    assert type(constant.first(3, place)) is torch.Tensor
