"""Which spans a pipeline sends, and whose tokens it adds up.

The first span of a pipeline is scheduled statically, further ones among the pipelines that begin with the same source;
then runs of tokens, as many as a warp has lanes for their entries, among all of a launch.

Where pipelines add up, a launch sends its own rank nothing, and every ranks-th pipeline begins to add up at once, which
takes as long as the others send where rows are alike everywhere: links and SMs work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from cute_ep.kernels.combine.schedule import CombineSchedule
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.divide import Divisor, division_magic
from cute_ep.kernels.device.slices import from_lane, item_of, static_first
from cute_ep.layouts.maps.arena import CHUNK
from cute_ep.layouts.maps.record import Region, RegionMap


class PipelineSchedule(CombineSchedule):
    """Pipelines of a launch are numbered through its CTAs.

    adds_up: whether pipelines of a launch add up; None: those of this kernel never do.
    """

    always_spans = True

    def __init__(self, epoch: Region, shared: RegionMap, adds_up: Callable[[CombineContext], Boolean] | None) -> None:
        super().__init__(epoch, shared)
        self.adds_up = adds_up

    def in_span(self, ctx: CombineContext) -> Int32:
        """A chunk."""
        return Int32(CHUNK)

    def due(self, ctx: CombineContext, slices: Int32) -> Int32:
        """None for the own rank where pipelines add up."""
        if self.adds_up is None:
            return slices
        return cutlass.select_(self.adds_up(ctx) & (ctx.lane == ctx.rank), Int32(0), slices)

    def by_sources(self, ctx: CombineContext) -> Divisor:
        """All ranks, or all but the own one, which is the last in the order of sources."""
        if self.adds_up is None:
            return ctx.by_ranks
        sources = ctx.ranks - Int32(self.adds_up(ctx))
        return Divisor(sources, division_magic(Uint32(cutlass.max(sources, Int32(1)))))

    def senders_before(self, ctx: CombineContext, pipeline: Int32) -> Int32:
        """How many pipelines before that one begin with spans: its own number among them, if it does."""
        if self.adds_up is None:
            return pipeline
        _, adding = ctx.by_ranks.split(pipeline)
        return pipeline - cutlass.select_(self.adds_up(ctx), adding, Int32(0))

    def sends(self, ctx: CombineContext, pipeline: Int32) -> Boolean:
        """Whether a pipeline begins with spans."""
        return self.senders_before(ctx, pipeline + 1) != self.senders_before(ctx, pipeline)

    def compares(self, ctx: CombineContext, pipeline: Int32, pipelines: Int32) -> Boolean:
        """Whether that one of so many pipelines compares rounds, before it adds up: the first that does not send, so
        that a rank that has not begun is seen by this."""
        return pipeline == cutlass.min(ctx.ranks, pipelines) - 1

    def first_of(self, sender: Int32, senders: Int32) -> Int32:
        """The first span of a sender."""
        return static_first(self.count(), sender, senders, Int32(0), warps=1)

    @cute.jit
    def ask_of(self, ctx: CombineContext, sender: Int32) -> Int32:
        """What `next_of` will need, in lane 0: it comes while the pipeline carries a span."""
        ticket = Int32(0)
        if ctx.lane == 0:
            ticket = self.take(ctx, self._turn(ctx, sender), Int32(0))
        return ticket

    def next_of(self, ctx: CombineContext, sender: Int32, senders: Int32, asked: Int32) -> Int32:
        """The next span of a sender: of its source, where sources divide `senders`."""
        turns = cutlass.min(self.by_sources(ctx).extent, senders)
        return item_of(senders, from_lane(asked, 0), turns, self._turn(ctx, sender))

    @cute.jit
    def ask_run(self, ctx: CombineContext) -> Int32:
        """The next run of tokens, in lane 0, from the counter of the own rank's turn: it sends nothing there."""
        ticket = Int32(0)
        if ctx.lane == 0:
            ticket = self.take(ctx, ctx.ranks - 1, Int32(0))
        return ticket

    def _turn(self, ctx: CombineContext, sender: Int32) -> Int32:
        """Which source a sender begins with."""
        turn, _ = self.by_sources(ctx).split(sender)
        return turn
