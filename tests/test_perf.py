"""The measuring code where it needs no GPU: operations, floors, bytes, the suite, SwiGLU, and that what is missing on a
machine becomes a note."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_ep
from cute_ep.aot import library
from cute_ep.aot.library import LibraryEntry, source_hash
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.bench import ceilings as ceilings_module
from cute_ep.bench import machine
from cute_ep.bench import measure as measure_module
from cute_ep.bench.ceilings import floors
from cute_ep.bench.measure import CHAINED, CONDITIONS, OPERATIONS, PARTS, make_sets, measure
from cute_ep.bench.timing import rounds_per_graph
from cute_ep.bench.traffic import count_routing, traffic
from cute_ep.layouts.maps.formats import formats_of
from cute_ep.layouts.maps.variants import Variant
from cute_ep.runtime.connection import connect_local
from cute_ep.runtime.local_ops import fused_silu
from perf import compiled, peers, suite
from perf.cases import BASIC, MAIN, MEASURED_FORMATS, OTHERS, TOKENS, Shape, case_groups
from perf.swiglu import GROUPS, group_options, ragged_offsets, silu_bytes
from tests.perf_example import CEILINGS, RANKS, example_run


class CountingRunner:
    """In place of lanes on GPUs: runs a lane after the other (so one rank only, a combine waits for nobody) and says
    that a round takes 1 us more in each graph than in the one before."""

    graphs = 0

    def __init__(self, communicators: list) -> None:
        self.communicators = communicators

    def on_all(self, work: Callable[[int], None]) -> None:
        for rank in range(len(self.communicators)):
            work(rank)
        for communicator in self.communicators:
            communicator.synchronize()

    def time(self, samples: int, enqueue: Callable[[int, int], None], *, chained: bool = False) -> list[float]:
        assert chained
        return self.time_graphs(samples, enqueue, 5)

    def host_time(self, enqueue: Callable[[int, int], None]) -> float:
        self.time_graphs(1, enqueue, 2)
        return 2e-6

    def time_graphs(self, samples: int, work: Callable[[int, int], None], rounds: int) -> list[float]:
        for index in range(rounds):
            self.on_all(lambda rank: work(rank, index))  # noqa: B023
        self.graphs += 1
        return [1e-6 * self.graphs] * samples


def test_measure_runs_every_operation_on_every_set() -> None:
    cfg = EPConfig(64, 8, 2, 16, 1, "nvfp4")
    communicators = connect_local(cfg, ["cpu"])
    sets = make_sets(cfg, ["cpu"], 9, "zipf")
    batches = [batch for own in sets.batches for batch in own]
    assert set(OPERATIONS) | set(CONDITIONS) == set(PARTS)
    results = measure(communicators, sets, samples=7, runner=CountingRunner(communicators))
    assert [one["operation"] for one in results] == list(OPERATIONS)
    assert all(batch.dispatched is not None and batch.result.abs().sum() > 0 for batch in batches)
    for one in results:
        assert (one["samples"], one["tokens"], one["format"], one["routing"]) == (7, 9, "nvfp4", "zipf")
        assert one["rounds"] == (1 if one["operation"] == "pair_chained" else rounds_per_graph(9))
        assert len(one["parts"]) == len(PARTS[one["operation"]])
        assert one.get("host_us") == (2 if one["operation"] == CHAINED else None)
    with pytest.raises(EPInputError, match="operation = 'fly': must be one of"):
        measure(communicators, sets, ("fly",))


@pytest.mark.parametrize("operation", CONDITIONS)
def test_pairs_under_other_conditions(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before each launch runs as often as launches do, and its own time is taken off; buffers of the
    default size serve all sets."""
    cfg = EPConfig(64, 8, 2, 16, 1, "nvfp4")
    communicators = connect_local(cfg, ["cpu"])
    sets = make_sets(cfg, ["cpu"], 9)
    done: list[str] = []
    make, dispatch, combine = measure_module.stand_in, communicators[0].dispatch, communicators[0].combine
    capacities = set()

    def stand_in(*words: Any) -> Callable[[], None] | None:
        between = make(*words)
        return between and (lambda: done.append("between") or between())

    def launch(name: str, call: Callable) -> Callable:
        def run(*words: Any, **options: Any) -> Any:
            done.append(name)
            if name == "dispatch":
                capacities.add(options["out"].tokens.shape[0])
            return call(*words, **options)

        return run

    monkeypatch.setattr(measure_module, "stand_in", stand_in)
    monkeypatch.setattr(communicators[0], "dispatch", launch("dispatch", dispatch))
    monkeypatch.setattr(communicators[0], "combine", launch("combine", combine))
    (one,) = measure(communicators, sets, (operation,), 3, CountingRunner(communicators))
    assert len(one["parts"]) == 2 and one["rounds"] == rounds_per_graph(9)
    last = done[-4 * one["rounds"] :] if operation != "pair_roomy" else done[-2 * one["rounds"] :]
    if operation == "pair_roomy":
        assert last == ["dispatch", "combine"] * one["rounds"] and "between_us" not in one
        assert one["p50_us"] == pytest.approx(1) and cfg.max_rows in capacities
    else:
        assert last == ["between", "dispatch", "between", "combine"] * one["rounds"]
        assert one["between_us"] == pytest.approx(1) and one["p50_us"] == pytest.approx(2 - 1)
        assert cfg.max_rows not in capacities


