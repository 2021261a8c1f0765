"""Which spans a pipeline sends, and whose tokens it adds up.

The first span of a pipeline is scheduled statically, further ones among the pipelines that start with the same source,
which have a counter; runs of tokens among all of a launch.

Where pipelines add up, a launch sends its own rank nothing, and every ranks-th pipeline begins to add up at once, which
takes as long as the others send where rows are alike everywhere: links and SMs work at the same time. If its next run
is not there after some looks, it sends a span from its counter; also in the end, where spans are left there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from cute_ep.kernels.combine.schedule import CombineSchedule
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.divide import Divisor, division_magic
from cute_ep.kernels.device.slices import from_lane, item_of, static_first
from cute_ep.layouts.maps.arena import CHUNK
from cute_ep.layouts.maps.launch import PIPELINES
from cute_ep.layouts.maps.record import Region, RegionMap

LONG_SPANS = (32, 160)
"""Slices for each pipeline from which on a span of partial sums has two and four chunks: flags cost them time, which
the rows of exact sums hide. With spans of 4, 8 and 16 tokens, 4096 take 352, 335 and 335 us on 24 SMs, on 44 SMs 222,
216 and 238; 1024 on 24 SMs take 107, 102 and 113 (2 x H200, 2026-11-27)."""
LOOKS, FEW_LOOKS, FEW_CTAS = 160, 16, 24
"""Looks for a run before a pipeline sends a span instead; fewer for partial sums on few SMs, which do not fill the
links: 1024 tokens take 102 us on 24 SMs, with LOOKS 107; on 44 SMs 82.8 and 80.4 (2 x H200, 2026-11-27). On 32 SMs 1100
/ 4096 tokens take 90.0 / 284 us with FEW_LOOKS, 85.1 / 254 with LOOKS (2 x H200, 2026-11-30)."""
RUNS = 4
"""Runs for each pipeline below which they become shorter. With as many tokens as a warp has lanes for, and with at
least 4, 8 and 16 runs, partial sums of 1024 tokens take 102, 98.5, 103 and 103 us on 24 SMs, on 44 SMs 83.9, 70.4, 70.4
and 70.3; of 4096 tokens 332, 333, 333 and 334, and 215, 216, 213 and 232 (2 x H200, 2026-11-27)."""


@dataclass(frozen=True)
class Sender:
    """A pipeline as one that sends spans.

    Attributes:
        number: among those that begin with spans; of another one how many of these come before it.
        senders: how many begin with spans.
        begins: whether it does.
        start: the source that it starts with, and so the counter that it draws from; each counter has pipelines that
            begin with its spans, if there are any.
    """

    number: Int32
    senders: Int32
    begins: Boolean
    start: Int32


class PipelineSchedule(CombineSchedule):
    """Pipelines of a launch are numbered through its CTAs.

    partial: whether rows are added up before they go home.
    adds_up: whether pipelines of a launch add up; None: those of this kernel never do.
    """

    always_spans = True

    def __init__(
        self,
        epoch: Region,
        shared: RegionMap,
        partial: bool,
        adds_up: Callable[[CombineContext], Boolean] | None,
    ) -> None:
        super().__init__(epoch, shared)
        self.partial, self.adds_up = partial, adds_up
        self.span_slices = shared.add("span_slices", 4, 1)

    @cute.jit
    def choose_span(self, ctx: CombineContext, most: Int32) -> Int32:
        """A chunk; of partial sums two or four, if pipelines have many."""
        chunks = Int32(1)
        if cutlass.const_expr(self.partial):
            for least in LONG_SPANS:
                many = most * self.by_sources(ctx).extent >= ctx.grid.send_ctas * (PIPELINES * least)
                chunks = cutlass.select_(many, 2 * chunks, chunks)
            sSlices = shared_array(self.span_slices, Int32)
            if ctx.tid == 0:
                sSlices[0] = chunks * CHUNK
        return chunks * CHUNK

    def in_span(self, ctx: CombineContext) -> Int32:
        """What `choose_span` has chosen, behind a CTA barrier."""
        return shared_array(self.span_slices, Int32)[0] if self.partial else Int32(CHUNK)

    def looks(self, ctx: CombineContext) -> Int32:
        """How often a pipeline looks whether its run is there, before it sends a span instead."""
        if not self.partial:
            return Int32(LOOKS)
        return cutlass.select_(ctx.grid.send_ctas <= FEW_CTAS, Int32(FEW_LOOKS), Int32(LOOKS))

    def run_tokens(self, ctx: CombineContext) -> Int32:
        """Tokens of a run: as many as a warp has lanes for their entries, or fewer, so that pipelines have RUNS; at
        least one."""
        _, most = ctx.by_top_k.split(Int32(32))
        share = Int32(Uint32(ctx.sums.tokens) // Uint32(ctx.grid.send_ctas * (PIPELINES * RUNS)))
        return cutlass.max(cutlass.min(share, most), Int32(1))

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

    def sender(self, ctx: CombineContext, pipeline: Int32, pipelines: Int32) -> Sender:
        """What a pipeline, of so many, is as a sender."""
        number, behind = (self._senders_before(ctx, one) for one in (pipeline, pipeline + 1))
        begins = number != behind
        # those that do not begin with spans spread over the sources, too
        start, _ = self.by_sources(ctx).split(cutlass.select_(begins, number, pipeline - number))
        return Sender(number, self._senders_before(ctx, pipelines), begins, start)

    def _senders_before(self, ctx: CombineContext, pipeline: Int32) -> Int32:
        """How many pipelines before that one begin with spans."""
        if self.adds_up is None:
            return pipeline
        _, adding = ctx.by_ranks.split(pipeline)
        return pipeline - cutlass.select_(self.adds_up(ctx), adding, Int32(0))

    def compares(self, ctx: CombineContext, pipeline: Int32, pipelines: Int32) -> Boolean:
        """Whether that one of so many pipelines compares rounds, before it adds up: the first that does not begin with
        spans, so that a rank that has not begun is seen by this."""
        return pipeline == cutlass.min(ctx.ranks, pipelines) - 1

    def first_of(self, sender: Sender) -> Int32:
        """The first span of a sender that begins with one; else, and where there is none, the number of all."""
        first = static_first(self.count(), sender.number, sender.senders, Int32(0), warps=1)
        return cutlass.select_(sender.begins, first, self.count())

    @cute.jit
    def ask_of(self, ctx: CombineContext, sender: Sender) -> Int32:
        """What `next_of` will need, in lane 0: it may come while the pipeline carries a span."""
        ticket = Int32(0)
        if ctx.lane == 0:
            ticket = self.take(ctx, sender.start, Int32(0))
        return ticket

    def next_of(self, ctx: CombineContext, sender: Sender, asked: Int32) -> Int32:
        """The next span of a sender: of one source, where sources divide `senders`."""
        counters = cutlass.min(self.by_sources(ctx).extent, sender.senders)
        return item_of(sender.senders, from_lane(asked, 0), counters, sender.start)

    @cute.jit
    def ask_run(self, ctx: CombineContext) -> Int32:
        """The next run of tokens, in lane 0, from the counter of the own rank, to which it sends nothing."""
        ticket = Int32(0)
        if ctx.lane == 0:
            ticket = self.take(ctx, ctx.ranks - 1, Int32(0))
        return ticket
