"""How a launch is shaped: CTAs, their roles, pieces of a row. Tables and their look-up; every choice gives the same
bytes, so ranks may choose differently.

A communicator holds one `Tuning`: the one that it was given, else the one of `cute_ep.tuning_file.find_tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2
from typing import NamedTuple, TypeVar

from cute_ep.config import EPConfig
from cute_ep.errors import EPConfigError
from cute_ep.layouts.arena import (
    COMBINE_ITEMSIZE,
    EXPRESS_TOKENS,
    MANY_PIECES,
    MAX_PIECES,
    SEGMENT_BYTES,
    message_bytes,
)
from cute_ep.layouts.routing import MAX_TOKENS_PER_RANK

Found = TypeVar("Found")

CTAS_PER_SM = 2
MANY = 1 << 30
"""More than any number of tokens or CTAs."""
FAMILIES = ("dispatch", "combine")
"""Operations that have a table; halves and modes share it."""


def pieces_for(tokens: int) -> tuple[int, ...]:
    """Numbers of pieces that a row may have in a call of `tokens` tokens: the arena has a flag for each of them."""
    most = MAX_PIECES if tokens <= EXPRESS_TOKENS else MANY_PIECES
    return tuple(1 << log2 for log2 in range(most.bit_length()))


@dataclass(frozen=True)
class Entry:
    """What was fastest up to a number of tokens a rank.

    Attributes:
        tokens: the entry holds up to this many.
        grid: CTAs at most.
        senders: share of the CTAs that only send while the others only receive; 0: every CTA does both.
        pieces: pieces of a message (dispatch) or of a returned row (combine).
        packed: whether senders share SMs with each other instead of with receivers, which their stores hold up while
            links are busy (dispatch only).
        most_senders: CTAs that send at most: more would not fill the links better, but be missing as receivers.
        split_from: CTAs from which on some only send and the others only receive; of fewer, every one does both.

    Raises:
        EPConfigError: a field breaks its rule (the message has them).
    """

    tokens: int
    grid: int
    senders: float
    pieces: int
    packed: bool = False
    most_senders: int = MANY
    split_from: int = 4

    def __post_init__(self) -> None:
        counts = self.tokens, self.grid, self.pieces, self.most_senders, self.split_from
        whole = all(isinstance(number, int) and number > 0 for number in counts)
        if not whole or not 0 <= self.senders < 1 or self.pieces not in pieces_for(self.tokens):
            raise EPConfigError(
                f"{self}: must be positive integers, senders in [0, 1), pieces a power of two of at most {MAX_PIECES}, "
                f"{MANY_PIECES} for more than {EXPRESS_TOKENS} tokens"
            )


TABLE_CTAS = 264
"""CTAs that the built-in tables were measured with."""
FEW = (Entry(2, 128, 1 / 8, 32), Entry(32, 128, 1 / 4, 8))
FEW_LARGE = (Entry(2, 64, 1 / 8, 32), Entry(32, 128, 1 / 4, 8))
FEW_OF_MANY = (Entry(2, 128, 1 / 8, 32), Entry(16, 128, 1 / 4, 8))
ONE_A_SM = 132
UP_TO_64 = Entry(64, ONE_A_SM, 24 / 132, 4)
SHORT = (
    *FEW_OF_MANY,
    UP_TO_64,
    Entry(128, ONE_A_SM, 32 / 132, 2),
    Entry(256, ONE_A_SM, 32 / 132, 1),
    Entry(512, MANY, 1 / 4, 1, most_senders=32),
    Entry(1024, MANY, 1 / 4, 4, most_senders=32),
    Entry(MANY, MANY, 3 / 8, 4, packed=True, most_senders=56),
)
MIDDLE = (
    *FEW_OF_MANY,
    UP_TO_64,
    Entry(128, ONE_A_SM, 32 / 132, 2),
    Entry(256, MANY, 64 / 264, 2, packed=True),
    Entry(768, MANY, 64 / 264, 1, packed=True),
    Entry(1024, MANY, 48 / 264, 2, packed=True),
)
DISPATCH: dict[int, dict[int, tuple[Entry, ...]]] = {
    2: {
        3000: (
            *FEW,
            UP_TO_64,
            Entry(256, ONE_A_SM, 32 / 132, 2),
            Entry(512, MANY, 3 / 8, 2, most_senders=64, split_from=130),
            Entry(1024, MANY, 1 / 2, 1, most_senders=64, split_from=130),
            Entry(MANY, MANY, 1 / 2, 1, most_senders=64, split_from=66),
        ),
        4095: (
            *FEW,
            UP_TO_64,
            Entry(192, MANY, 1 / 4, 4, most_senders=32),
            Entry(256, MANY, 1 / 4, 2, most_senders=32),
            Entry(512, MANY, 3 / 8, 2, most_senders=64, split_from=130),
            Entry(1024, MANY, 1 / 2, 1, most_senders=64, split_from=130),
            Entry(MANY, MANY, 1 / 2, 1, most_senders=64, split_from=66),
        ),
        7000: (
            *FEW,
            Entry(128, ONE_A_SM, 24 / 132, 4),
            Entry(256, ONE_A_SM, 32 / 132, 2),
            Entry(512, MANY, 3 / 8, 2, most_senders=64, split_from=130),
            Entry(1024, MANY, 1 / 2, 1, most_senders=64, split_from=130),
            Entry(MANY, MANY, 1 / 2, 2, most_senders=64, split_from=66),
        ),
        10000: (
            *FEW,
            UP_TO_64,
            Entry(192, MANY, 1 / 4, 4, most_senders=32),
            Entry(256, MANY, 1 / 4, 2, most_senders=32),
            Entry(1024, MANY, 1 / 4, 1, most_senders=48),
            Entry(MANY, MANY, 1 / 3, 4, most_senders=64, split_from=34),
        ),
        MANY: (
            *FEW_LARGE,
            Entry(96, ONE_A_SM, 24 / 132, 8),
            Entry(128, MANY, 48 / 264, 8),
            Entry(1024, MANY, 48 / 264, 4),
            Entry(MANY, MANY, 1 / 4, 4, most_senders=32),
        ),
    },
    MANY: {
        3000: SHORT,
        4095: (
            *FEW_OF_MANY,
            UP_TO_64,
            Entry(128, MANY, 1 / 4, 4, most_senders=32),
            Entry(256, MANY, 1 / 4, 2, most_senders=32),
            Entry(512, MANY, 1 / 4, 1, most_senders=32),
            Entry(1024, MANY, 1 / 4, 4, most_senders=32),
            Entry(MANY, MANY, 3 / 8, 2, most_senders=56),
        ),
        5000: SHORT,
        8000: (*MIDDLE, Entry(MANY, MANY, 1 / 3, 4, most_senders=44)),
        10000: (*MIDDLE, Entry(MANY, MANY, 1 / 3, 4, packed=True, most_senders=44)),
        MANY: (
            *FEW_LARGE,
            UP_TO_64,
            Entry(128, ONE_A_SM, 32 / 132, 2),
            Entry(256, MANY, 64 / 264, 2, packed=True),
            Entry(1024, MANY, 1 / 4, 4, packed=True, most_senders=48),
            Entry(MANY, MANY, 1 / 4, 4, most_senders=28),
        ),
    },
}
"""Tables for at most so many ranks, and of those for messages of at most so many bytes. H200s (264 CTAs), 2026-11-22:
rows of 7168 elements, 256 experts, top-8 on two GPUs, for more ranks on four, up to 512 tokens as their traffic on two
(`perf.mirror`); other messages so too, rows of 2048 to 6144 elements, 128 experts, top-8 and top-4. `split_from`: the
same GPUs with 16, 32, 64 and 128 CTAs a rank."""
RETURNS = (Entry(2, 64, 0, 32), Entry(32, ONE_A_SM, 0, 32))
COMBINE: dict[int, tuple[Entry, ...]] = {
    2: (
        *RETURNS,
        Entry(256, MANY, 0, 32),
        Entry(1024, MANY, 2 / 3, 16, split_from=130),
        Entry(MANY, MANY, 208 / 264, 4, split_from=130),
    ),
    MANY: (
        *RETURNS,
        Entry(64, ONE_A_SM, 0, 32),
        Entry(128, MANY, 0, 32),
        Entry(512, MANY, 1 / 2, 32, split_from=66),
        Entry(1024, MANY, 1 / 2, 32, split_from=34),
        Entry(MANY, MANY, 208 / 264, 4, split_from=66),
    ),
}
"""Tables for at most so many ranks, measured as DISPATCH."""
SEGMENTS: dict[str, dict[int, float]] = {
    "dispatch": {256: 1 / 2, MANY: 3 / 2},
    "combine": {EXPRESS_TOKENS: 1 / 2, MANY: 3 / 2},
}
"""A row has more segments than this for each of its pieces, up to so many tokens; with half of one, pieces are as short
as they can be. Rows of 2048 to 6144 elements, otherwise measured as DISPATCH."""


class Shape(NamedTuple):
    """The choice for one call: grid, CTAs below `send_ctas` send, CTAs from `receive_from` receive; pieces of each
    message (dispatch), or of each row that is to come back (combine; decided and announced by the dispatch before);
    `Entry.packed`."""

    grid: int
    send_ctas: int
    receive_from: int
    pieces: int
    packed: bool = False

    @property
    def pieces_log2(self) -> int:
        """Base-2 logarithm of `pieces`, as headers and kernels have it."""
        return self.pieces.bit_length() - 1


@dataclass(frozen=True)
class Tuning:
    """The tables of one deployment.

    Attributes:
        dispatch, combine: entries with ascending tokens, the last one's at least MAX_TOKENS_PER_RANK (say, MANY);
            EPConfigError otherwise.
    """

    dispatch: tuple[Entry, ...]
    combine: tuple[Entry, ...]

    def __post_init__(self) -> None:
        for family in FAMILIES:
            ends = [entry.tokens for entry in self.table(family)]
            if not ends or ends != sorted(set(ends)) or ends[-1] < MAX_TOKENS_PER_RANK:
                raise EPConfigError(f"tokens of {family} = {ends}: must ascend to at least {MAX_TOKENS_PER_RANK}")

    def table(self, operation: str) -> tuple[Entry, ...]:
        """The table of "dispatch", "dispatch_async", ..., "combine_wait" (mode and format do not matter)."""
        return self.dispatch if operation.startswith("dispatch") else self.combine

    def entry(self, operation: str, tokens: int) -> Entry:
        """The entry for `tokens` tokens."""
        for entry in self.table(operation):
            if tokens <= entry.tokens:
                return entry
        raise AssertionError("unreachable")

    def shape(self, operation: str, tokens: int, max_ctas: int, *, whole_rows: bool = False) -> Shape:
        """Shape of one launch.

        Args:
            operation: as `table`.
            tokens: this rank's tokens; the other ranks' numbers may differ.
            max_ctas: CTAs that are resident together (the SM budget times CTAS_PER_SM).
            whole_rows: combine returns rows, not partial sums. There is more to add up: at most half of the CTAs send
                (4 x H200, 2026-11-22, 4096 tokens: 1100 us, by 160 of 264 CTAs 1163).
        """
        entry = self.entry(operation, tokens)
        grid = min(max_ctas, entry.grid)
        if operation.endswith("_async"):
            return Shape(grid, grid, grid, entry.pieces)
        if operation.endswith("_wait"):
            return Shape(grid, 0, 0, entry.pieces)
        senders = min(round(grid * entry.senders), entry.most_senders, grid // 2 if whole_rows else grid - 1)
        if not senders or grid < entry.split_from:
            return Shape(grid, grid, 0, entry.pieces)
        return Shape(grid, senders, senders, entry.pieces, entry.packed)

    def revised(self, family: str, found: Mapping[int, Entry]) -> Tuning:
        """This with what was found at some numbers of tokens. A finding holds up to its number, the one of the most
        tokens in a range of the table up to the range's end; ranges without any stay as they are."""
        table: list[Entry] = []
        below = 0
        for end in sorted({EXPRESS_TOKENS, *(entry.tokens for entry in self.table(family))}):
            inside = sorted(tokens for tokens in found if below < tokens <= end)
            entries = [found[tokens] for tokens in inside] or [self.entry(family, end)]
            table += [replace(one, tokens=to) for one, to in zip(entries, [*inside[:-1], end], strict=True)]
            below = end
        return replace(self, **{family: tuple(table)})


