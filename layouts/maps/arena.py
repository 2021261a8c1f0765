"""The arena: one rank's symmetric memory, and who writes which part of it when.

Every rank allocates one arena of the same layout; peers store into it through mapped addresses. `parity`
is the round number (epoch) modulo 2. The third column names who writes a word; a flag or an LL word has one writer.

| region            | axes                               | written by  | meaning                                     |
| ----------------- | ---------------------------------- | ----------- | ------------------------------------------- |
| state             | (StateWord)                        | owner       | epochs, exit and other counters, abort      |
| peers             | (peer)                             | host        | address of each peer's arena, as mapped here|
| combine_tickets   | (parity, start, counter, word)     | owner       | tickets drawn for slices, spans, own tokens |
| dispatch_consumed | (peer)                             | peer        | last epoch whose messages `peer` has read   |
| combine_consumed  | (peer)                             | peer        | last epoch whose returns `peer` has read    |
| message_ready     | (source, flag)                     | source      | last epoch whose slices of messages are here|
| return_ready      | (peer, flag)                       | peer        | last epoch whose slices of returns are here |
| return_rounds     | (parity, peer, one word)           | peer        | dispatch round of the rows that it returns* |
| table             | (parity, source, HeaderWord, then  | source      | tokens, slices of a row, weights?; then     |
|                   | local expert)                      |             | rows that `source` sends to each expert   * |
| entries           | (parity, source, token, k)         | source      | packed (position, expert), see `routing`  * |
| weights           | (parity, source, token, k)         | source      | router weights, float32                   * |
| returns           | (parity, token, slot, byte)        | peer        | expert outputs; slot = k or peer rank, and  |
|                   |                                    |             | then a token has a slot a rank              |
| messages          | (parity, source, token, byte)      | source      | one encoded row a (source, token)           |
| lamport_returns   | as returns                         | peer, owner | the same where they are Lamport rows     ** |
| lamport_messages  | as messages                        | source,     | the same for at most LAMPORT_TOKENS      ** |
|                   |                                    | owner       |                                             |
| staged_scales     | (source, token, byte)              | owner       | scale factors taken from lamport_messages   |

* LL words: 64 bits that hold a 32-bit value and, above it, the low 32 bits of its epoch. One store writes both, so
whoever finds the epoch has the value, and no flag or fence is needed.

** Lamport words: 32 bits each that are SENTINEL until they have arrived. Whoever finds another content has the value,
and clears the word again; only a row that contains SENTINEL itself needs its flag.

A flag stands for CHUNK neighbouring slices of a source (`chunk_of`), or for one slice where its rows are Lamport rows.

Why no write can overtake a read: `docs/protocol.md`, `docs/memory_model.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from cute_ep.layouts.maps.arguments import Region1D, Region2D, Region3D, Region4D, Regions
from cute_ep.layouts.maps.formats import VECTOR_BYTES, Format
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import Int, Region, RegionMap, align_up
from cute_ep.layouts.maps.scales import WORD_BYTES

ARENA_ALIGNMENT = 256
PARITIES = 2
LL_BYTES = 8
"""Bytes of an LL word, and of every word of an arena that is not a row."""
BYTE_REGIONS = ("returns", "messages", "lamport_returns", "lamport_messages", "staged_scales")
"""Regions of rows, whose last mode counts bytes."""
RETURN_TOKEN, RETURN_SLOT = 1, 2
"""Modes of `returns` and `lamport_returns`, whose slots are alike: `along` of either steps through both."""
SEGMENT_BYTES = 32 * VECTOR_BYTES
"""Payload bytes that a warp carries at a time."""
MAX_SLICES = 32
"""Most slices into which a Lamport row is cut, so that several warps may carry one token."""
MANY_SLICES = 8
"""Most slices of a row that is not a Lamport row. There are flags for twice as many."""
CHUNK = WARPS
"""Slices that share a flag where rows are not Lamport rows: one for each warp of a CTA."""
LAMPORT_TOKENS = 1024
"""Most tokens of a call whose rows travel through the Lamport regions; of rows that come home, the source says which
(`HeaderWord.RETURNS`)."""
SENTINEL = 0xFFFFFFFF
"""Content of a Lamport word that has not arrived: as bfloat16 or e4m3 a NaN that no arithmetic makes."""
COUNTERS = 4
"""Counters that hand out one source's slices, each to a part of every CTA's warps: an addition takes 2.6 ns (H200)."""
COUNTER_WORDS = 32
"""Words from one counter to the next, so that additions to one do not wait for those to another."""
MAX_STRIDE = 1 << 31
"""Kernels are given all strides but those of a region's first mode in 32 bits."""
MAX_SCALED = 1 << 36
"""Bytes of an arena where there are scale factors: `ScaleTiles` counts 16-byte vectors in 32 bits."""
APART_SHARE, LEAST_APART = 256, 1 << 16
"""Each rank's arena begins further into its allocation than that of the rank before, by a power of two of at most
1/APART_SHARE of an arena's bytes, but at least LEAST_APART."""
PAGE_BYTES = 2 << 20
"""Allocations are whole pages: one of at least 512 MiB then makes launches of 64 to 1024 tokens 0.2 to 0.35 us
shorter (2 x H200, 2026-11-22), until a kernel uses memory that was mapped later (`docs/lessons.md`, "Allocations
elsewhere change times")."""
PACKET_BYTES = 128
"""Bytes that a link carries at a time: messages begin at a multiple, so that no warp's store spans one packet more."""
COMBINE_ITEMSIZE = 2
"""Bytes of one element of a returned row (bfloat16)."""


