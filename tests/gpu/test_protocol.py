"""The protocol over many rounds: reuse of buffers, CUDA graphs, overlap, late and absent ranks, bad input."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from cute_ep import reference
from cute_ep.communicator import Communicator
from cute_ep.compare import assert_bits
from cute_ep.config import EPConfig
from cute_ep.errors import EPError, EPInputError, EPTimeout
from cute_ep.verify import check_round, expert_rows, poison, poisoned_buffers
from cute_ep.workloads import make_inputs

from .conftest import connected

ROUTINGS = ("uniform", "zipf", "masked", "one_expert")


class Workload:
    """One batch on every rank: inputs, outputs to write and what they must become."""

    def __init__(self, communicators: Sequence[Communicator], tokens: Sequence[int], routing: str, seed: int) -> None:
        cfg = communicators[0].cfg
        inputs = make_inputs(cfg, tokens, routing, seed)
        oracle = communicators[0].device
        xs, ids, weights = (
            [getattr(one, name).to(oracle) for one in inputs] for name in ("x", "topk_ids", "router_weights")
        )
        self.expected = reference.dispatch(cfg, xs, ids, None, weights)
        rows = expert_rows(self.expected, cfg.hidden, seed)
        self.arguments, self.buffers, self.rows, self.outs = [], [], [], []
        for rank, communicator in enumerate(communicators):
            device = communicator.device
            self.arguments.append((xs[rank].to(device), ids[rank].to(device), weights[rank].to(device)))
            self.buffers.append(poisoned_buffers(communicator, int(self.expected[rank].num_rows)))
            padded = torch.zeros(self.buffers[rank].tokens.shape[0], cfg.hidden, dtype=torch.bfloat16, device=device)
            padded[: rows[rank].shape[0]].copy_(rows[rank])
            self.rows.append(padded)
            self.outs.append(poison(torch.empty_like(self.arguments[rank][0])))
        self.sums = {mode: reference.combine(cfg, rows, self.expected, weights, mode) for mode in ("exact", "partial")}
        self.wanted = [self._wanted(rank, communicator.device) for rank, communicator in enumerate(communicators)]

    def _wanted(self, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """What each output of one rank must become, on its device."""
        names = ("tokens", "src_info", "row_offsets", "num_rows", "scales")
        wanted = {name: getattr(self.expected[rank], name) for name in names}
        wanted |= {mode: sums[rank] for mode, sums in self.sums.items()}
        return {name: tensor.to(device) for name, tensor in wanted.items() if tensor is not None}

    def run(self, rank: int, communicator: Communicator, mode: str) -> None:
        """Enqueue one dispatch and one combine."""
        dispatched = communicator.dispatch(*self.arguments[rank], out=self.buffers[rank])
        communicator.combine(self.rows[rank], dispatched, mode=mode, out=self.outs[rank])

    def count_mismatches(self, rank: int, mode: str, counter: torch.Tensor) -> None:
        """Enqueue on the current stream: add the number of wrong bytes to `counter`, then poison the outputs."""
        buffers = vars(self.buffers[rank]) | {mode: self.outs[rank]}
        for name, expected in self.wanted[rank].items():
            if name in buffers:
                actual = buffers[name][: expected.shape[0]]
                counter += (actual.view(torch.uint8) != expected.view(torch.uint8)).sum()
                poison(actual)


def warmed_counters(communicators: Sequence[Communicator], batch: Workload) -> list[torch.Tensor]:
    """Mismatch counters at zero, after one use of every torch kernel that counts.

    CUDA loads a kernel at its first launch and waits for the device to be idle: for ever, when a rank's kernel spins
    there for a rank that the same host thread has yet to launch.
    """
    counters = [torch.zeros((), dtype=torch.int64, device=c.device) for c in communicators]
    for rank, counter in enumerate(counters):
        for mode in ("exact", "partial"):
            batch.count_mismatches(rank, mode, counter)
        counter.zero_()
    for communicator in communicators:
        torch.cuda.synchronize(communicator.device)
    return counters


def on_stream(communicator: Communicator) -> torch.cuda.StreamContext:
    return torch.cuda.stream(communicator.stream)


def synchronize(communicators: Sequence[Communicator]) -> None:
    for communicator in communicators:
        communicator.stream.synchronize()
        communicator.synchronize()


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_thousand_rounds(devices: list[str], fmt: str) -> None:
    """1000 rounds with changing routing, token counts and mode, no host synchronisation or reset in between."""
    cfg = EPConfig(2048, 64, 4, 96, len(devices), fmt, timeout_s=60)
    with connected(cfg, devices) as communicators:
        ranks = len(devices)
        batches = [
            Workload(communicators, [(17 * seed + 29 * rank) % 97 for rank in range(ranks)], ROUTINGS[seed % 4], seed)
            for seed in range(8)
        ]
        counters = warmed_counters(communicators, batches[0])
        for number in range(1000):
            batch, mode = batches[(number * 5 + number // 8) % 8], ("exact", "partial")[number % 3 == 0]
            for rank, communicator in enumerate(communicators):
                with on_stream(communicator):
                    batch.run(rank, communicator, mode)
                    batch.count_mismatches(rank, mode, counters[rank])
        synchronize(communicators)
        assert [int(counter) for counter in counters] == [0] * ranks


def test_cuda_graph_replayed_with_changing_inputs(devices: list[str]) -> None:
    """One captured dispatch + combine a rank, 101 replays, new inputs and routing copied in before each."""
    cfg = EPConfig(2048, 64, 4, 64, len(devices), "nvfp4", timeout_s=60)
    ranks = len(devices)
    with connected(cfg, devices) as communicators:
        batches = [Workload(communicators, [64] * ranks, ROUTINGS[seed % 4], seed) for seed in range(5)]
        static = Workload(communicators, [64] * ranks, "uniform", 99)
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
        counters = warmed_counters(communicators, batches[0])
        for number in range(101):
            batch = batches[number % 5]
            static.wanted = batch.wanted
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
    cfg = EPConfig(4096, 32, 4, 128, len(devices), "bf16", timeout_s=20)
    with connected(cfg, devices) as communicators:
        first = Workload(communicators, [128] * len(devices), "uniform", 1)
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


def test_rank_that_starts_two_seconds_late(devices: list[str]) -> None:
    cfg = EPConfig(2048, 16, 2, 64, len(devices), "bf16", timeout_s=30)
    with connected(cfg, devices) as communicators:
        batch = Workload(communicators, [64] * len(devices), "uniform", 3)
        torch.cuda.synchronize()
        for rank, communicator in enumerate(communicators):
            if rank == len(devices) - 1:
                time.sleep(2)
            with on_stream(communicator):
                batch.run(rank, communicator, "exact")
        synchronize(communicators)
        for rank in range(len(devices)):
            assert_bits(batch.outs[rank], batch.sums["exact"][rank], f"rank {rank}")


def test_rank_that_never_comes(devices: list[str]) -> None:
    """The others report it within the set time, announce nothing, and a fresh group works in the same process."""
    ranks = len(devices)
    absent = ranks // 2
    cfg = EPConfig(2048, 64, 4, 64, ranks, "nvfp4", timeout_s=1.0)
    with connected(cfg, devices) as communicators:
        batch = Workload(communicators, [64] * ranks, "uniform", 4)
        torch.cuda.synchronize()
        started = time.monotonic()
        dispatched = {}
        for rank, communicator in enumerate(communicators):
            if rank != absent:
                with on_stream(communicator):
                    dispatched[rank] = communicator.dispatch(*batch.arguments[rank], out=batch.buffers[rank])
        for rank, communicator in enumerate(communicators):
            if rank == absent:
                continue
            communicator.stream.synchronize()
            with pytest.raises(EPTimeout) as caught:
                communicator.synchronize()
            assert caught.value.missing == (absent,)
            assert caught.value.rank == rank
            assert caught.value.phase == "ROUTE"
            assert int(dispatched[rank].num_rows) == 0
            assert not dispatched[rank].row_offsets.view(torch.int32).any()
            with pytest.raises(EPTimeout):  # the communicator stays unusable, and says why
                communicator.dispatch(*batch.arguments[rank], out=batch.buffers[rank])
        assert time.monotonic() - started < 5 * cfg.timeout_s
    with connected(cfg, devices) as communicators:
        check_round(communicators, make_inputs(cfg, [64] * ranks, "uniform", 5))


def test_rank_that_stops_before_combine(devices: list[str]) -> None:
    ranks = len(devices)
    cfg = EPConfig(2048, 64, 4, 64, ranks, "bf16", timeout_s=1.0)
    with connected(cfg, devices) as communicators:
        batch = Workload(communicators, [64] * ranks, "uniform", 6)
        torch.cuda.synchronize()
        dispatched = []
        for rank, communicator in enumerate(communicators):
            with on_stream(communicator):
                dispatched.append(communicator.dispatch(*batch.arguments[rank], out=batch.buffers[rank]))
        for rank, communicator in enumerate(communicators[1:], start=1):
            with on_stream(communicator):
                communicator.combine(batch.rows[rank], dispatched[rank], out=batch.outs[rank])
        for rank, communicator in enumerate(communicators[1:], start=1):
            communicator.stream.synchronize()
            with pytest.raises(EPTimeout) as caught:
                communicator.synchronize()
            assert (caught.value.phase, caught.value.missing) == ("RETURN", (0,)), rank
            ids, out, wanted = batch.arguments[rank][1], batch.outs[rank], batch.wanted[rank]["exact"]
            from_absent = ((ids >= 0) & (ids // cfg.local_experts == 0)).any(dim=1)
            untouched = (out.view(torch.uint8) == 0xA5).all(dim=1)
            complete = (out.view(torch.int16) == wanted.view(torch.int16)).all(dim=1)
            assert untouched[from_absent].all()  # a token is summed only when all its rows are home
            assert (untouched | complete).all()


def test_split_calls_out_of_order_are_refused() -> None:
    cfg = EPConfig(2048, 8, 2, 16, 1, "bf16", timeout_s=5)
    with connected(cfg, ["cuda:0"]) as (communicator,):
        batch = Workload([communicator], [16], "uniform", 9)
        first = communicator.dispatch_async(*batch.arguments[0])
        with pytest.raises(EPInputError, match="1 split round"):
            communicator.dispatch(*batch.arguments[0])
        second = communicator.dispatch_async(*batch.arguments[0])
        with pytest.raises(EPInputError, match="2 are outstanding"):
            communicator.dispatch_async(*batch.arguments[0])
        with pytest.raises(EPInputError, match="next to receive is 1"):
            communicator.dispatch_wait(second)
        communicator.dispatch_wait(first)
        dispatched = communicator.dispatch_wait(second, batch.buffers[0])
        communicator.combine(batch.rows[0], dispatched, out=batch.outs[0])
        communicator.synchronize()
        assert_bits(batch.outs[0], batch.sums["exact"][0], "combine")


@pytest.mark.parametrize(("bad", "rule"), [(64, "64"), (-2, "-2"), (2**31 - 1, "2147483647")])
def test_expert_id_out_of_range_is_reported_and_masked(bad: int, rule: str) -> None:
    cfg = EPConfig(2048, 64, 4, 64, 1, "bf16", timeout_s=5)
    with connected(cfg, ["cuda:0"]) as (communicator,):
        batch = Workload([communicator], [8], "uniform", 7)
        x, ids, weights = batch.arguments[0]
        ids[3, 1] = bad
        dispatched = communicator.dispatch(x, ids, weights)
        with pytest.raises(EPInputError, match=rf"topk_ids.flatten\(\)\[13\] = {rule}"):
            communicator.synchronize()
        communicator.synchronize()  # reported once; the next round is unharmed
        check_round([communicator], make_inputs(cfg, [8], "uniform", 1))
        assert int(dispatched.num_rows) == 31


def test_more_rows_than_the_buffers_hold_are_reported_not_written() -> None:
    cfg = EPConfig(2048, 8, 2, 64, 1, "nvfp4", timeout_s=5)
    with connected(cfg, ["cuda:0"]) as (communicator,):
        batch = Workload([communicator], [64], "uniform", 8)
        small = communicator.allocate(100)
        guard = communicator.allocate(300)
        poison(guard.tokens)
        x, ids, weights = batch.arguments[0]
        communicator.dispatch(x, ids, weights, out=small)
        with pytest.raises(EPInputError, match="out holds 100 rows"):
            communicator.synchronize()


def test_bad_arguments_are_refused_before_a_launch() -> None:
    cfg = EPConfig(2048, 8, 2, 16, 1, "nvfp4", timeout_s=5)
    with connected(cfg, ["cuda:0"]) as (communicator,):
        x = torch.zeros(4, 2048, dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
        calls: list[tuple[str, Callable[[], object]]] = [
            ("x.dtype", lambda: communicator.dispatch(x.float(), ids)),
            ("x.shape", lambda: communicator.dispatch(x[:, :1024].contiguous(), ids)),
            ("max_tokens_per_rank", lambda: communicator.dispatch(x.repeat(5, 1), ids.repeat(5, 1))),
            ("topk_ids.dtype", lambda: communicator.dispatch(x, ids.long())),
            ("topk_ids.device", lambda: communicator.dispatch(x, ids.cpu())),
            ("x.stride", lambda: communicator.dispatch(x.repeat(1, 2)[:, ::2], ids)),
        ]
        for message, call in calls:
            with pytest.raises(EPInputError, match=message):
                call()
        dispatched = communicator.dispatch(x, ids)
        rows = torch.zeros(100, 2048, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(EPInputError, match="partial combine needs them"):
            communicator.combine(rows, dispatched, mode="partial")
        with pytest.raises(EPInputError, match="mode = 'sum'"):
            communicator.combine(rows, dispatched, mode="sum")
        communicator.synchronize()
    with pytest.raises(EPError, match="closed"):
        communicator.dispatch(x, ids)
