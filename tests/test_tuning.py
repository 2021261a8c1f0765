"""Launch shapes: what every choice must satisfy for a kernel to be correct, over all deployments; which tables a
communicator uses; how `cute-ep tune` chooses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cute_ep
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.cli.main import main, tune
from cute_ep.layouts.maps.arena import EXPRESS_TOKENS, MANY_PIECES, MAX_PIECES, message_bytes
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK
from cute_ep.layouts.maps.variants import COMBINE_KERNELS, COMBINE_MODES, DISPATCH_KERNELS
from cute_ep.runtime import connection
from cute_ep.tuning.builtin import COMBINE, DISPATCH, ONE_A_SM, TABLE_CTAS, built_in
from cute_ep.tuning.builtin import file as tuning_file
from cute_ep.tuning.file import Setting, find_tuning, read_tables, write_tables
from cute_ep.tuning.launch_shape import FAMILIES, MANY, Entry, Shape, Tuning, pieces_for

from .conftest import GPU
from .strategies import configs

OPERATIONS = ("dispatch", "dispatch_async", "dispatch_wait", "combine", "combine_async", "combine_wait")
CFG = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=MAX_TOKENS_PER_RANK, world_size=4)
MINE = (Entry(64, 100, 0.25, 2), Entry(MANY, 200, 0, 1))

launches = st.builds(
    lambda cfg, share, ctas: (cfg, max(1, int(share * cfg.max_tokens_per_rank)), ctas),
    configs,
    st.floats(0, 1),
    st.integers(1, 296),
)


def has_flags(cfg: EPConfig, tokens: int, pieces: int) -> bool:
    """Whether the arena has a flag for the last piece of a call, or for its convoy."""
    last = tokens * pieces - 1
    return (last if tokens <= 1024 else last // 16) < cfg.arena.message_ready.shape[1]


@st.composite
def entries(draw: st.DrawFn, most: int = MANY) -> Entry:
    tokens = draw(st.integers(1, most))
    senders = draw(st.floats(0, 1, exclude_max=True))
    pieces = draw(st.sampled_from(pieces_for(tokens)))
    grid, most_senders, split_from = (draw(st.integers(1, 300)) for _ in range(3))
    return Entry(tokens, grid, senders, pieces, draw(st.booleans()), most_senders, split_from)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Entry, ...]:
    some = {entry.tokens: entry for entry in draw(st.lists(entries(MAX_TOKENS_PER_RANK), max_size=5))}
    return (*(some[tokens] for tokens in sorted(some)), Entry(MANY, draw(st.integers(1, 300)), 0.3, 1))


tunings = st.builds(Tuning, tables(), tables())


# ---- every choice is a launch that ends


@given(launches, tunings)
def test_no_launch_shape_has_more_pieces_than_flags(launch: tuple[EPConfig, int, int], made: Tuning) -> None:
    """Whatever the number of tokens in a call, its pieces fit the flags that the arena has for a rank."""
    cfg, most, ctas = launch
    for tuning in (built_in(cfg, ctas), made):
        for tokens in {1, most // 2, most, min(most, EXPRESS_TOKENS), min(most, EXPRESS_TOKENS + 1)} - {0}:
            for family in FAMILIES:
                shape = tuning.shape(family, tokens, ctas)
                assert 1 <= 1 << shape.pieces_log2 == shape.pieces <= MAX_PIECES
                assert has_flags(cfg, tokens, shape.pieces)


@given(launches, tunings, st.sampled_from(OPERATIONS))
def test_shape(launch: tuple[EPConfig, int, int], made: Tuning, operation: str) -> None:
    """The grid is resident together, and each half that runs has at least one CTA."""
    cfg, tokens, max_ctas = launch
    sends, receives = not operation.endswith("_wait"), not operation.endswith("_async")
    for tuning in (built_in(cfg, max_ctas), made):
        shape = tuning.shape(operation, tokens, max_ctas)
        assert 1 <= shape.grid <= max_ctas
        if sends:
            assert 1 <= shape.send_ctas <= shape.grid
        if receives:
            assert 0 <= shape.receive_from < shape.grid
        if sends and receives:
            assert shape.receive_from <= shape.send_ctas, "a CTA that neither sends nor receives"
        if shape.packed:
            assert tuning.entry(operation, tokens).packed and 0 < shape.receive_from == shape.send_ctas


@given(launches, tunings)
def test_whole_rows(launch: tuple[EPConfig, int, int], made: Tuning) -> None:
    """At most half of the CTAs send, where not every one does both; nothing else is different."""
    _, tokens, max_ctas = launch
    shape = made.shape("combine", tokens, max_ctas)
    whole = made.shape("combine", tokens, max_ctas, whole_rows=True)
    if shape.receive_from:
        half = min(shape.send_ctas, shape.grid // 2)
        assert whole == shape._replace(send_ctas=half, receive_from=half)
    else:
        assert whole == shape


@given(launches, st.sampled_from(OPERATIONS))
def test_more_ctas_never_shrink_the_grid(launch: tuple[EPConfig, int, int], operation: str) -> None:
    cfg, tokens, max_ctas = launch
    grids = [built_in(cfg, ctas).shape(operation, tokens, ctas).grid for ctas in (max_ctas, max_ctas + 1, 2 * max_ctas)]
    assert grids == sorted(grids)


def test_few_tokens_are_carried_by_many_warps() -> None:
    """One token is cut into more pieces than one of many, in both directions."""
    one, most = (
        [built_in(CFG, TABLE_CTAS).shape(name, tokens, TABLE_CTAS) for name in FAMILIES]
        for tokens in (1, MAX_TOKENS_PER_RANK)
    )
    assert all(few.pieces > many.pieces and few.grid < many.grid == 264 for few, many in zip(one, most, strict=True))


def test_fewer_ctas_have_fewer_pieces() -> None:
    """As many a warp, as far as they can be halved; where few tokens take part of the CTAs from half of those down.
    Nothing else changes, and nothing with more CTAs than were measured."""
    tables = {ctas: built_in(CFG, ctas) for ctas in (4, 32, 64, 132, TABLE_CTAS, 296)}

    def pieces(family: str, tokens: int) -> list[int]:
        return [tuning.entry(family, tokens).pieces for tuning in tables.values()]

    assert pieces("dispatch", 1024) == [1, 1, 1, 2, 4, 4] and pieces("combine", 1024) == [1, 4, 8, 16, 32, 32]
    assert pieces("dispatch", 16) == [1, 4, 8, 8, 8, 8] and pieces("combine", 16) == [2, 16, 32, 32, 32, 32]
    for family in FAMILIES:
        for tuning in tables.values():
            for entry, whole in zip(tuning.table(family), tables[TABLE_CTAS].table(family), strict=True):
                assert replace(entry, pieces=whole.pieces) == whole


@pytest.mark.parametrize(
    ("hidden", "fmt", "dispatched", "returned"),
    [
        (7168, "bf16", [32, 4, 4], [32, 32, 4]),  # 28 segments
        (7168, "nvfp4", [8, 4, 4], [32, 32, 4]),  # 7 of a message
        (4096, "mxfp8", [8, 4, 4], [16, 16, 4]),  # 8, and 16 of a returned row
        (2880, "mxfp8", [8, 4, 2], [16, 16, 4]),  # 6, and 12
        (2880, "mxfp4", [4, 4, 1], [16, 16, 4]),  # 3
        (512, "bf16", [2, 2, 1], [2, 2, 1]),  # 2, and 2
    ],
)
def test_short_rows_have_fewer_pieces(hidden: int, fmt: str, dispatched: list[int], returned: list[int]) -> None:
    """With few tokens more than half of the pieces have a segment; with many each has two, or one is short of it."""
    tuning = built_in(replace(CFG, hidden=hidden, dispatch_format=fmt, world_size=4), TABLE_CTAS)
    assert [tuning.entry("dispatch", tokens).pieces for tokens in (1, 64, 1024)] == dispatched
    assert [tuning.entry("combine", tokens).pieces for tokens in (1, 1024, 4096)] == returned


def test_few_ctas_do_both() -> None:
    """Down to `split_from` some only send, by share or at most so many."""
    table = (Entry(MANY, MANY, 1 / 4, 2, most_senders=20, split_from=40),)
    tuning = Tuning(table, table)
    shapes = [tuning.shape("dispatch", 100, ctas) for ctas in (39, 40, 264)]
    assert shapes == [Shape(39, 39, 0, 2), Shape(40, 10, 10, 2), Shape(264, 20, 20, 2)]


def test_messages_of_every_size_and_all_ranks_have_a_table() -> None:
    """The first one that holds their size, or number; rows come home in one type."""
    for tables in (DISPATCH, COMBINE, *DISPATCH.values()):
        assert list(tables) == sorted(tables) and list(tables)[-1] == MANY
    used = set()
    for fmt, hidden in product(FORMATS, (4096, 7168)):
        for ranks, most_ranks in ((1, 2), (2, 2), (4, MANY), (8, MANY)):
            cfg = replace(CFG, hidden=hidden, dispatch_format=fmt, world_size=ranks)
            sizes = DISPATCH[most_ranks]
            size = min(most for most in sizes if message_bytes(cfg.format, cfg.hidden) <= most)
            tuning = built_in(cfg, TABLE_CTAS)
            for entries, table in ((tuning.dispatch, sizes[size]), (tuning.combine, COMBINE[most_ranks])):
                assert all(one.pieces <= listed.pieces for one, listed in zip(entries, table, strict=True))
                assert [replace(one, pieces=1) for one in entries] == [replace(one, pieces=1) for one in table]
            used.add((most_ranks, size))
    assert used == {(ranks, size) for ranks, sizes in DISPATCH.items() for size in sizes}, "each is used"
    alone = built_in(replace(CFG, skip_a2a=True), TABLE_CTAS)
    assert alone.combine == COMBINE[2] and alone.dispatch == DISPATCH[2][MANY], "each rank alone, long rows as listed"


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Entry(0, 1, 0, 1),
        lambda: Entry(8, 0, 0, 1),
        lambda: Entry(8, 1.5, 0, 1),
        lambda: Entry(8, 1, 1.0, 1),
        lambda: Entry(8, 1, -0.1, 1),
        lambda: Entry(8, 1, float("nan"), 1),
        lambda: Entry(8, 1, 0, 1, most_senders=0),
        lambda: Entry(8, 1, 0, 1, split_from=0),
        lambda: Entry(8, 1, 0, 3),
        lambda: Entry(8, 1, 0, 2 * MAX_PIECES),
        lambda: Entry(EXPRESS_TOKENS + 1, 1, 0, 2 * MANY_PIECES),
        lambda: Tuning((), MINE),
        lambda: Tuning(MINE, MINE[:1]),
        lambda: Tuning(MINE, MINE[::-1]),
        lambda: Tuning(MINE, (*MINE, MINE[1])),
    ],
)
def test_no_other_tables(bad: Callable) -> None:
    with pytest.raises(EPConfigError, match="must "):
        bad()


def test_operations_cover_the_kernels() -> None:
    ends = "|".join(f"_{mode}" for mode in COMBINE_MODES)
    assert {re.sub(f"({ends})$", "", name) for name in (*DISPATCH_KERNELS, *COMBINE_KERNELS)} == set(OPERATIONS)


# ---- which tables


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's tables would be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tuning_file.tuning_file()


def setting(family: str = "dispatch", cfg: EPConfig = CFG, gpu: str = GPU, gpus: int = 4, ctas: int = 264) -> Setting:
    return Setting.of(family, cfg, gpu, gpus, ctas)


def find(cfg: EPConfig = CFG, gpu: str = GPU, gpus: int = 4, ctas: int = 264) -> Tuning:
    return find_tuning(cfg, gpu, gpus, ctas)


def test_tables_come_back_from_the_file(file: Path) -> None:
    assert read_tables() == {} and find() == built_in(CFG, TABLE_CTAS)
    built = built_in(CFG, TABLE_CTAS)
    write_tables({setting(): built.dispatch, setting("combine"): MINE})
    assert read_tables() == {setting(): built.dispatch, setting("combine"): MINE}
    write_tables({setting(): MINE})
    assert read_tables() == {setting(): MINE, setting("combine"): MINE}, "others stay"
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no draft is left"


def test_tables_hold_for_what_they_were_measured_with() -> None:
    write_tables({setting(): MINE, setting("combine", replace(CFG, top_k=4)): MINE})
    built = built_in(CFG, TABLE_CTAS)
    assert find() == Tuning(MINE, built.combine)
    assert find(replace(CFG, max_tokens_per_rank=8, timeout_s=1.0)).dispatch == MINE
    assert find(replace(CFG, top_k=4)) == Tuning(built.dispatch, MINE)
    nvfp4 = replace(CFG, top_k=4, dispatch_format="nvfp4")
    assert find(nvfp4) == Tuning(built_in(nvfp4, TABLE_CTAS).dispatch, MINE), "rows come home as bfloat16"
    for other in (
        {"hidden": 4096},
        {"num_experts": 128},
        {"world_size": 8},
        {"dispatch_format": "fp8"},
        {"skip_a2a": True},
    ):
        cfg = replace(CFG, **other)
        assert find(cfg) == built_in(cfg, TABLE_CTAS), other
    assert find(gpu="NVIDIA B200") == find(gpus=1) == built
    assert find(ctas=32) == built_in(CFG, 32)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"version": "VERSION"}', '{"version": "VERSION", "tables": [[]]}'],
)
def test_a_damaged_file_is_named(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text.replace("VERSION", cute_ep.__version__))
    with pytest.raises(EPConfigError, match=re.escape(f"{file}: ") + ".*remove the file"):
        find()
    with pytest.raises(EPConfigError, match=re.escape(str(file))):
        write_tables({setting(): MINE})
    assert file.read_text() == text.replace("VERSION", cute_ep.__version__)


@pytest.mark.parametrize(
    ("place", "value"), [(("pieces",), 3), (("pieces",), "2"), (("tokens",), MANY), (("extra",), 1), (("grid",), None)]
)
def test_a_table_that_no_kernel_could_run_is_damage(file: Path, place: tuple, value: object) -> None:
    write_tables({setting(): MINE})
    content = json.loads(file.read_text())
    content["tables"][0]["entries"][0][place[0]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(EPConfigError, match=re.escape(str(file))):
        read_tables()
    content["version"] = "0.0.1"
    file.write_text(json.dumps(content))
    assert read_tables() == {} and find() == built_in(CFG, TABLE_CTAS), "another version's file does not count"
    write_tables({setting(): MINE})
    assert read_tables() == {setting(): MINE}


@pytest.mark.parametrize("given", [None, Tuning(MINE, MINE)])
def test_communicators_look_once_and_prefer_what_they_are_given(
    given: Tuning | None, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def read() -> dict:
        reads.append(1)
        return {setting("combine"): MINE}

    monkeypatch.setattr(tuning_file, "read_tables", read)
    ranks = connection.connect_local(CFG, [f"cuda:{index}" for index in range(4)], tuning=given)
    wanted = given or Tuning(built_in(CFG, TABLE_CTAS).dispatch, MINE)
    assert [rank.tuning for rank in ranks] == [wanted] * 4
    assert len(reads) == (given is None)


def test_communicators_have_the_tables_of_their_ctas(gpus: None) -> None:
    """Of the SM budget, and of the ranks that share a GPU."""
    few, half = (Entry(MANY, 30, 0, 1),), (Entry(MANY, 60, 0, 1),)
    write_tables({setting(ctas=32): few, setting(): MINE, setting(gpus=3, ctas=62): half})
    for sms, ctas, table in ((32, 32, few), (132, TABLE_CTAS, MINE), (48, 48, None)):
        built = built_in(CFG, ctas)
        ranks = connection.connect_local(CFG, [f"cuda:{index}" for index in range(4)], sms=sms)
        assert [rank.tuning for rank in ranks] == [replace(built, dispatch=table or built.dispatch)] * 4
    ranks = connection.connect_local(CFG, ["cuda:0", "cuda:0", "cuda:1", "cuda:2"])
    whole = built_in(CFG, TABLE_CTAS).dispatch
    assert [rank.tuning.dispatch for rank in ranks] == [half, half, whole, whole]


# ---- findings


@given(tunings, st.lists(entries(MAX_TOKENS_PER_RANK), max_size=6), st.sampled_from(FAMILIES))
def test_a_finding_holds_where_it_was_made(tuning: Tuning, some: list[Entry], family: str) -> None:
    found = {entry.tokens: entry for entry in some}
    revised = tuning.revised(family, found)
    (other,) = set(FAMILIES) - {family}
    assert revised.table(other) == tuning.table(other)
    for tokens, entry in found.items():
        assert replace(revised.entry(family, tokens), tokens=tokens) == entry
    ends = sorted({EXPRESS_TOKENS, *(entry.tokens for entry in tuning.table(family))})
    for below, end in zip([0, *ends], ends, strict=False):
        inside = sorted(tokens for tokens in found if below < tokens <= end)
        for tokens in {below + 1, (below + end + 1) // 2, end}:
            nearest = [found[one] for one in inside if tokens <= one] or [found[one] for one in inside[-1:]]
            wanted = nearest[0] if nearest else tuning.entry(family, end)
            assert replace(revised.entry(family, tokens), tokens=1) == replace(wanted, tokens=1)
    assert revised.revised(family, found) == revised, "again changes nothing"


@given(launches, st.sampled_from(FAMILIES))
def test_every_candidate_is_valid(launch: tuple[EPConfig, int, int], family: str) -> None:
    cfg, tokens, max_ctas = launch
    base = built_in(cfg, max_ctas)
    fields = tune.choices(family, cfg, tokens)
    assert all(fields.values()) and sum(map(len, fields.values())) <= 21
    for name, values in fields.items():
        for value in values:
            entry = replace(base.entry(family, tokens), tokens=tokens, **{name: value})
            shape = base.revised(family, {tokens: entry}).shape(family, tokens, max_ctas)
            assert has_flags(cfg, tokens, shape.pieces)
            assert shape.pieces in pieces_for(tokens)
            assert shape.grid <= max_ctas and shape.send_ctas >= 1 and shape.receive_from < shape.grid


def test_pieces_are_no_smaller_than_a_segment() -> None:
    fields = {fmt: tune.choices("dispatch", replace(CFG, dispatch_format=fmt), 8)["pieces"] for fmt in FORMATS}
    assert fields["nvfp4"] == (1, 2, 4, 8), "3584 bytes are 7 segments"
    assert max(fields["bf16"]) == min(MAX_PIECES, 32)
    assert tune.choices("dispatch", replace(CFG, hidden=8), 8)["pieces"] == (1,)
    assert tune.choices("combine", CFG, EXPRESS_TOKENS + 1)["pieces"] == pieces_for(EXPRESS_TOKENS + 1) == (1, 2, 4)


DEFAULT = Entry(16, MANY, 0.25, 4)
FIELDS = {"pieces": (1, 2, 4, 8), "senders": (0, 0.25, 0.5), "grid": (64, MANY)}


def chosen(cost: Callable[[Entry, int], float]) -> tuple[tune.Outcome, list[Entry]]:
    """The outcome where an entry takes `cost(entry, samples)`, and what was timed."""
    timed: list[Entry] = []

    def time(entry: Entry, samples: int) -> float:
        timed.append(entry)
        return cost(entry, samples)

    def shape(entry: Entry) -> Shape:
        return Tuning((entry, Entry(MANY, 1, 0, 1)), MINE).shape("dispatch", 16, 64)

    return tune.choose(DEFAULT, FIELDS, shape, time), timed


def test_fields_are_tried_one_after_the_other_from_the_fastest_so_far() -> None:
    outcome, timed = chosen(lambda one, _: 10 - (one.pieces == 8) - (one.senders == 0.5) * (one.pieces == 8))
    best = replace(DEFAULT, pieces=8, senders=0.5)
    assert outcome == tune.Outcome(best, 10, 8)
    assert timed == [
        DEFAULT,
        *(replace(DEFAULT, pieces=pieces) for pieces in (1, 2, 8)),
        *(replace(DEFAULT, pieces=8, senders=senders) for senders in (0, 0.5)),
        DEFAULT,  # a grid of 64 is the whole GPU: the same shape
        best,
    ]


def test_little_is_no_gain() -> None:
    outcome, timed = chosen(lambda one, _: 10 - 0.19 * (one.pieces == 8))
    assert outcome == tune.Outcome(DEFAULT, 10, 10)
    assert len(timed) == 6, "nothing to confirm"


def test_a_gain_must_be_confirmed() -> None:
    outcome, timed = chosen(lambda one, samples: 10 - (one.pieces == 8) * (samples == tune.SAMPLES))
    assert outcome == tune.Outcome(DEFAULT, 10, 10) and len(timed) == 8


# ---- the command


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Two GPUs on which 2 pieces of a message and 128 CTAs of a combine of 1000 tokens are fastest; the ranks made."""
    from cute_ep.bench import machine, measure

    made: list[SimpleNamespace] = []

    def connect(cfg: EPConfig, devices: list[str], *, sms: int | None, library: str | None) -> list[SimpleNamespace]:
        ctas = sms or TABLE_CTAS
        made.extend(SimpleNamespace(cfg=cfg, tuning=None, max_ctas=ctas, closed=False) for _ in devices)
        for rank in made:
            rank.close = lambda rank=rank: setattr(rank, "closed", True)
        return made[-len(devices) :]

    def fake_measure(ranks, sets, operations, samples, lanes) -> list[dict]:
        assert len({id(rank) for rank in ranks}) == 2 and ranks[0].tuning == ranks[1].tuning
        results = []
        for operation in operations:
            shape = ranks[0].tuning.shape(operation, sets.tokens, 264)
            fast = shape.pieces == 2 if operation == "dispatch" else shape.grid == ONE_A_SM and sets.tokens == 1000
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
        pieces = 2 if entry.tokens in tuned else entry.pieces
        assert found.entry("dispatch", entry.tokens) == replace(entry, pieces=pieces)
    assert found.entry("combine", 300) == replace(built.entry("combine", 300), tokens=300)
    assert found.entry("combine", EXPRESS_TOKENS).grid == ONE_A_SM
    assert found.entry("combine", EXPRESS_TOKENS + 1) == built.entry("combine", EXPRESS_TOKENS + 1)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    shape = built.shape("dispatch", 16, 264)
    roles = f"{shape.grid}, {shape.send_ctas}"
    assert ["dispatch", "fp8", "16", f"{roles}, {shape.pieces}", "100.0", f"{roles}, 2", "50.0", "50.0 %"] in rows
    shape = built.shape("combine", 300, 264)
    roles = f"{shape.grid}, {shape.send_ctas}, {shape.pieces}"
    assert ["combine", "any", "300", roles, "100.0", "the same", "100.0", "0.0 %"] in rows
    assert len([row for row in rows if row]) == 3 * 3
    before = file.read_text()
    assert main(["tune", "--tokens", "16", "--format", "fp8"]) == 0
    assert file.read_text() == before, "other numbers of tokens keep what was found"
    assert main(["tune", "--tokens", "16", "--format", "fp8", "--sms", "32"]) == 0
    few = built_in(cfg, 32)
    wanted = few.revised("dispatch", {16: replace(few.entry("dispatch", 16), pieces=2)})
    assert find(cfg, gpus=2, ctas=32).dispatch == wanted.dispatch != few.dispatch
    assert find(cfg, gpus=2) == found, "whole GPUs keep what was found"


def test_tune_measures_every_format_and_range(machine: list, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", "--quick", "--preset", "gpt-oss-120b"]) == 0
    formats = ["bf16", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row"]
    assert [rank.cfg.dispatch_format for rank in machine[::2]] == formats
    sizes = [int(word) for word in tune.QUICK_TOKENS.split(",")]
    for tuning in (
        built_in(replace(CFG, dispatch_format=fmt, world_size=n), TABLE_CTAS) for fmt in FORMATS for n in (2, 4)
    ):
        for family in FAMILIES:
            assert {tuning.entry(family, tokens) for tokens in sizes} == set(tuning.table(family)), "none is left out"
    assert {int(word) for word in tune.TOKENS.split(",")} >= {EXPRESS_TOKENS} and max(sizes) == 4096


def test_tune_refuses_a_damaged_file_before_it_measures(
    machine: list, file: Path, capsys: pytest.CaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_text("{")
    assert main(["tune"]) == 2
    assert not machine and str(file) in "".join(capsys.readouterr().err.split("\n"))
