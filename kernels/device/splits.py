"""How rows are dealt out to warps: a row is cut into pieces, a piece into segments of 32 units of 16 bytes.

A warp carries a piece by itself. While tokens are few a row has several pieces, so that many warps carry it, on as many
SMs as there are. Where rows are not express, the warps of a CTA carry CONVOY neighbouring pieces side by side, which
have one flag: a flag costs a link as much as 128 bytes of rows, and its fence holds a warp until its stores have
arrived. First items are dealt out. Where there are more, warps may take them by number, as they get ready: from those
of their CTA (`Numbers`) or, where each warp has many, from what no CTA has taken yet (`taken`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import quotient, round_up
from cute_ep.layouts.maps.arena import CONVOY, HeaderWord
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import RegionMap

SEGMENT = 32
"""Units that a warp takes at a time, one a lane."""


@dataclass(frozen=True)
class Piece:
    """One piece of one row: `index` counts the source's pieces; segments first .. last - 1 of the row."""

    index: Int32
    token: Int32
    first: Int32
    last: Int32


def piece_of(index: Int32, pieces_log2: Int32, units: Int32, count=1) -> Piece:
    """The piece with an index, in a source whose rows of `units` units have 2^pieces_log2 pieces, or `count`
    neighbouring pieces of one row as one. The last pieces of a short row are empty (first >= last): nobody sends them,
    nobody waits for them."""
    token = index >> pieces_log2
    segments = segments_of(units)
    share = (segments + (Int32(1) << pieces_log2) - 1) >> pieces_log2
    first = (index - (token << pieces_log2)) * share
    return Piece(index, token, first, cutlass.min(first + count * share, segments))


def segments_of(units: Int32) -> Int32:
    """Segments of a row, the last one maybe in part."""
    return quotient(units + (SEGMENT - 1), SEGMENT)


def own_units(base: Int32, last: Int32, units: Int32, lane: Int32) -> Int32:
    """How many of segments base .. last - 1 of a row of `units` units have one for the lane."""
    return cutlass.min(last - base, quotient(units - base * SEGMENT - lane + (SEGMENT - 1), SEGMENT))


@cute.jit
def most_pieces(sHeader, ranks: Int32) -> Int32:
    """Message pieces of the source that has most, from the headers."""
    most = Int32(0)
    for source in cutlass.range(ranks, unroll=1):
        most = cutlass.max(
            most, sHeader[source, int(HeaderWord.TOKENS)] << sHeader[source, int(HeaderWord.MESSAGE_PIECES)]
        )
    return most


def units_of(row_bytes) -> Int32:
    """16-byte units of a row."""
    return Int32(quotient(row_bytes, VECTOR_BYTES))


def first_item(cta: Int32, ctas: Int32, warp: Int32) -> Int32:
    """A warp's first item: neighbouring items go to different CTAs."""
    return warp * ctas + cta


def item_stride(ctas: Int32) -> Int32:
    """Warps of `ctas` CTAs."""
    return ctas * WARPS


def packed_cta(block: Int32, blocks: Int32) -> Int32:
    """A number for each block, such that 2 i and 2 i + 1 belong to blocks that share an SM where two fit: the GPU hands
    out one block an SM before it hands out the second ones. It is free not to, and then times change, and no byte."""
    first = (blocks + 1) >> 1
    return 2 * block - cutlass.select_(block < first, Int32(0), 2 * first - 1)


def spare_cta(ctas):
    """Which of `ctas` CTAs carries no items while the others have warps enough: it has other work."""
    return quotient(ctas, 2)


def dealt_first(items: Int32, cta: Int32, ctas: Int32, warp: Int32, convoys=False) -> Int32:
    """First of `items` items of a warp of CTA `cta` of `ctas`; `items` where it has none.

    With `convoys`, neighbouring items go to the warps of one CTA, all of which have the same number of items: then
    `items` is a multiple of CONVOY.
    """
    spare, carriers = spare_cta(ctas), _carriers(items, ctas)
    place = cta - cutlass.select_(cta > spare, ctas - carriers, Int32(0))
    first = cutlass.select_(Boolean(convoys), place * CONVOY + warp, first_item(place, carriers, warp))
    return cutlass.select_((carriers != ctas) & (cta == spare), items, first)


def are_many(items: Int32, ctas: Int32) -> Boolean:
    """Whether there are more items than warps in `ctas` CTAs; then no CTA is spared."""
    return items > item_stride(ctas)


class Numbers:
    """Numbers 0, 1, ..., each of which one warp of a CTA takes: a warp that is held up takes fewer."""

    def __init__(self, name: str, shared: RegionMap) -> None:
        self.next = shared.add(name, 4, 1)

    @cute.jit
    def open(self, tid: Int32) -> None:
        """A CTA barrier must follow before `take`."""
        sNext = shared_array(self.next, Int32)
        if tid == 0:
            sNext[0] = Int32(0)

    @cute.jit
    def take(self, lane: Int32) -> Int32:
        """Warp-wide."""
        sNext = shared_array(self.next, Int32)
        number = Int32(0)
        if lane == 0:
            number = cute.arch.inline_ptx(
                "atom.shared.inc.u32 {$w0}, [{$r0}], 0x7fffffff;",
                write_only_types=[Int32],
                read_only_args=[sNext.iterator.toint()],
            )
        return from_lane(number, 0)


def whole_convoys(pieces: Int32) -> Int32:
    """`pieces` and as many that nobody has as fill their last convoy."""
    return round_up(pieces, CONVOY)


def dealt_stride(items: Int32, ctas: Int32) -> Int32:
    """From an item of a warp to its next one. Computed at each item, it takes no register."""
    return item_stride(_carriers(items, ctas))


def _carriers(items: Int32, ctas: Int32) -> Int32:
    return ctas - Int32(items <= (ctas - 1) * WARPS)


def taken(dealt: Int32, number: Int32, turns=1, turn=0) -> Int32:
    """The item, or convoy, of a number that a CTA has taken (`sync.take`): the first `dealt` ones are dealt out, and of
    the others each of `turns` counters has every turns-th, from the one of its `turn` on. CTAs with the same work are
    not equally fast, since they share their SM or not: this gives each what it can carry."""
    return dealt + number * turns + turn


def has_bit(bits: Uint32, index) -> Boolean:
    """Whether a bit is set."""
    return (bits >> Uint32(index)) & Uint32(1) != Uint32(0)


def lowest(bits: Uint32) -> Int32:
    """Number of the lowest set bit."""
    return Int32(cute.arch.popc((bits & (Uint32(0) - bits)) - Uint32(1)))


def from_lane(value, lane):
    """`value` of one lane, in all lanes."""
    return cute.arch.shuffle_sync(value, lane)
