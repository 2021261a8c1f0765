"""Which slices of which source rank a CTA of `combine_send` sends, one after the other.

An item is a slice of a source (`slices`); the source varies fastest, beginning after the own rank, so that all links
work at once. If rows of some source are not Lamport rows, all are sent in chunks. The first item, or chunk, of a CTA is
scheduled statically. For a few slices more its warps draw tickets of the CTA. Chunks, and slices where each warp has
many, are scheduled dynamically among the CTAs that begin with the same source.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.lamport import is_lamport
from cute_ep.kernels.device.memory import vector_atom, vector_tensor
from cute_ep.kernels.device.slices import (
    Tickets,
    are_many,
    first_item,
    from_lane,
    item_of,
    item_stride,
    slice_of,
    static_first,
    whole_chunks,
)
from cute_ep.kernels.device.sync import reset_counter, take_ticket
from cute_ep.layouts.maps.arena import CHUNK, COUNTERS, HeaderWord, chunk_of
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import MAX_RANKS

FEW_ROUNDS = 4
"""Up to so many Lamport slices per warp stay with their CTA: a ticket of the CTA comes sooner (2 x H200, 2026-11-22:
128 tokens of 4096 elements 9.1 us, from a global counter 10.6). More are scheduled among CTAs."""


class CombineSchedule:
    """The items of one launch, and the headers that tell how many there are. Slices are those of returned rows."""

    def __init__(self, epoch: Region, shared: RegionMap) -> None:
        self.epoch = epoch
        self.items = shared.add("return_items", 4, 1)
        self.chunks = shared.add("return_chunks", 4, 1)
        self.headers = shared.add("return_headers", 4, MAX_RANKS, len(HeaderWord))
        self.tickets = Tickets("return_tickets", shared)
        self.asked = shared.add("return_asked", 4, 2)

    @cute.jit
    def open(self, group, args):
        """Read the headers: (source, token, whether there is something to send) of the warp's first item. A CTA
        barrier must follow before any other method."""
        sHeader, sItems = shared_array(self.headers, Int32), shared_array(self.items, Int32)
        gHeader = vector_tensor(args.headers, 1, group.ranks)
        rHeader = cute.make_rmem_tensor(len(HeaderWord), Uint32)
        rHeader.fill(0)
        if group.lane < group.ranks:
            cute.copy(vector_atom(), gHeader[None, 0, group.lane], rHeader)
            if group.warp == 0:
                for word in cutlass.range_constexpr(len(HeaderWord)):
                    sHeader[group.lane, word] = Int32(rHeader[word])
        tokens, log2 = Int32(rHeader[int(HeaderWord.TOKENS)]), Int32(rHeader[int(HeaderWord.RETURN_SLICES)])
        chunks = cute.arch.vote_any_sync(~is_lamport(tokens))
        most = Int32(cute.arch.warp_redux_sync(tokens << log2, "max"))
        items = cutlass.select_(chunks, whole_chunks(most), most) * group.ranks
        sChunks = shared_array(self.chunks, Int32)
        if group.tid == 0:
            sItems[0] = items
            sChunks[0] = Int32(chunks)
        self.tickets.open(group.tid)
        item = _first(group, args, items, chunks)
        source, run = self.split(group, cutlass.select_(chunks, chunk_of(item), item))
        index = cutlass.select_(chunks, run * CHUNK + remainder(item, CHUNK), run)
        row_slice = slice_of(index, from_lane(log2, source), row_units(group))
        due = (item < items) & (row_slice.token < from_lane(tokens, source)) & (row_slice.first < row_slice.last)
        return source, row_slice.token, due

    def count(self) -> Int32:
        """Items of the launch: an item from here on is none."""
        return shared_array(self.items, Int32)[0]

    def are_chunks(self) -> Boolean:
        """Whether rows of some source are not Lamport rows: then items are scheduled in chunks."""
        return shared_array(self.chunks, Int32)[0] != 0

    def are_many(self, args) -> Boolean:
        """Whether some warps have more than one Lamport slice."""
        return are_many(self.count(), args.send_ctas)

    def are_staggered(self, args) -> Boolean:
        """Whether warps of a sending CTA do not end together."""
        return ~self.are_chunks() & self.are_many(args)

    def first(self, group, args, chunks: bool) -> Int32:
        """A warp's first item, of a chunk its CTA's: all its warps carry all its tokens together."""
        return _first(group, args, self.count(), Boolean(chunks))

    def split(self, group, item):
        """(source, number of its slice or chunk) of an item or chunk."""
        turn, run = group.by_ranks.split(item)
        source = group.rank + 1 + turn
        return source - cutlass.select_(source >= group.ranks, group.ranks, Int32(0)), run

    def row_slice(self, group, source, index, count=1):
        """`slice_of` in what a source gets back."""
        return slice_of(index, self._header(source, HeaderWord.RETURN_SLICES), row_units(group), count)

    def chunk_slice(self, group, item):
        """(source, slices of a token that are carried together, as one) of an item of a chunk."""
        source, run = self.split(group, chunk_of(item))
        return source, self.row_slice(group, source, run * CHUNK + remainder(item, CHUNK), self.together(source))

    def is_due(self, item, source, row_slice) -> Boolean:
        """Whether an item exists, and its slice."""
        return (item < self.count()) & (row_slice.token < self.tokens(source)) & (row_slice.first < row_slice.last)

    def together(self, source) -> Int32:
        """Slices of a token in a chunk."""
        return cutlass.min(Int32(1) << self._header(source, HeaderWord.RETURN_SLICES), Int32(CHUNK))

    def tokens(self, source) -> Int32:
        """Tokens of a source."""
        return self._header(source, HeaderWord.TOKENS)

    def slices(self, source) -> Int32:
        """Slices of all its tokens."""
        return self.tokens(source) << self._header(source, HeaderWord.RETURN_SLICES)

    def _header(self, source, word: HeaderWord):
        return shared_array(self.headers, Int32)[source, int(word)]

    @cute.jit
    def ask(self, group, args) -> Int32:
        """What `next` will need, in lane 0: it comes while the warp carries a slice."""
        number = Int32(0)
        if self._are_most(args) & (group.lane == 0):
            number = self._take(group, remainder(group.warp, COUNTERS))
        return number

    @cute.jit
    def next(self, group, args, number: Int32) -> Int32:
        """A warp's next item of Lamport slices."""
        item = self.count()
        if self._are_most(args):
            number = from_lane(number, 0) * COUNTERS + remainder(group.warp, COUNTERS)
            item = self._item_of(group, args, item_stride(args.send_ctas), number)
        elif self.are_many(args):
            item = first_item(group.cta, args.send_ctas, WARPS + self.tickets.draw(group.lane))
        return item

    def ask_chunk(self, group, turn) -> None:
        """What `next_chunk` will need, by one thread; turn: 0 and 1 alternately. A CTA barrier must follow."""
        sAsked = shared_array(self.asked, Int32)
        sAsked[turn] = self._take(group, Int32(0))

    def next_chunk(self, group, args, turn) -> Int32:
        """A CTA's next chunk, as its first item."""
        return self._item_of(group, args, args.send_ctas, shared_array(self.asked, Int32)[turn]) * CHUNK

    @cute.jit
    def clear_counters(self, group, epoch: Int64, cta) -> None:
        """Let the tickets of round `epoch`, which another launch will draw, begin at 0: one thread per counter."""
        if (group.cta == cta) & (group.tid < group.ranks * COUNTERS):
            reset_counter(group.base + group.arena.combine_tickets.at(epoch & 1, 0, group.tid))

    def _are_most(self, args) -> Boolean:
        """Whether there are so many Lamport slices that CTAs take them from each other."""
        return self.count() > FEW_ROUNDS * item_stride(args.send_ctas)

    def _take(self, group, counter) -> Int32:
        """The next number from one of the counters that CTAs with the same turn share."""
        sEpoch = shared_array(self.epoch, Int64)
        return take_ticket(group.base + group.arena.combine_tickets.at(sEpoch[0] & 1, _turn(group), counter))

    def _item_of(self, group, args, static: Int32, ticket: Int32) -> Int32:
        """The item or chunk of a ticket: of the CTA's source, where ranks divide `static`."""
        return item_of(static, ticket, cutlass.min(group.ranks, args.send_ctas), _turn(group))


def _turn(group) -> Int32:
    turn, _ = group.by_ranks.split(group.cta)
    return turn


def _first(group, args, items, chunks: Boolean) -> Int32:
    warp = cutlass.select_(chunks, Int32(0), group.warp)
    return static_first(items, group.cta, args.send_ctas, warp, chunks)


def row_units(group) -> Int32:
    """16-byte units of a returned row."""
    return quotient(group.hidden, VECTOR_ELEMENTS)
