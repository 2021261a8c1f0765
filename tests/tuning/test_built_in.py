"""The tables of the package: slices of a row by tokens, CTAs and length, and which deployment has which table."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, message_bytes
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.launch import RING_BYTES
from cute_ep.layouts.maps.routing import EXPERT_MAJOR, MAX_TOKENS_PER_RANK, ROW_ORDERS, RowOrder
from cute_ep.tuning.builtin import COMBINE, DISPATCH, FEW_RETURNS, TABLE_CTAS, built_in
from cute_ep.tuning.launch_shape import FAMILIES, MANY, PIPED_TOKENS, TWIN_CTAS, Entry

from .launch_tables import CFG


def test_one_token_is_cut_into_more_slices_than_one_of_many() -> None:
    """In both directions."""
    one, most = (
        [built_in(CFG, TABLE_CTAS).shape(name, tokens, TABLE_CTAS) for name in FAMILIES]
        for tokens in (1, MAX_TOKENS_PER_RANK)
    )
    assert all(few.slices > many.slices and few.grid < many.grid == 264 for few, many in zip(one, most, strict=True))


def test_with_fewer_ctas_a_row_is_cut_into_fewer_slices() -> None:
    """As many a warp, as far as they can be halved; where few tokens take part of the CTAs from half of those down.
    Nothing else changes, and nothing with more CTAs than were measured."""
    tables = {ctas: built_in(CFG, ctas) for ctas in (4, 32, 64, 132, TABLE_CTAS, 296)}

    def slices(family: str, tokens: int) -> list[int]:
        return [tuning.entry(family, tokens).slices for tuning in tables.values()]

    assert slices("dispatch", 1024) == [1, 1, 1, 2, 4, 4] and slices("combine", 1024) == [1, 4, 8, 16, 32, 32]
    assert slices("dispatch", 16) == [1, 4, 8, 8, 8, 8]
    for tuning in tables.values():
        for family, few in (("dispatch", 0), ("combine", FEW_RETURNS[MANY])):
            known, own = ([one for one in a.table(family) if one.tokens > few] for a in (tables[TABLE_CTAS], tuning))
            for entry, whole in zip(own, known, strict=True):
                assert replace(entry, slices=whole.slices) == whole


@pytest.mark.parametrize(
    ("ranks", "sms", "slices"),
    [
        pytest.param(2, 8, [32, 16, 16, 16, 8, 4, 2, 1, 1], id="8"),
        pytest.param(2, 24, [32, 32, 16, 16, 16, 16, 8, 4, 2], id="24"),
        pytest.param(4, 44, [32, 32, 32, 16, 16, 16, 16, 8, 4], id="44, more ranks"),
        pytest.param(2, 64, [32, 32, 32, 32, 16, 16, 16, 8, 4], id="64"),
        pytest.param(2, 132, [32, 32, 32, 32, 32, 16, 16, 16, 16], id="132"),
        pytest.param(2, TABLE_CTAS, [32] * 8 + [16], id="all, two CTAs each"),
    ],
)
def test_few_rows_come_home_in_a_slice_a_warp(ranks: int, sms: int, slices: list[int]) -> None:
    """On so many SMs; of 2, 4, ... 512 tokens."""
    tuning = built_in(replace(CFG, world_size=ranks), sms)
    assert [tuning.entry("combine", 2 << power).slices for power in range(9)] == slices


@pytest.mark.parametrize(
    ("order", "fmt", "sms", "tokens", "senders", "joins", "slices"),
    [
        pytest.param("expert_major", "bf16", 24, 4096, 12, True, 1, id="a quarter, which join"),
        pytest.param("expert_major", "bf16", 24, 1024, 12, True, 2, id="in slices, of fewer tokens"),
        pytest.param("expert_major", "bf16", 44, 2048, 22, True, 2, id="in slices, more SMs"),
        pytest.param("expert_major", "bf16", 24, 128, 6, False, 4, id="few tokens, whose senders do not join"),
        pytest.param("expert_major", "bf16", 1, 4096, 2, False, 1, id="one SM"),
        pytest.param("expert_major", "fp8", 24, 4096, 24, True, 1, id="shorter messages"),
        pytest.param("expert_major", "fp8", 44, 4096, 44, True, 1, id="shorter messages, more SMs"),
        pytest.param("expert_major", "nvfp4", 44, 4096, 77, True, 1, id="the shortest messages"),
        pytest.param("rank_major", "bf16", 24, 4096, 16, False, 1, id="another order"),
        pytest.param("rank_major", "bf16", 44, 4096, 22, False, 1, id="another order, more SMs"),
        pytest.param("rank_major", "fp8", 24, 4096, 30, True, 1, id="another order, more tokens of shorter messages"),
        pytest.param("rank_major", "nvfp4", 24, 1024, 48, False, 1, id="another order, the shortest messages"),
        pytest.param("rank_major", "fp8", 24, 1024, 20, False, 1, id="another order, shorter messages"),
        pytest.param("rank_major", "nvfp4", 44, 128, 37, False, 2, id="another order, few of the shortest messages"),
        pytest.param("rank_major", "fp8", 8, 16, 16, False, 4, id="few tokens, of another order"),
        pytest.param("expert_major", "bf16", 8, 16, 16, False, 8, id="few long messages"),
        pytest.param("expert_major", "bf16", 24, 64, 9, False, 4, id="more of them"),
        pytest.param("expert_major", "nvfp4", 24, 64, 48, False, 4, id="short ones of fewer twins than some send"),
        pytest.param("expert_major", "nvfp4", 26, 64, 9, False, 4, id="of as many"),
    ],
)
def test_where_ctas_have_twins_dispatch_has_tables_of_its_own(
    order: RowOrder, fmt: str, sms: int, tokens: int, senders: int, joins: bool, slices: int
) -> None:
    """Of all twins so many send; these then receive, too, if they join or if there are no others."""
    cfg = EPConfig(7168, 256, 8, 4096, 2, fmt, row_order=order)
    shape = built_in(cfg, sms, ring_bytes=RING_BYTES).shape("dispatch", tokens, sms, ring_bytes=RING_BYTES)
    assert (shape.grid, shape.send_ctas, shape.joins, shape.slices) == (2 * sms, senders, joins, slices)
    assert shape.receive_from == (0 if joins or senders == 2 * sms else senders)


def test_tables_of_twins_are_for_all_rows() -> None:
    """Of either order and of any length, which caps their slices; up to 2 tokens nothing changes, nor in combine where
    rows come home as Lamport rows. What pipelines carry has a flag for every four tokens where rows are long."""
    for order, fmt, hidden in product(("expert_major", "rank_major"), FORMATS, (128, 7168)):
        cfg = EPConfig(hidden, 256, 8, 4096, 2, fmt, row_order=order)
        one, few, usual = (
            built_in(cfg, sms, ring_bytes=ring) for sms, ring in ((1, RING_BYTES), (24, RING_BYTES), (24, 0))
        )
        assert one.dispatch[1:] == few.dispatch[1:] != usual.dispatch[1:]
        assert few.dispatch[0] == usual.dispatch[0]
        for tokens in (1, 2, 32, 33, 24 * PIPED_TOKENS):
            found, other = (tuning.entry("combine", tokens) for tuning in (few, usual))
            assert replace(found, tokens=1) == replace(other, tokens=1)
        assert few.entry("combine", 24 * PIPED_TOKENS + 1) == Entry(MANY, MANY, 0, 4 if hidden > 128 else 1)
        assert hidden > 128 or all(entry.slices == 1 for entry in few.dispatch if entry.tokens > 2)


def test_where_ctas_have_no_twins_dispatch_has_the_usual_tables() -> None:
    """They have none if there are more than TWIN_CTAS, which may have pipelines, or if they do not fill SMs."""
    cfg = EPConfig(7168, 256, 8, 4096, 2)
    for sms, ring, twins in ((TWIN_CTAS, RING_BYTES, True), (TWIN_CTAS, 0, False), (TWIN_CTAS + 1, RING_BYTES, False)):
        found, usual = built_in(cfg, sms, ring_bytes=ring), built_in(cfg, sms)
        assert (found.dispatch != usual.dispatch) == twins
        assert (found.combine != usual.combine) == (ring > 0)


@pytest.mark.parametrize(
    ("hidden", "most", "ring_bytes"),
    [
        pytest.param(7176, 4096, RING_BYTES, id="longer rows than pipelines carry"),
        pytest.param(7168, LAMPORT_TOKENS, RING_BYTES, id="all rows are Lamport rows"),
        pytest.param(7168, 4096, 99 << 10, id="too little memory"),
    ],
)
def test_where_combine_has_no_pipelines_its_tables_are_as_without(hidden: int, most: int, ring_bytes: int) -> None:
    cfg = EPConfig(hidden, 256, 8, most, 2)
    few, usual = (built_in(cfg, 24, ring_bytes=ring) for ring in (ring_bytes, 0))
    assert few.combine == usual.combine and few.dispatch != usual.dispatch


@pytest.mark.parametrize(
    ("hidden", "fmt", "dispatched", "returned"),
    [
        pytest.param(7168, "bf16", [32, 4, 4], [32, 32, 8], id="28 tiles"),
        pytest.param(7168, "nvfp4", [8, 4, 4], [32, 32, 8], id="7 of a message, 28 of a returned row"),
        pytest.param(4096, "mxfp8", [8, 4, 4], [16, 16, 8], id="8 of a message, 16 of a returned row"),
        pytest.param(2880, "mxfp8", [8, 4, 2], [16, 16, 4], id="6 of a message, 12 of a returned row"),
        pytest.param(2880, "mxfp4", [4, 4, 1], [16, 16, 4], id="3 of a message, 12 of a returned row"),
        pytest.param(512, "bf16", [2, 2, 1], [2, 2, 1], id="2 segments"),
    ],
)
def test_short_rows_are_cut_into_fewer_slices(
    hidden: int, fmt: str, dispatched: list[int], returned: list[int]
) -> None:
    """With few tokens more than half of the slices have a segment; with many each has two, or one is short of it."""
    tuning = built_in(replace(CFG, hidden=hidden, dispatch_format=fmt, world_size=4), TABLE_CTAS)
    assert [tuning.entry("dispatch", tokens).slices for tokens in (1, 64, 1024)] == dispatched
    assert [tuning.entry("combine", tokens).slices for tokens in (1, 1024, 4096)] == returned


def test_every_table_serves_the_deployments_up_to_its_message_size_and_ranks() -> None:
    """Of dispatch by the order of rows, the size of a message and the number of ranks, of combine by order and ranks
    alone, since rows come home in one type. No table is left over."""
    for order in ROW_ORDERS:
        for tables in (DISPATCH[order], COMBINE[order], *DISPATCH[order].values()):
            assert list(tables) == sorted(tables) and list(tables)[-1] == MANY
    used = set()
    for order, fmt, hidden in product(ROW_ORDERS, FORMATS, (4096, 7168)):
        for ranks, most_ranks in ((1, 2), (2, 2), (4, MANY), (8, MANY)):
            cfg = replace(CFG, hidden=hidden, dispatch_format=fmt, world_size=ranks, row_order=order)
            sizes = DISPATCH[order][most_ranks]
            size = min(most for most in sizes if message_bytes(cfg.format, cfg.hidden) <= most)
            tuning = built_in(cfg, TABLE_CTAS)
            for entries, table in ((tuning.dispatch, sizes[size]), (tuning.combine, COMBINE[order][most_ranks])):
                assert all(one.slices <= listed.slices for one, listed in zip(entries, table, strict=True))
                assert [replace(one, slices=1) for one in entries] == [replace(one, slices=1) for one in table]
            used.add((order, most_ranks, size))
    every = {(order, ranks, size) for order, tables in DISPATCH.items() for ranks in tables for size in tables[ranks]}
    assert used == every, "each is used"
    alone = built_in(replace(CFG, skip_a2a=True), TABLE_CTAS)
    assert alone.combine == COMBINE[EXPERT_MAJOR][2] and alone.dispatch == DISPATCH[EXPERT_MAJOR][2][MANY], (
        "each rank alone, long rows as listed"
    )
