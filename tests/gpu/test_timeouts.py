"""What an EPTimeout says, by how far a rank has come that then stops: the rank, and the step that is missing."""

from __future__ import annotations

import re

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPTimeout
from cute_ep.layouts.maps.arena import HeaderWord, pack_messages
from cute_ep.layouts.maps.routing import pack_entry
from cute_ep.runtime.communicator import Communicator

from .conftest import connected
from .workload import FEW, MANY, Workload, on_stream

STOPS = 1
"""The rank that stops; the test stores to the arena of rank 0 what it would have sent before."""
STEPS = ("nothing", "counts", "entries")


def store(one: Communicator, region: str, number: int, *place: int, values: list[int]) -> None:
    """LL words of round `number`, side by side."""
    words = [number << 32 | value & 0xFFFFFFFF for value in values]
    one.arena.store(getattr(one.cfg.arena, region).at(number & 1, *place), words)


def send(one: Communicator, step: str, tokens: int, number: int) -> None:
    """As far as `step`, a dispatch of `tokens` tokens that all go to expert 0 twice."""
    if STEPS.index(step) >= 1:
        header = dict.fromkeys(HeaderWord, 0) | {
            HeaderWord.TOKENS: tokens,
            HeaderWord.MESSAGES: pack_messages(0, 0),
            HeaderWord.ROUND: number,
        }
        counts = [2 * tokens] + [0] * (one.cfg.local_experts - 1)
        store(one, "table", number, STOPS, 0, values=[header[word] for word in sorted(header)] + counts)
    if STEPS.index(step) >= 2:
        positions = range(2 * tokens)
        store(one, "entries", number, STOPS, 0, values=[pack_entry(0, position) for position in positions])
    torch.cuda.synchronize()


def told(one: Communicator, phases: set[str], words: str) -> EPTimeout:
    """The error of a rank that waited for STOPS, which has said so at once and goes on saying it."""
    with pytest.raises(EPTimeout) as caught:
        one.synchronize()
    error = caught.value
    assert (error.rank, error.missing) == (0, (STOPS,)) and error.phase in phases, str(error)
    assert re.search(rf"\n  {error.phase} of rank {STOPS}: .*{words}", str(error)), str(error)
    assert error.flags is not None and {flag.peer for flag in error.flags.behind} <= {0, STOPS}
    return error


def names(error: EPTimeout) -> set[str]:
    """Flags of the rank that stopped that are behind."""
    assert error.flags is not None
    return {flag.name for flag in error.flags.behind if flag.peer == STOPS}


@pytest.mark.parametrize(
    ("tokens", "step", "phase", "words", "flag"),
    [
        (16, "nothing", "ROUTE_TABLE", "sent nothing of dispatch round 1", "table"),
        (
            16,
            "counts",
            "ROUTE_ENTRY",
            r"the counts of dispatch round 1, but not the routing of its topk_ids.flatten\(\)\[\d+\]",
            "entries",
        ),
        (
            16,
            "entries",
            "MESSAGE_WORDS",
            r"routing of dispatch round 1, but not all words of slice 0 of its token",
            None,
        ),
        (MANY, "entries", "MESSAGE", r"routing of dispatch round 1, but not slice 0 of its token", "message_ready"),
    ],
)
@pytest.mark.parametrize("sms", [None, 8], ids=["half of the SMs", "few SMs"])
def test_a_rank_stops_in_a_dispatch(
    sms: int | None, tokens: int, step: str, phase: str, words: str, flag: str | None
) -> None:
    """On few SMs twins wait."""
    cfg = EPConfig(1024, 8, 2, MANY, 2, "bf16", timeout_s=1.0)
    with connected(cfg, ["cuda:0"] * 2, sms=sms) as communicators:
        one = communicators[0]
        load = Workload(communicators, [tokens] * 2, "uniform", 4)
        send(one, step, tokens, 1)
        with on_stream(one):
            one.dispatch(*load.arguments[0], out=load.buffers[0])
        error = told(one, {phase}, words)
        assert (flag is None or flag in names(error)) and "table" not in names(error) - {flag}, error.flags


@pytest.mark.parametrize(
    ("tokens", "begun", "phases", "words"),
    [
        (16, False, {"RETURN_ROUND", "RETURN_WORDS"}, "combine round 1"),
        (MANY, False, {"RETURN_ROUND", "RETURN"}, "combine round 1"),
        (
            16,
            True,
            {"RETURN_WORDS"},
            r"all rows in combine round 1: words of slice \d+ of this rank's token \d+ are missing",
        ),
        (
            MANY,
            True,
            {"RETURN"},
            r"round 1: slice \d+ of this rank's token \d+ is missing \(there.* round 0\)",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("sms", [None, 8], ids=["half of the SMs", "few SMs"])
def test_a_rank_stops_in_a_combine(
    sms: int | None, mode: str, tokens: int, begun: bool, phases: set[str], words: str
) -> None:
    """On few SMs pipelines wait for many tokens."""
    cfg = EPConfig(1024, 8, 2, MANY, 2, "bf16", timeout_s=1.0)
    with connected(cfg, ["cuda:0"] * 2, sms=sms) as communicators:
        load = Workload(communicators, [tokens] * 2, "uniform", 4)
        batches = []
        for rank, one in enumerate(communicators):
            with on_stream(one):
                batches.append(one.dispatch(*load.arguments[rank], out=load.buffers[rank]))
        torch.cuda.synchronize()
        one = communicators[0]
        if begun:
            store(one, "return_rounds", 1, STOPS, 0, values=[1])
            torch.cuda.synchronize()
        with on_stream(one):
            one.combine(load.rows[0], batches[0], mode=mode, out=load.outs[0])
        error = told(one, phases, words)
        assert ("return_rounds" in names(error)) == (not begun), error.flags


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_rank_falls_two_rounds_back(operation: str) -> None:
    """Its peer may not overwrite what it has not read."""
    cfg = EPConfig(1024, 8, 2, FEW, 2, "bf16", timeout_s=1.0)
    with connected(cfg, ["cuda:0"] * 2) as communicators:
        load = Workload(communicators, [16] * 2, "uniform", 4)
        batches = []
        for rank, one in enumerate(communicators):
            with on_stream(one):
                batches.append(one.dispatch(*load.arguments[rank], out=load.buffers[rank]))
        if operation == "combine":
            for rank, one in enumerate(communicators):
                with on_stream(one):
                    one.combine(load.rows[rank], batches[rank], mode="exact", out=load.outs[rank])
        torch.cuda.synchronize()
        one = communicators[0]
        with on_stream(one):
            for _ in range(2):  # rounds 2 and 3, which takes the memory of round 1
                if operation == "dispatch":
                    one.dispatch_async(*load.arguments[0])
                else:
                    one.combine_async(load.rows[0], batches[0], "exact")
        words = rf"launched no {operation} since it received round 1 \(the last: 0\), so round 3 cannot be sent"
        assert f"{operation}_consumed" in names(told(one, {f"{operation.upper()}_CONSUMED"}, words))
