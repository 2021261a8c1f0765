"""Measured times of dispatch and combine on this process's GPUs, beside copy ceilings of the same run.

How a time is taken. Every rank has a host thread of its own (one thread for all ranks would launch them one after
the other and charge that to the kernels that wait). A burst of rounds is queued on all streams behind a gate, a word
in host memory that the streams wait for; the gate opens when all ranks have queued everything, so no host
work is inside the measured time. A rank's time of a round is the time between two events around its launch; the first
rounds of a burst only bring the ranks into step and are dropped. The result of a round is its slowest rank.

Inputs and routing rotate from round to round through the sets that the caller gives.

For small batches take the graph modes: events between launches add to a round and delay ranks against each other.
Dispatch of 1 BF16 token of 7168 a rank, 2026-11-21: 15.2 us by events and 11.6 us in a graph on two H200s, 37 us and
16 us with 4 virtual ranks on one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from cuda.bindings import driver

from cute_ep.communicator import Communicator
from cute_ep.config import EPConfig
from cute_ep.dispatched import DispatchBuffers, Dispatched
from cute_ep.driver import HostMemory, check, enable_peer_access
from cute_ep.errors import EPInputError
from cute_ep.traffic import Traffic, add_traffic, count_routing, traffic
from cute_ep.workloads import RankInputs

GRAPH = "_graph"
OPERATIONS = ("dispatch", "combine_exact", "combine_partial", "pair_exact", "pair_partial")
MODES = (*OPERATIONS[:3], *(operation + GRAPH for operation in OPERATIONS))
"""What `measure_case` times: one launch a round, or rounds in a CUDA graph; a pair is dispatch, then combine."""
ROUNDS_PER_GRAPH = 8
MIN_REPLAYS = 20
"""Graphs that are timed at least, whatever the number of iterations."""
MIN_SETS = 4
BURST = 32
"""Rounds behind one gate: three queue entries each, far from the about 1000 at which a launch would block."""
IN_STEP = 2
"""Rounds at the start of a burst that are dropped."""
COPY_BYTES = 1 << 30
COPY_REPEATS = 10
GATE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ceilings:
    """Copy rates in bytes per second.

    Attributes:
        push: one device's copy to another device, all devices at once in a ring; on one GPU, a copy within it.
            Bytes count once.
        memory: a copy within one device, bytes read plus bytes written.
    """

    push: float
    memory: float


@dataclass
class _Batch:
    """One input set of one rank, on its device."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    router_weights: torch.Tensor
    buffers: DispatchBuffers
    rows: torch.Tensor
    result: torch.Tensor
    dispatched: Dispatched | None = None


def measure_ceilings(devices: Sequence[str]) -> Ceilings:
    """Copy rates of the named GPUs with torch's `copy_` of 1 GiB; the slowest device's median of 10 copies."""
    names = list(dict.fromkeys(devices))
    sources = [torch.full((COPY_BYTES,), 1 + index, dtype=torch.uint8, device=name) for index, name in enumerate(names)]
    within = [torch.empty_like(source) for source in sources]
    memory = _copy_rates(sources, within)
    if len(names) == 1:
        return Ceilings(push=memory, memory=2 * memory)
    for source in sources:
        for target in within:
            enable_peer_access(source.device.index, target.device.index)
    return Ceilings(push=_copy_rates(sources, within[1:] + within[:1]), memory=2 * memory)


