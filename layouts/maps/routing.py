"""Routing facts that host, reference and kernels share: packed table entries, row order, capacities.

Row order of a rank's output: local expert ascending, then source rank, then token, then k. The row of entry
(source, token, k) with expert e is  base[source, e] + position,  where `position` counts the earlier entries of the
same source (tokens ascending, then k) that chose e, and  base[source, e]  is the exclusive prefix sum of counts in
(e, source) order, each expert's rows rounded up to the row alignment. In blocks it is e times the rows of a block.

With a fused shared expert, group 0 of the output holds the rank's own tokens in order, and expert e is group e + 1.

In rank-major order a token has one row on each rank that owns one of its experts: source rank ascending, then token.
`position` counts the source's earlier tokens for that rank, and stands in the token's last entry for it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, get_args

from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.record import Int, align_up

MAX_RANKS = 32
"""Ranks of one NVLink domain: a token's destinations are one 32-bit mask."""
MAX_TOP_K = 32
EXPERT_BITS = 10
MAX_EXPERTS = 1 << EXPERT_BITS
MAX_TOKENS_PER_RANK = 32768
"""A position is below MAX_TOKENS_PER_RANK * MAX_TOP_K = 2^20, so a packed entry is a positive 32-bit number."""

MASKED_ENTRY = -1
NO_ROW = -1
LOST_ROW = 2**31 - 1
"""Row of every entry of a rank whose output could not hold all its rows, and of those that a block could not hold:
larger than any capacity."""


def pack_entry(expert: Int, position: Int) -> Int:
    """One 32-bit routing entry: the global expert id in the lowest EXPERT_BITS bits, the position above."""
    return (position << EXPERT_BITS) | expert


def entry_expert(entry: Int) -> Int:
    """Global expert id of an entry that is not MASKED_ENTRY."""
    return entry & (MAX_EXPERTS - 1)


def entry_position(entry: Int) -> Int:
    """Position of the entry among its source's entries for that expert; in rank-major order, in its last entry for a
    rank, of the token among those for that rank. The entry is not MASKED_ENTRY."""
    return entry >> EXPERT_BITS


RowOrder = Literal["expert_major", "rank_major"]
"""By local expert, a row for each (token, expert); by source rank, a row for each (token, rank)."""
EXPERT_MAJOR: RowOrder = "expert_major"
RANK_MAJOR: RowOrder = "rank_major"
ROW_ORDERS: tuple[RowOrder, ...] = get_args(RowOrder)
ROW_ALIGNMENTS = (1, 4, 8, 16, 64, 128)
"""Multiples to which a group's rows may be padded."""


def max_rows(rows: int, groups: int, alignment: int) -> int:
    """Most rows that one rank can have: those that tokens bring at most, and each group's padding."""
    return align_up(rows + groups * (alignment - 1), alignment)


def shared_slice(tokens: int, rank: int, world_size: int) -> tuple[int, int]:
    """(first token, number of tokens) of rank `rank` when `world_size` ranks share out replicated tokens evenly."""
    share, rest = divmod(tokens, world_size)
    return rank * share + min(rank, rest), share + (rank < rest)


class StatusWord(IntEnum):
    """Indices of the 32-bit words of one host-visible status record: one record a peer, then one each of
    INPUT_ERRORS. PHASE is what `pack_phase` makes of the phase and the token; SEEN means
    nothing where words of a row were awaited."""

    PHASE = 0
    INDEX = 1
    EXPECTED = 2
    SEEN = 3


def count_words(ranks: int, experts: int) -> int:
    """32-bit words of a rank's counts: tokens by rank, entries by expert, tokens, and zeros up to whole vectors."""
    return align_up(ranks + experts + 1, VECTOR_BYTES // 4)


def division_magic(extent: int) -> int:
    """ceil(2^32 / extent), by which kernels divide (`kernels/device/divide.py`); 0 stands for extent 1."""
    return -(-(1 << 32) // extent) % (1 << 32)


class Phase(IntEnum):
    """What a status record is about: a kind of wait that a kernel gave up, or what it found wrong.

    Attributes:
        NONE: there is nothing to report.
        DISPATCH_CONSUMED, COMBINE_CONSUMED: until a peer has read the round before last.
        ROUTE_TABLE: for a word of a source's header and counts.
        ROUTE_ENTRY: for an entry of a source's tokens, counted over all, or its router weight.
        MESSAGE: for the flag of a slice of a source's token.
        MESSAGE_WORDS: for the words of a slice that is part of a Lamport row, or its flag.
        RETURN_ROUND: for the dispatch round of the rows that a peer returns.
        RETURN, RETURN_WORDS: as MESSAGE and MESSAGE_WORDS, for what a peer returns of a token of this rank.
        GRID: for the CTAs of the same launch.
        ORDER: a fused launch has found a round that was sent and not received.
        PAIR: rows come home from another dispatch round.
        EXPERT_ID, ROW_CAPACITY: INPUT_ERRORS.
        FRAME_READ, SUMS_READ: until another node's rank has read this rank's mail of the round before.
        FRAME, SUMS: for a piece of the mail of another node's rank, counted as `Piece`; after these, for its header.
        FRAME_SIZE: the frames of another node's rank have more or fewer rows.
    """

    NONE = 0
    DISPATCH_CONSUMED = 1
    ROUTE_TABLE = 2
    ROUTE_ENTRY = 3
    MESSAGE = 4
    MESSAGE_WORDS = 5
    COMBINE_CONSUMED = 6
    RETURN_ROUND = 7
    RETURN = 8
    RETURN_WORDS = 9
    GRID = 10
    ORDER = 11
    PAIR = 12
    EXPERT_ID = 13
    ROW_CAPACITY = 14
    FRAME_READ = 15
    FRAME = 16
    SUMS_READ = 17
    SUMS = 18
    FRAME_SIZE = 19


def pack_phase(phase: int, token: Int) -> Int:
    """The first word of a status record: the phase in its lowest 8 bits, above them the token that it is about."""
    return token << 8 | phase


def unpack_phase(word: int) -> tuple[int, int]:
    """(phase, token) of such a word."""
    return word & 0xFF, word >> 8


INPUT_ERRORS = (Phase.EXPERT_ID, Phase.ROW_CAPACITY)
"""What a kernel may find wrong with its rank's input; the round goes on."""


BEYOND = -(1 << 31)
"""What is reported of an expert id that does not fit 32 bits."""


class OutputType(IntEnum):
    """Element types of combine's output."""

    BF16 = 0
    FP16 = 1
    F32 = 2
