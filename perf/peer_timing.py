"""How one rank of another library is timed.

Samples are what ours are (`cute_ep.bench.timing`): graphs of several rounds where the library can be captured, without
host work inside the measured time; the result of a sample is its slowest rank.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from perf.cases import Shape
from perf.peer_list import CHAINED

if TYPE_CHECKING:
    import torch

SETS = 4
SAMPLES, LARGE_SAMPLES = 200, 40
BURST = 10
"""Samples queued at once, a graph or one round each: far from the about 1000 queue entries at which a launch blocks."""
WARM_UP = 4
MOST_LATE = 5
SLEEP_S, MOST_SLEEP_S = 2e-3, 0.5
CLOCK_HZ = 2e9
"""No lower than any GPU's clock, so that a sleep is no shorter than it should be."""


@dataclass
class Inputs:
    """One input set: x [T, hidden], ids and weights [T, K] of this rank, and all ranks' ids [R, T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    all_ids: torch.Tensor


@dataclass
class Work:
    """One format and batch size of a peer.

    Attributes:
        format, tokens: which.
        dispatch, combine: take the index of an input set; a combine follows a dispatch of the same set.
        error: the largest relative error of a round, where it was looked at.
        alone: whether dispatches may follow one another, and combines.
        about: what else its results say: "how", for whoever reads them, and "sms".
    """

    format: str
    tokens: int
    dispatch: Callable[[int], object]
    combine: Callable[[int], object]
    error: float | None = None
    alone: bool = True
    about: dict[str, str | int] = field(default_factory=dict)


@dataclass
class Rank:
    """This process and the problem."""

    rank: int
    world: int
    shape: Shape
    tokens: list[int]

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.shape.num_experts // self.world

    def inputs(self, tokens: int) -> list[Inputs]:
        """SETS input sets with the uniform routing that `cute_ep.bench.measure.make_sets` draws on such GPUs; every
        rank makes all ranks' routing from its seed."""
        import torch

        from cute_ep.bench.measure import set_generator
        from cute_ep.testing.workloads import ROUTINGS

        cfg = self.shape.config("bf16", self.world, tokens)
        found = []
        for number in range(SETS):
            with torch.device("cuda"):
                every = [
                    ROUTINGS["uniform"](cfg, tokens, set_generator("cuda", rank, number)) for rank in range(self.world)
                ]
            x = torch.randn(tokens, self.shape.hidden, dtype=torch.bfloat16, device="cuda")
            weights = torch.randn(tokens, self.shape.top_k, device="cuda").softmax(dim=1)
            found.append(Inputs(x, every[self.rank].contiguous(), weights, torch.stack(every)))
        return found


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error against |wanted|, which counts as at least 0.02."""
    difference = (result.float() - wanted.float()).abs() / wanted.float().abs().clamp(min=0.02)
    return float(difference.max())


class Host:
    """What the processes agree on without their GPUs, so it waits for no stream."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo")

    def highest(self, values: Sequence[float]) -> list[float]:
        """The highest of all ranks' values, one by one."""
        import torch
        import torch.distributed as dist

        agreed = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        return agreed.tolist()