class StateWord(IntEnum):
    """Indices of the 64-bit words of the `state` region. An epoch word counts completed rounds."""

    DISPATCH_SEND_EPOCH = 0
    DISPATCH_RECV_EPOCH = 1
    COMBINE_SEND_EPOCH = 2
    COMBINE_RECV_EPOCH = 3
    DISPATCH_SEND_DONE = 4
    DISPATCH_RECV_DONE = 5
    COMBINE_SEND_DONE = 6
    COMBINE_RECV_DONE = 7
    ABORT = 8
    DISPATCH_BARRIER = 9
    DISPATCH_TICKETS = 10
    DISPATCH_SLICES = 11


class HeaderWord(IntEnum):
    """Indices of the words of one source's header.

    Attributes:
        TOKENS: its tokens.
        MESSAGES: what `pack_messages` makes of the slices of a message and of whether it gives weights.
        ROUND: number of the dispatch round, its low 32 bits; 0: unknown.
        RETURNS: what `pack_returns` makes of the slices of a returned row and of whether rows come home with flags.
    """

    TOKENS = 0
    MESSAGES = 1
    ROUND = 2
    RETURNS = 3


def pack_messages(slices_log2: Int, has_weights: Int) -> Int:
    """How a source's messages come: the base-2 logarithm of their slices, and 1 where router weights come with them."""
    return slices_log2 << 1 | has_weights


def message_slices_log2(messages: Int) -> Int:
    """Base-2 logarithm of the slices of a message."""
    return messages >> 1


def has_weights(messages: Int) -> Int:
    """1 where router weights come with the messages, else 0."""
    return messages & 1


def pack_returns(slices_log2: Int, flagged: Int) -> Int:
    """How a source's rows come home: the base-2 logarithm of their slices, at most that of MAX_SLICES, and 1 where
    flags tell that they have come, 0 where they are Lamport rows."""
    return flagged << 3 | slices_log2


def return_slices_log2(returns: Int) -> Int:
    """Base-2 logarithm of the slices of a returned row."""
    return returns & 7


def are_flagged(returns: Int) -> Int:
    """1 where rows come home with flags, 0 where they are Lamport rows."""
    return returns >> 3


