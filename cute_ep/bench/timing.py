"""How a time is taken on this process's GPUs.

Every lane (a rank, or a GPU) has a stream and a host thread of its own. A burst of samples is queued on all streams
behind a gate, a word in host memory that the streams wait for; the gate opens when all lanes have queued everything,
so no host work is inside the measured time. A lane's time of a sample is the time between two events around it; the
first samples of a burst only bring the lanes into step and are dropped. The result of a sample is its slowest lane.

Events between launches add to a round and delay ranks against each other, so a sample is a CUDA graph of several
rounds wherever a single operation is asked for. Dispatch of 1 BF16 token of 7168 a rank, 2026-11-21: 15.2 us by events
and 11.6 us in a graph on two H200s, 37 us and 16 us with 4 virtual ranks on one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import TracebackType

import torch

from cute_ep.api.errors import EPError
from cute_ep.runtime.driver import HostMemory
from cute_ep.runtime.driver_calls import hold_stream

SAMPLES = 200
BURST = 32
"""Samples behind one gate: a graph and two events each, far from the about 1000 queue entries at which a launch would
block."""
QUEUED, QUEUEINGS = 10, 60
"""Rounds that are queued at once to find how long that takes the host, and how often."""
IN_STEP = 2
"""Samples at the start of a burst that are dropped."""
GATE_TIMEOUT_S = 60.0
PERCENTILES = (50, 95, 99)
LARGE_TOKENS = 1024
"""From this many tokens on a graph has fewer rounds, and from twice as many there are fewer samples."""
ROUNDS, LARGE_ROUNDS = 32, 4


def rounds_per_graph(tokens: int) -> int:
    """Rounds of one graph, even. From the last round of a graph to the first of the next 8 us pass (H200, 2026-11-21):
    0.3 us of each of ROUNDS rounds, which as many layers of a model in one graph would pay too."""
    return ROUNDS if tokens < LARGE_TOKENS else LARGE_ROUNDS


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """ "samples", "p50_us", "p95_us", "p99_us", "mean_us" and "min_us" of times in seconds."""
    return {
        "samples": len(seconds),
        **{f"p{percent}_us": 1e6 * percentile(seconds, percent) for percent in PERCENTILES},
        "mean_us": 1e6 * sum(seconds) / len(seconds),
        "min_us": 1e6 * min(seconds),
    }


class Gate:
    """Streams that `hold` has stopped go on when the host calls `open`, or after GATE_TIMEOUT_S.

    forced: whether the time was over: then what was measured behind the gate includes the host's work.
    """

    def __init__(self) -> None:
        self._memory = HostMemory(1)
        self._turn = 0
        self._timer: threading.Timer | None = None
        self.forced = False

    def close(self) -> None:
        """Begin a new turn."""
        self._turn += 1
        self.forced = False
        self._timer = threading.Timer(GATE_TIMEOUT_S, self._force)
        self._timer.daemon = True
        self._timer.start()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for this turn's `open`."""
        hold_stream(stream.cuda_stream, self._memory.address, self._turn)

    def open(self) -> None:
        """Release every stream that holds in this turn."""
        if self._timer is not None:
            self._timer.cancel()
        self._memory.words[0] = self._turn

    def _force(self) -> None:
        self.forced = True
        self.open()

    def free(self) -> None:
        """Release the memory; opens first, so that no stream is left waiting."""
        self.open()
        torch.cuda.synchronize()
        self._memory.free()


