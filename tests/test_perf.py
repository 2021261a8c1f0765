"""The measuring code where it needs no GPU: statistics, floors, bytes, the model, tables, the report, and that what is
missing on a machine becomes a note."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_ep
from cute_ep import ceilings as ceilings_module
from cute_ep import library, machine, timing
from cute_ep import measure as measure_module
from cute_ep.ceilings import Ceilings, floors
from cute_ep.config import EPConfig
from cute_ep.connection import connect_local
from cute_ep.errors import EPError, EPInputError
from cute_ep.layouts.formats import formats_of
from cute_ep.layouts.variants import Variant
from cute_ep.library import LibraryEntry, source_hash
from cute_ep.local_ops import fused_silu
from cute_ep.measure import CHAINED, CONDITIONS, OPERATIONS, PARTS, make_sets, measure, set_generator
from cute_ep.timing import Runner, percentile, rounds_per_graph, summary
from cute_ep.traffic import count_routing, traffic
from perf import compiled, losses, model, nvshmem, peer_worker, peers, plots, report, suite, tables
from perf.cases import BASIC, MAIN, MEASURED_FORMATS, OTHERS, TOKENS, Shape, case_groups
from perf.swiglu import GROUPS, group_options, ragged_offsets, silu_bytes

CEILINGS = Ceilings(4e11, 3.5e11, 3.9e11, 3.9e12, 4.2e12, 1.2e-6, 1.0e-6)
RANKS = 2


def case(operation: str, fmt: str, tokens: int, p50: float, parts: list, **other: Any) -> dict:
    """A result as the suite writes it."""
    times = summary([1e-6 * p50] * 3)
    about = {"shape": MAIN.text, "routing": "uniform", "operation": operation, "format": fmt, "tokens": tokens}
    return about | {"rounds": 8, "parts": parts} | times | floors(parts, CEILINGS) | other


def synthetic(overhead: float = 5.0, link: float = 0.8, memory: float = 0.5) -> list[dict]:
    """Cases that follow the model exactly."""
    cases = []
    fits = {
        model.key_of(name, fmt): model.Fit(overhead, link, memory) for name in model.LAUNCHES for fmt in ("bf16", "fp8")
    }
    for fmt, message in (("bf16", 14336), ("fp8", 7392)):
        for tokens in (1, 16, 128, 4096):
            for operation, launches in PARTS.items():
                parts = [[3 * tokens * message, (4 if tokens == 128 else 40) * tokens * message] for _ in launches]
                one = case(operation, fmt, tokens, 1.0, parts)
                time = model.predict(one, fits, CEILINGS)
                assert time is not None
                cases.append(case(operation, fmt, tokens, time, parts))
    return cases


def example_run() -> dict:
    machine = {"gpus": {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200"}, "devices": ["cuda:0", "cuda:1"]}
    machine |= {
        "links": [["X", "NV18"], ["NV18", "X"]],
        "driver": "580",
        "cuda": "13.0",
        "torch": "2.11",
        "python": "3",
    }
    machine |= {"date": "2026-11-21T00:00:00", "commit": "abc", "command": "python -m perf.suite"}
    pair = {"operation": "pair", "peer": "nccl_ag_rs", "format": "bf16", "error": 0.0}
    silu = {"format": "bf16", "rows": 64, "width": 2048, "p50_us": 4.0, "share": 0.5}
    ragged = silu | {"groups": 64, "p50_us": 6.0}
    return {
        "machine": machine,
        "ceilings": vars(CEILINGS),
        "cases": synthetic(),
        "sweep": [case("dispatch", "bf16", 128, 30.0, [[1, 1]], sms=sms) for sms in (8, 132)],
        "swiglu": [one | {"interleaved": kind} for one in (silu, ragged) for kind in (False, True)],
        "peers": [pair | {"tokens": 1, "p50_us": 50.5}, pair | {"tokens": 4096, "p50_us": 1.5}],
        "notes": ["deepep_normal: not present: no module deep_ep"],
    }


# How times are taken


def test_percentiles() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 95, 99, 100)] == [100, 190, 198, 200]
    assert percentile([3.0], 1) == 3.0
    found = summary([1e-6, 2e-6, 3e-6, 10e-6])
    assert found["samples"] == 4 and found["p50_us"] == pytest.approx(2) and found["p99_us"] == pytest.approx(10)
    assert found["mean_us"] == pytest.approx(4) and found["min_us"] == pytest.approx(1)


class FakeStream:
    device, cuda_stream = "fake", 0

    def query(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock in milliseconds for each of two lanes; events read the clock of the lane whose turn it is."""
    times, lanes = [0.0, 0.0], {"stream": FakeStream()}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = times[lanes["stream"].lane]

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    class Lane:
        def __init__(self, stream: FakeStream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            lanes["stream"] = self.stream

        def __exit__(self, *error: object) -> None: ...

    class Pool:
        def __init__(self, count: int) -> None: ...
        def submit(self, work: Callable, lane: int) -> SimpleNamespace:
            work(lane)
            return SimpleNamespace(result=lambda: None)

        def shutdown(self) -> None: ...

    gate = SimpleNamespace(
        close=lambda: None, open=lambda: None, hold=lambda stream: None, free=lambda: None, forced=False
    )
    fakes = SimpleNamespace(Event=Event, stream=Lane, synchronize=lambda device: None)
    monkeypatch.setattr(timing.torch, "cuda", fakes)
    monkeypatch.setattr(timing, "Gate", lambda: gate)
    monkeypatch.setattr(timing, "ThreadPoolExecutor", Pool)
    return times


@pytest.mark.parametrize("chained", [False, True])
def test_a_sample_is_its_slowest_lane(clocks: list[float], chained: bool) -> None:
    """Samples that bring the lanes into step take 100 ms and do not count; there are several bursts."""
    streams, samples = [FakeStream(), FakeStream()], 2 * timing.BURST
    for lane, stream in enumerate(streams):
        stream.lane = lane
    calls = [0, 0]

    def enqueue(lane: int, index: int) -> None:
        behind_a_gate = calls[lane] - 1  # one call before loads the kernels
        first = behind_a_gate % timing.BURST < timing.IN_STEP
        clocks[lane] += 100 if first else 3 + lane
        calls[lane] += 1

    with Runner(streams) as runner:
        spans = runner.time(samples, enqueue, chained=chained)
    assert len(spans) == samples
    assert spans == pytest.approx([4e-3] * samples)


def test_a_round_is_its_share_of_a_graph(clocks: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane's graph has all rounds in their order; lane 1 takes 2 ms a round, lane 0 half as long."""
    streams, rounds, samples = [FakeStream(), FakeStream()], 8, timing.BURST
    captured: list[list[int]] = [[], []]

    class Graph:
        def __init__(self, lane: int) -> None:
            self.lane = lane

        def replay(self) -> None:
            clocks[self.lane] += len(captured[self.lane]) * (1 + self.lane)

    def capture(runner: Runner, work: Callable[[int], None]) -> list[Graph]:
        for lane in range(len(runner.streams)):
            work(lane)
        return [Graph(0), Graph(1)]

    for lane, stream in enumerate(streams):
        stream.lane = lane
    monkeypatch.setattr(Runner, "capture", capture)
    with Runner(streams) as runner:
        spans = runner.time_graphs(samples, lambda lane, index: captured[lane].append(index), rounds)
    assert captured == [list(range(rounds))] * 2
    assert spans == pytest.approx([2e-3] * samples)


def test_host_time_is_of_the_slowest_lane(clocks: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are queued one after the other, behind the gate; the fastest of several times counts."""
    done: list[object] = []

    class Stream(FakeStream):
        def __init__(self, lane: int) -> None:
            self.lane = lane

        def synchronize(self) -> None:
            done.append(("wait", self.lane))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        done.append(("on", stream.lane))
        yield

    def enqueue(lane: int, index: int) -> None:
        done.append((lane, index))
        disturbed = len(done) <= 3 * timing.QUEUED
        now[0] += 1e-3 if disturbed else (2 + lane) * 1e-6

    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    with Runner([Stream(0), Stream(1)], finish=lambda: done.append("finish")) as runner:
        runner._gate.close, runner._gate.open = (lambda: done.append("close")), (lambda: done.append("open"))
        runner._gate.hold = lambda stream: done.append(("hold", stream.lane))
        monkeypatch.setattr(timing.torch.cuda, "stream", on)
        assert runner.host_time(enqueue) == pytest.approx(3e-6)
        lanes = [[("on", lane), ("hold", lane), *((lane, index) for index in range(timing.QUEUED))] for lane in (0, 1)]
        one = ["close", *lanes[0], *lanes[1], "open", ("wait", 0), ("wait", 1), "finish"]
        assert done == one * timing.QUEUEINGS


def test_times_behind_a_gate_that_was_forced_open_do_not_count(
    clocks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FakeStream()
    stream.lane = 0
    with Runner([stream]) as runner:
        monkeypatch.setattr(runner._gate, "forced", True)
        with pytest.raises(EPError, match="not queued within 60 s"):
            runner.time(1, lambda lane, index: None)


def test_a_gate_opens_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(words=[0], address=0)
    monkeypatch.setattr(timing, "HostMemory", lambda words: memory)
    gate = timing.Gate()
    gate.close()
    assert memory.words == [0]
    gate.open()
    assert memory.words == [1] and not gate.forced
    monkeypatch.setattr(timing, "GATE_TIMEOUT_S", 0.0)
    gate.close()
    assert gate._timer is not None
    gate._timer.join(60)
    assert memory.words == [2] and gate.forced


def test_the_gate_opens_when_queueing_fails(clocks: list[float]) -> None:
    stream = FakeStream()
    stream.lane = 0

    def enqueue(lane: int, index: int) -> None:
        raise EPError("refused")

    with Runner([stream]) as runner, pytest.raises(EPError, match="refused"):
        runner.time(1, enqueue)


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
    for devices in ("auto", "cpu:2", "cuda:0"):
        monkeypatch.setattr(sys, "argv", ["suite", "--devices", devices])
        with pytest.raises(SystemExit) as stop:
            suite.main()
        assert stop.value.code == 2 and "devices = " in capsys.readouterr().err


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
    monkeypatch.setattr("cute_ep.reference_backend.ReferenceCommunicator.close", lambda self: None)

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


# The model


def test_fit_recovers_constants() -> None:
    run = example_run() | {"cases": synthetic(overhead=7.5, link=0.62, memory=0.44)}
    fits = model.fit_model([run, run])
    assert set(fits) == {("dispatch", "bf16"), ("dispatch", "fp8"), ("combine_exact", None), ("combine_partial", None)}
    for fit in fits.values():
        assert (fit.overhead_us, fit.link, fit.memory) == pytest.approx((7.5, 0.62, 0.44), rel=0.02)


def test_fit_has_no_negative_overhead() -> None:
    fit = model.fit_constants([(10.0, 0.0, 10.0, 12.0), (20.0, 0.0, 25.0, 27.0)])
    assert fit.overhead_us == 0 and 0.8 <= fit.link <= 1
    assert model.fit_constants([(0.0, 0.0, 5.0, 7.0)]).overhead_us == pytest.approx(5.0)


def test_a_pair_is_its_launches() -> None:
    cases = synthetic()
    fits = model.fit_model([example_run() | {"cases": cases}])
    for one in cases:
        assert model.predict(one, fits, CEILINGS) == pytest.approx(one["p50_us"], rel=0.01)
    assert model.predict(cases[0] | {"format": "mxfp4"}, fits, CEILINGS) is None
    text = model.errors_table(cases, fits, CEILINGS)
    assert text.count("+0%") + text.count("-0%") == len(cases)
    graphs = sum(one["operation"] not in ("pair_chained", *CONDITIONS) for one in cases)
    text = model.summary_table(example_run() | {"cases": cases}, fits)
    launches = sum(one["operation"] in model.LAUNCHES for one in cases)
    assert f"| fitted | {launches} | {launches} | 0% | 0% |" in text
    assert f"| not fitted | {graphs - launches} | {graphs - launches} | 0% | 0% |" in text


def test_ranks_that_share_a_gpu_are_another_machine() -> None:
    alone, shared = example_run(), example_run()
    shared["machine"] = shared["machine"] | {"devices": ["cuda:0", "cuda:0"]}
    shared["cases"] = synthetic(overhead=50.0)
    assert model.page(alone, [alone, shared]) == model.page(alone, [alone])
    assert "NVL72" not in model.page(shared, [alone, shared]) and "| 50." in model.page(shared, [alone, shared])


def test_other_machines_scale_with_their_nominal_rates() -> None:
    there = model.ceilings_elsewhere(CEILINGS, "NVIDIA H200", "B200")
    assert there is not None and there.push == 2 * CEILINGS.push and there.flag == CEILINGS.flag
    assert there.memory == pytest.approx(CEILINGS.memory * 8 / 4.8)
    assert model.ceilings_elsewhere(CEILINGS, "GeForce", "B200") is None
    eight = model.expected_case("dispatch", "bf16", 8, 64)
    assert eight["parts"][0][0] / (64 * 14336) == pytest.approx(4.63, rel=0.1)  # remote ranks of a token, top-8 of 256
    text = model.page(example_run(), [example_run()])
    assert "NVL72" in text and "8 x H200" in text


# Tables, report and plots


def test_tables_show_the_numbers() -> None:
    run = example_run()
    text = tables.page(run)
    dispatch = next(one for one in run["cases"] if (one["operation"], one["tokens"]) == ("dispatch", 4096))
    assert f"| 4096 | bf16 | {dispatch['p50_us']:.1f} ({dispatch['p99_us']:.1f}) |" in text
    assert "SM stores to a peer 400 GB/s (ring), 350 GB/s" in text and "one flag 1.20 us" in text
    assert "2 x NVIDIA H200, NV18 between GPUs" in text
    assert "| 64 | 2048 | bf16 | 4.0 / 4.0 (50% / 50%) | 6.0 / 6.0 (50% / 50%) |  |" in text
    assert "| operation | format | tokens per rank | 8 SMs | 132 SMs |" in text
    assert (
        "| tokens per rank | cute_ep bf16 partial | cute_ep bf16 exact (default) | cute_ep fp8 partial | nccl ag"
        in text
        and "| 50.5 |" in text
    )
    assert "- deepep_normal: not present: no module deep_ep" in text
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))
    assert tables.markdown(("a", "b"), []) == ""


def test_tables_of_a_run_that_found_nothing() -> None:
    run = example_run() | {"ceilings": {}, "cases": [], "notes": ["ceilings: EPError: no kernel"]}
    assert "ceilings: EPError" in tables.page(run)


def test_report_writes_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, readme = tmp_path / "run", tmp_path / "README.md"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(example_run()))
    markers = ["<!-- headline:begin -->", "<!-- headline:end -->", "<!-- perf:begin -->", "<!-- perf:end -->"]
    readme.write_text("before\n{}\nold words\n{}\n{}\nold numbers\n{}\nafter\n".format(*markers))
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    words = ["--readme", str(readme), "--more", str(page)]
    monkeypatch.setattr(sys, "argv", ["report", str(folder), *words])
    assert report.main() == 0
    once = readme.read_text()
    assert once.startswith(f"before\n{markers[0]}\nOn 2 x NVIDIA H200") and once.endswith(f"{markers[3]}\nafter\n")
    assert not {"old words", "old numbers"} & set(once.splitlines()) and all(
        once.count(marker) == 1 for marker in markers
    )
    assert (folder / "tables.md").read_text() == tables.page(model.read_run(folder))
    assert "](run/tables.md)" in once and "](docs/performance.md)" in once
    assert page.read_text().count("## 2 x NVIDIA H200") == page.read_text().count("this commit's runs") == 1
    assert report.main() == 0 and readme.read_text() == once
    another = tmp_path / "another"
    another.mkdir()
    faster = example_run()
    faster["machine"]["commit"] = "feed123"
    faster["mirror"] = [
        {"operation": operation, "format": fmt, "tokens": tokens, "p50_us": 1000 * tokens, "ranks": 4}
        for fmt, operation, tokens in (("bf16", "pair", 9), ("bf16", "dispatch", 7), ("fp8", "dispatch", 7))
    ]
    (another / "run.json").write_text(json.dumps(faster))
    monkeypatch.setattr(sys, "argv", ["report", str(folder), str(another), *words])
    assert report.main() == 0 and readme.read_text() == once, "as many GPUs: nothing to add"
    faster["machine"]["gpus"] = {"cuda:0": "NVIDIA H200"}
    (another / "run.json").write_text(json.dumps(faster))
    assert report.main() == 0
    added = set(readme.read_text().splitlines()) - set(once.splitlines())
    assert len(added) == 1 and added.pop().startswith(
        "- On 1 GPUs: pairs with partial combine: nccl ag rs bf16 at 4096"
    )
    faster["machine"]["gpus"] = example_run()["machine"]["gpus"]
    (another / "run.json").write_text(json.dumps(faster))
    assert report.main() == 0
    both = page.read_text()
    assert both.count("## 2 x NVIDIA H200") == 2 and both.count("feed123") == 1
    assert both.count("Where it loses") == 2 and both.count("this commit's runs") == 2
    assert "](../another/tables.md)" in both
    assert (
        "traffic of 4 ranks" in both
        and "| tokens per rank | dispatch bf16 | dispatch fp8 | pair, partial bf16 |" in both
    )
    assert "| 7 | 7000.0 | 7000.0 |  |\n| 9 |  |  | 9000.0 |" in both
    readme.write_text("no markers\n")
    with pytest.raises(SystemExit) as stop:
        report.main()
    assert stop.value.code == 2 and readme.read_text() == "no markers\n"


def test_documents_are_what_the_runs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README, the page and the tables beside each run that it names, byte for byte."""
    root = Path(__file__).parents[1]
    text = report.MORE.read_text()
    (line,) = re.findall(r"`python -m perf.model ([^`]+)`", text)
    folders = []
    for name in line.split():
        folders.append(tmp_path / name)
        shutil.copytree(root / name, folders[-1])
    (tmp_path / "docs").mkdir()
    readme, page = shutil.copy(report.README, tmp_path), tmp_path / "docs" / report.MORE.name
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "LOG", tmp_path / "perf" / "LOG.md")
    monkeypatch.setattr(sys, "argv", ["report", *map(str, folders), "--readme", str(readme), "--more", str(page)])
    assert report.main() == 0
    again = "; python -m perf.report " + line
    assert page.read_text() == text and Path(readme).read_text() == (root / "README.md").read_text(), again
    for name in line.split():
        assert (tmp_path / name / "tables.md").read_text() == (root / name / "tables.md").read_text(), again


def test_report_says_where_it_loses() -> None:
    run = example_run()
    (line, *_) = losses.peers_lines(run)
    assert line.startswith("Pairs with partial combine: nccl ag rs bf16 at 4096 tokens: 1.5 us, here ")
    run["peers"] = run["peers"][:1]
    assert list(losses.peers_lines(run)) == []


def test_report_says_where_exact_combine_and_few_sms_lose() -> None:
    def case(operation: str, p50_us: float, tokens: int = 9) -> dict:
        return {"shape": MAIN.text, "routing": "uniform", "tokens": tokens, "format": "bf16"} | {
            "operation": operation,
            "p50_us": p50_us,
        }

    def row(peer: str, operation: str, p50_us: float, tokens: int = 9) -> dict:
        return {"peer": peer, "operation": operation, "tokens": tokens, "format": "bf16", "p50_us": p50_us}

    run = {
        "cases": [case("pair", 8.0), case("dispatch", 3.0), case("combine_exact", 9.5)],
        "peers": [
            row("nccl_ag_rs", "pair", 12.0),
            row("deepep_normal", "combine", 6.0),
            row("nccl_ag_rs", "combine", 1.0),
        ],
        "sweep": [case("combine_partial", time) | {"sms": sms} for sms, time in ((16, 9.0), (24, 7.0), (132, 5.0))],
    }
    budget = "With an SM budget of 24, combine: deepep normal bf16 at 9 tokens: 6.0 us, here 7.0 us."
    exact = "Pairs with exact (the default) combine: nccl ag rs bf16 at 9 tokens: 12.0 us, here 12.5 us"
    assert list(losses.peers_lines(run)) == [f"{exact}.", budget]
    more = [case("dispatch", 5.0, 1), case("combine_exact", 6.0, 1)]
    run["cases"], run["peers"] = more + run["cases"], [row("nccl_ag_rs", "pair", 10.0, 1), *run["peers"]]
    assert next(losses.peers_lines(run)) == f"{exact} (also at 1)."
    run["cases"].append(case("pair_exact", 11.0))  # measured as a pair it wins
    assert "at 9 tokens" not in next(losses.peers_lines(run))


def test_exact_pairs_say_what_they_are() -> None:
    run = example_run()
    pairs = [case for case in run["cases"] if case["operation"] == "pair_exact"]
    assert tables.exact_pairs(run) == {(one["tokens"], one["format"]): one["p50_us"] for one in pairs}
    assert tables.exact_text(run).endswith("measured as a pair")
    run["cases"] = [case for case in run["cases"] if case["operation"] != "pair_exact"]
    (dispatch,) = (
        one for one in run["cases"] if (one["operation"], one["tokens"]) == ("dispatch", 16) and "bf" in one["format"]
    )
    key = (16, "bf16")
    assert tables.exact_pairs(run)[key] == pytest.approx(dispatch["p50_us"] + tables.medians(run, "combine_exact")[key])
    for one in run["cases"]:
        if one["operation"] == "pair":
            one["p50_us"] *= 1.1 if one["tokens"] == 16 else 1.0
    assert "not measured as a pair" in tables.exact_text(run) and "+0% to +10%" in tables.exact_text(run)


def test_pairs_under_other_conditions_have_a_table() -> None:
    run = example_run()
    text = tables.page(run)
    times = [tables.medians(run, name)[4096, "fp8"] for name in tables.CONDITIONS]
    (row,) = (line for line in text.splitlines() if line.endswith(" | ".join(f"{time:.1f}" for time in times) + " |"))
    assert row.startswith("| 4096 |") and tables.CONDITIONS_TEXT in text
    assert tables.CONDITIONS_TEXT in report.conditions_text(run)
    assert set(tables.CONDITIONS) == {"pair", *CONDITIONS}
    run["cases"] = [case for case in run["cases"] if case["operation"] not in CONDITIONS]
    assert "did not measure" in report.conditions_text(run) and tables.CONDITIONS_TEXT not in tables.page(run)


def test_mirrored_times_are_corrected_by_what_is_known() -> None:
    """Here GPUs of their own took 1.25 times what the mirror of the same kernels took for 16 tokens, 1 for others."""

    def mirrored(commit: str, factor: float) -> dict:
        run = example_run()
        run["machine"] |= {"commit": commit}
        pairs = [case for case in run["cases"] if (case["operation"], case["format"]) == ("pair", "bf16")]
        run["mirror"] = [
            {"operation": "pair", "format": "bf16", "tokens": one["tokens"], "ranks": 2}
            | {"p50_us": factor * one["p50_us"] / (1.25 if one["tokens"] == 16 else 1)}
            for one in pairs
        ]
        return run

    known, later = mirrored("abc", 1.0), mirrored("feed", 0.5)
    real = tables.medians(known, "pair")[16, "bf16"]
    text = report.mirror_text(later, [known, later])
    assert "kernels of feed" in text  # its own commit first: this run has GPUs of their own as well
    later["machine"] |= {"gpus": {"cuda:0": "NVIDIA H200"}}
    text = report.mirror_text(later, [known, later])
    assert "kernels of abc, 2 GPUs took 1.000 to 1.250 times as long" in text
    assert f"| 16 | {real / 2.5:.1f} ({real / 2:.1f}) |" in text
    alone = report.mirror_text(later, [later])
    assert "unknown amount" in alone and f"| 16 | {real / 2.5:.1f} |" in alone
    assert report.mirror_text(example_run(), [known]) == ""


def test_headline() -> None:
    def case(operation: str, tokens: int, p50_us: float) -> dict:
        about = {"shape": MAIN.text, "routing": "uniform", "format": "bf16"}
        return about | {"operation": operation, "tokens": tokens, "p50_us": p50_us}

    run = example_run()
    times = {"pair": (10.0, 40.0, 900.0), "pair_exact": (12.5, 60.0, 1600.0)}
    run["cases"] = [
        case(name, tokens, time)
        for name, every in times.items()
        for tokens, time in zip((1, 128, 4096), every, strict=True)
    ]
    run["peers"] = [
        {"peer": peer, "format": fmt, "operation": "pair", "tokens": tokens, "p50_us": time}
        for peer, fmt, every in (
            ("nccl_ag_rs", "bf16", (15.0, 80.0, 1200.0)),
            ("nccl_all_to_all", "bf16", (30.0, 90.0, 5000.0)),
            ("deepep_normal", "bf16", (60.0, 100.0, 1800.0)),
            ("deepep_low_latency", "fp8", (1.0, 1.0, 1.0)),
        )
        for tokens, time in zip((1, 128, 4096), every, strict=True)
    ]
    text = report.headline(run)
    assert "take 10.0 / 40.0 / 900 us" in text and "1.5 / 2.0 / 1.3 times as fast" in text
    assert "6.0 / 2.5 / 2.0 times as fast as DeepEP" in text and "takes 12.5 / 60.0 / 1600 us" in text
    assert "with 4096 tokens it loses to NCCL." in text and "two halves" not in text
    assert report.headline(run | {"peers": []}) == ""


def test_provenance() -> None:
    run = example_run()
    assert tables.provenance_text(run) == "" and "Versions: not in this" in tables.peers_text(run)
    run["machine"] |= {
        "commit": "0123456789abcdef-dirty",
        "library": {"sources": "5ace", "cubins": "c0b1", "dsl": ["4.8.1"]},
    }
    state = dict(zip(machine.GPU_STATE, ("1755 MHz", "3201 MHz", "402.10 W", "700.00 W", "50"), strict=True))
    run["gpu_state"] = {"ceilings": [state, state | {"clocks.sm": "1980 MHz"}], "peers": []}
    run["peer_versions"] = {"nccl": "2.28.9", "some-deepep": "1.2"}
    text = tables.page(run)
    assert "Kernels of sources 5ace, cubins c0b1, DSL 4.8.1. At the ends of sections SM clocks were 1755 MHz" in text
    assert "at most 402 of 700 W" in text and "commit 0123456789ab-dirty" in text
    assert "Versions: nccl 2.28.9, some-deepep 1.2." in text


def test_runs_are_read_with_floors_of_one_rule(tmp_path: Path) -> None:
    """Whatever they were when the run was made; the copy engine counts."""
    run = example_run()
    run["ceilings"] = run["ceilings"] | {"copy_engine": 8e11}
    (tmp_path / "run.json").write_text(json.dumps(run))
    for old, new in zip(run["cases"], model.read_run(tmp_path)["cases"], strict=True):
        assert new["link_floor_us"] == pytest.approx(old["link_floor_us"] / 2) and new["p50_us"] == old["p50_us"]


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = example_run()
    assert {path.stem for path in plots.draw(run, tmp_path)} == set(plots.PLOTS)
    before = (tmp_path / "latency.svg").read_bytes()
    assert b"<svg" in before
    plots.draw(run, tmp_path)
    assert (tmp_path / "latency.svg").read_bytes() == before, "the same run draws the same file"
    few = plots.draw(run | {"peers": [], "sweep": [], "swiglu": []}, tmp_path)
    assert {path.stem for path in few} == {"latency", "ratio"}


def test_no_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plots.draw(example_run(), tmp_path) == [] and not list(tmp_path.iterdir())


# Other libraries


def test_peers_are_notes_without_gpus() -> None:
    found = peers.run_peers(0)
    assert found["rows"] == [] and len(found["notes"]) == len(peers.PEERS)
    assert all("not present: needs at least 2 GPUs" in note for note in found["notes"])
    code = "import sys, perf.peers, perf.peer_worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_a_missing_module_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = peers.run_peers(4, names=("deepep_normal",))
    assert found["notes"] == ["deepep_normal: not present: no module deep_ep"]


WORKER = """
import faulthandler, json, signal, sys, time
from pathlib import Path
faulthandler.register(signal.SIGUSR1)
names, rank, folder = sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3])
def at(peer, what="pair, timing"):
    (folder / f"rank{rank}.new").write_text(f"{peer}: {what}")
    (folder / f"rank{rank}.new").replace(folder / f"rank{rank}.at")
def row(peer):
    values = {"peer": peer, "operation": "pair", "graph": True, "ahead": True, "error": None, "format": "bf16"}
    if rank == 0:
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(values) + chr(10))
def stuck():
    time.sleep(60)
def wait_for_row():
    while not (folder / "rows.jsonl").exists() or not (folder / "rows.jsonl").stat().st_size:
        time.sleep(0.01)
"""
BOTH = ("nccl_ag_rs", "nccl_all_to_all")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets every worker run some code instead, after WORKER, with budgets of seconds."""
    monkeypatch.setattr(peers, "START_S", 10.0)
    monkeypatch.setattr(peers, "BUDGETS_S", dict.fromkeys(peers.PEERS, 2.0))

    def run(code: str) -> None:
        def command(names: list, rank: int, world: int, port: int, shape: Shape, tokens: object, folder: Path) -> list:
            return [sys.executable, "-c", WORKER + code, ",".join(names), str(rank), str(folder)]

        monkeypatch.setattr(peers, "worker_command", command)

    return run


@pytest.mark.parametrize(
    ("code", "count", "notes", "left"),
    [
        ("for name in names: at(name); row(name)", 2, [], ()),
        (
            "at(names[0]); row(names[0]); sys.exit(wait_for_row() or 'ValueError: bad' if rank else 0)",
            1,
            ["nccl_ag_rs: rank 1 ended with 1 at pair, timing: ValueError: bad"],
            BOTH[1:],
        ),
        (
            "sys.exit((sys.stderr.write('OSError: no libmlx5') and 3))",
            0,
            [f"{name}: not present: OSError: no libmlx5" for name in BOTH],
            (),
        ),
    ],
    ids=["ends", "fails", "missing"],
)
def test_a_peer_that_ends_badly_keeps_its_rows(
    workers: Callable[[str], None], code: str, count: int, notes: list[str], left: tuple[str, ...]
) -> None:
    workers(code)
    found, said, rest = peers.run_workers(BOTH, 2, MAIN, (1,))
    assert (len(found), said, tuple(rest)) == (count, notes, left)


def test_a_peer_that_hangs_says_where_and_costs_no_other_its_turn(
    workers: Callable[[str], None], tmp_path: Path
) -> None:
    workers("at(names[0]); row(names[0]); stuck() if names[0] == 'nccl_ag_rs' else None")
    saved: list[int] = []
    found = peers.run_peers(
        2, names=BOTH, save=lambda so_far: saved.append(len(so_far["rows"])), logs=tmp_path / "logs"
    )
    assert [row["peer"] for row in found["rows"]] == list(BOTH) and saved == [1, 2, 2]
    (note,) = found["notes"]
    assert note == "nccl_ag_rs: stopped after 2 s with 1 results; rank 0, 1: pair, timing, in stuck (<string>:15)"
    assert "stuck" in (tmp_path / "logs" / "nccl_ag_rs-rank1.log").read_text()


def test_peers_that_do_not_start_are_all_noted(workers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    workers("stuck()")
    monkeypatch.setattr(peers, "START_S", 1.0)
    found, notes, rest = peers.run_workers(BOTH, 2, MAIN, (1,))
    assert found == [] and tuple(rest) == () and len(notes) == 2
    assert all("stopped after 1 s with 0 results; rank 0, 1: starting, in stuck" in note for note in notes)


def test_what_was_not_taken_as_the_rest_is_noted() -> None:
    row = {"peer": "nccl_ag_rs", "operation": "dispatch", "graph": True, "ahead": True, "error": None}
    row |= {"format": "bf16"}
    eager = row | {"operation": "pair_chained", "graph": False}
    assert peers.caveats([row, eager]) == []
    assert peers.caveats([row | {"format": "fp8", "error": 0.06}]) == []
    notes = peers.caveats([row | {"graph": False}, eager | {"ahead": False, "error": 0.06}])
    assert [note.split(": ")[1][:14] for note in notes] == ["1 of 2 results"] * 3


def test_budgets_fit() -> None:
    assert set(peers.BUDGETS_S) == set(peers.PEERS)
    assert sum(peers.BUDGETS_S.values()) + 2 * 10 <= 150


@pytest.mark.parametrize("chained", [False, True])
def test_lane_drops_bursts_that_began_early(monkeypatch: pytest.MonkeyPatch, chained: bool) -> None:
    """A burst's first samples take 100 ms, the others 3; the sleep ends too early in the first two bursts."""
    clock, sleeps, calls = [0.0], [], [0]

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None:
            self.at = clock[0]

        def query(self) -> bool:
            return len(sleeps) <= 2

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    def sleep(cycles: int) -> None:
        sleeps.append(cycles)
        calls[0] = 0

    def enqueue(index: int) -> None:
        clock[0] += 100 if calls[0] < timing.IN_STEP else 3
        calls[0] += 1

    fakes = {"Event": Event, "stream": lambda stream: nullcontext(), "Stream": object}
    fakes |= {"synchronize": lambda: None, "_sleep": sleep}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**fakes))
    lane = peer_worker.Lane(SimpleNamespace(highest=lambda values: [float(value) for value in values]))
    seconds, ahead = lane.time(20, enqueue, chained=chained)
    assert ahead and seconds == pytest.approx([3e-3] * 20)
    assert len(sleeps) == 2 + 3 and sleeps[1] > 1.9 * sleeps[0] and sleeps[2] == sleeps[3]
    monkeypatch.setattr(Event, "query", lambda self: True)
    seconds, ahead = lane.time(3, enqueue, chained=chained)
    assert not ahead and seconds == pytest.approx([3e-3] * 3)


