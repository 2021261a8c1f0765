"""Launch shapes: what every choice must satisfy for a kernel to be correct, over all deployments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, MANY_SLICES, MAX_SLICES
from cute_ep.layouts.maps.launch import RING_BYTES
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK
from cute_ep.layouts.maps.variants import COMBINE_KERNELS, COMBINE_MODES, DISPATCH_OPERATIONS
from cute_ep.tuning.builtin import built_in
from cute_ep.tuning.launch_shape import (
    FAMILIES,
    MANY,
    PIPED_TOKENS,
    Entry,
    Shape,
    Tuning,
    has_pipelines,
    most_lamport_tokens,
)

from .launch_tables import MINE, OPERATIONS, entries, has_flags, launches, tunings


def test_the_operations_of_these_tests_cover_all_kernels() -> None:
    ends = "|".join(f"_{mode}" for mode in COMBINE_MODES)
    assert {re.sub(f"({ends})$", "", name) for name in (*DISPATCH_OPERATIONS, *COMBINE_KERNELS)} == set(OPERATIONS)


@given(launches, tunings)
def test_no_launch_shape_has_more_pieces_than_flags(launch: tuple[EPConfig, int, int], made: Tuning) -> None:
    """Whatever the number of tokens in a call, its slices fit the flags that the arena has for a rank."""
    cfg, most, ctas = launch
    for tuning in (built_in(cfg, ctas), made):
        for tokens in {1, most // 2, most, min(most, LAMPORT_TOKENS), min(most, LAMPORT_TOKENS + 1)} - {0}:
            for family in FAMILIES:
                shape = tuning.shape(family, tokens, ctas)
                assert 1 <= 1 << shape.slices_log2 == shape.slices <= MAX_SLICES
                assert has_flags(cfg, tokens, shape.slices)


@given(launches, tunings, st.sampled_from(OPERATIONS), st.booleans(), st.booleans())
def test_each_half_that_runs_has_a_cta_of_a_resident_grid(
    launch: tuple[EPConfig, int, int], made: Tuning, operation: str, pairs: bool, fills: bool
) -> None:
    """The grid is resident together, and each half that runs has at least one CTA, or twin."""
    cfg, tokens, max_ctas = launch
    sends, receives = not operation.endswith("_wait"), not operation.endswith("_async")
    for tuning in (built_in(cfg, max_ctas), made):
        shape = tuning.shape(operation, tokens, max_ctas, pairs=pairs, whole_sms=fills, ring_bytes=RING_BYTES * fills)
        assert 1 <= shape.ctas <= max_ctas and shape.ctas * (1 + shape.twins) == shape.grid
        assert not pairs or shape.ctas == 1 or shape.ctas % 2 == 0
        if sends:
            assert 1 <= shape.send_ctas <= shape.grid
        if receives:
            assert 0 <= shape.receive_from < shape.grid
        if sends and receives:
            assert shape.receive_from <= shape.send_ctas, "a CTA that neither sends nor receives"
        entry = tuning.entry(operation, tokens)
        if shape.packed:
            assert entry.packed and 0 < shape.receive_from == shape.send_ctas
        if sends and receives and shape.send_ctas < shape.grid:
            assert shape.receive_from == (0 if entry.joins and operation == "dispatch" else shape.send_ctas)


@given(launches, tunings)
def test_of_whole_rows_at_most_a_quarter_of_the_ctas_send(launch: tuple[EPConfig, int, int], made: Tuning) -> None:
    """At most a quarter of the CTAs send, where not every one does both; nothing else is different."""
    _, tokens, max_ctas = launch
    shape = made.shape("combine", tokens, max_ctas)
    whole = made.shape("combine", tokens, max_ctas, whole_rows=True)
    if shape.receive_from:
        fewer = min(shape.send_ctas, max(1, shape.grid // 4))
        assert whole == shape._replace(send_ctas=fewer, receive_from=fewer)
    else:
        assert whole == shape


@given(launches, st.sampled_from(OPERATIONS))
def test_more_ctas_never_shrink_the_grid(launch: tuple[EPConfig, int, int], operation: str) -> None:
    cfg, tokens, max_ctas = launch
    grids = [built_in(cfg, ctas).shape(operation, tokens, ctas).grid for ctas in (max_ctas, max_ctas + 1, 2 * max_ctas)]
    assert grids == sorted(grids)


@pytest.mark.parametrize(
    ("operation", "tokens", "whole_sms", "threads"),
    [
        ("combine", 47, True, 512),
        ("combine", 48, True, 1024),
        ("combine_async", 48, True, 1024),
        ("combine_wait", 48, True, 1024),
        ("combine", 4096, False, 512),
        ("dispatch", 4096, True, 512),
    ],
)
def test_combine_fills_sms_from_two_tokens_a_cta_on(operation: str, tokens: int, whole_sms: bool, threads: int) -> None:
    tuning = Tuning(MINE, MINE)
    assert tuning.shape(operation, tokens, 24, whole_sms=whole_sms).threads == threads


@pytest.mark.parametrize(
    ("ctas", "ring_bytes", "most"),
    [
        pytest.param(1, RING_BYTES, PIPED_TOKENS, id="one SM"),
        pytest.param(24, RING_BYTES, 24 * PIPED_TOKENS, id="few"),
        pytest.param(264, RING_BYTES, LAMPORT_TOKENS, id="more than the arena has room for"),
        pytest.param(24, 0, LAMPORT_TOKENS, id="no pipelines"),
    ],
)
def test_the_more_sms_the_more_tokens_whose_rows_come_home_as_lamport_rows(
    ctas: int, ring_bytes: int, most: int
) -> None:
    pipelines = has_pipelines(EPConfig(7168, 8, 2, 4096, 2), ring_bytes)
    assert most_lamport_tokens(ctas, pipelines) == most


def test_one_cta_does_both_whatever_the_table_says() -> None:
    table = (Entry(MANY, MANY, 3 / 4, 1, split_from=1),)
    for operation, whole_rows in (("dispatch", False), ("combine", False), ("combine", True)):
        assert Tuning(table, table).shape(operation, 5, 1, whole_rows=whole_rows) == Shape(1, 1, 0, 1)


def test_below_split_from_every_cta_does_both() -> None:
    """Down to `split_from` some only send, by share or at most so many."""
    table = (Entry(MANY, MANY, 1 / 4, 2, most_senders=20, split_from=40),)
    tuning = Tuning(table, table)
    shapes = [tuning.shape("dispatch", 100, ctas) for ctas in (39, 40, 264)]
    assert shapes == [Shape(39, 39, 0, 2), Shape(40, 10, 10, 2), Shape(264, 20, 20, 2)]


def test_senders_of_a_fused_dispatch_may_receive_when_they_have_sent() -> None:
    """No others may, and none are packed."""
    table = (Entry(MANY, MANY, 1 / 4, 2, packed=True, joins=True),)
    shapes = {name: Tuning(table, table).shape(name, 100, 40) for name in ("dispatch", "dispatch_async", "combine")}
    assert shapes == {
        "dispatch": Shape(40, 10, 0, 2),
        "dispatch_async": Shape(40, 40, 40, 2),
        "combine": Shape(40, 10, 10, 2, packed=True),
    }


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda: Entry(0, 1, 0, 1), id="no tokens"),
        pytest.param(lambda: Entry(8, 0, 0, 1), id="no CTAs"),
        pytest.param(lambda: Entry(8, 1.5, 0, 1), id="part of a CTA"),
        pytest.param(lambda: Entry(8, 1, 1.0, 1), id="all CTAs send"),
        pytest.param(lambda: Entry(8, 1, -0.1, 1), id="negative share"),
        pytest.param(lambda: Entry(8, 1, float("nan"), 1), id="share that is no number"),
        pytest.param(lambda: Entry(8, 1, 0, 1, most_senders=0), id="no senders"),
        pytest.param(lambda: Entry(8, 1, 0, 1, split_from=0), id="split from no CTA on"),
        pytest.param(lambda: Entry(8, 1, 0, 3), id="3 slices"),
        pytest.param(lambda: Entry(8, 1, 0, 2 * MAX_SLICES), id="too many slices"),
        pytest.param(lambda: Entry(LAMPORT_TOKENS + 1, 1, 0, 2 * MANY_SLICES), id="too many slices of many tokens"),
        pytest.param(lambda: Tuning((), MINE), id="an empty table"),
        pytest.param(lambda: Tuning(MINE, None), id="none"),
        pytest.param(lambda: Tuning(list(MINE), MINE), id="a list"),
        pytest.param(lambda: Tuning(MINE, (*MINE[:1], 7)), id="numbers"),
        pytest.param(lambda: Tuning(MINE, MINE[:1]), id="a table that ends too early"),
        pytest.param(lambda: Tuning(MINE, MINE[::-1]), id="a table that descends"),
        pytest.param(lambda: Tuning(MINE, (*MINE, MINE[1])), id="the same tokens twice"),
    ],
)
def test_tables_that_no_launch_could_use_are_refused(bad: Callable) -> None:
    with pytest.raises(EPConfigError, match="must "):
        bad()


@given(tunings, st.lists(entries(MAX_TOKENS_PER_RANK), max_size=6), st.sampled_from(FAMILIES))
def test_a_finding_holds_where_it_was_made(tuning: Tuning, some: list[Entry], family: str) -> None:
    found = {entry.tokens: entry for entry in some}
    revised = tuning.revised(family, found)
    (other,) = set(FAMILIES) - {family}
    assert revised.table(other) == tuning.table(other)
    for tokens, entry in found.items():
        assert replace(revised.entry(family, tokens), tokens=tokens) == entry
    ends = sorted({LAMPORT_TOKENS, *(entry.tokens for entry in tuning.table(family))})
    for below, end in zip([0, *ends], ends, strict=False):
        inside = sorted(tokens for tokens in found if below < tokens <= end)
        for tokens in {below + 1, (below + end + 1) // 2, end}:
            nearest = [found[one] for one in inside if tokens <= one] or [found[one] for one in inside[-1:]]
            wanted = nearest[0] if nearest else tuning.entry(family, end)
            assert replace(revised.entry(family, tokens), tokens=1) == replace(wanted, tokens=1)
    assert revised.revised(family, found) == revised, "again changes nothing"