@dataclass(frozen=True)
class Message:
    """Byte map of one message: payload, scale factors, the row's own scale; each field padded to 16 bytes."""

    payload: Region
    scales: Region
    row_scale: Region
    nbytes: int

    @property
    def pitch(self) -> int:
        """Bytes from one message to the next in an arena."""
        return align_up(self.nbytes, PACKET_BYTES)


def message_map(payload_bytes: int, scale_bytes: int, row_scale_bytes: int) -> Message:
    """The message of rows with these sizes; 0: the row has none."""
    fields = RegionMap(VECTOR_BYTES)
    payload = fields.add("payload", 1, payload_bytes)
    scales = fields.add("scales", 1, scale_bytes)
    row_scale = fields.add("row_scale", 1, row_scale_bytes)
    return Message(payload, scales, row_scale, fields.nbytes)


def message_of(fmt: Format, hidden: int) -> Message:
    """The message of a format's rows."""
    return message_map(fmt.payload_bytes(hidden), fmt.scale_bytes(hidden), fmt.row_scale_bytes)


def message_bytes(fmt: Format, hidden: int) -> int:
    """Bytes of one message on the wire."""
    return message_of(fmt, hidden).nbytes


class Arena:
    """Byte map of one rank's arena.

    Args:
        ranks: number of ranks.
        local_experts: experts a rank owns.
        top_k: experts a token chooses.
        max_tokens: most tokens of one rank in one call.
        message: byte map of one dispatched message (`message_of`).
        hidden: elements of one returned row.
        slots: return rows a token (`return_slots`).

    Attributes:
        cleared: regions that are filled with SENTINEL words before the first round; all others are zero.
        nbytes: bytes of the map.
        allocation: bytes that every rank allocates, whole pages: its arena begins somewhere in them (`begin`).
    """

    def __init__(
        self,
        *,
        ranks: int,
        local_experts: int,
        top_k: int,
        max_tokens: int,
        message: Message,
        hidden: int,
        slots: int,
    ) -> None:
        few, many = min(max_tokens, LAMPORT_TOKENS), max_tokens if max_tokens > LAMPORT_TOKENS else 0
        flags = few * MAX_SLICES  # more tokens need fewer: one a CHUNK slices, of MANY_SLICES a token
        row = hidden * COMBINE_ITEMSIZE
        regions = RegionMap(ARENA_ALIGNMENT)
        self.state = regions.add("state", 8, len(StateWord))
        self.peers = regions.add("peers", 8, ranks)
        self.combine_tickets = regions.add("combine_tickets", 8, PARITIES, ranks, COUNTERS, COUNTER_WORDS)
        self.dispatch_consumed = regions.add("dispatch_consumed", 8, ranks)
        self.combine_consumed = regions.add("combine_consumed", 8, ranks)
        self.message_ready = regions.add("message_ready", 8, ranks, flags)
        self.return_ready = regions.add("return_ready", 8, ranks, flags)
        # the mode of one word gives ranks a stride of their own, which `perf.mirror` makes a whole block
        self.return_rounds = regions.add("return_rounds", LL_BYTES, PARITIES, ranks, 1)
        self.table = regions.add("table", LL_BYTES, PARITIES, ranks, len(HeaderWord) + local_experts)
        self.entries = regions.add("entries", LL_BYTES, PARITIES, ranks, max_tokens, top_k)
        self.weights = regions.add("weights", LL_BYTES, PARITIES, ranks, max_tokens, top_k)
        self.returns = regions.add("returns", 1, PARITIES, many, slots, row)
        self.messages = regions.add("messages", 1, PARITIES, ranks, many, message.pitch)
        self.lamport_returns = regions.add("lamport_returns", 1, PARITIES, few, slots, row)
        self.lamport_messages = regions.add("lamport_messages", 1, PARITIES, ranks, few, message.pitch)
        self.staged_scales = regions.add("staged_scales", 1, ranks, few, align_up(message.scales.nbytes, VECTOR_BYTES))
        self.cleared = (self.lamport_returns, self.lamport_messages)
        self.regions = regions.regions
        self._partial = self.regions | {
            one.name: replace(one, stride=(one.stride[0], ranks * row, *one.stride[2:]))
            for one in (self.returns, self.lamport_returns)
        }
        self.nbytes = regions.nbytes
        self.allocation = align_up(self.nbytes + self.begin(ranks - 1), PAGE_BYTES)

    def begin(self, rank: int) -> int:
        """Where in its allocation a rank's arena begins.

        GPUs that have allocated alike would have their arenas at the same physical addresses, and so the copies of a
        row for several peers, which are stored together. Apart they take 1 to 3 % less time (4 x H200, 2026-11-22).
        """
        share = max(self.nbytes // APART_SHARE, LEAST_APART)
        return rank << (share.bit_length() - 1)

    def arguments(self, *, partial: bool = False) -> Regions:
        """The map as an argument of kernels. All strides but the first are below MAX_STRIDE, if the messages of one
        rank are.

        Args:
            partial: for kernels of partial combine. A token's slots that they use, one a rank, lie side by side, where
                exact combine may have top_k: fewer pages (2 x H200, 4096 tokens: 1 % less time, 2026-11-22).
        """
        return region_arguments(self._partial if partial else self.regions)


def region_arguments(regions: Mapping[str, Region]) -> Regions:
    """Where regions are, by name: bytes from the arena's start, and the strides of all modes but the last, in bytes."""
    records = (Region1D, Region2D, Region3D, Region4D)
    places: dict[str, Region1D | Region2D | Region3D | Region4D] = {}
    for name, region in regions.items():
        strides = [int(stride) * region.itemsize for stride in region.stride[:-1]]
        places[name] = records[len(strides)](int(region.offset), *strides)
    return Regions(**places)  # type: ignore[arg-type]  # each the record of its modes


def segment_words(fmt: Format) -> int:
    """Scale words that travel with one segment, 32 vectors of payload: those of its elements, or where they are not
    whole words (`has_whole_segments`), as many as a row has for each of its segments at most. 0 when the format has no
    scales."""
    return -(-SEGMENT_BYTES * 8 * fmt.scale_itemsize // (fmt.bits * fmt.block * WORD_BYTES))


def has_whole_segments(fmt: Format) -> bool:
    """Whether segments end where units and scale words do. A message that a kernel encodes has one slice otherwise, so
    that the words of a slice are those of its elements."""
    return fmt.unit_words * WORD_BYTES == VECTOR_BYTES


def chunk_of(index: Int) -> Int:
    """Number of the chunk, and so of the flag, that a slice belongs to where rows are not Lamport rows."""
    return index >> (CHUNK.bit_length() - 1)


def return_slots(ranks: int, top_k: int) -> int:
    """Return rows a token: one per top-k slot (exact combine) or one per rank (partial combine)."""
    return max(ranks, top_k)


class ArenaRegions(NamedTuple):
    """The regions of an arena, without their extents."""

    state: Region
    peers: Region
    combine_tickets: Region
    dispatch_consumed: Region
    combine_consumed: Region
    message_ready: Region
    return_ready: Region
    return_rounds: Region
    table: Region
    entries: Region
    weights: Region
    returns: Region
    messages: Region
    lamport_returns: Region
    lamport_messages: Region
    staged_scales: Region


def regions_of(arguments: Regions, region_type: type[Region] = Region) -> ArenaRegions:
    """The regions that kernel arguments tell."""
    found: dict[str, Region] = {}
    for name, (at, *strides) in zip(Regions._fields, arguments, strict=True):
        itemsize = 1 if name in BYTE_REGIONS else LL_BYTES
        found[name] = region_type(name, at, 1, (), (*strides, itemsize))
    return ArenaRegions(**found)
