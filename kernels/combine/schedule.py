"""Which slices of which source rank a sending CTA sends, one after the other.

An item is a slice of a source (`slices`); the source varies fastest, beginning after the own rank, so that all links
work at once. If rows of some source are not Lamport rows, an item is a span: neighbouring slices of a source, as many
as the CTA has warps, which carry them together; of pipelines it is always a span, of some chunks (`piped_schedule`).
The first item of a warp, or span of a CTA, is scheduled statically. For a few slices more the warps of a CTA draw its
tickets. Spans, and slices where each warp has many, are scheduled dynamically among the CTAs that begin with the same
source.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS
from cute_ep.kernels.device.atoms import move, plain
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.divide import Divisor, quotient, remainder
from cute_ep.kernels.device.memory import vectors_at
from cute_ep.kernels.device.slices import (
    RowSlice,
    Tickets,
    are_many,
    first_item,
    from_lane,
    has_bit,
    highest,
    item_of,
    item_stride,
    slice_of,
    static_first,
)
from cute_ep.kernels.device.sync import reset_counter, take_ticket
from cute_ep.layouts.maps.arena import COUNTERS, HeaderWord, are_flagged, return_slices_log2
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import MAX_RANKS

FEW_ROUNDS = 4
"""Up to this many Lamport slices per warp stay with their CTA, whose tickets come sooner: 128 tokens of 4096 elements
take 9.1 us, with a global counter 10.6 (2 x H200, 2026-11-22). More are scheduled among CTAs."""


@dataclass(frozen=True)
class Span:
    """What the warps of a CTA carry together: segments first .. last - 1 of `tokens` tokens, from `token` on, of a
    source; `index` counts its slices. No tokens where the source has none there."""

    source: Int32
    index: Int32
    token: Int32
    tokens: Int32
    first: Int32
    last: Int32


@dataclass(frozen=True)
class FirstItem:
    """What a warp begins with, or a CTA.

    Attributes:
        is_span: whether items are spans of CTAs, or slices of warps.
        source, number: whose rows it is of, and which of that source's spans or slices it is.
        tokens, slices_log2: of the source, and of its rows.
    """

    is_span: Boolean
    source: Int32
    number: Int32
    tokens: Int32
    slices_log2: Int32


class CombineSchedule:
    """The items of one launch, and the headers that tell how many there are. Slices are those of returned rows."""

    always_spans = False
    """Whether items are spans although all rows are Lamport rows."""

    def __init__(self, epoch: Region, shared: RegionMap) -> None:
        self.epoch = epoch
        self.items = shared.add("return_items", 4, 1)
        self.flagged = shared.add("flagged_sources", 4, 1)
        self.headers = shared.add("return_headers", 4, MAX_RANKS, len(HeaderWord))
        self.tickets = Tickets("return_tickets", shared)
        self.asked = shared.add("return_asked", 4, 2)

    def load_header(self, ctx: CombineContext) -> cute.Tensor:
        """Begin to load the header of source `lane`; zeros in lanes beyond the ranks."""
        rHeader = cute.make_rmem_tensor(len(HeaderWord), Uint32)
        rHeader.fill(0)
        self._load_header(ctx, rHeader)
        return rHeader

    @cute.jit
    def _load_header(self, ctx: CombineContext, rHeader: cute.Tensor) -> None:
        if ctx.lane < ctx.ranks:
            move(plain, vectors_at(ctx.batch.headers, ctx.lane), [rHeader])

    @cute.jit
    def open(self, ctx: CombineContext, rHeader: cute.Tensor) -> FirstItem:
        """Find the items from the headers of `load_header`, which it changes. A CTA barrier must follow before any
        other method but `split`."""
        sHeader, sItems = shared_array(self.headers, Int32), shared_array(self.items, Int32)
        tokens, returns = Int32(rHeader[int(HeaderWord.TOKENS)]), Int32(rHeader[int(HeaderWord.RETURNS)])
        log2, flagged = return_slices_log2(returns), Uint32(cute.arch.vote_ballot_sync(are_flagged(returns) != 0))
        rHeader[int(HeaderWord.RETURNS)] = Uint32(log2)  # all that is read of it later
        if (ctx.warp == 0) & (ctx.lane < ctx.ranks):
            for word in cutlass.range_constexpr(len(HeaderWord)):
                sHeader[ctx.lane, word] = Int32(rHeader[word])
        spans = flagged != Uint32(0)
        if cutlass.const_expr(self.always_spans):
            spans = Boolean(True)
        most = Int32(cute.arch.warp_redux_sync(self.due(ctx, tokens << log2), "max"))
        if spans:
            in_span = self.choose_span(ctx, most)
            most = (most + in_span - 1) >> highest(Uint32(in_span))
        items = most * self.by_sources(ctx).extent
        sFlagged = shared_array(self.flagged, Uint32)
        if ctx.tid == 0:
            sItems[0] = items
            sFlagged[0] = flagged
        self.tickets.open(ctx.tid)
        source, number = self.split(ctx, _first(ctx, items, spans))
        return FirstItem(spans, source, number, from_lane(tokens, source), from_lane(log2, source))

    def count(self) -> Int32:
        """Number of items of the launch."""
        return shared_array(self.items, Int32)[0]

    def any_flagged(self) -> Boolean:
        """Whether rows of some source are not Lamport rows. Then items are spans; those of pipelines always are."""
        return shared_array(self.flagged, Uint32)[0] != Uint32(0)

    def are_lamport(self, source: Int32) -> Boolean:
        """Whether a source gets Lamport rows back."""
        return ~has_bit(shared_array(self.flagged, Uint32)[0], source)

    def are_many(self, ctx: CombineContext) -> Boolean:
        """Whether some warps have more than one Lamport slice."""
        return are_many(self.count(), ctx.grid.send_ctas, ctx.warps)

    def are_staggered(self, ctx: CombineContext) -> Boolean:
        """Whether warps of a sending CTA do not end together."""
        return ~self.any_flagged() & self.are_many(ctx)

    def first(self, ctx: CombineContext, spans: bool) -> Int32:
        """A warp's first item; the number of a CTA's first span."""
        return _first(ctx, self.count(), Boolean(spans))

    def split(self, ctx: CombineContext, item: Int32) -> tuple[Int32, Int32]:
        """(source, number of its slice or span) of an item."""
        start, number = self.by_sources(ctx).split(item)
        source = ctx.rank + 1 + start
        return source - cutlass.select_(source >= ctx.ranks, ctx.ranks, Int32(0)), number

    def due(self, ctx: CombineContext, slices: Int32) -> Int32:
        """How many of them are sent to the source that is this lane."""
        return slices

    def by_sources(self, ctx: CombineContext) -> Divisor:
        """The number of sources that rows are sent to."""
        return ctx.by_ranks

    def row_slice(self, ctx: CombineContext, source: Int32, index: Int32) -> RowSlice:
        """`slice_of` in what a source gets back."""
        return slice_of(index, self._slices_log2(source), row_vectors(ctx))

    def span(self, ctx: CombineContext, item: Int32) -> Span:
        """The span of an item; it has no tokens from item `count()` on."""
        source, number = self.split(ctx, item)
        log2, vectors = self._slices_log2(source), row_vectors(ctx)
        return span_of(source, number, self.tokens(source), log2, vectors, self.in_span(ctx))

    def choose_span(self, ctx: CombineContext, most: Int32) -> Int32:
        """The slices of a span, where no source has more than `most`; `in_span` has it behind a CTA barrier."""
        return self.in_span(ctx)

    def in_span(self, ctx: CombineContext) -> Int32:
        """Slices of a span, a power of two."""
        return ctx.warps

    def is_due(self, item: Int32, source: Int32, row_slice: RowSlice) -> Boolean:
        """Whether an item exists, and its slice."""
        return (item < self.count()) & (row_slice.token < self.tokens(source)) & (row_slice.first < row_slice.last)

    def tokens(self, source: Int32) -> Int32:
        """Tokens of a source."""
        return self._header(source, HeaderWord.TOKENS)

    def slices(self, source: Int32) -> Int32:
        """Slices of all its tokens."""
        return self.tokens(source) << self._slices_log2(source)

    def round(self, ctx: CombineContext) -> Int32:
        """The dispatch round whose rows are returned, as the own header has it."""
        return self._header(ctx.rank, HeaderWord.ROUND)

    def _slices_log2(self, source: Int32) -> Int32:
        return self._header(source, HeaderWord.RETURNS)

    def _header(self, source: Int32, word: HeaderWord) -> Int32:
        return shared_array(self.headers, Int32)[source, int(word)]

    @cute.jit
    def ask(self, ctx: CombineContext) -> Int32:
        """What `next` will need, in lane 0: it comes while the warp carries a slice."""
        number = Int32(0)
        if self._are_most(ctx) & (ctx.lane == 0):
            number = self.take(ctx, _start(ctx), remainder(ctx.warp, COUNTERS))
        return number

    @cute.jit
    def next(self, ctx: CombineContext, number: Int32) -> Int32:
        """A warp's next item of Lamport slices."""
        item = self.count()
        if self._are_most(ctx):
            number = from_lane(number, 0) * COUNTERS + remainder(ctx.warp, COUNTERS)
            item = _item_of(ctx, item_stride(ctx.grid.send_ctas, ctx.warps), number)
        elif self.are_many(ctx):
            item = first_item(ctx.cta, ctx.grid.send_ctas, ctx.warps + self.tickets.draw(ctx.lane))
        return item

    @cute.jit
    def ask_span(self, ctx: CombineContext, stage: Int32) -> None:
        """What `next_span` will need, by thread 0; stage: 0 and 1 alternately. A CTA barrier must follow."""
        sAsked = shared_array(self.asked, Int32)
        if ctx.tid == 0:
            sAsked[stage] = self.take(ctx, _start(ctx), Int32(0))

    def next_span(self, ctx: CombineContext, stage: Int32) -> Int32:
        """Number of a CTA's next span."""
        return _item_of(ctx, ctx.grid.send_ctas, shared_array(self.asked, Int32)[stage])

    @cute.jit
    def clear_counters(self, ctx: CombineContext, cta: Int32) -> None:
        """Let the tickets of the next round, which another launch will draw, begin at 0: one thread per counter."""
        if (ctx.cta == cta) & (ctx.tid < ctx.ranks * COUNTERS):
            reset_counter(ctx.here(ctx.arena.combine_tickets, (ctx.epoch + 1) & 1, 0, ctx.tid))

    def _are_most(self, ctx: CombineContext) -> Boolean:
        """Whether there are so many Lamport slices that CTAs take them from each other."""
        return self.count() > FEW_ROUNDS * item_stride(ctx.grid.send_ctas, ctx.warps)

    def take(self, ctx: CombineContext, start: Int32, counter: Int32) -> Int32:
        """The next number from one of the counters that CTAs, or pipelines, which begin with the same source share.
        start: which that is, counted from the one behind the own rank."""
        sEpoch = shared_array(self.epoch, Int64)
        return take_ticket(ctx.here(ctx.arena.combine_tickets, sEpoch[0] & 1, start, counter))


