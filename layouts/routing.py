"""Routing facts that host, reference and kernels share: packed table entries, row order, capacities.

Row order of a rank's output: local expert ascending, then source rank, then token. The row of entry
(source, token, k) with expert e is  base[source, e] + position,  where `position` counts the earlier tokens of
the same source that chose e, and  base[source, e]  is the exclusive prefix sum of counts in (e, source) order.
"""

from __future__ import annotations

from enum import IntEnum

from cute_ep.layouts.record import Int

MAX_RANKS = 32
"""Ranks of one NVLink domain: a token's destinations are one 32-bit mask."""
MAX_TOP_K = 32
MAX_EXPERTS = 1024
MAX_TOKENS_PER_RANK = 32768
"""A position is stored in 16 bits."""

MAX_CHUNK_ENTRIES = 1024
"""Entries (tokens times top_k) of one chunk of tokens that share a completion flag."""

MASKED_ENTRY = -1
NO_ROW = -1


def pack_entry(expert: Int, position: Int) -> Int:
    """One 32-bit routing entry: position in the upper, global expert id in the lower 16 bits."""
    return (position << 16) | expert


def entry_expert(entry: Int) -> Int:
    """Global expert id of an entry that is not MASKED_ENTRY."""
    return entry & 0xFFFF


def entry_position(entry: Int) -> Int:
    """Position of the token among its source's tokens for that expert."""
    return (entry >> 16) & 0xFFFF


def max_rows(ranks: int, local_experts: int, top_k: int, max_tokens: int) -> int:
    """Most rows that one rank can receive: every token of every rank to min(top_k, local experts) of its experts."""
    return ranks * max_tokens * min(top_k, local_experts)


class StatusWord(IntEnum):
    """Indices of the 32-bit words of one host-visible status record (one record a peer, and one for input errors)."""

    PHASE = 0
    INDEX = 1
    EXPECTED = 2
    SEEN = 3


class Phase(IntEnum):
    """What a kernel was doing when it gave up; 0 means that it did not."""

    NONE = 0
    DISPATCH_CONSUMED = 1
    ROUTE = 2
    MESSAGE = 3
    COMBINE_CONSUMED = 4
    RETURN = 5
    EXPERT_ID = 6
    ROW_CAPACITY = 7