def _copy_rates(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> float:
    """Bytes per second of the slowest of copies that run at the same time, counted once."""
    seconds: list[list[float]] = [[] for _ in sources]
    for repeat in range(COPY_REPEATS + 1):
        spans = []
        for source, target in zip(sources, targets, strict=True):
            with torch.cuda.device(source.device):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                target.copy_(source, non_blocking=True)
                stop.record()
                spans.append((start, stop))
        for source in sources:
            torch.cuda.synchronize(source.device)
        if repeat:
            for rank, (start, stop) in enumerate(spans):
                seconds[rank].append(start.elapsed_time(stop) / 1e3)
    return sources[0].nbytes / max(percentile(times, 50) for times in seconds)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def case_traffic(cfg: EPConfig, inputs: Sequence[RankInputs], mode: str) -> Traffic:
    """Bytes of one round in a mode out of MODES."""
    counts = count_routing(cfg, [one.topk_ids for one in inputs])
    operation = mode.removesuffix(GRAPH)
    if operation.startswith("pair_"):
        combine = traffic(cfg, counts, operation.replace("pair", "combine"))
        return add_traffic(traffic(cfg, counts, "dispatch"), combine)
    return traffic(cfg, counts, operation)


def measure_case(
    communicators: Sequence[Communicator], inputs_sets: Sequence[Sequence[RankInputs]], mode: str, iterations: int
) -> dict:
    """Time one operation on all ranks of this process.

    Args:
        communicators: all ranks, in order; the calls run on each rank's `stream`.
        inputs_sets: at least MIN_SETS times all ranks' inputs, on the CPU; round i uses set i % len.
        mode: out of MODES.
        iterations: rounds that are measured (graph modes: at least as many, in 20 or more graphs of 8).

    Returns:
        "mode", "tokens" (most of a rank), "iterations"; "p50_us", "p95_us", "p99_us", "mean_us" of the slowest
        rank (graph modes: a graph's time / 8); bytes of an average round: "remote_bytes" (to other
        ranks), "logical_bytes" (one message per (token, expert)), "link_bytes" (busiest device, one way) and
        "memory_bytes" (busiest device).

    Raises:
        EPInputError: an unknown mode or too few sets.
        EPTimeout, EPError: as the kernels or the driver report.
    """
    if mode not in MODES:
        raise EPInputError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
    if len(inputs_sets) < MIN_SETS:
        raise EPInputError(f"len(inputs_sets) = {len(inputs_sets)}: must be at least {MIN_SETS}")
    cfg = communicators[0].cfg
    batches = [[_place(communicators, inputs, rank) for inputs in inputs_sets] for rank in range(cfg.world_size)]
    runner = _Runner(communicators)

    operation, sets = mode.removesuffix(GRAPH), len(inputs_sets)

    def one_round(rank: int, index: int) -> None:
        _run(communicators[rank], batches[rank][index % sets], operation)

    def warm_up(rank: int) -> None:
        for batch in batches[rank]:
            _run(communicators[rank], batch, "pair_exact")
            _run(communicators[rank], batch, "combine_partial")

    runner.on_all(warm_up)
    if mode.endswith(GRAPH):
        graphs = [_capture(c, own, operation) for c, own in zip(communicators, batches, strict=True)]
        runner.on_all(lambda rank: graphs[rank].replay())
        replays = max(MIN_REPLAYS, -(-iterations // ROUNDS_PER_GRAPH))
        spans = runner.time(replays, lambda rank, index: graphs[rank].replay())
        spans = [span / ROUNDS_PER_GRAPH for span in spans]
    else:
        spans = runner.time(iterations, one_round)
    return {
        "mode": mode,
        "tokens": max(one.x.shape[0] for one in inputs_sets[0]),
        "iterations": len(spans) * (ROUNDS_PER_GRAPH if mode.endswith(GRAPH) else 1),
        **{f"p{percent}_us": 1e6 * percentile(spans, percent) for percent in (50, 95, 99)},
        "mean_us": 1e6 * sum(spans) / len(spans),
        **_average_bytes(communicators, inputs_sets, mode),
    }


def against_ceilings(case: dict, ceilings: Ceilings) -> dict:
    """Floors of a case's bytes at the measured copy rates, in us, and p50 over the larger of the two."""
    link, memory = 1e6 * case["link_bytes"] / ceilings.push, 1e6 * case["memory_bytes"] / ceilings.memory
    floor = max(link, memory)
    return {"link_floor_us": link, "memory_floor_us": memory, "ratio": case["p50_us"] / floor if floor else None}


def _average_bytes(communicators: Sequence[Communicator], inputs_sets: Sequence[Sequence[RankInputs]], mode: str):
    devices = [str(communicator.device) for communicator in communicators]
    every = [case_traffic(communicators[0].cfg, inputs, mode) for inputs in inputs_sets]

    def mean(measure: Callable[[Traffic], int]) -> int:
        return round(sum(measure(one) for one in every) / len(every))

    return {
        "remote_bytes": mean(lambda one: one.remote_bytes),
        "logical_bytes": mean(lambda one: one.logical),
        "link_bytes": mean(lambda one: one.busiest_link(devices)),
        "memory_bytes": mean(lambda one: one.busiest_memory(devices)),
    }


def _place(communicators: Sequence[Communicator], inputs: Sequence[RankInputs], rank: int) -> _Batch:
    """One rank's arguments and outputs on its device, with room for exactly the rows that will arrive."""
    communicator, one = communicators[rank], inputs[rank]
    cfg, device = communicator.cfg, communicator.device
    rows = max(1, count_routing(cfg, [each.topk_ids for each in inputs]).rows_received(rank))
    generator = torch.Generator(device=device).manual_seed(rank)
    return _Batch(
        one.x.to(device),
        one.topk_ids.to(device),
        one.router_weights.to(device),
        communicator.allocate(rows),
        torch.randn(rows, cfg.hidden, dtype=torch.bfloat16, device=device, generator=generator),
        torch.empty(one.x.shape, dtype=torch.bfloat16, device=device),
    )


def _run(communicator: Communicator, batch: _Batch, operation: str) -> None:
    """Enqueue one of OPERATIONS; a combine needs an earlier dispatch of the same batch."""
    name, _, kind = operation.partition("_")
    if name != "combine":
        batch.dispatched = communicator.dispatch(batch.x, batch.topk_ids, batch.router_weights, out=batch.buffers)
    if name != "dispatch":
        assert batch.dispatched is not None
        communicator.combine(batch.rows, batch.dispatched, mode=kind, out=batch.result)


def _capture(communicator: Communicator, batches: Sequence[_Batch], operation: str) -> torch.cuda.CUDAGraph:
    """ROUNDS_PER_GRAPH rounds of one rank; capturing runs nothing, so no rank waits."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(communicator.device), torch.cuda.graph(graph, stream=communicator.stream):
        for index in range(ROUNDS_PER_GRAPH):
            _run(communicator, batches[index % len(batches)], operation)
    return graph


class _Runner:
    """Runs a function of every rank in a thread of its own, on the rank's device and stream."""

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self.communicators = communicators

    def on_all(self, work: Callable[[int], None], after: Callable[[], None] | None = None) -> None:
        """Queue `work(rank)` of every rank, call `after` once all are queued, wait for all; first error wins."""
        for communicator in self.communicators:
            torch.cuda.synchronize(communicator.device)

        def run(rank: int) -> None:
            communicator = self.communicators[rank]
            with torch.cuda.device(communicator.device), torch.cuda.stream(communicator.stream):
                work(rank)

        with ThreadPoolExecutor(len(self.communicators)) as pool:
            futures = [pool.submit(run, rank) for rank in range(len(self.communicators))]
            try:
                for future in futures:
                    future.result()
            finally:
                if after is not None:
                    after()
        for communicator in self.communicators:
            communicator.stream.synchronize()
            communicator.synchronize()

    def time(self, rounds: int, enqueue: Callable[[int, int], None]) -> list[float]:
        """Seconds of the slowest rank of each of `rounds` rounds; `enqueue(rank, index)` queues one."""
        gate = _Gate()
        spans: list[float] = []
        try:
            while len(spans) < rounds:
                count = min(BURST, IN_STEP + rounds - len(spans))
                spans += self._burst(gate, range(len(spans), len(spans) + count), enqueue)
        finally:
            gate.free()
        return spans

    def _burst(self, gate: _Gate, indices: range, enqueue: Callable[[int, int], None]) -> list[float]:
        events = [
            [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in indices] for _ in self.communicators
        ]
        gate.close()

        def queue(rank: int) -> None:
            gate.hold(self.communicators[rank].stream)
            for index, (start, stop) in zip(indices, events[rank], strict=True):
                start.record()
                enqueue(rank, index)
                stop.record()

        self.on_all(queue, after=gate.open)
        rounds = list(zip(*events, strict=True))[IN_STEP:]
        return [max(start.elapsed_time(stop) for start, stop in ranks) / 1e3 for ranks in rounds]


class _Gate:
    """Streams that `hold` has stopped go on when the host calls `open`, or after GATE_TIMEOUT_S."""

    def __init__(self) -> None:
        self._memory = HostMemory(1)
        self._turn = 0
        self._timer: threading.Timer | None = None

    def close(self) -> None:
        """Begin a new turn."""
        self._turn += 1
        self._timer = threading.Timer(GATE_TIMEOUT_S, self.open)
        self._timer.daemon = True
        self._timer.start()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for this turn's `open`."""
        flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        check(driver.cuStreamWaitValue32(stream.cuda_stream, self._memory.address, self._turn, flags))

    def open(self) -> None:
        """Release every stream that holds in this turn."""
        if self._timer is not None:
            self._timer.cancel()
        self._memory.words[0] = self._turn

    def free(self) -> None:
        """Release the memory; opens first, so that no stream is left waiting."""
        self.open()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        self._memory.free()