def test_host_time_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the stream sleeps, which a first queue, that loads kernels, says how long; the least time of the slowest
    rank."""
    now, done = [0.0], []

    def enqueue(index: int) -> None:
        sleeps = [what for what in done if isinstance(what, float)]
        now[0] += (100 if len(sleeps) == 1 else 1 + len(sleeps)) * 1e-6
        done.append(index)

    fakes = {"stream": lambda stream: nullcontext(), "Stream": object, "synchronize": lambda: done.append("wait")}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**fakes, _sleep=lambda cycles: done.append(float(cycles))))
    monkeypatch.setattr(peer_worker.time, "perf_counter", lambda: now[0])
    lane = peer_worker.Lane(SimpleNamespace(highest=lambda values: [2 * float(value) for value in values]))
    assert lane.host_time(enqueue) == pytest.approx(2 * 3e-6)
    seconds = peer_worker.SLEEP_S + 2 * 2 * timing.QUEUED * 100e-6
    sleeps = [0.0] + [float(int(seconds * peer_worker.CLOCK_HZ))] * timing.QUEUEINGS
    assert done == [what for sleep in sleeps for what in (sleep, *range(timing.QUEUED), "wait")]


def test_host_times_have_a_table_where_they_were_measured() -> None:
    run = example_run()
    run["cases"] = [*run["cases"], case(CHAINED, "bf16", 1, 9.0, [[1, 1]], host_us=33.25)]
    run["peers"] = [*run["peers"], run["peers"][0] | {"operation": CHAINED, "host_us": 25.5}]
    assert "host time" not in tables.page(example_run())
    assert "| 1 | 33.2 | 25.5 |" in tables.page(run).partition("libraries: host time")[2]


@pytest.mark.parametrize(
    ("own", "other", "lost"),
    [
        ((9.0, 33.0), (31.0, 25.0), "31.0 us, here 33.0 us"),
        ((9.0, 30.0), (31.0, 25.0), None),
        ((9.0, 33.0), (8.0, 40.0), None),
    ],
)
def test_without_a_graph_the_longer_of_two_times_counts(
    own: tuple[float, float], other: tuple[float, float], lost: str | None
) -> None:
    run = example_run()
    run["cases"] = [case(CHAINED, "bf16", 1, own[0], [[1, 1]], host_us=own[1])]
    run["peers"] = [run["peers"][0] | {"operation": CHAINED, "p50_us": other[0], "host_us": other[1]}]
    found = [line for line in losses.peers_lines(run) if "without a graph" in line]
    assert len(found) == (lost is not None) and all(f"nccl ag rs bf16 at 1 token: {lost}." in line for line in found)


def test_peer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair comes before any operation alone; what cannot be captured is queued one by one."""
    done: list[str] = []
    places: list[str] = []

    class FakeLane:
        def run(self, work: Callable[[], object]) -> float:
            work()
            return 0.0

        def capture(self, work: Callable[[], object]) -> SimpleNamespace | None:
            work()
            graph = SimpleNamespace(replay=lambda: None, reset=lambda: done.append("reset"))
            return None if places[-1].startswith("fp8, 2048") else graph

        def time(self, samples: int, enqueue: Callable, *, chained: bool = False) -> tuple[list[float], bool]:
            enqueue(0)
            return [64e-6] * samples, True

        def host_time(self, enqueue: Callable) -> float:
            enqueue(0)
            return 7e-6

    def works() -> Any:
        for fmt, tokens in (("bf16", 1), ("fp8", 2048)):
            done.append(f"set up {fmt}")
            yield peer_worker.Work(fmt, tokens, lambda index: done.append("d"), lambda index: done.append("c"), 0.5)

    rows: list[dict] = []
    peer_worker.time_works(works, FakeLane(), rows.append, places.append)  # type: ignore[arg-type]
    assert [row["operation"] for row in rows] == ["pair", "pair_chained"] * 2 + ["dispatch", "combine"] * 2
    assert [row["graph"] for row in rows] == [True, False, False, False, True, True, False, False]
    assert rows[0]["p50_us"] == pytest.approx(64 / rounds_per_graph(1)) and rows[1]["p50_us"] == pytest.approx(64)
    assert [row.get("host_us") for row in rows] == [None, pytest.approx(7)] * 2 + [None] * 4
    assert rows[0]["samples"] == peer_worker.SAMPLES and rows[-1]["samples"] == peer_worker.LARGE_SAMPLES
    assert (
        done.count("d") == done.count("c") and done.count("reset") == 3 and "bf16, 1 tokens, pair, capturing" in places
    )


