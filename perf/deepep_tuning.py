"""The fastest chunk sizes and number of SMs of DeepEP V1's normal kernels at one batch size, by the loop of DeepEP's
own test (tests/legacy/test_intranode.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_ep.torch_internals import sleep_on_gpu
from perf.peer_timing import CLOCK_HZ, SLEEP_S, Rank

DISPATCH_CHUNKS, COMBINE_CHUNKS = tuple(range(4, 33, 2)), tuple(range(1, 17))
"""Tokens of a chunk, as in DeepEP's loop; the defaults of 2, 4 and 8 ranks are among them."""
RECEIVE_TOKENS = 256
"""Of a channel's receive buffer, as in DeepEP's loop and defaults."""
SMS = (16, 24, 32, 48, 64, 96, 128)
FIRST, CALLS = 2, 8
"""Calls before the time begins, and calls that are timed."""


class Choice(NamedTuple):
    """Arguments of DeepEP's Config: SMs, and tokens of a chunk of a dispatch and of a combine."""

    sms: int
    dispatch: int
    combine: int

    @property
    def about(self) -> dict[str, str | int]:
        """As `perf.peer_timing.Work.about`."""
        return {"how": f"{self.sms} SMs, chunks of {self.dispatch} and {self.combine}", "sms": self.sms}


def choose(
    budgets: Sequence[int],
    time_dispatch: Callable[[int, int], float],
    time_combine: Callable[[int, int], float],
    agree: Callable[[Sequence[float]], Sequence[float]],
) -> Choice:
    """The choice with the least sum of a dispatch and a combine.

    Args:
        budgets: numbers of SMs.
        time_dispatch, time_combine: seconds of an operation on so many SMs with chunks of so many tokens; combines are
            asked for after a dispatch on as many SMs.
        agree: makes of a rank's seconds those that all ranks choose by.
    """
    found: list[tuple[float, Choice]] = []
    for sms in budgets:
        there = agree([time_dispatch(sms, chunk) for chunk in DISPATCH_CHUNKS])
        back = agree([time_combine(sms, chunk) for chunk in COMBINE_CHUNKS])
        least = min(zip(there, DISPATCH_CHUNKS, strict=True)), min(zip(back, COMBINE_CHUNKS, strict=True))
        found.append((least[0][0] + least[1][0], Choice(sms, least[0][1], least[1][1])))
    return min(found)[1]


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of a call that is queued with others while the stream sleeps, so no host work is inside."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    sleep_on_gpu(int(SLEEP_S * CLOCK_HZ))
    for _ in range(FIRST):
        call()
    start.record()
    for _ in range(CALLS):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / CALLS


def slowest(seconds: Sequence[float]) -> list[float]:
    """The highest of all ranks' times, one by one."""
    every = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.tolist()


def config_of(sms: int, chunk: int):
    """DeepEP's Config."""
    import deep_ep

    return deep_ep.Config(sms, chunk, RECEIVE_TOKENS)


def configs(choice: Choice) -> tuple:
    """Those of dispatch and combine."""
    return config_of(choice.sms, choice.dispatch), config_of(choice.sms, choice.combine)


_CHOSEN: dict[tuple, Choice] = {}


def fastest(
    me: Rank, key: tuple[int, str, tuple[int, ...]], dispatch: Callable, combine: Callable, room: int
) -> Choice:
    """The fastest choice for a batch size, looked for once; the same on all ranks. Collective.

    Args:
        me: the rank.
        key: the batch size, the format and the numbers of SMs.
        dispatch, combine: take an input set and `config`.
        room: bytes of DeepEP's buffer, into which the channels of so many SMs must fit.
    """
    if key not in _CHOSEN:
        row = 2 * me.shape.hidden
        budgets = [sms for sms in key[2] if config_of(sms, 1).get_nvl_buffer_size_hint(row, me.world) <= room]
        _CHOSEN[key] = choose(
            budgets,
            lambda sms, chunk: seconds_of(lambda: dispatch(0, config=config_of(sms, chunk))),
            lambda sms, chunk: seconds_of(lambda: combine(0, config=config_of(sms, chunk))),
            slowest,
        )
    return _CHOSEN[key]