def test_sets_differ_and_are_the_same_again() -> None:
    cfg = EPConfig(64, 8, 2, 16, RANKS)
    sets, again = (make_sets(cfg, ["cpu"] * RANKS, 16) for _ in range(2))
    ids = [tuple(batch.topk_ids.flatten().tolist()) for own in sets.batches for batch in own]
    assert len(set(ids)) == len(ids)
    for one, other in zip(sets.batches, again.batches, strict=True):
        assert all(
            torch.equal(a.x, b.x) and torch.equal(a.topk_ids, b.topk_ids) for a, b in zip(one, other, strict=True)
        )
    other = make_sets(cfg, ["cpu"] * RANKS, 16, seed=1)
    assert not torch.equal(other.batches[0][0].x, sets.batches[0][0].x)
    for number, counts in enumerate(sets.counts):
        for rank, own in enumerate(sets.batches):
            assert own[number].buffers.tokens.shape[0] == own[number].rows.shape[0] == counts.rows_received(rank)
    for words in ({"tokens": 17}, {"tokens": 1, "routing": "none"}):
        with pytest.raises(EPInputError):
            make_sets(cfg, ["cpu"] * RANKS, **words)


def test_bytes_of_a_case() -> None:
    cfg = EPConfig(64, 8, 2, 16, RANKS)
    sets = make_sets(cfg, ["cpu:0", "cpu:1"], 16, sets=1)
    (pair,) = measure(connect_local(cfg, ["cpu"] * RANKS), sets, ("pair",), 1, CountingRunner([]))
    counts = count_routing(cfg, [own[0].topk_ids for own in sets.batches])
    moved = [traffic(cfg, counts, name) for name in ("dispatch", "combine_partial")]
    devices = list(sets.devices)
    assert pair["parts"] == [[one.busiest_link(devices), one.busiest_memory(devices)] for one in moved]
    assert pair["remote_bytes"] == sum(one.remote_bytes for one in moved)


def test_floors_by_hand() -> None:
    """One launch bound by its link, one by memory: 4e5 / 4e11 s = 1 us, 8.4e6 / 4.2e12 s = 2 us, twice 2.2 us."""
    found = floors([(400_000, 4_200), (4_000, 8_400_000)], CEILINGS)
    assert found["link_floor_us"] == pytest.approx(1.01) and found["memory_floor_us"] == pytest.approx(2.001)
    assert found["floor_us"] == pytest.approx(1 + 2 + 2 * 2.2)
    assert floors([(0, 0)], CEILINGS)["floor_us"] == pytest.approx(2.2)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_copies_by_turns(count: int) -> None:
    """In each turn every GPU stores to another one, no two to the same; together they copy all bytes once."""
    turns = range(ceilings_module.TURNS)
    for turn in turns:
        peers_now = {lane: ceilings_module.peer_of(lane, turn, count) for lane in range(count)}
        assert sorted(peers_now.values()) == list(range(count))
        assert all(lane != peer for lane, peer in peers_now.items())
    assert {ceilings_module.peer_of(0, turn, count) for turn in turns} == set(range(1, count))
    parts = [ceilings_module.part_of(turn) for turn in turns]
    assert parts[0].start == 0 and parts[-1].stop == ceilings_module.COPY_BYTES
    assert all(one.stop == other.start for one, other in pairwise(parts))
    assert all((part.stop - part.start) % 16 == 0 for part in parts)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_ping_pong_assembles(arch: str, tmp_path: Path) -> None:
    source = tmp_path / "ping_pong.ptx"
    source.write_bytes(ceilings_module.PING_PONG.rstrip(b"\0"))
    subprocess.run(
        ["ptxas", f"-arch={arch}", "-o", str(tmp_path / "out"), str(source)], check=True, capture_output=True
    )
    assert len(ceilings_module._TYPES) == ceilings_module.PING_PONG.count(b".param ")


