"""Times of dispatch and combine on this process's GPUs, with the bytes that each must move. `cute_ep.bench.timing` says
how a time is taken, `cute_ep.bench.ceilings` what the bytes would take at best.

One batch of input sets serves all operations; rounds go through the sets in turn, so tokens and routing change from one
round to the next. A single operation is measured behind itself, where two of its launches may overlap, so a pair is not
the sum of its halves (2 x H200, 2026-11-22: 64 BF16 tokens take 19.2 us, the halves 16.6 together).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.bench.timing import LARGE_TOKENS, SAMPLES, Runner, rounds_per_graph, summary
from cute_ep.bench.traffic import RoutingCounts, Traffic, count_routing, traffic
from cute_ep.layouts.maps.routing import MAX_RANKS
from cute_ep.layouts.maps.variants import CombineMode
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.workloads import ROUTINGS

PARTS = {
    "dispatch": ("dispatch",),
    "combine_exact": ("combine_exact",),
    "combine_partial": ("combine_partial",),
    "pair": ("dispatch", "combine_partial"),
    "pair_exact": ("dispatch", "combine_exact"),
    "pair_chained": ("dispatch", "combine_partial"),
    "pair_apart": ("dispatch", "combine_partial"),
    "pair_roomy": ("dispatch", "combine_partial"),
}
"""What `measure` times, as the launches of a round. All are replayed in CUDA graphs but `pair_chained`: its launches
are queued one by one, and its time is from one round's beginning to the next one's. In the graphs a launch follows the
one before at once, inputs and outputs of SETS sets stay in the L2 cache as far as it holds them, and buffers have room
for exactly the rows that arrive; but for CONDITIONS."""
CHAINED = "pair_chained"
CONDITIONS = {
    "pair_apart": "a kernel of one element stands before each launch, so no launch starts while the one before runs",
    "pair_roomy": "each rank has one set of buffers of the default size (`allocate()`), and as many rows to combine",
}
"""What is different in the other pairs. The time of what stands between launches is measured alone and taken off."""
OPERATIONS = tuple(operation for operation in PARTS if operation not in CONDITIONS)
SETS = 4


@dataclass
class Batch:
    """One rank's arguments and outputs of one input set, on its device."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    router_weights: torch.Tensor
    buffers: DispatchBuffers
    rows: torch.Tensor
    result: torch.Tensor
    dispatched: Dispatched | None = None


@dataclass(frozen=True)
class InputSets:
    """What the rounds rotate through.

    Attributes:
        batches: of each rank, one of each set.
        counts: how often ranks talk to each other, one of each set.
    """

    cfg: EPConfig
    tokens: int
    routing: str
    devices: tuple[str, ...]
    batches: list[list[Batch]]
    counts: list[RoutingCounts]


def make_sets(
    cfg: EPConfig, devices: Sequence[str], tokens: int, routing: str = "uniform", *, sets: int = SETS
) -> InputSets:
    """Input sets of all ranks, generated on their devices; the same for the same arguments on GPUs of the same kind.

    Args:
        cfg, devices: a configuration with one device per rank.
        tokens: of every rank.
        routing: out of `cute_ep.testing.workloads.ROUTINGS`.
        sets: number of sets.

    Raises:
        EPInputError: an unknown routing, or more tokens than `cfg` allows.
    """
    if routing not in ROUTINGS:
        raise EPInputError(f"routing = {routing!r}: must be one of {', '.join(ROUTINGS)}")
    if not 0 <= tokens <= cfg.max_tokens_per_rank:
        raise EPInputError(f"tokens = {tokens}: must be in [0, max_tokens_per_rank = {cfg.max_tokens_per_rank}]")
    batches: list[list[Batch]] = [[] for _ in devices]
    counts = []
    for number in range(sets):
        generators = [set_generator(device, rank, number) for rank, device in enumerate(devices)]
        ids = []
        for device, generator in zip(devices, generators, strict=True):
            with torch.device(device):
                ids.append(ROUTINGS[routing](cfg, tokens, generator).int().contiguous())
        counts.append(count_routing(cfg, ids))
        for rank, (device, generator) in enumerate(zip(devices, generators, strict=True)):
            with torch.device(device):
                batches[rank].append(make_batch(cfg, ids[rank], counts[-1].rows_received(rank), generator))
    return InputSets(cfg, tokens, routing, tuple(devices), batches, counts)


def set_generator(device: str | torch.device, rank: int, number: int) -> torch.Generator:
    """The random numbers of a rank's input set; the first drawn from it are the routing's."""
    return torch.Generator(device).manual_seed(number * MAX_RANKS + rank)


def make_batch(cfg: EPConfig, ids: torch.Tensor, rows: int, generator: torch.Generator) -> Batch:
    """Arguments of one rank, and outputs with room for exactly the rows that will arrive."""

    def values(count: int) -> torch.Tensor:
        return torch.randn(count, cfg.hidden, dtype=torch.bfloat16, generator=generator)

    weights = torch.randn(ids.shape, generator=generator).softmax(dim=1)
    buffers = DispatchBuffers.allocate(cfg, ids.device, max(1, rows))
    x, made = values(ids.shape[0]), values(buffers.tokens.shape[0])
    return Batch(x, ids, weights, buffers, made, torch.empty_like(x))


def run_round(
    communicator: Communicator, batch: Batch, operation: str, before: Callable[[], object] | None = None
) -> None:
    """Enqueue one round of PARTS, each launch behind `before()`; a combine alone needs an earlier dispatch of the same
    batch."""
    for part in PARTS[operation]:
        if before is not None:
            before()
        if part == "dispatch":
            batch.dispatched = communicator.dispatch(batch.x, batch.topk_ids, batch.router_weights, out=batch.buffers)
        else:
            assert batch.dispatched is not None
            mode = cast(CombineMode, part.removeprefix("combine_"))
            communicator.combine(batch.rows, batch.dispatched, mode=mode, out=batch.result)


