"""The protocol over many rounds: reuse of buffers, CUDA graphs, overlap, late and absent ranks, bad input."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import tensors_of
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.maps.arena import EXPRESS_TOKENS, HeaderWord
from cute_ep.runtime.communicator import Communicator
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import POISON, check_round, expert_rows, poison, poisoned_buffers
from cute_ep.testing.workloads import make_inputs

from .conftest import connected

ROUTINGS = ("uniform", "zipf", "masked", "one_expert")
FEW, MANY = EXPRESS_TOKENS, EXPRESS_TOKENS + 1
"""The most tokens whose rows travel through the express regions, and the fewest whose rows do not."""


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
        self.defined = [self._defined(rank, communicator.device) for rank, communicator in enumerate(communicators)]

    def _wanted(self, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """What each output of one rank must become, on its device."""
        wanted = tensors_of(self.expected[rank])
        wanted |= {mode: sums[rank] for mode, sums in self.sums.items()}
        return {name: tensor.to(device) for name, tensor in wanted.items() if tensor is not None}

    def _defined(self, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Of outputs that the contract does not define as a whole, the bytes that it does."""
        row_map, headers = self.expected[rank].row_map, self.expected[rank].headers
        tokens = headers[:, HeaderWord.TOKENS, None, None]
        entries = torch.arange(row_map.shape[1], device=row_map.device)[None, :, None] < tokens
        words = torch.zeros_like(headers, dtype=torch.bool)
        words[:, HeaderWord.TOKENS] = True
        defined = {"row_map": entries.expand_as(row_map), "weights": entries & (row_map >= 0), "headers": words}
        return {name: tensor.repeat_interleave(4, dim=-1).to(device) for name, tensor in defined.items()}

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
                wrong = actual.view(torch.uint8) != expected.view(torch.uint8)
                counter += (wrong & self.defined[rank][name] if name in self.defined[rank] else wrong).sum()
                poison(actual)


def warmed_counters(
    communicators: Sequence[Communicator], batches: Sequence[Workload], rounds: int = 1
) -> list[torch.Tensor]:
    """One mismatch counter a round, at zero, for each rank, after one use of every torch kernel that counts.

    CUDA loads a kernel at its first launch and waits for the device to be idle: for ever, when a rank's kernel spins
    there for a rank that the same host thread has yet to launch. The counters lie 128 bytes apart, since torch chooses
    kernels by alignment, too.
    """
    counters = [torch.zeros(rounds, 16, dtype=torch.int64, device=c.device)[:, 0] for c in communicators]
    for rank, counter in enumerate(counters):
        for batch in batches:
            for mode in ("exact", "partial"):
                batch.count_mismatches(rank, mode, counter[0])
        counter.zero_()
    for communicator in communicators:
        torch.cuda.synchronize(communicator.device)
    return counters


def on_stream(communicator: Communicator) -> torch.cuda.StreamContext:
    return torch.cuda.stream(communicator.stream)


def synchronize(communicators: Sequence[Communicator]) -> None:
    for communicator in communicators:
        communicator.synchronize()


def check_rounds(communicators: Sequence[Communicator], batches: Sequence[Workload], order: Sequence[int]) -> None:
    """One round for each number of a batch in `order`, all enqueued without waiting for any."""
    counters = warmed_counters(communicators, batches, len(order))
    for number, index in enumerate(order):
        mode = ("exact", "partial")[number % 3 == 0]
        for rank, communicator in enumerate(communicators):
            with on_stream(communicator):
                batches[index].run(rank, communicator, mode)
                batches[index].count_mismatches(rank, mode, counters[rank][number])
    synchronize(communicators)
    wrong = torch.stack([counter.cpu() for counter in counters])
    assert not wrong.any(), f"(rank, round) with wrong bytes: {wrong.nonzero().tolist()}"


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