# Cases


def test_peers_call_the_chained_pair_what_the_measurement_does() -> None:
    assert peers.CHAINED == CHAINED


def test_the_suite_covers_what_it_promises() -> None:
    groups = case_groups(quick=False)
    main = {group.format: group for group in groups if group.shape == MAIN}
    assert tuple(main) == MEASURED_FORMATS
    for group in main.values():
        assert [tokens for tokens, routing in group.points if routing == "uniform"] == list(TOKENS)
        assert any(routing == "zipf" for _, routing in group.points) and group.max_tokens == 8192
    assert {group.shape for group in groups} == {MAIN, *OTHERS}
    assert {group.format for group in groups if group.shape.hidden == 2880} == set(formats_of(2880, MEASURED_FORMATS))
    for group in groups:
        group.shape.config(group.format, 4, group.max_tokens)
    assert {group.shape for group in case_groups(quick=True)} == {MAIN}
    measured = {
        (group.format, tokens): group.operations(tokens, routing)
        for group in main.values()
        for tokens, routing in group.points
        if routing == "uniform"
    }
    assert set(measured["bf16", 4096]) == set(PARTS) and set(measured["nvfp4", 8]) == set(OPERATIONS)
    assert measured["mxfp4", 1] == BASIC == groups[-1].operations(128, "uniform")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_the_suite_refuses_politely(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for words, rule in (
        ([], "there is no CUDA GPU on this machine"),
        (["--devices", "cpu:2"], "devices = 'cpu'"),
        (["--devices", "cuda:0"], "devices = 'cuda:0'"),
    ):
        monkeypatch.setattr(sys, "argv", ["suite", *words])
        with pytest.raises(SystemExit) as stop:
            suite.main()
        assert stop.value.code == 2 and rule in capsys.readouterr().err


def test_a_failed_section_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but GPUs: communicators are the reference's, times made up, and one section fails."""
    run = example_run()
    monkeypatch.setattr(suite, "environment", lambda devices, command: run["machine"] | {"command": command})
    monkeypatch.setattr(suite, "link_matrix", lambda: run["machine"]["links"])
    monkeypatch.setattr(suite, "measure_ceilings", lambda devices, library: CEILINGS)
    monkeypatch.setattr(suite.torch.cuda, "empty_cache", lambda: None)
    group = suite.Group(Shape(64, 8, 2), "bf16", ((4, "uniform"),))
    impossible = suite.Group(Shape(64, 1, 2), "bf16", ((4, "uniform"),))
    monkeypatch.setattr(suite, "case_groups", lambda quick: [group, impossible])
    monkeypatch.setattr(
        suite, "measure", lambda c, sets, names: measure(c, sets, names, samples=3, runner=CountingRunner(c))
    )
    state = [{"clocks.sm": "1980 MHz"}]
    monkeypatch.setattr(suite, "gpu_state", lambda: state)
    monkeypatch.setattr("cute_ep.reference.backend.ReferenceCommunicator.close", lambda self: None)

    def broken(*words: object) -> list:
        raise EPError("no such kernel")

    monkeypatch.setattr(suite, "measure_swiglu", broken)
    monkeypatch.setattr("sys.argv", ["suite.py", "--out", str(tmp_path / "run"), "--quick"])
    console = SimpleNamespace(print=lambda *words, **options: None)
    made = suite.Suite(["cpu"], tmp_path / "run", None, True, console, "feed" * 10)
    suite.run_suite(made, ("cases", "swiglu", "peers"))
    content = json.loads((tmp_path / "run" / suite.RUN).read_text())
    assert [one["operation"] for one in content["cases"]] == list(BASIC) and made.failed
    assert content["machine"]["commit"] == "feed" * 10 and content["peer_versions"] == {}
    assert content["machine"]["library"]["sources"] == source_hash()
    assert content["gpu_state"] == {"ceilings": state, "cases": state, "peers": state}
    assert all(one["shape"] == "64/8/2" and one["floor_us"] > 2 for one in content["cases"])
    notes = "\n".join(content["notes"])
    assert "swiglu: EPError: no such kernel" in notes and "64/1/2 bf16: top_k = 2" in notes
    assert "deepep_normal: not present" in notes and "no such kernel" in (tmp_path / "run" / suite.TABLES).read_text()
    assert {"ceilings", "64/8/2 bf16", "swiglu", "peers"} <= set(content["seconds"])
    assert content["machine"]["command"] == "python -m perf.suite --quick"


def test_which_kernels_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of those that the library would launch: a rebuilt cubin shows, sources that no longer fit do not count."""

    def entry(kernel: str, sha256: str, source: str) -> dict:
        variant = Variant(kernel, "sm_90a", None)
        path = tmp_path / f"{variant.arch}/{variant.symbol}.cubin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        return LibraryEntry(variant, path, sha256, source, "4.8.1", "entry", 1, 0, 0, 0.0, ()).to_json()

    def facts(*rows: dict) -> dict:
        content = {"version": cute_ep.__version__, "variants": list(rows)}
        (tmp_path / library.MANIFEST).write_text(json.dumps(content))
        return suite.library_facts(str(tmp_path))

    monkeypatch.setattr(library, "PACKAGE_FOLDER", tmp_path / "none")
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path / "none")
    one = facts(entry("copy", "aa", source_hash()), entry("quantize", "bb", "other sources"))
    assert (one["sources"], one["kernels"], one["arches"], one["dsl"]) == (source_hash(), 1, ["sm_90a"], ["4.8.1"])
    assert facts(entry("copy", "cc", source_hash()))["cubins"] != one["cubins"]


def test_clocks_and_power_of_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "1980 MHz, 3201 MHz, 312.40 W, 700.00 W, 41\n345 MHz, 3201 MHz, 76.11 W, 700.00 W, 28"
    monkeypatch.setattr(machine, "_output", lambda *command: answer)
    busy, idle = machine.gpu_state()
    assert set(busy) == set(machine.GPU_STATE)
    assert (busy["clocks.sm"], busy["power.draw"], idle["temperature.gpu"]) == ("1980 MHz", "312.40 W", "28")
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    assert machine.gpu_state() == []


# SwiGLU and tuning


def test_compiled_quantise_is_like_nvfp4() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    codes, scales = compiled.quantise(values.repeat(128, 4).bfloat16())
    assert codes.shape == (128, 32) and scales.shape == (1, 1, 32, 4, 4)
    assert codes[5, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]
    assert (scales.view(torch.uint8) == 0x38).all()  # 1.0 in e4m3
    x = torch.randn(4, 64).bfloat16()
    pairs = torch.stack(x.chunk(2, dim=1), dim=2).flatten(1)
    assert torch.equal(compiled.swiglu(x, False), compiled.swiglu(pairs, True))


def test_ragged_groups_are_what_dispatch_gives() -> None:
    """Offsets and first scale blocks of 64 experts as the reference computes them, some groups empty."""
    for rows in (64, 1024):
        offsets = ragged_offsets(rows)
        assert len(offsets) == GROUPS + 1 and offsets[0] == 0 and offsets[-1] == rows and offsets == sorted(offsets)
        assert offsets == ragged_offsets(rows) and len(set(offsets)) > 20
        for fmt in ("bf16", "fp8", "mxfp8", "nvfp4"):
            options = group_options(fmt, rows, "cpu")
            x = torch.randn(rows, 512).bfloat16()
            found = fused_silu(x, fmt=fmt, **options)
            assert ("scales_offsets" in options) == (fmt in ("mxfp8", "nvfp4"))
            if fmt == "bf16":
                assert torch.equal(found, fused_silu(x))
            else:
                assert torch.equal(found.payload.view(torch.uint8), fused_silu(x, fmt=fmt).payload.view(torch.uint8))
    starts = [
        first // 128 + offset
        for first, offset in zip(ragged_offsets(1024), options["scales_offsets"].tolist(), strict=False)
    ]
    sizes = [-(-(end - first) // 128) for first, end in pairwise(ragged_offsets(1024))]
    assert starts == [sum(sizes[:group]) for group in range(GROUPS)]


def test_silu_bytes() -> None:
    assert silu_bytes("bf16", 10, 2048) == 10 * 3 * 4096
    assert silu_bytes("nvfp4", 10, 2048) == 10 * (2 * 4096 + 1024 + 128)
