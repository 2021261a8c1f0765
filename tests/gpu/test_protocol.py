"""The protocol over many rounds: reuse of buffers, CUDA graphs, overlap, threads, many ranks."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import check_round, poisoned_buffers
from cute_ep.testing.workloads import make_inputs

from .conftest import connected
from .workload import FEW, MANY, Workload, check_rounds, on_stream, synchronize, warmed_counters

ROUTINGS = ("uniform", "zipf", "masked", "one_expert")


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_thousand_rounds(devices: list[str], fmt: str) -> None:
    """1000 rounds with changing routing, token counts and mode, no host synchronisation or reset in between."""
    tokens = (0, 17, FEW, 58, MANY, 3, 96, MANY + 80)
    cfg = EPConfig(1024, 64, 4, max(tokens), len(devices), fmt, timeout_s=60)
    with connected(cfg, devices) as communicators:
        counts = [[tokens[(seed + 3 * rank) % 8] for rank in range(len(devices))] for seed in range(8)]
        batches = [Workload(communicators, one, ROUTINGS[seed % 4], seed) for seed, one in enumerate(counts)]
        check_rounds(communicators, batches, [(number * 5 + number // 8) % 8 for number in range(1000)])


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4", "nvfp4_row"])
def test_few_and_many_tokens_by_turns(devices: list[str], fmt: str) -> None:
    """Each rank's rows change their way from round to round, and never all ranks' together. Seven batches: each is sent
    in both parities."""
    tokens = (1, MANY, FEW, 0, MANY + 80, 16, MANY)
    cfg = EPConfig(1408, 64, 4, max(tokens), len(devices), fmt, timeout_s=60)
    with connected(cfg, devices) as communicators:
        counts = [[tokens[(seed + rank) % 7] for rank in range(len(devices))] for seed in range(7)]
        batches = [Workload(communicators, one, ROUTINGS[seed % 4], seed) for seed, one in enumerate(counts)]
        check_rounds(communicators, batches, [number % 7 for number in range(20)])


@pytest.mark.parametrize("tokens", [64, MANY])
def test_cuda_graph_replayed_with_changing_inputs(devices: list[str], tokens: int) -> None:
    """One captured dispatch + combine a rank, 101 replays, new inputs and routing copied in before each."""
    cfg = EPConfig(2048, 64, 4, tokens, len(devices), "nvfp4", timeout_s=60)
    ranks = len(devices)
    with connected(cfg, devices) as communicators:
        batches = [Workload(communicators, [tokens] * ranks, ROUTINGS[seed % 4], seed) for seed in range(5)]
        static = Workload(communicators, [tokens] * ranks, "uniform", 99)
        most = max(int(want.num_rows) for batch in batches for want in batch.expected)
        for rank, communicator in enumerate(communicators):
            static.buffers[rank] = poisoned_buffers(communicator, most)
            static.rows[rank] = torch.zeros(
                static.buffers[rank].tokens.shape[0], cfg.hidden, dtype=torch.bfloat16, device=communicator.device
            )
        torch.cuda.synchronize()
        graphs = []
        for rank, communicator in enumerate(communicators):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(communicator.device), torch.cuda.graph(graph, stream=communicator.stream):
                static.run(rank, communicator, "exact")
            graphs.append(graph)
        counters = warmed_counters(communicators, batches)
        for number in range(101):
            batch = batches[number % 5]
            static.wanted, static.defined = batch.wanted, batch.defined
            for rank, communicator in enumerate(communicators):
                with torch.cuda.device(communicator.device), on_stream(communicator):
                    for target, source in zip(static.arguments[rank], batch.arguments[rank], strict=True):
                        target.copy_(source)
                    rows = batch.rows[rank].shape[0]
                    static.rows[rank][:rows].copy_(batch.rows[rank])
                    graphs[rank].replay()
                    static.count_mismatches(rank, "exact", counters[rank])
        synchronize(communicators)
        assert [int(counter) for counter in counters] == [0] * ranks


def test_two_batches_overlap(devices: list[str]) -> None:
    """dispatch A, dispatch B, combine B, combine A: a result does not depend on buffers of a later round."""
    cfg = EPConfig(4096, 32, 4, MANY, len(devices), "bf16", timeout_s=20)
    with connected(cfg, devices) as communicators:
        first = Workload(communicators, [MANY] * len(devices), "uniform", 1)
        second = Workload(communicators, [100] * len(devices), "zipf", 2)
        torch.cuda.synchronize()
        sent = []
        for rank, communicator in enumerate(communicators):
            with on_stream(communicator):
                sent.append([communicator.dispatch_async(*batch.arguments[rank]) for batch in (first, second)])
        received = []
        for rank, communicator in enumerate(communicators):
            with on_stream(communicator):
                received.append(
                    [
                        communicator.dispatch_wait(pending, batch.buffers[rank])
                        for pending, batch in zip(sent[rank], (first, second), strict=True)
                    ]
                )
        for batch, index in ((second, 1), (first, 0)):
            for rank, communicator in enumerate(communicators):
                with on_stream(communicator):
                    communicator.combine(batch.rows[rank], received[rank][index], mode="partial", out=batch.outs[rank])
        synchronize(communicators)
        for name, batch in (("first", first), ("second", second)):
            for rank in range(len(devices)):
                assert_bits(batch.outs[rank], batch.sums["partial"][rank], f"{name} batch, rank {rank}")


def test_launched_by_new_threads(devices: list[str]) -> None:
    """A thread's first CUDA call may be a launch; `synchronize` waits for streams of all threads."""
    cfg = EPConfig(2048, 64, 4, 64, len(devices), "bf16", timeout_s=20)
    with connected(cfg, devices) as communicators:
        batch = Workload(communicators, [64] * len(devices), "uniform", 8)
        streams = [torch.cuda.Stream(device) for device in devices]
        torch.cuda.synchronize()

        def work(rank: int) -> None:
            with torch.cuda.stream(streams[rank]) if rank else nullcontext():
                batch.run(rank, communicators[rank], "exact")

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        synchronize(communicators)
        assert all(stream.query() for stream in streams)
        for rank in range(len(devices)):
            assert_bits(batch.outs[rank], batch.sums["exact"][rank], f"rank {rank}")


