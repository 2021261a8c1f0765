"""Lamport rows: while tokens are few, each 32-bit word of a row is its own flag.

A word holds SENTINEL until it has arrived. The reader polls the data itself, and clears what it has taken for the round
after next. So a reader waits neither for a fence that follows the stores nor for a flag on its way. A row that
contains SENTINEL itself (quantised rows may) falls back to a flag: after the flag every word has arrived.

The clearing of round n comes before the stores of round n + 2: the launch after it signals `consumed` with a release,
and the sender waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_ep.kernels.device.context import Context
from cute_ep.kernels.device.divide import remainder
from cute_ep.kernels.device.slices import has_bit
from cute_ep.kernels.device.sync import Awaited, now_ns, report
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, Region

POLLS_PER_CHECK = 32
"""Polls of the words between two checks of their flag, the clock and the abort word."""


def is_lamport(tokens: Int32) -> Boolean:
    """Whether a source with this many tokens sends Lamport rows."""
    return tokens <= LAMPORT_TOKENS


def region_of(lamport: Boolean, lamport_region: Region, region: Region) -> Region:
    """One of the two regions that rows travel through; one computation for both."""
    offset = cutlass.select_(lamport, lamport_region.offset, region.offset)
    strides = zip(lamport_region.stride, region.stride, strict=True)
    stride = tuple(cutlass.select_(lamport, few, many) for few, many in strides)
    return replace(region, offset=offset, stride=stride)


def _ticks(time_ns: Int64) -> Int32:
    """A time in units of 2^20 ns: differences are right up to 26 days, and take one register."""
    return Int32(time_ns >> 20)


@cute.jit
def wait_lamport(
    ctx: Context, poll: Callable[[Uint32], Uint32], check: Callable[[], Uint32], flagged: Uint32, awaited: Awaited
) -> Boolean:
    """Warp-wide: poll words until they have all arrived. Returns False, in every lane, after a timeout.

    Args:
        poll: called with `flagged`, loads the words and returns a bit for each row of which it saw a SENTINEL word.
        check: returns a bit for each row whose flag was signaled: its sentinel words are content.
        flagged: what `check` has returned so far.
        awaited: in lane r that of row r.
    """
    alive = Boolean(True)
    waiting = Boolean(True)
    polls = Int32(0)
    limit = Int32(0)
    while waiting:
        missing = Uint32(cute.arch.warp_redux_sync(poll(flagged), "or"))
        waiting = missing != Uint32(0)
        polls += 1
        if waiting & (remainder(polls, POLLS_PER_CHECK) == 0):
            flagged = check()
            running = ctx.not_aborted()
            if limit == 0:
                limit = _ticks(now_ns() + ctx.group.timeout_ns) | 1
            in_time = cute.arch.vote_all_sync(running & (_ticks(now_ns()) - limit <= 0))
            if not in_time:
                if running & has_bit(missing, ctx.lane):
                    # the phase says that a word was SENTINEL; a constant in place of the epoch makes combine spill
                    report(ctx.wait_context, awaited, ctx.epoch, ctx.epoch - 1)
                alive = Boolean(False)
                waiting = Boolean(False)
    return alive
