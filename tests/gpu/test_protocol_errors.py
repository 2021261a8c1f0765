"""The protocol when something goes wrong: late and absent ranks, calls out of order, bad input."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import POISON, check_round, poison
from cute_ep.testing.workloads import make_inputs

from .conftest import connected
from .runs import ONE_CTA
from .workload import FEW, MANY, Workload, on_stream, synchronize


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
    """The others report it within the set time, publish nothing, and a fresh group works in the same process."""
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
            assert caught.value.phase == "ROUTE_TABLE"
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
                communicator.combine(batch.rows[rank], dispatched[rank], mode="exact", out=batch.outs[rank])
        for rank, communicator in enumerate(communicators[1:], start=1):
            with pytest.raises(EPTimeout) as caught:
                communicator.synchronize()
            assert caught.value.missing == (0,), rank
            assert caught.value.phase in ("RETURN_ROUND", "RETURN", "RETURN_WORDS"), rank  # whichever gave up first
            ids, out, wanted = batch.arguments[rank][1], batch.outs[rank], batch.wanted[rank]["exact"]
            from_absent = ((ids >= 0) & (ids // cfg.local_experts == 0)).any(dim=1)
            untouched = out.view(torch.uint8) == POISON
            assert untouched[from_absent].all()  # a token is summed only when all its rows are home
            assert (untouched | (out.view(torch.uint8) == wanted.view(torch.uint8))).all()  # other slices: all or none


@pytest.mark.parametrize("early", [False, True], ids=["", "launches start early"])
@pytest.mark.parametrize("tokens", [64, MANY])
def test_a_launch_behind_a_failed_wait_sends_and_sums_nothing(devices: list[str], tokens: int, early: bool) -> None:
    """Whatever the flags say: rows of all others have come when rank 0 waits in vain in a dispatch of its own."""
    ranks = len(devices)
    cfg = EPConfig(2048, 64, 4, tokens, ranks, "bf16", timeout_s=1.5)
    with connected(cfg, devices) as communicators:
        batch = Workload(communicators, [tokens] * ranks, "uniform", 6)
        if early:
            for communicator in communicators:
                communicator.tuning = ONE_CTA
        dispatched, pending = [], []
        torch.cuda.synchronize()
        for rank, communicator in enumerate(communicators):
            with on_stream(communicator):
                dispatched.append(communicator.dispatch(*batch.arguments[rank], out=batch.buffers[rank]))
        for rank, communicator in enumerate(communicators[1:], start=1):
            with on_stream(communicator):
                pending.append(communicator.combine_async(batch.rows[rank], dispatched[rank], mode="exact"))
        first = communicators[0]
        with on_stream(first):
            first.dispatch(*batch.arguments[0])
            first.combine(batch.rows[0], dispatched[0], mode="exact", out=batch.outs[0])
        with pytest.raises(EPTimeout) as caught:
            first.synchronize()
        assert caught.value.phase == "ROUTE_TABLE"
        assert (batch.outs[0].view(torch.uint8) == POISON).all()
        for rank, communicator in enumerate(communicators[1:], start=1):
            with on_stream(communicator):
                communicator.combine_wait(pending[rank - 1], out=batch.outs[rank])
        for rank, communicator in enumerate(communicators[1:], start=1):
            with pytest.raises(EPTimeout) as caught:
                communicator.synchronize()
            assert caught.value.missing == (0,), rank
            ids, untouched = batch.arguments[rank][1], batch.outs[rank].view(torch.uint8) == POISON
            from_failed = ((ids >= 0) & (ids // cfg.local_experts == 0)).any(dim=1)
            assert from_failed.any() and untouched[from_failed].all(), rank


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
        communicator.combine(batch.rows[0], dispatched, mode="exact", out=batch.outs[0])
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
@pytest.mark.parametrize(
    ("tokens", "half", "sms"), [(16, 1, None), (FEW, 1, None), (MANY, 1, None), (16, 0, None), (MANY, 1, 8)]
)
def test_more_rows_than_the_buffers_hold_are_reported_not_written(
    devices: list[str], tokens: int, half: int, sms: int | None, shared: bool
) -> None:
    """One rank has room for half of its rows, or of its shared expert's, or for none: it alone reports that and
    publishes none, tokens that lost a row come home as NaN, all others right, and the next rounds are unharmed."""
    ranks, short = len(devices), 1
    cfg = EPConfig(1408, 8 * ranks, 4, MANY, ranks, "nvfp4", timeout_s=20, fused_shared_expert=shared)
    with connected(cfg, devices, sms=sms) as communicators:
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
                else one.combine_async(batch.rows[0], first[0], mode="exact")
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
                one.combine(batch.rows[0], first[0], mode="exact", out=batch.outs[0])
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
        with pytest.raises(EPInputError, match="exact combine needs them"):
            communicator.combine(rows, dispatched, mode="exact")
        with pytest.raises(EPInputError, match="mode = 'sum'"):
            communicator.combine(rows, dispatched, mode="sum")
        communicator.synchronize()
    with pytest.raises(EPError, match="closed"):
        communicator.dispatch(x, ids)