class Runner:
    """Lanes that work at the same time.

    Args:
        streams: one stream (not a default one) a lane; several may be on one device.
        finish: called after every burst has run; raises what went wrong on the devices.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream], finish: Callable[[], None] | None = None) -> None:
        self.streams, self._finish = list(streams), finish
        self._gate = Gate()
        self._pool = ThreadPoolExecutor(len(self.streams))

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.open()
        for stream in self.streams:
            stream.synchronize()
        self._pool.shutdown()
        self._gate.free()

    def on_all(self, work: Callable[[int], None], after: Callable[[], None] | None = None) -> None:
        """Queue `work(lane)` of every lane, call `after` once all are queued, wait for all; first error wins."""
        for stream in self.streams:
            torch.cuda.synchronize(stream.device)

        def run(lane: int) -> None:
            with torch.cuda.stream(self.streams[lane]):
                self.streams[lane].query()  # a runtime call: driver calls need the context that it makes current
                work(lane)

        futures = [self._pool.submit(run, lane) for lane in range(len(self.streams))]
        try:
            for future in futures:
                future.result()
        finally:
            if after is not None:
                after()
        self._settle()

    def _settle(self) -> None:
        """Wait for all lanes, and raise what went wrong on the devices."""
        for stream in self.streams:
            stream.synchronize()
        if self._finish is not None:
            self._finish()

    def capture(self, work: Callable[[int], None]) -> list[torch.cuda.CUDAGraph]:
        """`work(lane)` of every lane as a graph. Capturing runs nothing, so no rank waits for another."""
        graphs = []
        for lane, stream in enumerate(self.streams):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(stream.device)
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work(lane)
                finally:
                    graph.capture_end()
            graphs.append(graph)
        return graphs

    def time(self, samples: int, enqueue: Callable[[int, int], None], *, chained: bool = False) -> list[float]:
        """Seconds of the slowest lane of each sample; `enqueue(lane, index)` queues one.

        A chained sample lasts until the next one begins, with one event between two samples instead of two. The first
        sample is queued once before any gate closes: a kernel's first launch loads it, and a load waits for the device
        to be idle, so behind a gate for ever.
        """
        self.on_all(lambda lane: enqueue(lane, 0))
        spans: list[float] = []
        while len(spans) < samples:
            count = min(BURST, IN_STEP + samples - len(spans))
            spans += self._burst(range(len(spans), len(spans) + count), enqueue, chained)
        return spans

    def time_graphs(self, samples: int, work: Callable[[int, int], None], rounds: int) -> list[float]:
        """Seconds of a round of the slowest lane: `work(lane, index)` of `rounds` rounds is captured into a graph of
        each lane; a sample is a graph's time / rounds."""

        def all_rounds(lane: int) -> None:
            for index in range(rounds):
                work(lane, index)

        graphs = self.capture(all_rounds)
        self.on_all(lambda lane: graphs[lane].replay())
        return [span / rounds for span in self.time(samples, lambda lane, index: graphs[lane].replay())]

    def host_time(self, enqueue: Callable[[int, int], None]) -> float:
        """Seconds that a thread takes to queue a round, on the lane where it takes longest; the least of QUEUEINGS.

        Lanes are queued one after the other while all streams hold, so neither a thread nor a GPU is waited for."""
        fastest = [math.inf] * len(self.streams)
        for _ in range(QUEUEINGS):
            self._gate.close()
            try:
                for lane, stream in enumerate(self.streams):
                    with torch.cuda.stream(stream):
                        self._gate.hold(stream)
                        start = time.perf_counter()
                        for index in range(QUEUED):
                            enqueue(lane, index)
                        fastest[lane] = min(fastest[lane], (time.perf_counter() - start) / QUEUED)
            finally:
                self._gate.open()
            self._settle()
        return max(fastest)

    def _burst(self, indices: range, enqueue: Callable[[int, int], None], chained: bool) -> list[float]:
        def event() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True)

        if chained:
            spans = [list(pairwise([event() for _ in range(len(indices) + 1)])) for _ in self.streams]
        else:
            spans = [[(event(), event()) for _ in indices] for _ in self.streams]
        self._gate.close()

        def queue(lane: int) -> None:
            self._gate.hold(self.streams[lane])
            for index, (start, stop) in zip(indices, spans[lane], strict=True):
                if index == indices[0] or not chained:
                    start.record()
                enqueue(lane, index)
                stop.record()

        self.on_all(queue, after=self._gate.open)
        if self._gate.forced:
            raise EPError(f"timing: the launches of a burst were not queued within {GATE_TIMEOUT_S:.0f} s")
        samples = list(zip(*spans, strict=True))[IN_STEP:]
        return [max(start.elapsed_time(stop) for start, stop in lanes) / 1e3 for lanes in samples]
