"""The sending role of a CTA that has an SM for itself, and many tokens: rows come through shared memory, ahead of the
warps that use them, so that an SM has as many bytes on their way as fit into it.

The CTA has PIPELINES, each of which carries spans of its own (`schedule`): a producer warp, a ring of stages and
consumer warps (`produce`, `ring`, `consume`). The producer has each row of a span copied into a stage (`bulk`), and
each consumer takes its segments of every row from there. Where all CTAs send and receive, a pipeline also adds up
what comes home, through the same ring; rows of the own rank's tokens it reads where they are, and they are not sent.

Why it ends: while a pipeline sends, its producer waits for its consumers only, and these for the producer. It waits
for a flag of another rank only when its counter has no span left and it has sent all that it drew. One pipeline of a
launch also waits, before it adds up and while it holds no span, for all ranks to tell their round, which each does
before it sends. Each counter has pipelines that begin with its spans, and empty it without a wait for a peer; so all
spans are sent, and signaled.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from cute_ep.kernels.combine.consume import Consumer
from cute_ep.kernels.combine.piped_schedule import PipelineSchedule
from cute_ep.kernels.combine.produce import Producer
from cute_ep.kernels.combine.ring import PipelineParams, Ring
from cute_ep.kernels.device.context import CombineContext
from cute_ep.layouts.maps.launch import PIPELINE_WARPS
from cute_ep.layouts.maps.record import RegionMap


class CombinePipelines:
    """In the place of `CombineSend`."""

    def __init__(self, params: PipelineParams, shared: RegionMap) -> None:
        self.params = params
        self.schedule = PipelineSchedule(params.epoch, shared, params.partial, params.adds_up if params.adds else None)
        self.ring = Ring(params.adds and params.partial, shared)
        self.producer = Producer(params, self.schedule, self.ring)
        self.consumer = Consumer(params, self.ring, shared)

    @cute.jit
    def prepare(self, ctx: CombineContext, rHeader: cute.Tensor) -> None:
        """rHeader: of `schedule.load_header`. A CTA barrier must follow before `run`."""
        self.schedule.open(ctx, rHeader)
        self.ring.prepare(ctx)
        self.consumer.prepare(ctx)

    @cute.jit
    def run(self, ctx: CombineContext) -> Boolean:
        """By all warps of a sending CTA, after the wait for `combine_consumed`. False after a timeout."""
        alive = Boolean(True)
        pipeline = Int32(Uint32(ctx.warp) // PIPELINE_WARPS)
        number = ctx.warp - pipeline * PIPELINE_WARPS
        if number == 0:
            alive = self.producer.run(ctx, pipeline)
        else:
            self.consumer.run(ctx, pipeline, number - 1)
        return alive

    def adds_up(self, ctx: CombineContext) -> Boolean:
        """Whether `run` has also added up what came home."""
        return self.params.adds_up(ctx)
