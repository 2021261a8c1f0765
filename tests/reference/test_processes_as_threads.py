"""One process per rank without GPUs: threads stand for the processes, but where processes themselves are tested."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.maps.routing import Phase
from cute_ep.reference import processes as reference_processes
from cute_ep.reference.backend import ReferenceCommunicator
from cute_ep.reference.processes import HEADER
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs, make_inputs
from tests.cases import CASES, Case
from tests.reference.ranks import at_once, check_filled, expected, is_poison, poisoned, processes, rows_for, small

ROOT = Path(__file__).parents[2]


def dispatch(communicators: list[ReferenceCommunicator], inputs: list[RankInputs]) -> list:
    return at_once(
        range(len(inputs)),
        lambda rank: communicators[rank].dispatch(
            inputs[rank].x, inputs[rank].topk_ids, inputs[rank].router_weights, out=poisoned(communicators[rank])
        ),
    )


def wait_in_vain(communicators: list[ReferenceCommunicator], phase: Phase, peers: dict[int, list[int]]) -> None:
    """Let the ranks in `peers` give up soon, once the first message of each of these peers is there."""
    for rank, those in peers.items():
        exchange = communicators[rank]._exchange
        with exchange._mail._news:
            boxes = exchange._mail._boxes[phase, 1]
            assert exchange._mail._news.wait_for(lambda boxes=boxes, those=those: boxes.keys() >= set(those), 30)
        exchange.dispatch._timeout_s = exchange.combine._timeout_s = 0.2


@pytest.mark.parametrize("case", [case for case in CASES if case.hidden <= 384], ids=lambda case: case.id)
def test_every_deployment_has_the_bytes_of_the_reference(case: Case) -> None:
    """Every byte is that of the reference, fused and in halves, without a synchronisation in between."""
    cfg, inputs = case.cfg, case.inputs()
    want = expected(cfg, inputs)
    rows = rows_for(want, cfg)
    modes = ["exact", "partial"] + ["unweighted"] * (not case.shared)
    sums = {mode: reference.combine(cfg, rows, want, mode=mode) for mode in modes}

    def layer(rank: int) -> None:
        ep, given = communicators[rank], inputs[rank]
        batch = ep.dispatch(given.x, given.topk_ids, given.router_weights, out=poisoned(ep))
        check_filled(cfg, batch, want[rank], f"rank {rank}")
        for mode in modes:
            assert_bits(ep.combine(rows[rank], batch, mode=mode), sums[mode][rank], f"rank {rank} {mode}")
        out, pending = poisoned(ep), ep.dispatch_async(given.x, given.topk_ids, given.router_weights)
        assert is_poison(out.row_map)
        batch = ep.dispatch_wait(pending, out)
        check_filled(cfg, batch, want[rank], f"rank {rank} in halves")
        sent = [ep.combine_async(rows[rank], batch, mode) for mode in modes[:2]]
        for one, mode in zip(sent, modes, strict=False):
            assert_bits(ep.combine_wait(one), sums[mode][rank], f"rank {rank} {mode} in halves")
        ep.synchronize()

    with processes(cfg) as communicators:
        assert at_once(range(cfg.world_size), layer) == [None] * cfg.world_size


def test_quantised_tokens_travel_between_processes() -> None:
    cfg = small()
    inputs = make_inputs(cfg, [5, 0, 3], "uniform", 0)
    ready = [reference.quantize(one.x, cfg.format) for one in inputs]
    with processes(cfg) as communicators:
        batches = at_once(
            range(3),
            lambda rank: communicators[rank].dispatch(
                ready[rank].payload,
                inputs[rank].topk_ids,
                inputs[rank].router_weights,
                out=poisoned(communicators[rank]),
                scales=ready[rank].scales,
            ),
        )
    for rank, want in enumerate(expected(cfg, inputs)):
        check_filled(cfg, batches[rank], want, f"rank {rank}")


def test_a_sending_half_needs_nobody() -> None:
    """Rank 0 sends two rounds before any other rank has called, and is waited for by nobody afterwards."""
    cfg = small()
    rounds = [make_inputs(cfg, [5, 4, 3], "uniform", seed) for seed in range(2)]
    with processes(cfg) as communicators:
        first = communicators[0]
        pending = [first.dispatch_async(one[0].x, one[0].topk_ids, one[0].router_weights) for one in rounds]

        def late(rank: int) -> list:
            batches = []
            for inputs in rounds:
                ep, given = communicators[rank], inputs[rank]
                batches.append(ep.dispatch(given.x, given.topk_ids, given.router_weights, out=poisoned(ep)))
            return batches

        others = at_once([1, 2], late)
        for number, inputs in enumerate(rounds):
            want = expected(cfg, inputs)
            check_filled(cfg, first.dispatch_wait(pending[number], poisoned(first)), want[0], "rank 0")
            for rank in (1, 2):
                check_filled(cfg, others[rank - 1][number], want[rank], f"rank {rank}")


def test_nothing_is_kept_of_past_rounds() -> None:
    cfg = small(dispatch_format="bf16")
    inputs = make_inputs(cfg, [1, 1, 1], "uniform", 0)
    with processes(cfg) as communicators:

        def rounds(rank: int) -> None:
            ep, given = communicators[rank], inputs[rank]
            for _ in range(20):
                batch = ep.dispatch(given.x, given.topk_ids, given.router_weights)
                ep.combine(batch.tokens, batch)

        assert at_once(range(3), rounds) == [None] * 3
        for ep in communicators:
            for collective in (ep._exchange.dispatch, ep._exchange.combine):
                assert not collective._live
            assert not ep._exchange._mail._boxes


# ---- errors


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_rank_that_does_not_come_is_named_and_nothing_hangs(operation: str) -> None:
    """The others name it, once its time is over; nothing hangs afterwards."""
    cfg = small()
    inputs = make_inputs(cfg, [1, 1, 1], "uniform", 0)
    phase = {"dispatch": Phase.ROUTE_TABLE, "combine": Phase.RETURN_ROUND}[operation]

    def send(rank: int) -> object:
        ep, given = communicators[rank], inputs[rank]
        if operation == "combine":
            return ep.combine_async(batches[rank].tokens.new_zeros(99, 32, dtype=torch.bfloat16), batches[rank])
        return ep.dispatch_async(given.x, given.topk_ids)

    with processes(cfg) as communicators:
        batches = dispatch(communicators, inputs) if operation == "combine" else []
        at_once([0, 1], send)
        wait_in_vain(communicators, phase, {0: [1], 1: [0]})
        begin = time.monotonic()
        errors = at_once([0, 1], lambda rank: getattr(communicators[rank], f"{operation}_wait")())
        assert time.monotonic() - begin >= 0.2
        for rank, error in enumerate(errors):
            assert isinstance(error, EPTimeout)
            assert (error.phase, error.rank, error.missing) == (phase.name, rank, (2,))
            assert error.details == (f"rank 2: expected 1 {operation} calls, saw 0",)
            assert communicators[rank].failed
            with pytest.raises(EPTimeout):
                communicators[rank].allocate()
        assert not communicators[2].failed


def test_a_rank_that_is_late_is_waited_for() -> None:
    cfg = small(timeout_s=20)
    inputs = make_inputs(cfg, [1, 1, 1], "uniform", 0)

    def call(rank: int) -> object:
        ep, given = communicators[rank], inputs[rank]
        if rank == 1:
            time.sleep(0.5)
        return ep.dispatch(given.x, given.topk_ids, given.router_weights, out=poisoned(ep))

    with processes(cfg) as communicators:
        for rank, batch in enumerate(at_once(range(3), call)):
            check_filled(cfg, batch, expected(cfg, inputs)[rank], f"rank {rank}")


def test_a_rank_that_has_gone_is_not_waited_for() -> None:
    """Nobody waits for it: the error comes at once. What it sent before still counts."""
    cfg = small(timeout_s=60)
    inputs = make_inputs(cfg, [1, 1, 1], "uniform", 0)
    begin = time.monotonic()
    with processes(cfg) as communicators:
        communicators[2].dispatch_async(inputs[2].x, inputs[2].topk_ids, inputs[2].router_weights)
        communicators[2].close()
        for rank, batch in enumerate(dispatch(communicators[:2], inputs[:2])):
            check_filled(cfg, batch, expected(cfg, inputs)[rank], f"rank {rank}")
        errors = dispatch(communicators[:2], inputs[:2])
    assert [error.missing for error in errors] == [(2,), (2,)]
    assert errors[0].details == ("rank 2: has closed its communicator, or its process has ended",)
    assert time.monotonic() - begin < 30


def test_modes_that_differ_are_told_to_all_ranks_which_go_on() -> None:
    """All ranks are told, and go on."""
    cfg = small()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    want = expected(cfg, inputs)
    rows = rows_for(want, cfg)
    with processes(cfg) as communicators:
        batches = dispatch(communicators, inputs)

        def combine(rank: int, mode: str) -> torch.Tensor:
            return communicators[rank].combine(rows[rank], batches[rank], mode=mode)

        errors = at_once(range(3), lambda rank: combine(rank, "partial" if rank == 2 else "exact"))
        assert [type(error) for error in errors] == [EPInputError] * 3
        assert str(errors[0]) == "mode = 'exact': must be 'partial', as in the combine of rank 2"
        for rank, got in enumerate(at_once(range(3), lambda rank: combine(rank, "partial"))):
            assert_bits(got, reference.combine(cfg, rows, want, mode="partial")[rank], f"rank {rank}")


def test_input_errors_are_those_of_the_rank() -> None:
    """A wrong id and rows that do not fit: reported by `synchronize` of their ranks. A refused call joins no round."""
    cfg = small()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    inputs[1].topk_ids[3, 1] = -1
    want = expected(cfg, inputs)
    inputs[1].topk_ids[3, 1] = 6
    with processes(cfg) as communicators:
        with pytest.raises(EPInputError, match=r"x\.dtype"):
            communicators[0].dispatch(inputs[0].x.float(), inputs[0].topk_ids)
        outs = [poisoned(one, 0 if rank == 2 else None) for rank, one in enumerate(communicators)]
        batches = at_once(
            range(3),
            lambda rank: communicators[rank].dispatch(inputs[rank].x, inputs[rank].topk_ids, out=outs[rank]),
        )
        assert_bits(batches[1].row_map, want[1].row_map, "rank 1")
        communicators[0].synchronize()
        with pytest.raises(EPInputError, match=r"rank 1: topk_ids.flatten\(\)\[7\] = 6"):
            communicators[1].synchronize()
        with pytest.raises(EPInputError, match="rank 2: out holds 0 rows"):
            communicators[2].synchronize()
        communicators[2].synchronize()


def test_a_call_interrupted_while_it_sends_ends_the_rank_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a message is no message: no rank takes another one for it, and the rank itself makes no call any more."""
    cfg = small()
    inputs = make_inputs(cfg, [1, 1, 1], "uniform", 0)
    with processes(cfg) as communicators:
        first = communicators[0]

        def cut(key: tuple[Phase, int], message: memoryview) -> None:
            whole = HEADER.pack(*key, len(message)) + message
            first._exchange._mail._to[1].sendall(whole)
            first._exchange._mail._to[2].sendall(whole[: len(whole) // 2])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(first._exchange._mail, "post", cut)
            with pytest.raises(KeyboardInterrupt):
                first.dispatch_async(inputs[0].x, inputs[0].topk_ids)
        for call in (
            lambda: first.dispatch_async(inputs[0].x, inputs[0].topk_ids),
            first.dispatch_wait,
            first.allocate,
        ):
            with pytest.raises(EPError, match="rank 0: a call was interrupted while it sent; close, and connect again"):
                call()
        for rank in (1, 2):
            communicators[rank].dispatch_async(inputs[rank].x, inputs[rank].topk_ids)
        wait_in_vain(communicators, Phase.ROUTE_TABLE, {2: [1]})
        with pytest.raises(EPTimeout) as caught:
            communicators[2].dispatch_wait()
        assert caught.value.missing == (0,)


def test_a_call_interrupted_before_it_sends_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has joined no round, so it can be made again."""
    cfg = small()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with processes(cfg) as communicators:
        with monkeypatch.context() as patch:
            patch.setattr(reference_processes.torch, "save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                communicators[0].dispatch(inputs[0].x, inputs[0].topk_ids)
        for rank, batch in enumerate(dispatch(communicators, inputs)):
            check_filled(cfg, batch, expected(cfg, inputs)[rank], f"rank {rank}")


def test_a_call_interrupted_while_it_waits_can_still_be_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round was sent, and can still be received."""
    cfg = small()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    want = expected(cfg, inputs)
    with processes(cfg) as communicators:
        first = communicators[0]

        def interrupted(timeout: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(first._exchange._mail._news, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                first.dispatch(inputs[0].x, inputs[0].topk_ids, inputs[0].router_weights)
        for rank, batch in enumerate(dispatch(communicators[1:], inputs[1:]), start=1):
            check_filled(cfg, batch, want[rank], f"rank {rank}")
        with pytest.raises(EPInputError, match=r"1 split round\(s\) outstanding"):
            first.dispatch(inputs[0].x, inputs[0].topk_ids)
        check_filled(cfg, first.dispatch_wait(out=poisoned(first)), want[0], "rank 0")


def test_a_rank_whose_messages_are_not_taken_names_the_peer_and_has_failed() -> None:
    """The sending half names the peer, and the communicator has failed."""
    cfg = small()
    inputs = make_inputs(cfg, [1, 1, 1], "uniform", 0)
    with processes(cfg) as communicators:
        communicators[0]._exchange._mail.post = lambda key, message: [2]
        with pytest.raises(EPTimeout) as caught:
            communicators[0].dispatch(inputs[0].x, inputs[0].topk_ids)
        assert caught.value.missing == (2,) and communicators[0].failed
        assert caught.value.details == ("rank 2: did not take the message of round 1",)


def test_a_fork_has_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half; in the process that connected the round goes on."""
    cfg, parent = small(), os.getpid()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    with processes(cfg) as communicators:
        first, given = communicators[0], inputs[0]
        first.dispatch_async(given.x, given.topk_ids, given.router_weights)
        with monkeypatch.context() as patch:
            patch.setattr(reference_processes.os, "getpid", lambda: parent + 1)
            for call in (lambda: first.dispatch_async(given.x, given.topk_ids), first.dispatch_wait):
                with pytest.raises(EPError, match=f"rank 0: the communicator belongs to process {parent}, connect in"):
                    call()
        for rank, batch in enumerate(dispatch(communicators[1:], inputs[1:]), start=1):
            check_filled(cfg, batch, expected(cfg, inputs)[rank], f"rank {rank}")
        check_filled(cfg, first.dispatch_wait(out=poisoned(first)), expected(cfg, inputs)[0], "rank 0")


def test_a_fork_that_closes_ends_nothing() -> None:
    """As a forked child does that leaves the block of its parent's communicator."""
    cfg = small()
    inputs = make_inputs(cfg, [5, 5, 5], "uniform", 0)
    with processes(cfg) as communicators:
        child = os.fork()
        if not child:
            try:
                communicators[0].close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        for rank, batch in enumerate(dispatch(communicators, inputs)):
            check_filled(cfg, batch, expected(cfg, inputs)[rank], f"rank {rank}")


def test_a_communicator_that_is_dropped_is_closed() -> None:
    cfg = small()
    inputs = make_inputs(cfg, [1, 1, 1], "uniform", 0)
    with processes(cfg) as communicators:
        mail = communicators[0]._exchange._mail
        communicators[0] = communicators[1]
        gc.collect()
        assert all(link.fileno() == -1 for link in (*mail._to.values(), *mail._of.values()))
        errors = dispatch(communicators[1:], inputs[1:])
        assert [error.missing for error in errors] == [(0,), (0,)]