class Lane:
    """A stream that is timed together with those of the other ranks.

    A burst of samples is queued while the stream sleeps, so no host work is inside the measured time. The sleep ends by
    itself. The gate of `cute_ep.bench.timing` waits for the host instead, and would for ever when the host waits for
    the device while it queues, as these libraries may: for a kernel to be loaded, memory, or room for a launch.
    """

    def __init__(self, host: Host) -> None:
        import torch

        self.stream = torch.cuda.Stream()
        self._host = host

    def run(self, work: Callable[[], object]) -> float:
        """Run `work` on the stream until it is done; seconds that queueing it took."""
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(self.stream):
            work()
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        return took

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """`work` as a graph; None when it cannot be captured on some rank."""
        import torch

        torch.cuda.synchronize()
        graph, failed = torch.cuda.CUDAGraph(), False
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError:
            traceback.print_exc()
            failed = True
        return None if self._host.highest([failed])[0] else graph

    def time(
        self, samples: int, enqueue: Callable[[int], object], *, chained: bool = False
    ) -> tuple[list[float], bool]:
        """Seconds of the slowest rank of each sample, and whether all launches were queued before the first began.

        A chained sample lasts until the next one begins. The first samples of a burst bring the ranks into step and are
        dropped, and so are up to MOST_LATE bursts that began before all launches were queued.
        """
        from cute_ep.bench.timing import IN_STEP

        self.run(lambda: enqueue(0))
        queueing = self.run(lambda: [enqueue(index) for index in range(WARM_UP)]) / WARM_UP
        (longest,) = self._host.highest([queueing])
        sleep = SLEEP_S + 2 * BURST * longest
        seconds: list[float] = []
        late = 0
        while len(seconds) < samples:
            count = min(BURST, IN_STEP + samples - len(seconds))
            spans, ahead = self._burst(count, enqueue, min(sleep, MOST_SLEEP_S), chained)
            if self._host.highest([not ahead])[0]:  # also makes the ranks begin the next one together
                late, sleep = late + 1, 2 * sleep
                if late <= MOST_LATE:
                    continue
            seconds += spans[IN_STEP:]
        return self._host.highest(seconds), late <= MOST_LATE

    def host_time(self, enqueue: Callable[[int], object]) -> float:
        """Seconds that queueing a round takes on the slowest rank, while the streams sleep; the least of QUEUEINGS."""
        import torch

        from cute_ep.bench.timing import QUEUED, QUEUEINGS
        from cute_ep.torch_internals import sleep_on_gpu

        def queue(sleep: float) -> float:
            with torch.cuda.stream(self.stream):
                sleep_on_gpu(int(sleep * CLOCK_HZ))
                start = time.perf_counter()
                for index in range(QUEUED):
                    enqueue(index)
                took = time.perf_counter() - start
            torch.cuda.synchronize()
            return took

        (longest,) = self._host.highest([queue(0.0)])
        sleep = min(SLEEP_S + 2 * longest, MOST_SLEEP_S)
        (slowest,) = self._host.highest([min(queue(sleep) for _ in range(QUEUEINGS))])
        return slowest / QUEUED

    def _burst(
        self, count: int, enqueue: Callable[[int], object], sleep: float, chained: bool
    ) -> tuple[list[float], bool]:
        import torch

        from cute_ep.torch_internals import sleep_on_gpu

        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1 if chained else 2 * count)]
        spans = list(pairwise(events)) if chained else list(zip(events[::2], events[1::2], strict=True))
        with torch.cuda.stream(self.stream):
            sleep_on_gpu(int(sleep * CLOCK_HZ))
            for index, (start, stop) in enumerate(spans):
                if index == 0 or not chained:
                    start.record()
                enqueue(index)
                stop.record()
            ahead = not events[0].query()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in spans], ahead


def one_round(work: Work, operation: str, index: int) -> None:
    """Queue a dispatch, a combine or both of the input set whose turn it is."""
    if operation != "combine":
        work.dispatch(index % SETS)
    if operation != "dispatch":
        work.combine(index % SETS)


def time_works(
    works: Callable[[], Iterator[Work]], lane: Lane, emit: Callable[[dict], None], at: Callable[[str], None]
) -> None:
    """Time all works: first the pairs of all of them, then dispatch and combine alone, which some may not allow.

    Args:
        works: generates what is to be timed.
        lane: where it runs.
        emit: gets every result, as `perf.peers.run_peers` describes it but for the peer.
        at: is told what is being done.
    """
    for operations in (("pair", CHAINED), ("dispatch", "combine")):
        at(f"setting up for {operations[0]}")
        for work in works():
            if not work.alone and CHAINED not in operations:
                continue
            about = f"{work.format}, {work.tokens} tokens"
            at(f"{about}, first pairs")
            for index in range(SETS):
                lane.run(partial(one_round, work, "pair", index))
            for operation in operations:
                emit(
                    time_operation(work, operation, lane, lambda what, start=f"{about}, {operation}": at(start + what))
                )
            at("setting up for the next")


def time_operation(work: Work, operation: str, lane: Lane, at: Callable[[str], None]) -> dict:
    """One result."""
    from cute_ep.bench.timing import LARGE_TOKENS, rounds_per_graph, summary

    # an even number: DeepEP's low-latency calls alternate between two buffers
    rounds, samples = rounds_per_graph(work.tokens), LARGE_SAMPLES if work.tokens >= LARGE_TOKENS else SAMPLES
    enqueue, graph = partial(one_round, work, operation), None
    if operation != CHAINED:
        at(", capturing")
        graph = lane.capture(lambda: [enqueue(index) for index in range(rounds)])
    at(", timing")
    if graph is None:
        seconds, ahead = lane.time(samples, enqueue, chained=operation == CHAINED)
    else:
        spans, ahead = lane.time(samples, lambda index: graph.replay())
        seconds = [span / rounds for span in spans]
        graph.reset()
    about = {"format": work.format, "tokens": work.tokens, "operation": operation, "error": work.error}
    host = {"host_us": 1e6 * lane.host_time(enqueue)} if operation == CHAINED else {}
    return about | work.about | {"graph": graph is not None, "ahead": ahead} | summary(seconds) | host
