"""The launch shapes that ship: measured tables, and which of them a configuration has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log2
from typing import TypeVar

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import (
    COMBINE_ITEMSIZE,
    LAMPORT_TOKENS,
    MAX_SLICES,
    SEGMENT_BYTES,
    message_bytes,
)
from cute_ep.layouts.maps.launch import WIDE_WARPS
from cute_ep.layouts.maps.routing import RowOrder
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning, has_pipelines, has_twins, most_lamport_tokens

Found = TypeVar("Found")

TABLE_CTAS, ONE_A_SM = 264, 132
"""CTAs that the tables were measured with, and half of them: launches of so many fit side by side."""
FEW = (Entry(2, 128, 1 / 8, 32), Entry(32, 128, 1 / 4, 8))
FEW_LARGE = (Entry(2, 64, 1 / 8, 32), Entry(32, 128, 1 / 4, 8))
FEW_OF_MANY = (Entry(2, 128, 1 / 8, 32), Entry(16, 128, 1 / 4, 8))
UP_TO_64, UP_TO_128 = Entry(64, ONE_A_SM, 24 / 132, 4), Entry(128, ONE_A_SM, 32 / 132, 2)
UP_TO_256_OF_TWO = (Entry(192, MANY, 1 / 4, 4, most_senders=32), Entry(256, MANY, 1 / 4, 2, most_senders=32))
UP_TO_1024_OF_TWO = (
    Entry(512, MANY, 3 / 8, 2, most_senders=64, split_from=130),
    Entry(1024, MANY, 1 / 2, 1, most_senders=64, split_from=130),
)
FROM_257_OF_TWO = (*UP_TO_1024_OF_TWO, Entry(MANY, MANY, 1 / 2, 1, most_senders=64, split_from=66))
UP_TO_128_LARGE_OF_TWO = (
    *FEW_LARGE,
    Entry(96, ONE_A_SM, 24 / 132, 8),
    Entry(128, MANY, 48 / 264, 8, most_senders=18),
)
SHORT = (
    *FEW_OF_MANY,
    UP_TO_64,
    UP_TO_128,
    Entry(256, ONE_A_SM, 32 / 132, 1),
    Entry(512, MANY, 1 / 4, 1, most_senders=32),
    Entry(1024, MANY, 1 / 4, 4, most_senders=32),
    Entry(MANY, MANY, 3 / 8, 4, packed=True, most_senders=56),
)
MIDDLE = (
    *FEW_OF_MANY,
    UP_TO_64,
    UP_TO_128,
    Entry(256, MANY, 64 / 264, 2, packed=True),
    Entry(768, MANY, 64 / 264, 1, packed=True),
    Entry(1024, MANY, 48 / 264, 2, packed=True),
)
"""Dispatch of more than two ranks: messages below 5000 bytes but FP4's of 7168 elements, and, up to 1024 tokens, those
up to 10000 bytes."""
OF_TWO: dict[int, tuple[Entry, ...]] = {
    3000: (
        *FEW,
        UP_TO_64,
        Entry(256, ONE_A_SM, 32 / 132, 2),
        *FROM_257_OF_TWO,
    ),
    4095: (
        *FEW,
        UP_TO_64,
        *UP_TO_256_OF_TWO,
        *FROM_257_OF_TWO,
    ),
    7000: (
        *FEW,
        Entry(128, ONE_A_SM, 24 / 132, 4),
        Entry(256, ONE_A_SM, 32 / 132, 2),
        *UP_TO_1024_OF_TWO,
        Entry(MANY, MANY, 1 / 2, 2, most_senders=64, split_from=66),
    ),
    10000: (
        *FEW,
        UP_TO_64,
        *UP_TO_256_OF_TWO,
        Entry(1024, MANY, 1 / 4, 1, most_senders=48),
        Entry(MANY, MANY, 1 / 3, 4, most_senders=64, split_from=34),
    ),
    MANY: (
        *UP_TO_128_LARGE_OF_TWO,
        Entry(256, MANY, 48 / 264, 4, most_senders=18),
        Entry(1024, MANY, 48 / 264, 4, most_senders=22),
        Entry(MANY, MANY, 3 / 16, 4, most_senders=40),
    ),
}
RANK_MAJOR_OF_TWO: dict[int, tuple[Entry, ...]] = {
    4095: (
        *FEW,
        UP_TO_64,
        Entry(256, MANY, 1 / 4, 2, most_senders=64),
        *FROM_257_OF_TWO,
    ),
    10000: (
        *FEW,
        UP_TO_64,
        Entry(256, MANY, 1 / 4, 4, most_senders=32),
        Entry(512, MANY, 1 / 4, 2, most_senders=32),
        Entry(1024, MANY, 1 / 3, 1, most_senders=64),
        Entry(MANY, MANY, 1 / 3, 2, most_senders=64, split_from=34),
    ),
    MANY: (
        *UP_TO_128_LARGE_OF_TWO,
        Entry(512, MANY, 1 / 8, 8, most_senders=16),
        Entry(1024, MANY, 1 / 4, 4, most_senders=32),
        Entry(MANY, MANY, 3 / 8, 4, most_senders=48),
    ),
}
"""Dispatch of two ranks whose rows are by source rank: messages of 7168 elements in NVFP4, FP8 and BF16. Of 1024 / 4096
tokens BF16 takes 48.3 / 173.4 us so, FP8 32.2 / 103.3, with the shapes of OF_TWO 51.7 / 176.5 and 33.9 / 112.4; NVFP4
of 256 tokens 10.7 and 11.9 (2 x H200, 2026-11-30)."""
OF_MORE: dict[int, tuple[Entry, ...]] = {
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
        UP_TO_128,
        Entry(256, MANY, 64 / 264, 2, packed=True),
        Entry(1024, MANY, 1 / 4, 4, packed=True, most_senders=48),
        Entry(MANY, MANY, 1 / 4, 4, most_senders=28),
    ),
}
DISPATCH: dict[RowOrder, dict[int, dict[int, tuple[Entry, ...]]]] = {
    "expert_major": {2: OF_TWO, MANY: OF_MORE},
    "rank_major": {2: OF_TWO | RANK_MAJOR_OF_TWO, MANY: OF_MORE},
}
"""Tables by the order of rows, for at most so many ranks, and of those for messages of at most so many bytes. H200s
(264 CTAs), 2026-11-22: rows of 7168 elements, 256 experts, top-8 on two GPUs (from 128 tokens on BF16 anew on
2026-11-26, since a rank's own tokens are no messages), for more ranks on four, up to 512 tokens as their traffic on two
(`perf.mirror`); other messages so too, rows of 2048 to 6144 elements, 128 experts, top-8 and top-4. `split_from`: the
same GPUs with 16, 32, 64 and 128 CTAs a rank. For four ranks `perf.mirror --tune` found no dispatch that is faster by 2
% on 2026-11-29, BF16 and FP8, 128 to 4096 tokens; by source rank FP8 of 1024 may gain 4 % (2026-11-30)."""
RETURNS = (Entry(2, 64, 0, 32), Entry(32, ONE_A_SM, 0, 32))
RETURNS_OF_MORE = (
    *RETURNS,
    Entry(64, ONE_A_SM, 0, 32),
    Entry(128, MANY, 0, 32),
    Entry(512, MANY, 1 / 2, 32, split_from=66),
    Entry(1024, MANY, 1 / 2, 32, split_from=34),
    Entry(MANY, MANY, 2 / 3, 8, split_from=66),
)
COMBINE: dict[RowOrder, dict[int, tuple[Entry, ...]]] = {
    "expert_major": {
        2: (
            *RETURNS,
            Entry(256, MANY, 0, 32),
            Entry(1024, MANY, 2 / 3, 16, split_from=130),
            Entry(MANY, MANY, 208 / 264, 4, split_from=130),
        ),
        MANY: RETURNS_OF_MORE,
    },
    "rank_major": {
        2: (
            *RETURNS,
            Entry(128, MANY, 0, 32),
            Entry(256, MANY, 13 / 24, 32, split_from=130),
            Entry(1024, MANY, 13 / 24, 16, split_from=130),
            Entry(MANY, MANY, 13 / 24, 4, split_from=130),
        ),
        MANY: RETURNS_OF_MORE,
    },
}
"""Tables by the order of rows, for at most so many ranks, measured as DISPATCH. Where rows are by source rank a sender
reads one row for each that it sends, so fewer of them fill the links: of 512 / 1024 / 2048 / 4096 tokens of two ranks
these take 26.5 / 47.7 / 96.5 / 177 us, with the shapes for rows by expert 28.9 / 53.3 / 109 / 193. With 208 of 264 CTAs
and 4 slices partial sums of 2048 / 4096 tokens of four ranks took 241 / 458 us instead of 232 / 449, by source rank 242
/ 460 instead of 234 / 448 (their traffic on two; exact sums were not measured so; 2 x H200, 2026-11-30)."""
FEW_RETURNS = {2: 512, MANY: 256}
"""Most tokens, for at most so many ranks, whose rows come home to few SMs in about as many slices as there are warps.
Partial combine of 4 to 512 tokens on 8 to 124 SMs is within 6 % of the fastest so. As many as with all SMs, in
proportion, took 9.1 us instead of 6.5 for 4 tokens on 8 SMs, 21.6 instead of 14.7 for 128 on 44 (2 and 4 x H200,
2026-11-27)."""
UP_TO_32_OF_TWINS = Entry(32, MANY, 1 / 4, 4, split_from=18)
FEW_OF_TWINS = (replace(UP_TO_32_OF_TWINS, tokens=8, slices=8), UP_TO_32_OF_TWINS)
FEW_LARGE_OF_TWINS = (
    replace(UP_TO_32_OF_TWINS, tokens=16, slices=8),
    UP_TO_32_OF_TWINS,
    Entry(64, MANY, 2 / 11, 4, split_from=34),
)
TWIN_DISPATCH: dict[RowOrder, dict[int, tuple[Entry, ...]]] = {
    "expert_major": {
        5000: (
            *FEW_OF_TWINS,
            Entry(64, MANY, 2 / 11, 4, split_from=50),
            Entry(256, MANY, 0, 2),
            Entry(1024, MANY, 0, 1),
            Entry(MANY, MANY, 7 / 8, 1, joins=True),
        ),
        10000: (
            *FEW_OF_TWINS,
            Entry(64, MANY, 1 / 5, 2, split_from=34),
            Entry(1024, MANY, 1 / 4, 2, split_from=66),
            Entry(MANY, MANY, 1 / 2, 1, joins=True),
        ),
        MANY: (
            *FEW_LARGE_OF_TWINS,
            Entry(256, MANY, 1 / 8, 4, split_from=26),
            Entry(2048, MANY, 1 / 4, 2, joins=True),
            Entry(MANY, MANY, 1 / 4, 1, joins=True),
        ),
    },
    "rank_major": {
        5000: (
            *FEW_OF_TWINS,
            Entry(256, MANY, 5 / 12, 2, split_from=34),
            Entry(1024, MANY, 0, 1),
            Entry(MANY, MANY, 7 / 8, 1, joins=True),
        ),
        10000: (
            *FEW_OF_TWINS,
            Entry(256, MANY, 1 / 3, 2, split_from=34),
            Entry(1024, MANY, 5 / 12, 1, split_from=34),
            Entry(MANY, MANY, 5 / 8, 1, joins=True),
        ),
        MANY: (
            *FEW_LARGE_OF_TWINS,
            Entry(256, MANY, 1 / 4, 2),
            Entry(1024, MANY, 1 / 3, 1, most_senders=20),
            Entry(MANY, MANY, 1 / 3, 1, most_senders=22, split_from=34),
        ),
    },
}
"""Tables where CTAs may have twins, by the order of rows, for messages of at most so many bytes, of more than 2 tokens:
rows of 7168 elements in BF16, FP8 and NVFP4, 256 experts, top-8, with 8, 24 and 44 SMs, up to 64 tokens with 8 to 66
(2 x H200, 2026-11-27). Receivers write a message once where rows are by source rank, and as often as it has experts
otherwise; quantised rows cost senders more."""
OF_PIPELINES = Entry(MANY, MANY, 0, 4)
"""Combine, where pipelines carry rows: long ones have a flag for every four. Exact combine of 1024 / 4096 tokens takes
217 / 730 us so on 24 SMs, with a flag for every 16 tokens 245 / 849; partial sums have longer spans
(`kernels/combine/piped_schedule.py`; 2 x H200, 2026-11-27)."""
SEGMENTS_PER_SLICE: dict[str, dict[int, float]] = {
    "dispatch": {256: 1 / 2, MANY: 3 / 2},
    "combine": {LAMPORT_TOKENS: 1 / 2, MANY: 3 / 2},
}
"""A row has more segments than this for each of its slices, up to so many tokens; with half of one, slices are as short
as they can be. Rows of 2048 to 6144 elements, otherwise measured as DISPATCH."""


def built_in(cfg: EPConfig, ctas: int, *, ring_bytes: int = 0) -> Tuning:
    """The tables that ship, for ranks with so many CTAs and such rows. With fewer than TABLE_CTAS slices are fewer in
    proportion, so that a warp has as many; where an entry takes part of the CTAs, from half of its grid down. Few rows
    that come home to up to ONE_A_SM CTAs, which are taken to have an SM each, have as many as FEW_RETURNS says. Rows
    that are too short for that many slices (SEGMENTS_PER_SLICE) have fewer. CTAs with `ring_bytes` of shared memory for
    stages (`cute_ep.runtime.gpus`) may have twins, and pipelines.

    4 x H200, 2026-11-22, 16 SMs a rank: partial combine of 1024 tokens 623 -> 315 us (284 where every CTA does both).
    """
    nbytes = message_bytes(cfg.format, cfg.hidden)
    dispatch = _scaled(_first_of(_first_of(DISPATCH[cfg.row_order], cfg.peers), nbytes), ctas)
    if has_twins(ctas, ring_bytes):
        dispatch = [dispatch[0], *_first_of(TWIN_DISPATCH[cfg.row_order], nbytes)]
    combine = _scaled(_first_of(COMBINE[cfg.row_order], cfg.peers), ctas)
    if ctas <= ONE_A_SM:
        combine = _few_returns(combine, ctas, _first_of(FEW_RETURNS, cfg.peers))
    if has_pipelines(cfg, ring_bytes):
        most = most_lamport_tokens(ctas, pipelines=True)
        few = next(entry for entry in combine if entry.tokens >= most)
        combine = [*(entry for entry in combine if entry.tokens < most), replace(few, tokens=most), OF_PIPELINES]
    return Tuning(_capped("dispatch", dispatch, cfg), _capped("combine", combine, cfg))


def segments_of(family: str, cfg: EPConfig) -> int:
    """Segments of a row that travels in slices: of a message's payload, or of a returned row."""
    row = cfg.format.payload_bytes(cfg.hidden) if family == "dispatch" else cfg.hidden * COMBINE_ITEMSIZE
    return -(-row // SEGMENT_BYTES)


def _scaled(table: tuple[Entry, ...], ctas: int) -> list[Entry]:
    """The entries with slices for so many CTAs."""
    shares = [min(1, ctas / (TABLE_CTAS if one.grid >= TABLE_CTAS else one.grid / 2)) for one in table]
    slices = [1 << max(0, round(log2(one.slices * share))) for one, share in zip(table, shares, strict=True)]
    return [replace(one, slices=count) for one, count in zip(table, slices, strict=True)]


def _few_returns(table: Sequence[Entry], ctas: int, most: int) -> list[Entry]:
    """A table of combine for so few CTAs, its entries up to `most` tokens anew: by powers of two, with about as many
    slices, up to 16, as wide CTAs have warps; with 32 where there are more than three such warps for each."""
    few = []
    for tokens in (1 << power for power in range(1, most.bit_length())):
        warps = WIDE_WARPS * ctas / tokens
        slices = MAX_SLICES if warps > 3 * MAX_SLICES else min(1 << max(0, ceil(log2(warps))), MAX_SLICES // 2)
        few.append(Entry(tokens, table[0].grid if tokens <= table[0].tokens else MANY, 0, slices))
    return [*few, *(entry for entry in table if entry.tokens > most)]


def _capped(family: str, table: Sequence[Entry], cfg: EPConfig) -> tuple[Entry, ...]:
    """The entries with as many slices as such rows may have."""
    segments, entries = segments_of(family, cfg), []
    for entry in table:
        slices = entry.slices
        while slices > 1 and slices * _first_of(SEGMENTS_PER_SLICE[family], entry.tokens) >= segments:
            slices //= 2
        entries.append(replace(entry, slices=slices))
    return tuple(entries)


def _first_of(tables: Mapping[int, Found], number: int) -> Found:
    """The first of the tables that is for at least `number`."""
    return next(table for most, table in tables.items() if number <= most)
