"""How times are taken, on clocks that tests set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cute_ep.api.errors import EPError
from cute_ep.bench import timing
from cute_ep.bench.timing import Runner, percentile, summary


def test_percentiles_are_samples_and_a_summary_has_them() -> None:
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


def test_a_gate_opens_by_itself_after_its_time_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
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
