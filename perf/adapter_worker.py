"""One rank of `perf.adapters`: `python -m perf.adapter_worker`. It times calls of adapters and, right behind each, what
a communicator does in its place.

Calls that can be captured are timed as `perf.peer_timing` times other libraries, in CUDA graphs. Where the host waits
for the GPU, and on the CPU, a time is the host's, from before the call to when the device has done its work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from cute_ep.bench.timing import IN_STEP, LARGE_TOKENS, percentile, rounds_per_graph
from perf import adapter_works, framework_works
from perf.adapter_problem import Rank, Work
from perf.adapters import ADAPTERS
from perf.peer_timing import BURST, Host, Lane
from perf.peer_worker import arguments, run, shape_of, told
from perf.peers import NOT_PRESENT

Works = Callable[[Rank], Iterator[Work]]
WORKS: dict[str, Works] = {
    name: work for module in (adapter_works, framework_works) for name, work in vars(module).items() if name in ADAPTERS
}
"""By adapter, the function that yields what is timed."""
SAMPLES, LARGE_SAMPLES, CPU_SAMPLES = 100, 40, 6
GRAPH, QUEUED, WAITED = "graph", "queued", "waited"
"""How a time was taken: of a graph, of calls that were queued before the first began, of calls waited for."""


class Agrees(Protocol):
    """`Host`, as far as it is used here."""

    def highest(self, values: Sequence[float]) -> list[float]:
        """The highest of all ranks' values, one by one."""


class Clock:
    """Medians of a call's times in seconds, each of the slowest rank. `lane`: None on the CPU."""

    def __init__(self, host: Agrees, lane: Lane | None) -> None:
        self.host, self.lane = host, lane

    def on_stream(self) -> AbstractContextManager:
        """Where calls are made."""
        return nullcontext() if self.lane is None else torch.cuda.stream(self.lane.stream)

    def finish(self) -> None:
        """Wait for the device."""
        if self.lane is not None:
            self.lane.stream.synchronize()

    def device_time(self, call: Callable[[], object], tokens: int, wanted: str = GRAPH) -> tuple[float, str]:
        """(seconds, GRAPH or QUEUED) of a call that does not wait; `wanted`, unless that is a graph and there can be
        none."""
        assert self.lane is not None
        rounds, samples = rounds_per_graph(tokens), self.samples(tokens)
        graph = self.lane.capture(lambda: [call() for _ in range(rounds)]) if wanted == GRAPH else None
        if graph is None:
            return percentile(self.lane.time(samples, lambda index: call())[0], 50), QUEUED
        spans, _ = self.lane.time(samples, lambda index: graph.replay())
        graph.reset()
        return percentile(spans, 50) / rounds, GRAPH

    def waited(self, call: Callable[[], object], tokens: int) -> float:
        """Seconds from before the call to the end of its work."""
        return self._host_clock(call, tokens, each=True)

    def host_time(self, call: Callable[[], object], tokens: int) -> float:
        """Seconds until the call returns, its work queued."""
        return self._host_clock(call, tokens, each=False)

    def samples(self, tokens: int) -> int:
        """How many there are."""
        return CPU_SAMPLES if self.lane is None else LARGE_SAMPLES if tokens >= LARGE_TOKENS else SAMPLES

    def _host_clock(self, call: Callable[[], object], tokens: int, *, each: bool) -> float:
        """Calls in bursts, of which the first only bring the ranks into step; `each`: wait for each of them."""
        spans: list[float] = []
        while len(spans) < self.samples(tokens):
            self.finish()
            self.host.highest([0.0])
            burst = []
            with self.on_stream():
                for _ in range(BURST):
                    start = time.perf_counter()
                    call()
                    if each:
                        self.finish()
                    burst.append(time.perf_counter() - start)
            spans += burst[IN_STEP:]
        self.finish()
        return percentile(self.host.highest(spans), 50)


def time_work(work: Work, clock: Clock) -> Iterator[dict]:
    """A result for each operation of a work, as `perf.adapters` describes it."""
    sides = {prefix: calls for prefix, calls in (("", work.calls), ("native_", work.native)) if calls}
    before: list[str] = []
    for operation in work.calls:
        with clock.on_stream():
            for name in (*before, operation):  # what was captured has no memory any more
                for calls in sides.values():
                    calls[name]()
        clock.finish()
        how = WAITED if clock.lane is None or operation in work.waits else GRAPH
        measured = {}
        for prefix, calls in sides.items():
            one = calls[operation]
            if how == WAITED:
                seconds = clock.waited(one, work.tokens)
            else:
                seconds, how = clock.device_time(one, work.tokens, how)
            with clock.on_stream():
                one()
            host = clock.host_time(one, work.tokens)
            measured |= {f"{prefix}p50_us": 1e6 * seconds, f"{prefix}host_us": 1e6 * host}
        about = {"format": work.format, "tokens": work.tokens, "rows": work.rows, "operation": operation, "how": how}
        yield about | ({"about": work.about} if work.about else {}) | measured
        before.append(operation)


def measure(works: Works, me: Rank, clock: Clock, emit: Callable[[dict], None]) -> None:
    """All results of an adapter."""
    with torch.no_grad(), clock.on_stream():
        for work in works(me):
            for row in time_work(work, clock):
                emit(row)
            del work


def main(every: Mapping[str, Works] = WORKS) -> int:
    """Run one rank, with what is timed by name; rank 0 appends the results."""
    args = arguments()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", args.rank) if gpu else torch.device("cpu")
    where = {"init_method": f"tcp://127.0.0.1:{args.port}", "rank": args.rank, "world_size": args.world}
    if gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", **where, device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **where)
    host = Host()
    clock = Clock(host, Lane(host) if gpu else None)
    for name in args.peers.split(","):
        at, emit = told(args, name)
        at("running")
        me = Rank(shape_of(args.shape), [int(word) for word in args.tokens.split(",")], device)
        try:
            measure(every[name], me, clock, emit)
        except ImportError as error:  # on all ranks alike: none has begun
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return NOT_PRESENT
        at("done")
        me.close()
        if gpu:
            torch.cuda.empty_cache()
    host.highest([0.0])
    return 0


if __name__ == "__main__":
    run(main)
