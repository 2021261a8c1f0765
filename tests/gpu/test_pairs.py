"""Ranks that combine batches of different dispatch rounds are told so, by both rounds, and soon."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import cute_ep.ops
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPTimeout
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import check_round
from cute_ep.testing.workloads import make_inputs

from .conftest import connected
from .workload import FEW, MANY, Workload, on_stream, synchronize

TIMEOUT_S = 20
OTHER = 1
"""The rank that combines another batch than all others."""
Batches = list[list[Dispatched]]
"""By round and rank."""


def dispatch(communicators: Sequence[Communicator], loads: Sequence[Workload]) -> Batches:
    """A round for each of the loads, on all ranks."""
    torch.cuda.synchronize()
    batches: Batches = [[] for _ in loads]
    for number, load in enumerate(loads):
        for rank, one in enumerate(communicators):
            with on_stream(one):
                batches[number].append(one.dispatch(*load.arguments[rank], out=load.buffers[rank]))
    return batches


def check_told(communicators: Sequence[Communicator]) -> None:
    """Every rank names both rounds, no wait has timed out, and the communicators are of no more use."""
    started = time.monotonic()
    for rank, one in enumerate(communicators):
        own, theirs = (2, 1) if rank == OTHER else (1, 2)
        rule = (
            rf"rank {rank}: combine round 1 has the batch of dispatch round {own} here, but rank \d+ rows of dispatch "
        )
        with pytest.raises(EPError, match=rf"{rule}round {theirs}") as caught:
            one.synchronize()
        assert not isinstance(caught.value, EPTimeout) and one.failed
        with pytest.raises(EPError, match="same dispatch rounds in the same order"):
            one.allocate()
    assert time.monotonic() - started < TIMEOUT_S / 2


Call = Callable[[Communicator, torch.Tensor, Dispatched, torch.Tensor], object]


def fused(mode: str) -> Call:
    return lambda one, rows, batch, out: one.combine(rows, batch, mode=mode, out=out)


def split(mode: str) -> Call:
    return lambda one, rows, batch, out: one.combine_wait(one.combine_async(rows, batch, mode), out=out)


def of_tensors(one: Communicator, rows: torch.Tensor, batch: Dispatched, out: torch.Tensor) -> object:
    names = ("tokens", "row_offsets", "row_map", "headers", "weights")
    given = {"topk_ids": batch.topk_ids, "router_weights": batch.router_weights}
    tensors = {name: getattr(batch, name) for name in names}
    made = Dispatched.of_tensors(tensors, rank=one.rank, return_slices_log2=batch.return_slices_log2, **given)
    return one.combine(rows, made, mode="exact", out=out)


CALLS: dict[str, Call] = {
    "exact": fused("exact"),
    "partial": fused("partial"),
    "unweighted": fused("unweighted"),
    "split": split("exact"),
    "split, partial": split("partial"),
    "planned": lambda one, rows, batch, out: one.plan_combine(rows, batch, mode="exact", out=out).launch(),
    "derived": lambda one, rows, batch, out: fused("exact")(one, rows, batch.derived(row_map=batch.row_map), out),
    "of tensors": of_tensors,
}


@pytest.mark.parametrize("tokens", [1, FEW, MANY])
def test_ranks_are_told_whose_rows_do_not_meet(devices: list[str], tokens: int) -> None:
    """One rank owns the experts of all tokens: the others return no row, and still name their rounds."""
    ranks = len(devices)
    cfg = EPConfig(1024, 2 * ranks, 2, MANY, ranks, "bf16", TIMEOUT_S)
    with connected(cfg, devices) as communicators:
        loads = [Workload(communicators, [tokens] * ranks, "one_rank", seed) for seed in (1, 2)]
        batches = dispatch(communicators, loads)
        for rank, one in enumerate(communicators):
            number = int(rank == OTHER)
            with on_stream(one):
                CALLS["partial"](one, loads[number].rows[rank], batches[number][rank], loads[number].outs[rank])
        check_told(communicators)


@pytest.mark.parametrize("tokens", [1, 64, FEW, MANY])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_combines_another_batch(devices: list[str], name: str, tokens: int) -> None:
    """Of two that are in flight, whose tokens need not be as many. A new group works in the same process."""
    ranks = len(devices)
    cfg = EPConfig(1024, 2 * ranks, 2 * ranks, MANY, ranks, "bf16", TIMEOUT_S)  # every token goes to every rank
    with connected(cfg, devices) as communicators:
        loads = [Workload(communicators, [count] * ranks, "uniform", count) for count in (tokens, max(tokens - 1, 1))]
        if name == "unweighted":
            for load in loads:
                load.outs = [out[:, None].repeat(1, cfg.top_k, 1) for out in load.outs]
        batches = dispatch(communicators, loads)
        for rank, one in enumerate(communicators):
            number = int(rank == OTHER)
            with on_stream(one):
                CALLS[name](one, loads[number].rows[rank], batches[number][rank], loads[number].outs[rank])
        check_told(communicators)
    with connected(cfg, devices) as communicators:
        check_round(communicators, make_inputs(cfg, [tokens] * ranks, "uniform", 5))


@pytest.mark.parametrize("ops", [False, True], ids=["rank-major", "ops"])
def test_rows_and_batches_of_other_kinds(devices: list[str], ops: bool) -> None:
    """One row for a token and a rank; batches that are plain tensors."""
    ranks = len(devices)
    if ops and len(set(devices)) < ranks:
        pytest.skip("ops take ranks that have a GPU each")
    cfg = EPConfig(1024, 2 * ranks, 2 * ranks, 64, ranks, "bf16", TIMEOUT_S)
    if not ops:
        cfg = replace(cfg, row_order="rank_major")
    with connected(cfg, devices) as communicators:
        inputs = make_inputs(cfg, [64] * ranks, "uniform", 3)
        arguments = [
            [part.to(one.device) for part in vars(given).values()]
            for one, given in zip(communicators, inputs, strict=True)
        ]
        buffers = [[one.allocate() for one in communicators] for _ in range(2)]
        outs = [torch.empty_like(given[0]) for given in arguments]
        torch.cuda.synchronize()
        batches: list[list] = [[], []]
        for number in range(2):
            for one, given, out in zip(communicators, arguments, buffers[number], strict=True):
                if ops:
                    made = cute_ep.ops.dispatch_into(*given, cute_ep.ops.register(one), out)
                else:
                    made = one.dispatch(*given, out=out)
                batches[number].append(made)
        for rank, one in enumerate(communicators):
            batch = batches[rank == OTHER][rank]
            if ops:
                cute_ep.ops.combine_into(batch.tokens, batch, outs[rank], "partial")
            else:
                one.combine(batch.tokens, batch, mode="partial", out=outs[rank])
        check_told(communicators)


def test_graphs_replayed_in_another_order(devices: list[str]) -> None:
    """A graph dispatches two batches, and two more combine one each. In the same order on all ranks replays are right
    and nothing is told; then one rank takes them in another order."""
    ranks, rounds = len(devices), 5
    cfg = EPConfig(1024, 2 * ranks, 2 * ranks, 64, ranks, "bf16", TIMEOUT_S)
    with connected(cfg, devices) as communicators:
        loads = [Workload(communicators, [tokens] * ranks, "uniform", tokens) for tokens in (64, 63)]
        streams = [one.stream if one.shares_device else torch.cuda.Stream(one.device) for one in communicators]
        dispatch(communicators, loads)
        synchronize(communicators)
        graphs: list[list[torch.cuda.CUDAGraph]] = []
        for rank, one in enumerate(communicators):
            graphs.append([torch.cuda.CUDAGraph() for _ in range(3)])
            with torch.cuda.device(one.device):
                with torch.cuda.graph(graphs[rank][2], stream=streams[rank]):
                    made = [one.dispatch(*load.arguments[rank], out=load.buffers[rank]) for load in loads]
                for number, load in enumerate(loads):
                    with torch.cuda.graph(graphs[rank][number], stream=streams[rank]):
                        one.combine(load.rows[rank], made[number], mode="exact", out=load.outs[rank])

        def replay(order: Callable[[int], tuple[int, int]]) -> None:
            for rank in range(ranks):
                with torch.cuda.stream(streams[rank]):
                    for number in (2, *order(rank)):
                        graphs[rank][number].replay()

        for _ in range(rounds):
            replay(lambda rank: (0, 1))
        for stream in streams:
            stream.synchronize()
        synchronize(communicators)
        for load in loads:
            for rank, want in enumerate(load.sums["exact"]):
                assert_bits(load.outs[rank], want, f"rank {rank}")
        replay(lambda rank: (1, 0) if rank == OTHER else (0, 1))
        for stream in streams:
            stream.synchronize()
        first = 2 + 2 * rounds + 1  # dispatch round of the first batch of the last replay
        for rank, one in enumerate(communicators):
            own, theirs = (first + 1, first) if rank == OTHER else (first, first + 1)
            rule = f"combine round {2 * rounds + 1} has the batch of dispatch round {own} here, but rank"
            with pytest.raises(EPError, match=rf"{rule} \d+ rows of dispatch round {theirs}"):
                one.synchronize()


def test_a_rank_without_tokens_waits_for_nobody(devices: list[str]) -> None:
    """Its combine ends though no other rank has made one, and is told nothing when these combine another batch."""
    ranks = len(devices)
    cfg = EPConfig(1024, 2 * ranks, 2 * ranks, 64, ranks, "bf16", TIMEOUT_S)
    with connected(cfg, devices) as communicators:
        loads = [Workload(communicators, [0, *[64 + more] * (ranks - 1)], "uniform", more) for more in (0, -1)]
        batches = dispatch(communicators, loads)
        synchronize(communicators)
        started, one = time.monotonic(), communicators[0]
        with on_stream(one):
            one.combine(loads[1].rows[0], batches[1][0], mode="exact", out=loads[1].outs[0])
        one.synchronize()
        assert time.monotonic() - started < TIMEOUT_S / 2
        for rank, other in enumerate(communicators[1:], start=1):
            with on_stream(other):
                other.combine(loads[0].rows[rank], batches[0][rank], mode="exact", out=loads[0].outs[rank])
        for rank, other in enumerate(communicators[1:], start=1):
            rule = f"rank {rank}: combine round 1 has the batch of dispatch round 1 here, but rank 0 rows of dispatch"
            with pytest.raises(EPError, match=rf"{rule} round 2: all ranks"):
                other.synchronize()
        one.synchronize()


def test_ranks_alone_have_nothing_to_compare(devices: list[str]) -> None:
    ranks = len(devices)
    cfg = EPConfig(1024, 2 * ranks, 2, 64, ranks, "bf16", TIMEOUT_S, skip_a2a=True)
    with connected(cfg, devices) as communicators:
        loads = [Workload(communicators, [tokens] * ranks, "uniform", tokens) for tokens in (64, 63)]
        batches = dispatch(communicators, loads)
        for rank, one in enumerate(communicators):
            for number in (1, 0) if rank == OTHER else (0, 1):
                with on_stream(one):
                    rows, out = loads[number].rows[rank], loads[number].outs[rank]
                    one.combine(rows, batches[number][rank], mode="exact", out=out)
        synchronize(communicators)
        for load in loads:
            for rank, want in enumerate(load.sums["exact"]):
                assert_bits(load.outs[rank], want, f"rank {rank}")


def test_rounds_are_counted_from_one(devices: list[str]) -> None:
    """In the header of every source, in fused and split calls alike."""
    ranks = len(devices)
    cfg = EPConfig(1024, 2 * ranks, 2, 64, ranks, "bf16", TIMEOUT_S)
    with connected(cfg, devices) as communicators:
        load = Workload(communicators, [64] * ranks, "uniform", 1)
        for number in range(1, 5):
            made = []
            for rank, one in enumerate(communicators):
                with on_stream(one):
                    if number % 2:
                        made.append(one.dispatch(*load.arguments[rank], out=load.buffers[rank]))
                    else:
                        one.dispatch_async(*load.arguments[rank])
            if not number % 2:
                for rank, one in enumerate(communicators):
                    with on_stream(one):
                        made.append(one.dispatch_wait(out=load.buffers[rank]))
            synchronize(communicators)
            for batch in made:
                assert batch.headers[:, HeaderWord.ROUND].tolist() == [number] * ranks
