"""How other libraries' times are taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep import torch_internals
from cute_ep.bench import measure as measure_module
from cute_ep.bench import timing
from cute_ep.bench.measure import make_sets, set_generator
from cute_ep.bench.timing import rounds_per_graph
from perf import peer_timing
from perf.cases import Shape
from tests.perf.example import RANKS


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
    lane = peer_timing.Lane(SimpleNamespace(highest=lambda values: [float(value) for value in values]))
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
    monkeypatch.setattr(peer_timing.time, "perf_counter", lambda: now[0])
    lane = peer_timing.Lane(SimpleNamespace(highest=lambda values: [2 * float(value) for value in values]))
    assert lane.host_time(enqueue) == pytest.approx(2 * 3e-6)
    seconds = peer_timing.SLEEP_S + 2 * 2 * timing.QUEUED * 100e-6
    sleeps = [0.0] + [float(int(seconds * peer_timing.CLOCK_HZ))] * timing.QUEUEINGS
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
            yield peer_timing.Work(fmt, tokens, lambda index: done.append("d"), lambda index: done.append("c"), 0.5)

    rows: list[dict] = []
    peer_timing.time_works(works, FakeLane(), rows.append, places.append)  # type: ignore[arg-type]
    assert [row["operation"] for row in rows] == ["pair", "pair_chained"] * 2 + ["dispatch", "combine"] * 2
    assert [row["graph"] for row in rows] == [True, False, False, False, True, True, False, False]
    assert rows[0]["p50_us"] == pytest.approx(64 / rounds_per_graph(1)) and rows[1]["p50_us"] == pytest.approx(64)
    assert [row.get("host_us") for row in rows] == [None, pytest.approx(7)] * 2 + [None] * 4
    assert rows[0]["samples"] == peer_timing.SAMPLES and rows[-1]["samples"] == peer_timing.LARGE_SAMPLES
    assert (
        done.count("d") == done.count("c") and done.count("reset") == 3 and "bf16, 1 tokens, pair, capturing" in places
    )


def test_what_allows_only_pairs_is_timed_as_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is called for the operations alone; results have what the work says about itself."""
    times = [1e-6]
    lane = SimpleNamespace(
        run=lambda work: work(),
        capture=lambda work: None,
        host_time=lambda enqueue: 0.0,
        time=lambda *a, **o: (times, True),
    )
    calls: list[str] = []

    def works() -> Any:
        about: dict[str, str | int] = {"how": "22 SMs", "sms": 22}
        there, back = (lambda index, name=name: calls.append(name) for name in "dc")
        yield peer_timing.Work("bf16", 1, there, back, alone=False, about=about)

    rows: list[dict] = []
    peer_timing.time_works(works, lane, rows.append, lambda what: None)  # type: ignore[arg-type]
    assert [(row["operation"], row["how"], row["sms"]) for row in rows] == [
        ("pair", "22 SMs", 22),
        ("pair_chained", "22 SMs", 22),
    ]
    assert calls == ["d", "c"] * peer_timing.SETS


def test_peers_route_as_the_measurement_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids of every rank and set; on the CPU here, where "cuda" is."""
    shape = Shape(64, 8, 2)
    sets = make_sets(shape.config("bf16", RANKS, 16), ["cpu"] * RANKS, 16)
    monkeypatch.setattr(measure_module, "set_generator", lambda device, *rest: set_generator("cpu", *rest))
    made, real, randn = peer_timing.Rank(1, RANKS, shape, [16]), torch.device, torch.randn
    monkeypatch.setattr(torch, "device", lambda name: real("cpu"))
    monkeypatch.setattr(torch, "randn", lambda *words, **options: randn(*words, **options | {"device": "cpu"}))
    for number, one in enumerate(made.inputs(16)):
        assert [ids.tolist() for ids in one.all_ids] == [own[number].topk_ids.tolist() for own in sets.batches]
        assert torch.equal(one.ids, one.all_ids[1])


def test_relative_errors_count_small_values_as_a_fiftieth() -> None:
    found = peer_timing.relative_error(torch.tensor([1.0, 0.01]), torch.tensor([2.0, 0.0]))
    assert found == 0.5