def built_in(cfg: EPConfig, ctas: int) -> Tuning:
    """The tables that ship, for ranks with so many CTAs and such rows. With fewer than TABLE_CTAS pieces are fewer in
    proportion, so that a warp has as many; where an entry takes part of the CTAs, from half of its grid down. Rows that
    are too short for that many pieces (SEGMENTS) have fewer.

    4 x H200, 2026-11-22, 16 SMs a rank: partial combine of 1024 tokens 623 -> 315 us (284 where every CTA does both),
    NVFP4 dispatch 242 -> 105.
    """
    dispatch = _first_of(_first_of(DISPATCH, cfg.peers), message_bytes(cfg.format, cfg.hidden))
    return Tuning(
        _fitted("dispatch", dispatch, ctas, cfg.format.payload_bytes(cfg.hidden)),
        _fitted("combine", _first_of(COMBINE, cfg.peers), ctas, cfg.hidden * COMBINE_ITEMSIZE),
    )


def _fitted(family: str, table: tuple[Entry, ...], ctas: int, row_bytes: int) -> tuple[Entry, ...]:
    segments, entries = -(-row_bytes // SEGMENT_BYTES), []
    for entry in table:
        share = min(1, ctas / (TABLE_CTAS if entry.grid >= TABLE_CTAS else entry.grid / 2))
        pieces = 1 << max(0, round(log2(entry.pieces * share)))
        while pieces > 1 and pieces * _first_of(SEGMENTS[family], entry.tokens) >= segments:
            pieces //= 2
        entries.append(replace(entry, pieces=pieces))
    return tuple(entries)


def _first_of(tables: Mapping[int, Found], number: int) -> Found:
    """The first of the tables that is for at least `number`."""
    return next(table for most, table in tables.items() if number <= most)
