"""Which pieces of which source a sending CTA of combine gives back, one after the other.

An item is a piece of a source (`pieces`); the source varies fastest, beginning after the own rank, so that all links
work at once. If rows of some source are not express all are taken in convoys. A CTA's first item, or convoy, is dealt
out. Of a few pieces more its warps take numbers within the CTA. Convoys, and pieces where each warp has many, are taken
from what no CTA with the same source has taken yet.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_ep.kernels.device.arith import VECTOR_ELEMENTS
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.lamport import is_express
from cute_ep.kernels.device.memory import vector_atom, vector_tensor
from cute_ep.kernels.device.splits import (
    Numbers,
    are_many,
    dealt_first,
    first_item,
    from_lane,
    item_stride,
    piece_of,
    taken,
    whole_convoys,
)
from cute_ep.kernels.device.sync import begin_again, take
from cute_ep.layouts.maps.arena import CONVOY, COUNTERS, HeaderWord, convoy_of
from cute_ep.layouts.maps.launch import WARPS
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import MAX_RANKS

FEW_ROUNDS = 4
"""Up to so many express pieces a warp are dealt out to CTAs: a number within a CTA comes sooner (2 x H200, 2026-11-22:
128 tokens of 4096 elements 9.1 us, from a counter 10.6). Of more, CTAs take pieces from each other."""


class Returns:
    """The items of one launch, and the headers that tell how many there are. Pieces are those of returned rows."""

    def __init__(self, epoch: Region, shared: RegionMap) -> None:
        self.epoch = epoch
        self.items = shared.add("return_items", 4, 1)
        self.convoys = shared.add("return_convoys", 4, 1)
        self.headers = shared.add("return_headers", 4, MAX_RANKS, len(HeaderWord))
        self.numbers = Numbers("return_numbers", shared)
        self.asked = shared.add("return_asked", 4, 2)

    @cute.jit
    def open(self, group, args):
        """Read the headers: (source, token, whether there is something to give back) of the warp's first item. A CTA
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
        tokens, log2 = Int32(rHeader[int(HeaderWord.TOKENS)]), Int32(rHeader[int(HeaderWord.RETURN_PIECES)])
        convoys = cute.arch.vote_any_sync(~is_express(tokens))
        most = Int32(cute.arch.warp_redux_sync(tokens << log2, "max"))
        items = cutlass.select_(convoys, whole_convoys(most), most) * group.ranks
        sConvoys = shared_array(self.convoys, Int32)
        if group.tid == 0:
            sItems[0] = items
            sConvoys[0] = Int32(convoys)
        self.numbers.open(group.tid)
        item = _first(group, args, items, convoys)
        source, run = self.split(group, cutlass.select_(convoys, convoy_of(item), item))
        index = cutlass.select_(convoys, run * CONVOY + remainder(item, CONVOY), run)
        piece = piece_of(index, from_lane(log2, source), row_units(group))
        due = (item < items) & (piece.token < from_lane(tokens, source)) & (piece.first < piece.last)
        return source, piece.token, due

    def count(self) -> Int32:
        """Items of the launch: an item from here on is none."""
        return shared_array(self.items, Int32)[0]

    def are_convoys(self) -> Boolean:
        """Whether rows of some source are not express: then items are dealt for convoys."""
        return shared_array(self.convoys, Int32)[0] != 0

    def are_many(self, args) -> Boolean:
        """Whether some warps have more than one express piece."""
        return are_many(self.count(), args.send_ctas)

    def are_uneven(self, args) -> Boolean:
        """Whether warps of a sending CTA do not end together."""
        return ~self.are_convoys() & self.are_many(args)

    def first(self, group, args, convoys: bool) -> Int32:
        """A warp's first item, of a convoy its CTA's: all its warps carry all its tokens together."""
        return _first(group, args, self.count(), Boolean(convoys))

    def split(self, group, item):
        """(source, number of its piece or convoy) of an item or convoy."""
        turn, run = group.by_ranks.split(item)
        source = group.rank + 1 + turn
        return source - cutlass.select_(source >= group.ranks, group.ranks, Int32(0)), run

    def piece(self, group, source, index, count=1):
        """`piece_of` in what a source gets back."""
        return piece_of(index, self._header(source, HeaderWord.RETURN_PIECES), row_units(group), count)

    def convoy_piece(self, group, item):
        """(source, pieces of a token that are carried together, as one) of an item of a convoy."""
        source, run = self.split(group, convoy_of(item))
        return source, self.piece(group, source, run * CONVOY + remainder(item, CONVOY), self.together(source))

    def is_due(self, item, source, piece) -> Boolean:
        """Whether an item exists, and its piece."""
        return (item < self.count()) & (piece.token < self.tokens(source)) & (piece.first < piece.last)

    def together(self, source) -> Int32:
        """Pieces of a token in a convoy."""
        return cutlass.min(Int32(1) << self._header(source, HeaderWord.RETURN_PIECES), Int32(CONVOY))

    def tokens(self, source) -> Int32:
        """Tokens of a source."""
        return self._header(source, HeaderWord.TOKENS)

    def pieces(self, source) -> Int32:
        """Pieces of all its tokens."""
        return self.tokens(source) << self._header(source, HeaderWord.RETURN_PIECES)

    def _header(self, source, word: HeaderWord):
        return shared_array(self.headers, Int32)[source, int(word)]

    @cute.jit
    def ask(self, group, args) -> Int32:
        """What `next` will need, in lane 0: it comes while the warp carries a piece."""
        number = Int32(0)
        if self._are_most(args) & (group.lane == 0):
            number = self._take(group, remainder(group.warp, COUNTERS))
        return number

    @cute.jit
    def next(self, group, args, number: Int32) -> Int32:
        """A warp's next item of express pieces."""
        item = self.count()
        if self._are_most(args):
            number = from_lane(number, 0) * COUNTERS + remainder(group.warp, COUNTERS)
            item = self._taken(group, args, item_stride(args.send_ctas), number)
        elif self.are_many(args):
            item = first_item(group.cta, args.send_ctas, WARPS + self.numbers.take(group.lane))
        return item

    def ask_convoy(self, group, turn) -> None:
        """What `next_convoy` will need, by one thread; turn: 0 and 1 alternately. A CTA barrier must follow."""
        sAsked = shared_array(self.asked, Int32)
        sAsked[turn] = self._take(group, Int32(0))

    def next_convoy(self, group, args, turn) -> Int32:
        """A CTA's next convoy, as its first item."""
        return self._taken(group, args, args.send_ctas, shared_array(self.asked, Int32)[turn]) * CONVOY

    @cute.jit
    def clear_counters(self, group, epoch: Int64, cta) -> None:
        """Let the numbers of round `epoch`, which another launch will take, begin at 0: a thread a counter."""
        if (group.cta == cta) & (group.tid < group.ranks * COUNTERS):
            begin_again(group.base + group.arena.combine_taken.at(epoch & 1, 0, group.tid))

    def _are_most(self, args) -> Boolean:
        """Whether there are so many express pieces that CTAs take them from each other."""
        return self.count() > FEW_ROUNDS * item_stride(args.send_ctas)

    def _take(self, group, counter) -> Int32:
        """The next number from one of the counters that CTAs with the same turn share."""
        sEpoch = shared_array(self.epoch, Int64)
        return take(group.base + group.arena.combine_taken.at(sEpoch[0] & 1, _turn(group), counter))

    def _taken(self, group, args, dealt: Int32, number: Int32) -> Int32:
        """The item or convoy of a number: for the CTA's source, where ranks divide `dealt`."""
        return taken(dealt, number, cutlass.min(group.ranks, args.send_ctas), _turn(group))


def _turn(group) -> Int32:
    turn, _ = group.by_ranks.split(group.cta)
    return turn


def _first(group, args, items, convoys: Boolean) -> Int32:
    warp = cutlass.select_(convoys, Int32(0), group.warp)
    return dealt_first(items, group.cta, args.send_ctas, warp, convoys)


def row_units(group) -> Int32:
    """16-byte units of a returned row."""
    return quotient(group.hidden, VECTOR_ELEMENTS)
