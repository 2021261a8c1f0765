"""Which schedules the cases of role tests have."""

from __future__ import annotations

from typing import Any

import pytest

from cute_ep.layouts.maps.arena import (
    SEGMENT_BYTES,
)
from cute_ep.layouts.maps.launch import CTAS_PER_SM, WIDE_THREADS
from cute_ep.runtime.launch_cache import LaunchShape
from tests.gpu.role_cases import COMBINES, DISPATCHES, fused_turns
from tests.gpu.role_schedules import adds_up

LONG = 12
"""Segments of a slice above which it is drawn in parts."""
KINDS: dict[str, set[str]] = {
    "own tokens stay": {"together"},
    "many own tokens stay": {"together"},
    "own tokens travel, or come quantised and stay": {"together"},
    "many travel, or come quantised and stay": {"together"},
    "some send": {"together", "apart"},
    "senders join": {"together", "joining"},
    "twins": {"together", "twins"},
    "twins of many": {"twins"},
    "twins by source rank": {"twins"},
    "some twins send": {"twins apart"},
    "twins join": {"together", "joining", "twins joining", "in parts"},
    "many twins join": {"joining", "twins joining", "in parts"},
    "twins join by source rank": {"twins joining"},
    "twins join, blocks": {"together", "joining", "twins joining"},
    "twins of a rank alone": {"together", "twins"},
    "all send and receive": {"together", "wide"},
    "many, some send": {"wide", "wide apart"},
    "pipelines": {"pipelines that add up", "pipelines"},
    "pipelines of the last rank": {"pipelines that add up", "pipelines", "wide"},
    "pipelines between ranks": {"pipelines that add up", "pipelines", "wide"},
    "pipelines of long rows": {"pipelines that add up", "pipelines"},
    "pipelines of a rank alone": {"pipelines that add up", "pipelines", "together"},
    "pipelines that only send": {"pipelines that add up", "pipelines"},
}
"""By case: what its launches are, in some turn. Pipelines that do not add up are of a rank without tokens, too."""


def kind_of(operation: str, shape: LaunchShape) -> str:
    """What a fused launch is; only CTAs of combine are `wide`."""
    if shape.grid.ring_bytes:
        return "pipelines that add up" if adds_up(shape, "partial") else "pipelines"
    kind, ctas = "", shape.ctas
    if shape.threads == WIDE_THREADS and operation == "combine":
        kind = "wide"
    elif shape.threads == WIDE_THREADS:
        kind, ctas = "twins", CTAS_PER_SM * ctas
    how = "apart" if shape.grid.receive_from else ""
    if not shape.grid.receive_from and shape.grid.send_ctas < ctas:
        how = "joining"
    return f"{kind} {how}".strip() or "together"


@pytest.mark.parametrize("name", KINDS)
def test_each_case_has_its_schedules(name: str, make_stage: Any) -> None:
    case = (DISPATCHES | COMBINES)[name]
    rank, found = make_stage(case).rank, set()
    segments = -(-case.cfg.format.payload_bytes(case.cfg.hidden) // SEGMENT_BYTES)
    for turn in fused_turns(case):
        tuning, _ = case.schedule.shapes(turn.index)
        operation = "combine" if name in COMBINES else "dispatch"
        shape = rank._cache.shape(tuning, operation, turn.tokens_of(case.me))
        kind = kind_of(operation, shape)
        found.add(kind)
        if "joining" in kind and segments >> shape.slices_log2 > LONG:
            found.add("in parts")
    assert found == KINDS[name]


def test_all_cases_have_kinds() -> None:
    assert set(KINDS) == {*DISPATCHES, *COMBINES}
