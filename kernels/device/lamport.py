"""Express rows: while tokens are few, each word of a row is its own flag.

A word is BLANK until it has arrived; the reader polls the data itself, and blanks what it has taken, for the round
after next. So neither a fence behind the stores nor a flag's flight and look-up lies between a row and its reader. A
row that holds a BLANK word itself (quantised rows may) gets its flag as other rows do: behind the flag every word has
arrived, blank or not.

The blanking of round n comes before the stores of round n + 2: the launch after it posts `consumed` with a release, and
the sender waits for that.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_ep.kernels.device.divide import remainder
from cute_ep.kernels.device.memory import WORDS, load_vector, pointer, vector_at, vector_atom
from cute_ep.kernels.device.splits import has_bit
from cute_ep.kernels.device.sync import now_ns, report
from cute_ep.layouts.maps.arena import BLANK, EXPRESS_TOKENS, Region

LOOKS_PER_CHECK = 32
"""Looks at the words between two looks at their flag, the clock and the abort word."""


def is_express(tokens) -> Boolean:
    """Whether a source with this many tokens sends, and gets back, express rows."""
    return tokens <= EXPRESS_TOKENS


def home_of(express: Boolean, express_region: Region, region: Region, *coord) -> Int64:
    """Byte offset of a row in one of the two regions that rows travel through; one computation for both."""
    offset = cutlass.select_(express, express_region.offset, region.offset)
    strides = zip(express_region.stride, region.stride, strict=True)
    chosen = [cutlass.select_(express, few, many) for few, many in strides][: len(coord)]
    return replace(region, offset=offset, stride=tuple(chosen)).at(*coord)


def has_blank(words) -> Boolean:
    """Whether one of a vector's words is BLANK."""
    largest = words[0]
    for index in range(1, WORDS):
        largest = cutlass.max(largest, words[index])
    return largest == Uint32(BLANK)


def send_vector(words, address: Int64) -> None:
    """Store 16 bytes that somebody may look at (own or peer memory)."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, *(Uint32(words[index]) for index in range(WORDS))],
    )


def send_word(word: Uint32, address: Int64) -> None:
    """Store 4 bytes that somebody may look at."""
    cute.arch.store(pointer(address, Uint32), word, sem="relaxed", scope="sys")


def look_at_vector(words, address: Int64) -> None:
    """Load 16 bytes that may be on their way."""
    load_vector(words, address, "relaxed.sys.global")


def look_at_word(address: Int64) -> Uint32:
    """Load 4 bytes that may be on their way."""
    return cute.arch.load(pointer(address, Uint32), Uint32, sem="relaxed", scope="sys")


def blank_vector(address: Int64) -> None:
    """Blank 16 bytes that this rank has taken."""
    words = cute.make_rmem_tensor(WORDS, Uint32)
    words.fill(BLANK)
    cute.copy(vector_atom(), words, vector_at(address, 0))


def blank_word(address: Int64) -> None:
    """Blank 4 bytes that this rank has taken."""
    cute.arch.store(pointer(address, Uint32), Uint32(BLANK))


def _ticks(time_ns: Int64) -> Int32:
    """A time in units of 2^20 ns: differences are right up to 26 days, and take one register."""
    return Int32(time_ns >> 20)


@cute.jit
def wait_whole(group, look, check, settled: Uint32, epoch: Int64, peer: Int32, phase: cutlass.Constexpr, index):
    """Warp-wide: look at words until they have all arrived. Returns False, in every lane, after a timeout.

    Args:
        look: called with `settled`, loads the words and returns a bit for each row of which it saw a BLANK word.
        check: returns a bit for each row whose flag was posted: its blank words are content.
        settled: `check`'s result so far.
        peer: in lane r the rank that sends row r.
        phase, index: what a timeout is reported as.
    """
    alive = Boolean(True)
    waiting = Boolean(True)
    looks = Int32(0)
    limit = Int32(0)
    while waiting:
        missing = Uint32(cute.arch.warp_redux_sync(look(settled), "or"))
        waiting = missing != Uint32(0)
        looks += 1
        if waiting & (remainder(looks, LOOKS_PER_CHECK) == 0):
            settled = check()
            healthy = group.is_healthy()
            if limit == 0:
                limit = _ticks(now_ns() + group.timeout_ns) | 1
            in_time = cute.arch.vote_all_sync(healthy & (_ticks(now_ns()) - limit <= 0))
            if not in_time:
                if healthy & has_bit(missing, group.lane):
                    report(group.watch, peer, phase, Int32(index), epoch, epoch - 1)
                alive = Boolean(False)
                waiting = Boolean(False)
    return alive