@pytest.mark.parametrize("tokens", [64, MANY])
def test_rank_that_stops_before_combine(devices: list[str], tokens: int) -> None:
    ranks = len(devices)
    cfg = EPConfig(2048, 64, 4, tokens, ranks, "bf16", timeout_s=1.0)
    with connected(cfg, devices) as communicators:
        batch = Workload(communicators, [tokens] * ranks, "uniform", 6)
        torch.cuda.synchronize()
        dispatched = []
        for rank, communicator in enumerate(communicators):
            with on_stream(communicator):
                dispatched.append(communicator.dispatch(*batch.arguments[rank], out=batch.buffers[rank]))
        for rank, communicator in enumerate(communicators[1:], start=1):
            with on_stream(communicator):
                communicator.combine(batch.rows[rank], dispatched[rank], out=batch.outs[rank])
        for rank, communicator in enumerate(communicators[1:], start=1):
            with pytest.raises(EPTimeout) as caught:
                communicator.synchronize()
            assert (caught.value.phase, caught.value.missing) == ("RETURN", (0,)), rank
            ids, out, wanted = batch.arguments[rank][1], batch.outs[rank], batch.wanted[rank]["exact"]
            from_absent = ((ids >= 0) & (ids // cfg.local_experts == 0)).any(dim=1)
            untouched = out.view(torch.uint8) == POISON
            assert untouched[from_absent].all()  # a token is summed only when all its rows are home
            assert (untouched | (out.view(torch.uint8) == wanted.view(torch.uint8))).all()  # other pieces: all or none


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
        with pytest.raises(EPInputError, match="round 2 of dispatch: must be round 1"):
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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens, half", [(16, 1), (FEW, 1), (MANY, 1), (16, 0)])
def test_more_rows_than_the_buffers_hold_are_reported_not_written(
    devices: list[str], tokens: int, half: int, shared: bool
) -> None:
    """One rank has room for half of its rows, or of its shared expert's, or for none: it alone reports that and
    announces none, tokens that lost a row come home as NaN, all others right, and the next rounds are unharmed."""
    ranks, short = len(devices), 1
    cfg = EPConfig(1408, 8 * ranks, 4, MANY, ranks, "nvfp4", timeout_s=20, fused_shared_expert=shared)
    with connected(cfg, devices) as communicators:
        batch = Workload(communicators, [tokens] * ranks, "uniform", tokens)
        whole, row_map = batch.buffers[short], batch.expected[short].row_map[:, :tokens]
        room = (tokens if shared else int(batch.expected[short].num_rows)) // 2 * half
        small = replace(communicators[short].allocate(room), tokens=whole.tokens[:room], src_info=whole.src_info[:room])
        batch.buffers[short], batch.rows[short] = small, batch.rows[short][:room]
        for mode in ("exact", "partial"):
            for rank, communicator in enumerate(communicators):
                poison(batch.outs[rank])
                torch.cuda.synchronize(communicator.device)
            for rank, communicator in enumerate(communicators):
                with on_stream(communicator):
                    batch.run(rank, communicator, mode)
            with pytest.raises(EPInputError, match=f"rank {short}: out holds {room} rows, but those"):
                communicators[short].synchronize()
            synchronize(communicators)
            assert int(small.num_rows) == 0 and not small.row_offsets.view(torch.int32).any()
            for tensor in (whole.tokens, whole.src_info):
                assert (tensor[room:].view(torch.uint8) == POISON).all()
            assert (row_map >= 0).any(dim=2).any() and not (row_map >= 0).any(dim=2).all()
            for rank, out in enumerate(batch.outs):
                lost = (row_map[rank] >= 0).any(dim=1).to(out.device)
                if shared and rank == short:
                    lost[room:] = True
                assert out[lost].isnan().all()
                assert_bits(out[~lost], batch.wanted[rank][mode][~lost], f"rank {rank} {mode}")
        for seed, count in enumerate((tokens, 1, MANY)):
            check_round(communicators, make_inputs(cfg, [count] * ranks, "zipf", seed))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_graphs_replayed_out_of_order_are_an_error(phase: str) -> None:
    """A fused call behind a replay that sends and before the one that receives: it writes nothing, and says so at once.
    With two ranks on the GPU the other one times out, for it is sent nothing."""
    cfg = EPConfig(2048, 8, 2, 16, 2, "bf16", timeout_s=2)
    with connected(cfg, ["cuda:0"] * 2) as communicators:
        batch = Workload(communicators, [16, 16], "uniform", 11)
        torch.cuda.synchronize()
        first = [c.dispatch(*batch.arguments[rank], out=batch.buffers[rank]) for rank, c in enumerate(communicators)]
        synchronize(communicators)
        one = communicators[0]
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        spare = one.allocate()
        with torch.cuda.graph(graphs[0], stream=one.stream):
            sent = (
                one.dispatch_async(*batch.arguments[0])
                if phase == "dispatch"
                else one.combine_async(batch.rows[0], first[0])
            )
        with torch.cuda.graph(graphs[1], stream=one.stream):
            one.dispatch_wait(sent, spare) if phase == "dispatch" else one.combine_wait(sent)
        poison(spare.tokens)
        torch.cuda.synchronize()
        started = time.monotonic()
        with on_stream(one):
            graphs[0].replay()
            if phase == "dispatch":
                one.dispatch(*batch.arguments[0], out=spare)
            else:
                one.combine(batch.rows[0], first[0], out=batch.outs[0])
        with pytest.raises(EPError, match=f"a fused {phase} ran when . rounds had been sent and . received") as caught:
            one.synchronize()
        assert not isinstance(caught.value, EPTimeout) and time.monotonic() - started < cfg.timeout_s / 2
        out = spare.tokens if phase == "dispatch" else batch.outs[0]
        assert (out.view(torch.uint8) == POISON).all()
        with pytest.raises(EPError, match=f"a fused {phase} ran"):
            one.dispatch(*batch.arguments[0])


def test_bad_arguments_are_refused_before_a_launch() -> None:
    cfg = EPConfig(2048, 8, 2, 16, 1, "nvfp4", timeout_s=5)
    with connected(cfg, ["cuda:0"]) as (communicator,):
        x = torch.zeros(4, 2048, dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
        calls: list[tuple[str, Callable[[], object]]] = [
            ("x.dtype", lambda: communicator.dispatch(x.float(), ids)),
            ("x.shape", lambda: communicator.dispatch(x[:, :1024].contiguous(), ids)),
            ("max_tokens_per_rank", lambda: communicator.dispatch(x.repeat(5, 1), ids.repeat(5, 1))),
            ("topk_ids.dtype", lambda: communicator.dispatch(x, ids.short())),
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
