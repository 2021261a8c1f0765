"""What adapters share: sizes of communicators, and counts of rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.integrations.common import connections
from cute_ep.integrations.common.checks import LEAST_TOKENS, check_most, room_for
from cute_ep.integrations.common.connections import alignment_for, serves, timeout_of
from cute_ep.integrations.common.counts import ReceiveCounts
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK
from cute_ep.reference.backend import connect_reference
from cute_ep.runtime.gpus import sms_beside_nccl


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
    check_most("x.shape[0]", MAX_TOKENS_PER_RANK, "raise --context-parallel-size")
    with pytest.raises(
        EPInputError, match=r"x.shape\[0\] = 32769: must not exceed 32768 .*; raise --context-parallel-size"
    ):
        check_most("x.shape[0]", MAX_TOKENS_PER_RANK + 1, "raise --context-parallel-size")


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (SimpleNamespace(_timeout=timedelta(minutes=10)), 600.0),
        (SimpleNamespace(_timeout=timedelta(days=1)), 3600.0),
        (None, EPConfig.timeout_s),
    ],
    ids=["as long as the group", "at most an hour", "unknown"],
)
def test_ranks_wait_as_long_as_their_group(options: Any, seconds: float) -> None:
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    assert timeout_of(group) == seconds
    EPConfig(64, 8, 2, 64, 2, timeout_s=seconds)


@pytest.mark.parametrize(("asked", "sms"), [(None, 124), (20, 20)])
def test_nccl_kernels_have_sms_unless_somebody_says_how_many(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, sms: int
) -> None:
    """`tests/gpu/nccl_worker.py` shows what happens without."""
    said: list[int | None] = []
    hopper = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(connections, "timeout_of", lambda group: 30.0)
    monkeypatch.setattr(connections, "connect", lambda cfg, group, sms: said.append(sms))
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    connections.Connections(group).for_tokens({}, (64, 8, 2), 5, sms=asked)
    assert said == [sms] and sms_beside_nccl(torch.device("cpu")) is None


def test_who_shares_connections_still_closes_them_after_everybody_elses_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that releases them, such as FlashInfer's objects, may call again after `close`."""
    closed, user = [], object()
    made = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(connections, "Connections", lambda group: made)
    group: Any = "group"
    assert connections.connections_of(group) is connections.share(group, user) is made
    connections.close()
    assert closed == [True] and connections.share(group, user) is made
    connections.release(group, user)
    assert closed == [True] * 2 and not connections._SHARED


@pytest.mark.parametrize(("multiple", "alignment"), [(1, 1), (16, 16), (32, 64), (128, 128)])
def test_the_alignment_is_the_least_that_pads_enough(multiple: int, alignment: int) -> None:
    assert alignment_for(multiple) == alignment


def test_an_alignment_that_there_is_not_is_refused() -> None:
    with pytest.raises(EPConfigError, match="padding = 24: must be a divisor of 128"):
        alignment_for(24)


@pytest.mark.parametrize(("alignment", "rows"), [(1, [0, 1, 8, 9]), (8, [0, 8, 8, 16])])
def test_rows_of_experts_are_padded_each(alignment: int, rows: list[int]) -> None:
    assert ReceiveCounts([0, 1, 8, 9], 3, 5).padded(alignment) == rows


BASE = EPConfig(128, 8, 2, 64, 2)
BLOCKS = EPConfig(128, 8, 2, 64, 2, block_rows=128)


@pytest.mark.parametrize(
    ("own", "cfg", "does"),
    [
        (BASE, BASE, True),
        (BASE, replace(BASE, max_tokens_per_rank=8), True),
        (BASE, replace(BASE, max_tokens_per_rank=65), False),
        (BASE, replace(BASE, hidden=64), False),
        (BASE, replace(BASE, dispatch_format="fp8"), False),
        (BLOCKS, replace(BLOCKS, max_tokens_per_rank=8, block_rows=16), True),
        (BLOCKS, replace(BLOCKS, block_rows=256), False),
        (BASE, BLOCKS, False),
        (BLOCKS, BASE, False),
    ],
    ids=[
        "same",
        "fewer tokens",
        "more tokens",
        "hidden",
        "format",
        "smaller blocks",
        "larger blocks",
        "blocks",
        "none",
    ],
)
def test_a_communicator_serves_what_needs_no_more_room(own: EPConfig, cfg: EPConfig, does: bool) -> None:
    assert serves(own, cfg) == does


def test_configurations_that_differ_between_ranks_are_told_in_the_words_of_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differs(*arguments: Any, **options: Any) -> None:
        raise EPConfigError("rank 1: max_tokens_per_rank = 64, rank 0: max_tokens_per_rank = 128: must be equal")

    monkeypatch.setattr(connections, "connect", differs)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    names = {"max_tokens_per_rank": "num_max_dispatch_tokens_per_rank"}
    rule = (
        "rank 1: num_max_dispatch_tokens_per_rank = 64, rank 0: num_max_dispatch_tokens_per_rank = 128: must be equal"
    )
    with pytest.raises(EPConfigError, match=rule):
        connections.Connections(group).get(BASE, names=names)


def test_what_no_later_call_has_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    (one,) = connect_reference(EPConfig(8, 2, 1, 4, 1))
    ranks = connections.Connections(SimpleNamespace(rank=lambda: 0, size=lambda: 1))  # type: ignore[arg-type]
    ranks._open[one.cfg] = one
    one.dispatch(torch.zeros(1, 8).bfloat16(), torch.full((1, 1), 2))
    ranks.close()
    assert one.closed and "wrong input was found, and no later call has told" in caplog.text