def stand_in(operation: str, device: torch.device) -> Callable[[], object] | None:
    """What is queued before each launch of an operation of CONDITIONS, on the current stream of `device`."""
    if operation == "pair_apart":
        one = torch.zeros(1, device=device)
        return lambda: one.add_(1)
    return None


def roomy(cfg: EPConfig, batches: Sequence[Batch]) -> list[Batch]:
    """One rank's batches, all in the same buffers for `cfg.max_rows` rows, with as many rows of experts' outputs."""
    device = batches[0].x.device
    buffers = DispatchBuffers.allocate(cfg, device)
    rows = torch.randn(buffers.tokens.shape[0], cfg.hidden, dtype=torch.bfloat16, device=device)
    return [dataclasses.replace(batch, buffers=buffers, rows=rows, dispatched=None) for batch in batches]


def make_runner(communicators: Sequence[Communicator]) -> Runner:
    """A lane for each rank, on the rank's own stream; kernels' reports are raised after each burst."""

    def finish() -> None:
        for communicator in communicators:
            communicator.synchronize()

    return Runner([communicator.stream for communicator in communicators], finish)


def warm_up(runner: Runner, communicators: Sequence[Communicator], sets: InputSets, operations: Sequence[str]) -> None:
    """Run the launches of each operation once on every set, dispatch first."""

    def work(rank: int) -> None:
        for batch in sets.batches[rank]:
            for operation in {PARTS[name]: name for name in ("dispatch", *operations)}.values():
                run_round(communicators[rank], batch, operation)

    runner.on_all(work)


def measure(
    communicators: Sequence[Communicator],
    sets: InputSets,
    operations: Sequence[str] = OPERATIONS,
    samples: int = SAMPLES,
    runner: Runner | None = None,
) -> list[dict]:
    """Time operations on all ranks of this process.

    Args:
        communicators: all ranks, in order, made with the configuration of `sets`.
        sets: the inputs.
        operations: out of PARTS.
        samples: times that are taken; half as many from 2 * LARGE_TOKENS tokens on.
        runner: lanes to use; None makes those of `make_runner`.

    Returns:
        For each operation "operation", "format", "tokens", "routing", "rounds" (of a sample), what
        `cute_ep.bench.timing.summary` says of a round's times, and `case_bytes`; of CHAINED also "host_us", what a
        thread takes to queue a round; of pairs with something before each launch "between_us", the median time of that
        in a round, which has been taken off the other times.

    Raises:
        EPInputError: an unknown operation.
        EPTimeout, EPError: as the kernels or the driver report.
    """
    for operation in operations:
        if operation not in PARTS:
            raise EPInputError(f"operation = {operation!r}: must be one of {', '.join(PARTS)}")
    if runner is None:
        with make_runner(communicators) as lanes:
            return measure(communicators, sets, operations, samples, lanes)
    count = samples if sets.tokens < 2 * LARGE_TOKENS else -(-samples // 2)
    warm_up(runner, communicators, sets, operations)
    results = []
    for operation in operations:
        times = time_operation(communicators, sets, operation, count, runner)
        about = {"operation": operation, "format": sets.cfg.dispatch_format, "tokens": sets.tokens}
        results.append(about | {"routing": sets.routing} | times | case_bytes(sets, operation))
    return results


def time_operation(
    communicators: Sequence[Communicator], sets: InputSets, operation: str, count: int, runner: Runner
) -> dict:
    """The times of one operation: those of `measure`, from `count` samples."""
    batches = [roomy(sets.cfg, own) for own in sets.batches] if operation == "pair_roomy" else sets.batches
    before = [stand_in(operation, own[0].x.device) for own in batches]

    def one_round(rank: int, index: int) -> None:
        own = batches[rank]
        run_round(communicators[rank], own[index % len(own)], operation, before[rank])

    def only_between(rank: int, index: int) -> None:
        for queue in (before[rank],) * len(PARTS[operation]):
            if queue is not None:
                queue()

    if operation == CHAINED:
        seconds = runner.time(count, one_round, chained=True)
        return {"rounds": 1} | summary(seconds) | {"host_us": 1e6 * runner.host_time(one_round)}
    rounds = rounds_per_graph(sets.tokens)
    if before[0] is None:
        return {"rounds": rounds} | summary(runner.time_graphs(count, one_round, rounds))
    runner.on_all(lambda rank: one_round(rank, 0))  # loads what stands between
    between = summary(runner.time_graphs(count, only_between, rounds))["p50_us"]
    seconds = [span - 1e-6 * between for span in runner.time_graphs(count, one_round, rounds)]
    return {"rounds": rounds} | summary(seconds) | {"between_us": between}


def case_bytes(sets: InputSets, operation: str) -> dict:
    """Bytes of an average round.

    Returns:
        "remote_bytes" (to other ranks), "logical_bytes" (one message per (token, expert)), and "parts", for each
        launch of the round [bytes over the busiest device's links one way, bytes at the busiest device's memory].
    """
    devices = sets.devices

    def mean(part: str, measure: Callable[[Traffic], int]) -> int:
        return round(sum(measure(traffic(sets.cfg, one, part)) for one in sets.counts) / len(sets.counts))

    parts = PARTS[operation]
    return {
        "remote_bytes": sum(mean(part, lambda one: one.remote_bytes) for part in parts),
        "logical_bytes": sum(mean(part, lambda one: one.logical) for part in parts),
        "parts": [
            [
                mean(part, lambda one: one.busiest_link(devices)),
                mean(part, lambda one: one.busiest_memory(devices)),
            ]
            for part in parts
        ],
    }
