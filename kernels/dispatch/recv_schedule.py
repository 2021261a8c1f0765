"""Which slices of messages each receiving warp takes, one after the other.

An item is a slice of a source (`slices`); the source varies fastest, beginning with the own rank. Which items a warp
takes is known before, unless CTAs that send join those that only receive. Then each warp of the latter begins with an
item, and all others are drawn from a counter: also by CTAs that have sent all that they send. Of long slices the last
ones, as many as there are warps, are drawn in parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_ep.kernels.device.block import LOADS_IN_FLIGHT, shared_array
from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.slices import (
    PARTS,
    WHOLE,
    RowSlice,
    drawn_items,
    first_item,
    from_lane,
    has_same_source,
    item_of,
    item_stride,
    part_of,
    segments_of,
    slice_of,
    split_item,
    static_first,
    static_stride,
    turned_source,
    vectors_of,
)
from cute_ep.kernels.device.sync import take_ticket
from cute_ep.kernels.dispatch.row_tables import Tables
from cute_ep.layouts.maps.arena import HeaderWord, StateWord, message_slices_log2


@dataclass(frozen=True)
class Item:
    """What a warp takes.

    Attributes:
        source, row_slice: whose rows it is of, and which slice of them, or part of one.
        number: of the item, also of one that is drawn in parts.
        asked: the ticket for the next one, in lane 0, where items are drawn: it comes while this one is taken.
        turned: by how many sources the warp goes on behind it.
    """

    source: Int32
    row_slice: RowSlice
    number: Int32
    asked: Int32
    turned: Int32


class RecvSchedule:
    """The items of a launch, from the tables, which have been read.

    direct: as in `RowCopy`; fused: whether the launch sends, too.
    """

    def __init__(self, tables: Tables, direct: bool, fused: bool) -> None:
        self.tables, self.direct, self.fused = tables, direct, fused

    @cute.jit
    def first(self, ctx: DispatchContext, receiver: Int32, receivers: Int32) -> Int32:
        """The number of the item that a warp begins with; where senders join, of what is drawn (`split_item`)."""
        number = static_first(self._items(), receiver, receivers, ctx.warp)
        joining = self._joining(ctx)
        if joining > 0:
            if receiver < joining:
                number = self._drawn(ctx, self._ticket(ctx))
            else:
                number = first_item(receiver - joining, receivers - joining, ctx.warp)
        return number

    def exists(self, ctx: DispatchContext, number: Int32) -> Boolean:
        """Whether there is an item of that number."""
        return number < drawn_items(self._items(), self._split(ctx))

    @cute.jit
    def begin(self, ctx: DispatchContext, number: Int32, turned: Int32, receivers: Int32) -> Item:
        """The item of that number, with the ticket for the next one on its way. turned: by how many sources the warp
        has gone on: where each of its items would be of the same one, it would be done early with tokens of the own
        rank only."""
        sHeader = shared_array(self.tables.headers, Int32)
        asked, part = Int32(0), Int32(WHOLE)
        if self._joining(ctx) > 0:
            asked = self._ticket(ctx)
            number, part = split_item(number, self._items(), self._split(ctx))
        ahead, index = turned_source(number, turned, ctx.by_ranks)
        if cutlass.const_expr(self.direct):
            same = has_same_source(static_stride(self._items(), receivers), ctx.by_ranks)
            if same & (self._joining(ctx) == 0):
                turned = cutlass.select_(turned + 1 >= ctx.ranks, Int32(0), turned + 1)
        source = ctx.rank + ahead
        if source >= ctx.ranks:
            source -= ctx.ranks
        log2 = message_slices_log2(sHeader[source, int(HeaderWord.MESSAGES)])
        row_slice = part_of(slice_of(index, log2, vectors_of(ctx.wire.payload_bytes)), part)
        return Item(source, row_slice, number, asked, turned)

    def tokens(self, source: Int32) -> Int32:
        """Tokens of a source."""
        return shared_array(self.tables.headers, Int32)[source, int(HeaderWord.TOKENS)]

    @cute.jit
    def next(self, ctx: DispatchContext, item: Item, receivers: Int32) -> Int32:
        """The number of the item behind that one."""
        number = item.number
        if self._joining(ctx) > 0:
            number = self._drawn(ctx, item.asked)
        else:
            number += static_stride(self._items(), receivers)
        return number

    def _items(self) -> Int32:
        return shared_array(self.tables.items, Int32)[0]

    def _joining(self, ctx: DispatchContext) -> Int32:
        """How many CTAs send before they receive, while the others receive already; 0: none, or all of them."""
        if not self.fused:
            return Int32(0)
        some = (ctx.grid.receive_from == 0) & (ctx.grid.send_ctas < ctx.ctas)
        return cutlass.select_(some, ctx.grid.send_ctas, Int32(0))

    def _split(self, ctx: DispatchContext) -> Int32:
        """How many of the last items are drawn in parts: none where a part would be shorter than what a warp loads at
        once. The own rank's slices decide, which need not be those of other sources."""
        segments = segments_of(vectors_of(ctx.wire.payload_bytes)) >> ctx.input.message_slices_log2
        long = (self._joining(ctx) > 0) & (segments > (PARTS - 1) * LOADS_IN_FLIGHT)
        last = cutlass.min(self._items(), item_stride(ctx.ctas))
        return cutlass.select_(long, last, Int32(0))

    @cute.jit
    def _ticket(self, ctx: DispatchContext) -> Int32:
        """The next one, in lane 0."""
        ticket = Int32(0)
        if ctx.lane == 0:
            ticket = take_ticket(ctx.state_word(StateWord.DISPATCH_SLICES))
        return ticket

    def _drawn(self, ctx: DispatchContext, asked: Int32) -> Int32:
        """The number of a ticket, behind those that warps begin with (`split_item`)."""
        return item_of(item_stride(ctx.ctas - ctx.grid.send_ctas), from_lane(asked, 0))
