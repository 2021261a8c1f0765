"""Which slices of which source rank a sending CTA sends, one after the other.

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
from cute_ep.kernels.device.atoms import weak
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.lamport import is_lamport
from cute_ep.kernels.device.memory import rows
from cute_ep.kernels.device.slices import (
    RowSlice,
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
"""Up to this many Lamport slices per warp stay with their CTA, whose tickets come sooner: 128 tokens of 4096 elements
take 9.1 us, with a global counter 10.6 (2 x H200, 2026-11-22). More are scheduled among CTAs."""


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
    def open(self, ctx: CombineContext) -> tuple[Int32, Int32, Boolean]:
        """Read the headers: (source, token, whether there is something to send) of the warp's first item. A CTA
        barrier must follow before any other method."""
        sHeader, sItems = shared_array(self.headers, Int32), shared_array(self.items, Int32)
        gHeader = rows(ctx.batch.headers, 1, ctx.ranks)
        rHeader = cute.make_rmem_tensor(len(HeaderWord), Uint32)
        rHeader.fill(0)
        if ctx.lane < ctx.ranks:
            cute.copy(weak(), gHeader[None, 0, ctx.lane], rHeader)
            if ctx.warp == 0:
                for word in cutlass.range_constexpr(len(HeaderWord)):
                    sHeader[ctx.lane, word] = Int32(rHeader[word])
        tokens, log2 = Int32(rHeader[int(HeaderWord.TOKENS)]), Int32(rHeader[int(HeaderWord.RETURN_SLICES_LOG2)])
        chunks = cute.arch.vote_any_sync(~is_lamport(tokens))
        most = Int32(cute.arch.warp_redux_sync(tokens << log2, "max"))
        items = cutlass.select_(chunks, whole_chunks(most), most) * ctx.ranks
        sChunks = shared_array(self.chunks, Int32)
        if ctx.tid == 0:
            sItems[0] = items
            sChunks[0] = Int32(chunks)
        self.tickets.open(ctx.tid)
        item = _first(ctx, items, chunks)
        source, run = self.split(ctx, cutlass.select_(chunks, chunk_of(item), item))
        index = cutlass.select_(chunks, run * CHUNK + remainder(item, CHUNK), run)
        row_slice = slice_of(index, from_lane(log2, source), row_vectors(ctx))
        due = (item < items) & (row_slice.token < from_lane(tokens, source)) & (row_slice.first < row_slice.last)
        return source, row_slice.token, due

    def count(self) -> Int32:
        """Number of items of the launch."""
        return shared_array(self.items, Int32)[0]

    def are_chunks(self) -> Boolean:
        """Whether rows of some source are not Lamport rows: then items are scheduled in chunks."""
        return shared_array(self.chunks, Int32)[0] != 0

    def are_many(self, ctx: CombineContext) -> Boolean:
        """Whether some warps have more than one Lamport slice."""
        return are_many(self.count(), ctx.grid.send_ctas)

    def are_staggered(self, ctx: CombineContext) -> Boolean:
        """Whether warps of a sending CTA do not end together."""
        return ~self.are_chunks() & self.are_many(ctx)

    def first(self, ctx: CombineContext, chunks: bool) -> Int32:
        """A warp's first item, of a chunk its CTA's: all its warps carry all its tokens together."""
        return _first(ctx, self.count(), Boolean(chunks))

    def split(self, ctx: CombineContext, item: Int32) -> tuple[Int32, Int32]:
        """(source, number of its slice or chunk) of an item or chunk."""
        turn, run = ctx.by_ranks.split(item)
        source = ctx.rank + 1 + turn
        return source - cutlass.select_(source >= ctx.ranks, ctx.ranks, Int32(0)), run

    def row_slice(self, ctx: CombineContext, source: Int32, index: Int32, count: Int32 | int = 1) -> RowSlice:
        """`slice_of` in what a source gets back."""
        return slice_of(index, self._header(source, HeaderWord.RETURN_SLICES_LOG2), row_vectors(ctx), count)

    def chunk_slice(self, ctx: CombineContext, item: Int32) -> tuple[Int32, RowSlice]:
        """(source, slices of a token that are carried together, as one) of an item of a chunk."""
        source, run = self.split(ctx, chunk_of(item))
        return source, self.row_slice(ctx, source, run * CHUNK + remainder(item, CHUNK), self.together(source))

    def is_due(self, item: Int32, source: Int32, row_slice: RowSlice) -> Boolean:
        """Whether an item exists, and its slice."""
        return (item < self.count()) & (row_slice.token < self.tokens(source)) & (row_slice.first < row_slice.last)

    def together(self, source: Int32) -> Int32:
        """Slices of a token in a chunk."""
        return cutlass.min(Int32(1) << self._header(source, HeaderWord.RETURN_SLICES_LOG2), Int32(CHUNK))

    def tokens(self, source: Int32) -> Int32:
        """Tokens of a source."""
        return self._header(source, HeaderWord.TOKENS)

    def slices(self, source: Int32) -> Int32:
        """Slices of all its tokens."""
        return self.tokens(source) << self._header(source, HeaderWord.RETURN_SLICES_LOG2)

    def round(self, ctx: CombineContext) -> Int32:
        """The dispatch round whose rows are returned, as the own header has it."""
        return self._header(ctx.rank, HeaderWord.ROUND)

    def _header(self, source: Int32, word: HeaderWord) -> Int32:
        return shared_array(self.headers, Int32)[source, int(word)]

    @cute.jit
    def ask(self, ctx: CombineContext) -> Int32:
        """What `next` will need, in lane 0: it comes while the warp carries a slice."""
        number = Int32(0)
        if self._are_most(ctx) & (ctx.lane == 0):
            number = self._take(ctx, remainder(ctx.warp, COUNTERS))
        return number

    @cute.jit
    def next(self, ctx: CombineContext, number: Int32) -> Int32:
        """A warp's next item of Lamport slices."""
        item = self.count()
        if self._are_most(ctx):
            number = from_lane(number, 0) * COUNTERS + remainder(ctx.warp, COUNTERS)
            item = self._item_of(ctx, item_stride(ctx.grid.send_ctas), number)
        elif self.are_many(ctx):
            item = first_item(ctx.cta, ctx.grid.send_ctas, WARPS + self.tickets.draw(ctx.lane))
        return item

    def ask_chunk(self, ctx: CombineContext, turn: Int32) -> None:
        """What `next_chunk` will need, by one thread; turn: 0 and 1 alternately. A CTA barrier must follow."""
        sAsked = shared_array(self.asked, Int32)
        sAsked[turn] = self._take(ctx, Int32(0))

    def next_chunk(self, ctx: CombineContext, turn: Int32) -> Int32:
        """A CTA's next chunk, as its first item."""
        return self._item_of(ctx, ctx.grid.send_ctas, shared_array(self.asked, Int32)[turn]) * CHUNK

    @cute.jit
    def clear_counters(self, ctx: CombineContext, cta: Int32) -> None:
        """Let the tickets of the next round, which another launch will draw, begin at 0: one thread per counter."""
        if (ctx.cta == cta) & (ctx.tid < ctx.ranks * COUNTERS):
            reset_counter(ctx.here(ctx.arena.combine_tickets, (ctx.epoch + 1) & 1, 0, ctx.tid))

    def _are_most(self, ctx: CombineContext) -> Boolean:
        """Whether there are so many Lamport slices that CTAs take them from each other."""
        return self.count() > FEW_ROUNDS * item_stride(ctx.grid.send_ctas)

    def _take(self, ctx: CombineContext, counter: Int32) -> Int32:
        """The next number from one of the counters that CTAs with the same turn share."""
        sEpoch = shared_array(self.epoch, Int64)
        return take_ticket(ctx.here(ctx.arena.combine_tickets, sEpoch[0] & 1, _turn(ctx), counter))

    def _item_of(self, ctx: CombineContext, static: Int32, ticket: Int32) -> Int32:
        """The item or chunk of a ticket: of the CTA's source, where ranks divide `static`."""
        return item_of(static, ticket, cutlass.min(ctx.ranks, ctx.grid.send_ctas), _turn(ctx))


def _turn(ctx: CombineContext) -> Int32:
    turn, _ = ctx.by_ranks.split(ctx.cta)
    return turn


def _first(ctx: CombineContext, items: Int32, chunks: Boolean) -> Int32:
    warp = cutlass.select_(chunks, Int32(0), ctx.warp)
    return static_first(items, ctx.cta, ctx.grid.send_ctas, warp, chunks)


def row_vectors(ctx: CombineContext) -> Int32:
    """16-byte vectors of a returned row."""
    return quotient(ctx.group.hidden, VECTOR_ELEMENTS)