def _start(ctx: CombineContext) -> Int32:
    """Which source a CTA begins with, counted from the one behind the own rank."""
    start, _ = ctx.by_ranks.split(ctx.cta)
    return start


def _item_of(ctx: CombineContext, static: Int32, ticket: Int32) -> Int32:
    """The item of a CTA's ticket: of its source, where ranks divide `static`."""
    return item_of(static, ticket, cutlass.min(ctx.ranks, ctx.grid.send_ctas), _start(ctx))


def _first(ctx: CombineContext, items: Int32, spans: Boolean) -> Int32:
    """A span is an item of a CTA, as of one warp."""
    warp, warps = cutlass.select_(spans, Int32(0), ctx.warp), cutlass.select_(spans, Int32(1), ctx.warps)
    return static_first(items, ctx.cta, ctx.grid.send_ctas, warp, warps=warps)


def span_of(source: Int32, number: Int32, tokens: Int32, log2: Int32, vectors: Int32, slices: Int32) -> Span:
    """Span `number` of `slices` slices, a power of two, of a source of so many tokens, whose rows of so many vectors
    have 2^log2 slices: several tokens, one, or a part of one."""
    index = number * slices
    whole = slice_of(index, log2, vectors, cutlass.min(Int32(1) << log2, slices))
    count = cutlass.min(cutlass.max(slices >> log2, Int32(1)), tokens - whole.token)
    none = (count < 0) | (whole.first >= whole.last)
    return Span(source, index, whole.token, cutlass.select_(none, Int32(0), count), whole.first, whole.last)


def row_vectors(ctx: CombineContext) -> Int32:
    """16-byte vectors of a returned row."""
    return quotient(ctx.group.hidden, VECTOR_ELEMENTS)