@pytest.mark.parametrize("ranks", [16, 32])
def test_many_virtual_ranks(ranks: int) -> None:
    """More than a device has queues for streams by default."""
    cfg = EPConfig(2048, 64, 4, 64, ranks, "nvfp4", timeout_s=20)
    with connected(cfg, ["cuda:0"] * ranks) as communicators:
        for seed in range(3):
            check_round(communicators, make_inputs(cfg, [64] * ranks, "uniform", seed))


def test_ranks_of_two_communicators_never_wait_behind_each_other() -> None:
    """Half of the second one's ranks are called first, then half of the first one's, then the others. With a stream for
    two ranks, as torch gives the same one again after 32, each half would wait behind the other."""
    ranks = 16
    cfg = EPConfig(256, ranks, 2, 8, ranks, "bf16", timeout_s=5)
    inputs = make_inputs(cfg, [8] * ranks, "uniform", 3)
    given = [(one.x.to("cuda:0"), one.topk_ids.to("cuda:0"), one.router_weights.to("cuda:0")) for one in inputs]
    with connected(cfg, ["cuda:0"] * ranks, sms=2) as first:
        between = [torch.cuda.Stream("cuda:0") for _ in range(32 - ranks)]
        with connected(cfg, ["cuda:0"] * ranks, sms=2) as second:
            handles = {stream.cuda_stream for stream in between}
            handles |= {communicator.stream.cuda_stream for communicator in (*first, *second)}
            assert len(handles) == 32 + ranks
            buffers = [[communicator.allocate() for communicator in group] for group in (first, second)]
            torch.cuda.synchronize()
            order = [(1, 1), (0, 0), (0, 1), (1, 0)]  # communicator, odd ranks or even ones
            batches: list[dict[int, Dispatched]] = [{}, {}]
            for which, odd in order:
                for rank in range(odd, ranks, 2):
                    batches[which][rank] = (first, second)[which][rank].dispatch(*given[rank], out=buffers[which][rank])
            synchronize([*first, *second])
            for received in batches:
                assert sum(int(batch.num_rows) for batch in received.values()) == sum(
                    int((one.topk_ids >= 0).sum()) for one in inputs
                )
