"""Which warp carries what: a row is cut into slices, a slice into segments of 32 vectors of 16 bytes.

A warp carries a slice, or a part of one, by itself. While tokens are few a row has several slices, so that many warps
carry it, on as many SMs as there are. Where rows are not Lamport rows, the warps of a CTA carry CHUNK neighbouring
slices side by side, which share a flag: a flag costs a link as much as 128 bytes of rows, and its fence holds a warp
until its stores have arrived.

The first items are scheduled statically. Further ones may be scheduled dynamically: a warp draws a ticket when it is
ready, from a counter of its CTA (`Tickets`) or, where each warp has many items, from one that CTAs share (`item_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import Divisor, quotient, remainder, round_up
from cute_ep.layouts.maps.arena import CHUNK, HeaderWord, message_slices_log2
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import RegionMap

SEGMENT = 32
"""Vectors that a warp takes at a time, one a lane."""


@dataclass(frozen=True)
class RowSlice:
    """One slice of one row: `index` counts the source's slices; segments first .. last - 1 of the row."""

    index: Int32
    token: Int32
    first: Int32
    last: Int32


def slice_of(index: Int32, slices_log2: Int32, vectors: Int32, count: Int32 | int = 1) -> RowSlice:
    """The slice with an index, in a source whose rows of `vectors` vectors have 2^slices_log2 slices, or `count`
    neighbouring slices of one row as one. The last slices of a short row are empty (first >= last): they are neither
    sent nor awaited."""
    token = index >> slices_log2
    segments = segments_of(vectors)
    share = (segments + (Int32(1) << slices_log2) - 1) >> slices_log2
    first = (index - (token << slices_log2)) * share
    return RowSlice(index, token, first, cutlass.min(first + count * share, segments))


def segments_of(vectors: Int32) -> Int32:
    """Segments of a row, the last one maybe in part."""
    return quotient(vectors + (SEGMENT - 1), SEGMENT)


@cute.jit
def most_slices(sHeader: cute.Tensor, ranks: Int32) -> Int32:
    """Message slices of the source that has the most, from the headers."""
    most = Int32(0)
    for source in cutlass.range(ranks, unroll=1):
        log2 = message_slices_log2(sHeader[source, int(HeaderWord.MESSAGES)])
        most = cutlass.max(most, sHeader[source, int(HeaderWord.TOKENS)] << log2)
    return most


def vectors_of(row_bytes: Int32) -> Int32:
    """16-byte vectors of a row."""
    return Int32(quotient(row_bytes, VECTOR_BYTES))


def first_item(cta: Int32, ctas: Int32, warp: Int32) -> Int32:
    """A warp's first item: neighbouring items go to different CTAs."""
    return warp * ctas + cta


def item_stride(ctas: Int32, warps: Int32 | int = WARPS) -> Int32:
    """Warps of `ctas` CTAs of `warps` warps."""
    return ctas * warps


def packed_cta(block: Int32, blocks: Int32) -> Int32:
    """A number for each CTA (block), such that 2 i and 2 i + 1 belong to CTAs that share an SM where two fit: the GPU
    gives every SM one CTA before it gives out second ones. It need not: then times change, but no byte does."""
    first = (blocks + 1) >> 1
    return 2 * block - cutlass.select_(block < first, Int32(0), 2 * first - 1)


def control_cta(ctas: Int32) -> Int32:
    """Which of `ctas` CTAs has other work; of the items of `static_first` it carries none while the others have enough
    warps."""
    return quotient(ctas, 2)


def static_first(
    items: Int32, cta: Int32, ctas: Int32, warp: Int32, chunks: Boolean | bool = False, warps: Int32 | int = WARPS
) -> Int32:
    """First of `items` items of a warp of CTA `cta` of `ctas`, of `warps` warps each; `items` where it has no item.

    With `chunks`, neighbouring items go to the warps of one CTA, all of which have the same number of items: then
    `items` is a multiple of CHUNK, and a CTA has as many warps.
    """
    control, working = control_cta(ctas), _working_ctas(items, ctas, warps)
    place = cta - cutlass.select_(cta > control, ctas - working, Int32(0))
    first = cutlass.select_(Boolean(chunks), place * CHUNK + warp, first_item(place, working, warp))
    return cutlass.select_((working != ctas) & (cta == control), items, first)


def are_many(items: Int32, ctas: Int32, warps: Int32 | int = WARPS) -> Boolean:
    """Whether there are more items than warps in `ctas` CTAs; then no CTA is left out."""
    return items > item_stride(ctas, warps)


class Tickets:
    """Tickets 0, 1, ..., each of which one warp of a CTA draws: a warp that is held up draws fewer."""

    def __init__(self, name: str, shared: RegionMap) -> None:
        self.next = shared.add(name, 4, 1)

    @cute.jit
    def open(self, tid: Int32) -> None:
        """A CTA barrier must follow before `draw`."""
        sNext = shared_array(self.next, Int32)
        if tid == 0:
            sNext[0] = Int32(0)

    @cute.jit
    def draw(self, lane: Int32) -> Int32:
        """The warp's next ticket, in all lanes."""
        sNext = shared_array(self.next, Int32)
        ticket = Int32(0)
        if lane == 0:
            ticket = cute.arch.inline_ptx(
                "atom.shared.inc.u32 {$w0}, [{$r0}], 0x7fffffff;",
                write_only_types=[Int32],
                read_only_args=[sNext.iterator.toint()],
            )
        return from_lane(ticket, 0)


