"""Other libraries: their processes, what ends badly, how their times are taken."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep import torch_internals
from cute_ep.bench import measure as measure_module
from cute_ep.bench import timing
from cute_ep.bench.measure import make_sets, set_generator
from cute_ep.bench.timing import rounds_per_graph
from perf import nvshmem, peer_worker, peers, plots
from perf.cases import MAIN, Shape
from tests.perf.example import RANKS

# Other libraries


def test_without_gpus_every_peer_is_a_note() -> None:
    found = peers.run_peers(0)
    assert found["rows"] == [] and len(found["notes"]) == len(peers.PEERS)
    assert all("not present: needs at least 2 GPUs" in note for note in found["notes"])
    code = "import sys, perf.peers, perf.peer_worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


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
    monkeypatch.setattr(peers, "BUDGETS_S", dict.fromkeys(peers.PEERS, 4.0))  # python must start within less

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
    assert note == "nccl_ag_rs: stopped after 4 s with 1 results; rank 0, 1: pair, timing, in stuck (<string>:15)"
    assert "stuck" in (tmp_path / "logs" / "nccl_ag_rs-rank1.log").read_text()


def test_peers_that_do_not_start_are_all_noted(workers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    workers("stuck()")
    monkeypatch.setattr(peers, "START_S", 3.0)
    found, notes, rest = peers.run_workers(BOTH, 2, MAIN, (1,))
    assert found == [] and tuple(rest) == () and len(notes) == 2
    assert all("stopped after 3 s with 0 results; rank 0, 1: starting, in stuck" in note for note in notes)


def test_what_was_not_taken_as_the_rest_is_noted() -> None:
    row = {"peer": "nccl_ag_rs", "operation": "dispatch", "graph": True, "ahead": True, "error": None}
    row |= {"format": "bf16"}
    eager = row | {"operation": "pair_chained", "graph": False}
    assert peers.caveats([row, eager]) == []
    assert peers.caveats([row | {"format": "fp8", "error": 0.06}]) == []
    notes = peers.caveats([row | {"graph": False}, eager | {"ahead": False, "error": 0.06}])
    assert [note.split(": ")[1][:14] for note in notes] == ["1 of 2 results"] * 3


def test_the_budgets_of_all_peers_fit_into_the_suites() -> None:
    assert set(peers.BUDGETS_S) == set(peers.PEERS)
    assert sum(peers.BUDGETS_S.values()) + 2 * 10 <= 160


@pytest.mark.parametrize("chained", [False, True])
def test_a_lane_drops_bursts_that_began_early(monkeypatch: pytest.MonkeyPatch, chained: bool) -> None:
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
    monkeypatch.setattr(torch_internals, "sleep_on_gpu", sleep)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**fakes, synchronize=lambda: None))
    lane = peer_worker.Lane(SimpleNamespace(highest=lambda values: [float(value) for value in values]))
    seconds, ahead = lane.time(20, enqueue, chained=chained)
    assert ahead and seconds == pytest.approx([3e-3] * 20)
    assert len(sleeps) == 2 + 3 and sleeps[1] > 1.9 * sleeps[0] and sleeps[2] == sleeps[3]
    monkeypatch.setattr(Event, "query", lambda self: True)
    seconds, ahead = lane.time(3, enqueue, chained=chained)
    assert not ahead and seconds == pytest.approx([3e-3] * 3)


def test_host_time_of_a_peer_is_the_least_of_its_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the stream sleeps, which a first queue, that loads kernels, says how long; the least time of the slowest
    rank."""
    now, done = [0.0], []

    def enqueue(index: int) -> None:
        sleeps = [what for what in done if isinstance(what, float)]
        now[0] += (100 if len(sleeps) == 1 else 1 + len(sleeps)) * 1e-6
        done.append(index)

    fakes = {"stream": lambda stream: nullcontext(), "Stream": object, "synchronize": lambda: done.append("wait")}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**fakes))
    monkeypatch.setattr(torch_internals, "sleep_on_gpu", lambda cycles: done.append(float(cycles)))
    monkeypatch.setattr(peer_worker.time, "perf_counter", lambda: now[0])
    lane = peer_worker.Lane(SimpleNamespace(highest=lambda values: [2 * float(value) for value in values]))
    assert lane.host_time(enqueue) == pytest.approx(2 * 3e-6)
    seconds = peer_worker.SLEEP_S + 2 * 2 * timing.QUEUED * 100e-6
    sleeps = [0.0] + [float(int(seconds * peer_worker.CLOCK_HZ))] * timing.QUEUEINGS
    assert done == [what for sleep in sleeps for what in (sleep, *range(timing.QUEUED), "wait")]


def test_a_peers_pairs_are_measured_before_its_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
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
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
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


def test_fp8_rows_of_peers_are_within_their_error() -> None:
    from perf import peer_libraries

    x = torch.randn(3, 256).bfloat16()
    rows, scales = peer_libraries.to_fp8(x)
    error = peer_worker.relative_error(peer_libraries.from_fp8(rows, scales), x)
    assert 0.02 < error < peers.MAX_ERROR["fp8"]


def test_versions_of_peers_are_those_of_the_modules_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert peer_worker.versions_of(["torch", "no_such_module"]) == {"nccl": "2.28.9", "torch": version("torch")}


def test_every_peer_has_an_implementation() -> None:
    from perf import peer_libraries

    assert all(callable(getattr(peer_libraries, name)) for name in peers.PEERS)
    assert set(plots.PEER_STYLES) == set(peers.PEERS)
    assert peer_worker.relative_error(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])) == 0.5


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_the_mlx5_stub_has_the_symbols_that_nvshmem_asks_for(tmp_path: Path) -> None:
    library = nvshmem.ctypes.CDLL(str(nvshmem.compile_stub(tmp_path)))
    for words in nvshmem.MLX5_SYMBOLS.values():
        assert all(getattr(library, f"mlx5dv_{word}")() == -1 for word in words.split())