def test_worker_says_that_its_library_is_missing(tmp_path: Path) -> None:
    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("DeepEP is installed")
    command = peers.worker_command(("deepep_normal",), 0, 1, peers.free_port(), MAIN, (1,), tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == peers.NOT_PRESENT, done.stderr


def test_peers_route_as_the_measurement_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids of every rank and set; on the CPU here, where "cuda" is."""
    shape = Shape(64, 8, 2)
    sets = make_sets(shape.config("bf16", RANKS, 16), ["cpu"] * RANKS, 16)
    monkeypatch.setattr(measure_module, "set_generator", lambda device, *rest: set_generator("cpu", *rest))
    made, real, randn = peer_worker.Rank(1, RANKS, shape, [16]), torch.device, torch.randn
    monkeypatch.setattr(torch, "device", lambda name: real("cpu"))
    monkeypatch.setattr(torch, "randn", lambda *words, **options: randn(*words, **options | {"device": "cpu"}))
    for number, one in enumerate(made.inputs(16)):
        assert [ids.tolist() for ids in one.all_ids] == [own[number].topk_ids.tolist() for own in sets.batches]
        assert torch.equal(one.ids, one.all_ids[1])


def test_fp8_rows_of_peers() -> None:
    from perf import peer_libraries

    x = torch.randn(3, 256).bfloat16()
    rows, scales = peer_libraries.to_fp8(x)
    error = peer_worker.relative_error(peer_libraries.from_fp8(rows, scales), x)
    assert 0.02 < error < peers.MAX_ERROR["fp8"]


def test_versions_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert peer_worker.versions_of(["torch", "no_such_module"]) == {"nccl": "2.28.9", "torch": version("torch")}


def test_every_peer_has_an_implementation() -> None:
    from perf import peer_libraries

    assert all(callable(getattr(peer_libraries, name)) for name in peers.PEERS)
    assert set(plots.PEER_STYLES) == set(peers.PEERS)
    assert peer_worker.relative_error(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])) == 0.5


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_mlx5_stub_has_the_symbols(tmp_path: Path) -> None:
    library = nvshmem.ctypes.CDLL(str(nvshmem.compile_stub(tmp_path)))
    for words in nvshmem.MLX5_SYMBOLS.values():
        assert all(getattr(library, f"mlx5dv_{word}")() == -1 for word in words.split())


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