def whole_chunks(slices: Int32) -> Int32:
    """`slices` rounded up to whole chunks."""
    return round_up(slices, CHUNK)


def static_stride(items: Int32, ctas: Int32) -> Int32:
    """From an item of a warp to its next one. Computed at each item, it takes no register."""
    return item_stride(_working_ctas(items, ctas))


def has_same_source(stride: Int32, by_ranks: Divisor) -> Boolean:
    """Whether a warp whose items are `stride` apart would have the same source in all of them."""
    ahead, _ = by_ranks.split(stride)
    return ahead == 0


def turned_source(item: Int32, turned: Int32, by_ranks: Divisor) -> tuple[Int32, Int32]:
    """(ahead, index) of an item, whose source is `ahead` ranks after the own one. The items of an index are one for
    each source, and `turned`, which is below the number of ranks, moves them on to other sources. It must be the same
    for all items of an index: otherwise one source has the index twice, and another one not at all. Where a warp
    `has_same_source`, it may pass how many items it has had, modulo the ranks, because then warps have all items of an
    index at the same count. Elsewhere it passes 0."""
    ahead, index = by_ranks.split(item)
    ahead += turned
    return ahead - cutlass.select_(ahead >= by_ranks.extent, by_ranks.extent, Int32(0)), index


def _working_ctas(items: Int32, ctas: Int32, warps: Int32 | int = WARPS) -> Int32:
    return ctas - Int32(items <= (ctas - 1) * warps)


def item_of(static: Int32, ticket: Int32, counters: Int32 | int = 1, counter: Int32 | int = 0) -> Int32:
    """The item, or chunk, of a ticket that a CTA or warp has drawn (`sync.take_ticket`): the first `static` ones are
    scheduled statically, and of the others each of `counters` counters has every counters-th, from number `counter` on.
    CTAs with the same work are not equally fast, since they share their SM or not: this gives each what it can
    carry."""
    return static + ticket * counters + counter


PARTS = 4
"""Parts of a slice that warps draw one by one."""
WHOLE = -1
"""The part that is all of a slice."""


def drawn_items(items: Int32, split: Int32) -> Int32:
    """How many numbers `split_item` has for `items` items, of which the last `split` are drawn in parts."""
    return items + (PARTS - 1) * split


def split_item(number: Int32, items: Int32, split: Int32) -> tuple[Int32, Int32]:
    """(item, part) of a number: first come the whole items, then the PARTS parts of each of the last `split` ones. A
    warp that drew a whole one last would keep the launch running long after other warps have nothing left to do."""
    beyond = number - (items - split)
    item = cutlass.select_(beyond < 0, number, items - split + quotient(beyond, PARTS))
    return item, cutlass.select_(beyond < 0, Int32(WHOLE), remainder(beyond, PARTS))


def part_of(whole: RowSlice, part: Int32) -> RowSlice:
    """A part of a slice, or all of it (WHOLE). The last parts of a short one are empty (first >= last)."""
    share = quotient(whole.last - whole.first + PARTS - 1, PARTS)
    first = whole.first + part * share
    return RowSlice(
        whole.index,
        whole.token,
        cutlass.select_(part < 0, whole.first, first),
        cutlass.select_(part < 0, whole.last, cutlass.min(first + share, whole.last)),
    )


def has_bit(bits: Uint32, index: Int32) -> Boolean:
    """Whether a bit is set."""
    return (bits >> Uint32(index)) & Uint32(1) != Uint32(0)


def lowest(bits: Uint32) -> Int32:
    """Number of the lowest set bit."""
    return Int32(cute.arch.popc((bits & (Uint32(0) - bits)) - Uint32(1)))


def without_lowest(bits: Uint32) -> Uint32:
    """The bits but for the lowest set one."""
    return bits & (bits - Uint32(1))


def highest(bits: Uint32) -> Int32:
    """Number of the highest set bit."""
    return 31 - Int32(cute.arch.clz(bits))


@cute.jit
def take_each(bits: Uint32, in_flight: cutlass.Constexpr, load: cutlass.Constexpr, use: cutlass.Constexpr) -> None:
    """For each set bit, lowest first: load(bit, turn) and then use(bit, turn), with `in_flight` loads before the first
    use. `turn` is below `in_flight`."""
    left = bits
    while left != Uint32(0):
        again = left
        for turn in cutlass.range_constexpr(in_flight):
            if left != Uint32(0):
                bit = lowest(left)
                left = without_lowest(left)
                load(bit, turn)
        for turn in cutlass.range_constexpr(in_flight):
            if again != Uint32(0):
                bit = lowest(again)
                again = without_lowest(again)
                use(bit, turn)


Value = TypeVar("Value")


def from_lane(value: Value, lane: Int32 | int) -> Value:
    """`value` of one lane, in all lanes."""
    return cute.arch.shuffle_sync(value, lane)
