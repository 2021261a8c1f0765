"""Rounds of which nobody calls the hook: the next call drops them, or `clean_low_latency_buffer` does."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPError, EPInputError
from cute_ep.integrations.common.halves import Halves, Round
from cute_ep.integrations.deep_ep import Buffer

from .groups import on_buffers, on_groups
from .refusals import refused
from .rigs import EXPERTS, MOST, RANKS, VLLM, vllm
from .test_wrong_ids import expected, tokens
from .vllm_parts import TURN

Patch = pytest.MonkeyPatch
HOOK = {"return_recv_hook": True, "use_fp8": False}


class Calls:
    """Low-latency calls of one rank."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.x, self.ids, self.weights = tokens(buffer.rank)

    def send(self, factor: int = 1, **options: Any) -> tuple:
        """(rows, handle, hook) of a dispatch."""
        sent = self.x * factor, self.ids, MOST, EXPERTS
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(*sent, **{"use_fp8": False, **options})
        return rows, handle, hook

    def home(self, rows: torch.Tensor, handle: Any, **options: Any) -> tuple:
        """(sums, hook) of a combine."""
        out, _, hook = self.buffer.low_latency_combine(rows, self.ids, self.weights, handle, **options)
        return out, hook

    def check(self) -> None:
        """A good round, at once and in halves, of both calls."""
        want = self.x * (self.weights * (self.ids >= 0)).sum(1, keepdim=True).bfloat16()
        for factor in (1, 2):
            rows, handle, _ = self.send(factor)
            assert torch.equal(self.home(rows, handle)[0], want * factor)
        rows, handle, hook = self.send(**HOOK)
        hook()
        out, hook = self.home(rows, handle, return_recv_hook=True)
        hook()
        assert torch.equal(out, want)


def lose_dispatch(calls: Calls) -> None:
    calls.send(3, **HOOK)


def lose_two(calls: Calls) -> None:
    calls.send(3, **HOOK)
    calls.send(4, **HOOK)


def lose_combine(calls: Calls) -> None:
    rows, handle, _ = calls.send()
    calls.home(rows, handle, return_recv_hook=True)


def lose_combine_into_memory_that_is_used_again(calls: Calls) -> None:
    rows, handle, _ = calls.send()
    out = torch.zeros_like(calls.x)
    calls.home(rows, handle, return_recv_hook=True, out=out)
    out.fill_(7)
    calls.check()
    assert (out == 7).all()


def lose_behind_one_that_waits(calls: Calls) -> None:
    _, _, waits = calls.send(3, **HOOK)
    calls.send(4, **HOOK)
    rule = "low_latency_dispatch: 2 hook(s) of earlier calls have not been called: must be called first"
    refused(partial(calls.send, 5, **HOOK), rule, EPInputError)
    waits()


def lose_before_one_that_waits(calls: Calls) -> None:
    calls.send(3, **HOOK)
    rows, handle, hook = calls.send(4, **HOOK)
    hook()
    calls.home(rows, handle)


def lose_by_an_error(calls: Calls) -> None:
    """As where a request is aborted: the traceback has the hook until the error was handled."""
    try:
        _, _, hook = calls.send(3, **HOOK)
        raise KeyError(hook)
    except KeyError:
        pass


@pytest.mark.parametrize(
    "lose",
    [
        lose_dispatch,
        lose_two,
        lose_combine,
        lose_combine_into_memory_that_is_used_again,
        lose_behind_one_that_waits,
        lose_before_one_that_waits,
        lose_by_an_error,
    ],
    ids=lambda lose: lose.__name__,
)
@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["all ranks", "one rank"])
def test_lost_hooks_end_nothing(monkeypatch: Patch, lose: Any, ranks: tuple[int, ...]) -> None:
    """Where only one rank has lost its hook the other one calls its own, or drops its round as well."""

    def program(buffer: Buffer) -> None:
        calls, kept = Calls(buffer), []
        if buffer.rank in ranks:
            lose(calls)
        elif lose not in (lose_combine, lose_combine_into_memory_that_is_used_again):
            for factor in (3, 4)[: 1 + (lose not in (lose_dispatch, lose_by_an_error))]:
                kept.append(calls.send(factor, **HOOK))
            for _, _, hook in kept:
                hook()
            if lose is lose_before_one_that_waits:
                calls.home(*kept[1][:2])
        else:
            lose(calls)
        calls.check()

    on_buffers(monkeypatch, RANKS, program)


