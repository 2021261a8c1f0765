"""`cute-ep tune`: which shapes it tries, how it chooses, and that `connect` finds what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_ep.api.config import EPConfig
from cute_ep.bench import tune as search
from cute_ep.cli import tune
from cute_ep.cli.main import main
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, MAX_SLICES
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.runtime import connection
from cute_ep.tuning.builtin import ONE_A_SM, TABLE_CTAS, TWIN_DISPATCH, built_in
from cute_ep.tuning.file import read_tables
from cute_ep.tuning.launch_shape import FAMILIES, MANY, Entry, Shape, Tuning, slices_for
from tests.fake_gpu import GPU

from .launch_tables import CFG, MINE, find, has_flags, launches, setting

# ---- what is tried


@given(launches, st.sampled_from(FAMILIES))
def test_every_shape_that_is_tried_can_be_launched(launch: tuple[EPConfig, int, int], family: str) -> None:
    cfg, tokens, max_ctas = launch
    base = built_in(cfg, max_ctas)
    changes = search.choices(family, cfg, tokens)
    assert all(changes) and sum(map(len, changes)) <= 26
    for change in chain(*changes):
        entry = replace(base.entry(family, tokens), tokens=tokens, **change)
        shape = base.revised(family, {tokens: entry}).shape(family, tokens, max_ctas)
        assert has_flags(cfg, tokens, shape.slices)
        assert shape.slices in slices_for(tokens)
        assert shape.grid <= max_ctas and shape.send_ctas >= 1 and shape.receive_from < shape.grid


def test_what_ships_is_tried_of_senders_that_join() -> None:
    """None join where none only send: (0, True) would be (0, False) once more."""
    tried = [(one["senders"], one["joins"]) for one in chain(*search.choices("dispatch", CFG, 8)) if "senders" in one]
    tables = chain(*(table.values() for table in TWIN_DISPATCH.values()))
    assert {(entry.senders, True) for entry in chain(*tables) if entry.joins} <= set(tried)
    assert (0, False) in tried and (0, True) not in tried and len(tried) == len(set(tried))
    assert not any(one.get("joins") for one in chain(*search.choices("combine", CFG, 8)))


def test_pieces_that_are_tried_are_no_smaller_than_a_segment() -> None:
    def slices(family: str, cfg: EPConfig, tokens: int) -> tuple[int, ...]:
        return tuple(one["slices"] for one in chain(*search.choices(family, cfg, tokens)) if "slices" in one)

    assert slices("dispatch", replace(CFG, dispatch_format="nvfp4"), 8) == (1, 2, 4, 8), "3584 bytes are 7 segments"
    assert max(slices("dispatch", replace(CFG, dispatch_format="bf16"), 8)) == min(MAX_SLICES, 32)
    assert slices("dispatch", replace(CFG, hidden=8), 8) == (1,)
    assert slices("combine", CFG, LAMPORT_TOKENS + 1) == slices_for(LAMPORT_TOKENS + 1) == (1, 2, 4, 8)


# ---- what is chosen


DEFAULT = Entry(16, MANY, 0.25, 4)
CHANGES = [
    [{name: value} for value in values]
    for name, values in {"slices": (1, 2, 4, 8), "senders": (0, 0.25, 0.5), "grid": (64, MANY)}.items()
]


def chosen(cost: Callable[[Entry, int], float]) -> tuple[search.Outcome, list[Entry]]:
    """The outcome where an entry takes `cost(entry, samples)`, and what was timed."""
    timed: list[Entry] = []

    def time(entry: Entry, samples: int) -> float:
        timed.append(entry)
        return cost(entry, samples)

    def shape(entry: Entry) -> Shape:
        return Tuning((entry, Entry(MANY, 1, 0, 1)), MINE).shape("dispatch", 16, 64)

    return search.choose(DEFAULT, CHANGES, shape, time), timed


def test_fields_are_tried_one_after_the_other_from_the_fastest_so_far() -> None:
    outcome, timed = chosen(lambda one, _: 10 - (one.slices == 8) - (one.senders == 0.5) * (one.slices == 8))
    best = replace(DEFAULT, slices=8, senders=0.5)
    assert outcome == search.Outcome(best, 10, 8)
    assert timed == [
        DEFAULT,
        *(replace(DEFAULT, slices=slices) for slices in (1, 2, 8)),
        *(replace(DEFAULT, slices=8, senders=senders) for senders in (0, 0.5)),
        DEFAULT,  # a grid of 64 is the whole GPU: the same shape
        best,
    ]


def test_less_than_two_percent_is_no_gain() -> None:
    outcome, timed = chosen(lambda one, _: 10 - 0.19 * (one.slices == 8))
    assert outcome == search.Outcome(DEFAULT, 10, 10)
    assert len(timed) == 6, "nothing to confirm"


def test_a_gain_must_be_confirmed() -> None:
    outcome, timed = chosen(lambda one, samples: 10 - (one.slices == 8) * (samples == search.SAMPLES))
    assert outcome == search.Outcome(DEFAULT, 10, 10) and len(timed) == 8


# ---- the command


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Two GPUs on which 2 slices of a message and 128 CTAs of a combine of 1000 tokens are fastest; the ranks made."""
    from cute_ep.bench import machine, measure

    made: list[SimpleNamespace] = []

    def connect(cfg: EPConfig, devices: list[str], *, sms: int | None, library: str | None) -> list[SimpleNamespace]:
        ctas = sms or TABLE_CTAS
        made.extend(
            SimpleNamespace(
                cfg=cfg,
                tuning=None,
                max_ctas=ctas,
                ring_bytes=0,
                most_slices=lambda tokens: 32,
                measured=[],
                closed=False,
            )
            for _ in devices
        )
        for rank in made:
            rank.close = lambda rank=rank: setattr(rank, "closed", True)
        return made[-len(devices) :]

    def fake_measure(ranks, sets, operations, samples, lanes) -> list[dict]:
        assert len({id(rank) for rank in ranks}) == 2 and ranks[0].tuning == ranks[1].tuning
        results = []
        ranks[0].measured.extend(operations)
        for operation in operations:
            shape = ranks[0].tuning.shape(operation, sets.tokens, 264)
            fast = shape.slices == 2 if operation == "dispatch" else shape.grid == ONE_A_SM and sets.tokens == 1000
            results.append({"p50_us": 50.0 if fast else 100.0})
        return results

    monkeypatch.setattr(machine, "parse_devices", lambda text, experts: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(machine, "describe_devices", lambda devices, sms: "2 ranks")
    monkeypatch.setattr(connection, "connect_local", connect)
    monkeypatch.setattr(connection.torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(measure, "make_runner", lambda ranks: nullcontext())
    monkeypatch.setattr(measure, "make_sets", lambda cfg, devices, tokens: SimpleNamespace(cfg=cfg, tokens=tokens))
    monkeypatch.setattr(measure, "measure", fake_measure)
    yield made


def test_tune_writes_what_connect_finds(machine: list, file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", "--tokens", "300,16,1000", "--format", "fp8,nvfp4"]) == 0
    assert len(machine) == 4 and all(rank.closed for rank in machine)
    cfg = replace(CFG, world_size=2, dispatch_format="fp8")
    assert set(read_tables()) == {
        setting("dispatch", cfg, gpus=2),
        setting("dispatch", replace(cfg, dispatch_format="nvfp4"), gpus=2),
        setting("combine", cfg, gpus=2),
    }
    found, built = find(cfg, gpus=2), built_in(cfg, TABLE_CTAS)
    tuned = {built.entry("dispatch", tokens).tokens for tokens in (16, 300)}
    for entry in built.dispatch:
        slices = 2 if entry.tokens in tuned else entry.slices
        assert found.entry("dispatch", entry.tokens) == replace(entry, slices=slices)
    assert found.entry("combine", 300) == replace(built.entry("combine", 300), tokens=300)
    assert found.entry("combine", LAMPORT_TOKENS).grid == ONE_A_SM
    assert found.entry("combine", LAMPORT_TOKENS + 1) == built.entry("combine", LAMPORT_TOKENS + 1)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    shape = built.shape("dispatch", 16, 264)
    roles = f"{shape.grid}, {shape.send_ctas}"
    assert ["dispatch", "fp8", "16", f"{roles}, {shape.slices}", "100.0", f"{roles}, 2", "50.0", "50.0 %"] in rows
    shape = built.shape("combine", 300, 264)
    roles = f"{shape.grid}, {shape.send_ctas}, {shape.slices}"
    assert ["combine", "any", "300", roles, "100.0", "the same", "100.0", "0.0 %"] in rows
    assert len([row for row in rows if row]) == 3 * 3
    before = file.read_text()
    assert main(["tune", "--tokens", "16", "--format", "fp8"]) == 0
    assert file.read_text() == before, "other numbers of tokens keep what was found"
    assert main(["tune", "--tokens", "16", "--format", "fp8", "--sms", "32"]) == 0
    few = built_in(cfg, 32)
    wanted = few.revised("dispatch", {16: replace(few.entry("dispatch", 16), slices=2)})
    assert find(cfg, gpus=2, ctas=32).dispatch == wanted.dispatch != few.dispatch
    assert find(cfg, gpus=2) == found, "whole GPUs keep what was found"


def test_tune_keeps_the_orders_of_rows_apart(machine: list, capsys: pytest.CaptureFixture) -> None:
    """Rank-major rows come home as partial sums, so only these are timed."""
    assert main(["tune", "--tokens", "16,1000", "--format", "fp8", "--order", "rank_major"]) == 0
    assert "rank_major" in capsys.readouterr().out
    cfg = replace(CFG, world_size=2, dispatch_format="fp8", row_order="rank_major")
    assert set(read_tables()) == {setting(family, cfg, gpus=2) for family in FAMILIES}
    assert set(machine[0].measured) == {"dispatch", "combine_partial"}
    by_expert, usual = replace(cfg, row_order="expert_major"), built_in(cfg, TABLE_CTAS)
    assert find(by_expert, gpus=2) == built_in(by_expert, TABLE_CTAS)
    for family in FAMILIES:
        assert find(cfg, gpus=2).table(family) != usual.table(family)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (Shape(264, 264, 0, 2), "264, all, 2"),
        (Shape(264, 66, 66, 4), "264, 66, 4"),
        (Shape(264, 66, 66, 4, packed=True), "264, 66 packed, 4"),
        (Shape(48, 12, 0, 1, twins=True), "48, 12 joining, 1"),
    ],
)
def test_tune_says_which_ctas_send(shape: Shape, text: str) -> None:
    assert tune.shape_text(shape) == text


def test_tune_measures_every_format_and_range(machine: list, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", "--quick", "--preset", "gpt-oss-120b"]) == 0
    formats = ["bf16", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_row"]
    assert [rank.cfg.dispatch_format for rank in machine[::2]] == formats
    sizes, every = ([int(word) for word in tokens.split(",")] for tokens in (tune.QUICK_TOKENS, tune.TOKENS))
    for fmt, ranks, (ctas, tried) in product(FORMATS, (2, 4), ((TABLE_CTAS, sizes), (TABLE_CTAS, every), (64, every))):
        tuning = built_in(replace(CFG, dispatch_format=fmt, world_size=ranks), ctas)
        for family in FAMILIES:
            assert {tuning.entry(family, tokens) for tokens in tried} == set(tuning.table(family)), "none is left out"
    assert set(every) >= {LAMPORT_TOKENS} and max(sizes) == 4096


def test_tune_refuses_a_damaged_file_before_it_measures(
    machine: list, file: Path, capsys: pytest.CaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_text("{")
    assert main(["tune"]) == 2
    assert not machine and str(file) in "".join(capsys.readouterr().err.split("\n"))