def test_hooks_that_wait_are_named_and_can_be_given_up(monkeypatch: Patch) -> None:
    """In the interface's words; a hook that was refused can be called in its turn."""

    def program(buffer: Buffer) -> None:
        calls = Calls(buffer)
        _, _, first = calls.send(3, **HOOK)
        rule = "low_latency_dispatch: 1 hook(s) of earlier calls have not been called: must be called first, before a c"
        refused(calls.send, rule, EPInputError)
        rows, handle, second = calls.send(1, **HOOK)
        refused(partial(calls.send, **HOOK), "give them up with clean_low_latency_buffer(...)", EPInputError)
        refused(partial(calls.home, rows, handle), "handle: the dispatch's hook must be called before", EPInputError)
        rule = (
            "hook of low_latency_dispatch: must be called after those of earlier calls; or give them up with clean_low"
        )
        refused(second, rule, EPInputError)
        first()
        second()
        out, third = calls.home(rows, handle, return_recv_hook=True)
        refused(partial(calls.home, rows, handle), "low_latency_combine: 1 hook(s) of earlier calls", EPInputError)
        _, _, fourth = calls.send(5, **HOOK)
        buffer.clean_low_latency_buffer(MOST, calls.x.shape[1], EXPERTS)
        for hook, call in ((third, "low_latency_combine"), (fourth, "low_latency_dispatch")):
            refused(hook, f"hook of {call}: its round was given up; make the call again", EPError)
        first()  # nothing more
        del out
        calls.check()

    on_buffers(monkeypatch, RANKS, program)


def test_a_lost_round_does_not_count_into_statistics(monkeypatch: Patch) -> None:
    def program(buffer: Buffer) -> None:
        calls, stats = Calls(buffer), torch.zeros(EXPERTS // RANKS, dtype=torch.int32)
        calls.send(cumulative_local_expert_recv_stats=stats, **HOOK)
        calls.check()
        assert not stats.any()

    on_buffers(monkeypatch, RANKS, program)


def test_hooks_leave_no_garbage_that_refers_to_itself(monkeypatch: Patch) -> None:
    """Or a hook that was dropped would not be lost before Python collects garbage."""

    def program(buffer: Buffer) -> None:
        calls = Calls(buffer)
        for _ in range(3):
            lose_dispatch(calls)
        calls.check()

    gc.disable()
    try:
        on_buffers(monkeypatch, RANKS, program)
    finally:
        gc.enable()


def test_rounds_of_vllm_whose_hooks_were_lost_are_dropped(monkeypatch: Patch) -> None:
    """As where a micro-batch ends by an error."""

    def program(group: Any) -> tuple:
        rig = VLLM(group, batched=True)
        x, ids, weights = given = tokens(group.rank())
        try:
            for _ in range(2):
                TURN.hooks, TURN.number = {}, 0
                sent = x * 3, weights, ids, EXPERTS, None, False, rig.experts.quant_config, False
                hook, _ = rig.layer.prepare_async(*sent)
                refused(partial(rig.dispatch, given), "prepare: 1 hook(s) of earlier calls have not been called")
                del hook
                TURN.hooks = TURN.number = None
                out = rig.combine(given, rig.dispatch(given))
        finally:
            rig.close()
        return rig, given, out

    with vllm(monkeypatch):
        for rig, given, out in on_groups(monkeypatch, RANKS, program):
            assert torch.equal(out, expected(rig, given))


# ---- captures


class Communicator:
    """What halves ask of one: nothing."""


@pytest.mark.parametrize(
    ("captured", "capturing", "rule"),
    [
        (False, True, "an earlier call's hook was lost, and no graph may receive its round; before a capture clean up"),
        (True, False, "was captured into a CUDA graph without its hook; destroy"),
        (True, True, None),
        (False, False, None),
    ],
    ids=["sent before", "sent in a capture that has ended", "sent in the capture", "no capture"],
)
def test_no_graph_receives_a_round_that_it_has_not_sent(captured: bool, capturing: bool, rule: str | None) -> None:
    """Each replay would receive another one's."""
    pool: Any = SimpleNamespace(capturing=lambda: capturing)
    halves, one, dropped = Halves(pool, "clean up"), Communicator(), []
    halves.sent(Round(one, "send", lambda: None, lambda: dropped.append(1), captured))  # type: ignore[arg-type]
    call = partial(halves.make_way, one, "send", whole=True)  # type: ignore[arg-type]
    if rule is None:
        call()
        call()
        assert dropped == [1]
        return
    for _ in range(2):
        refused(call, f"send: {rule}", EPError)
    assert not dropped


def test_a_hook_that_raises_can_be_called_again() -> None:
    pool: Any = SimpleNamespace(capturing=lambda: False)
    halves, one, tried = Halves(pool, "clean up"), Communicator(), []

    def receive() -> None:
        tried.append(1)
        if len(tried) == 1:
            raise TimeoutError

    hook = halves.sent(Round(one, "send", receive, lambda: None, False))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        hook()
    hook()
    hook()
    assert tried == [1, 1]
