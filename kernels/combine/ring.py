"""Where rows wait in shared memory: a ring of stages, which one warp fills and others empty.

    stages            (pipeline, stage, vector)     (PIPELINES, S, V) : (S V, V, 1)     V vectors of a row
    headers           (pipeline, stage, word)       (PIPELINES, MOST_STAGES, 4) : (4 MOST_STAGES, 4, 1)

Where a sum may be put aside, a row for it follows each pipeline's stages: S V is then (S + 1) V.

    producer                                        consumers
    wait empty[stage]                        <---   arrive at empty[stage], each, when it has read the row
    header, expect full[stage], copy         --->   wait full[stage]: the header is there, and all bytes

The two barriers of a stage alternate, so neither side gets more than a ring ahead of the other. Stages are counted
through all pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.recv import CombineRecv
from cute_ep.kernels.combine.schedule import row_vectors
from cute_ep.kernels.device.arith import opaque
from cute_ep.kernels.device.atoms import bulk, move, plain
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.memory import WORDS, element, part_at
from cute_ep.layouts.maps.arena import CHUNK
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.launch import CONSUMERS, MOST_STAGES, PIPELINES
from cute_ep.layouts.maps.record import Region, RegionMap, align_up

ALIGNMENT = 128
"""Of the first stage, behind all other shared memory."""


class Mark(IntEnum):
    """What a header says of its stage. A header with none of ROW, LAST and STOP ends a span.

    Attributes:
        ROW: the stage holds a row.
        LOST: dispatch had no room for the row, so NaN is sent. A lost row that is added up has the weight NaN instead.
        LAST: no other row of the token follows. Without ROW the token has no rows.
        OUT: the row is added up for this rank's output. Without it the row, or its sum, is sent.
        STOP: nothing follows.
        OWN_END: the row is the last of the own rank's sum, which is now rounded as if it were sent.
        ASIDE: the sum is kept in shared memory.
        JOIN: the kept sum is added behind this row.

    Partial sums are added in the order of their ranks, but the own one is made first. That is right where at most one
    lower rank has rows, since a + b = b + a. Otherwise the own sum waits ASIDE, and JOINs behind that of the highest
    lower rank."""

    ROW = 1
    LOST = 2
    LAST = 4
    OUT = 8
    STOP = 16
    OWN_END = 32
    ASIDE = 64
    JOIN = 128


NUMBER_SHIFT = 8
"""Above the marks stands a number."""


@dataclass(frozen=True)
class Header:
    """What is said of a stage.

    Attributes:
        target: the address where the row, or its token's sum, goes; with OUT the token's number; at the end of a span
            the address of its first flag.
        weight: of the row.
        marks: of `Mark`; from NUMBER_SHIFT on the row's vectors, or at the end of a span how many flags it has.
    """

    target: Int64
    weight: Float32
    marks: Int32

    def has(self, mark: int) -> Boolean:
        """Whether one of these marks is set."""
        return self.marks & int(mark) != 0

    @property
    def number(self) -> Int32:
        """The number beside the marks."""
        return self.marks >> NUMBER_SHIFT


@dataclass(frozen=True)
class PipelineParams:
    """What pipelines do in a kernel.

    Attributes:
        partial: whether rows are added up before they go home.
        adds: whether pipelines may add up what comes home, as `recv` does.
        compare: whether all of that is of one dispatch (`CombinePairs`).
        epoch: shared memory that has the round.
    """

    partial: bool
    adds: bool
    recv: CombineRecv
    compare: Callable[[CombineContext], Boolean]
    epoch: Region

    def adds_up(self, ctx: CombineContext) -> Boolean:
        """Whether pipelines add up what comes home, and rows of the own rank stay: all of a launch's CTAs have them,
        this rank's rows are no Lamport rows, and the slices of a token have one flag."""
        if not self.adds:
            return Boolean(False)
        every = (ctx.grid.send_ctas == ctx.ctas) & (ctx.grid.receive_from == 0)
        return every & ~ctx.gets_lamport & (Int32(1) << ctx.sums.return_slices_log2 <= CHUNK)


@dataclass(frozen=True)
class Stages:
    """Of a pipeline: the number of the first one, how many there are, and the byte of shared memory at which they
    begin."""

    first: Int32
    count: Int32
    begin: Int32


@dataclass(frozen=True)
class PipelineState:
    """Where a warp is in a ring, as CUTLASS calls it: at which stage, and for which phase of the stage's barrier it
    waits."""

    stage: Int32
    phase: Int32


class Ring:
    """The rings of all pipelines of a CTA.

    aside: whether a sum may have to be put aside, where there are more than two ranks.
    """

    def __init__(self, aside: bool, shared: RegionMap) -> None:
        self.aside, self.shared = aside, shared
        self.full = shared.add("ring_full", 8, PIPELINES * MOST_STAGES)
        self.empty = shared.add("ring_empty", 8, PIPELINES * MOST_STAGES)
        self.headers = shared.add("ring_headers", 4, PIPELINES * MOST_STAGES, WORDS)

    @cute.jit
    def prepare(self, ctx: CombineContext) -> None:
        """Begin with empty stages. A CTA barrier must follow."""
        if ctx.tid < PIPELINES * MOST_STAGES:
            cute.arch.mbarrier_init(self._barrier(self.full, ctx.tid), 1)
            cute.arch.mbarrier_init(self._barrier(self.empty, ctx.tid), CONSUMERS)
            cute.arch.mbarrier_init_fence()

    def stages(self, ctx: CombineContext, pipeline: Int32) -> Stages:
        """Those of a pipeline; a division, for once."""
        fit = Int32(Uint32(ctx.grid.ring_bytes) // Uint32(PIPELINES * self.row_bytes(ctx)))
        aside = Int32(ctx.ranks > 2) if self.aside else Int32(0)
        count = opaque(cutlass.min(fit - aside, Int32(MOST_STAGES)))
        begin = part_at(align_up(self.shared.nbytes, ALIGNMENT), pipeline * (count + aside) * self.row_bytes(ctx))
        return Stages(pipeline * MOST_STAGES, count, opaque(begin))

    def row_bytes(self, ctx: CombineContext) -> Int32:
        """From stage to stage."""
        return row_vectors(ctx) * VECTOR_BYTES

    @cute.jit
    def put(
        self,
        ctx: CombineContext,
        stages: Stages,
        state: PipelineState,
        header: Header,
        row: Int64,
        nbytes: Int32,
    ) -> PipelineState:
        """Put a header, and so many bytes of a row, into the stage, once it is empty; by the producer, whose phase
        begins with 1. Returns the state at the next stage."""
        stage = state.stage
        cute.arch.mbarrier_wait(self._barrier(self.empty, stage), state.phase)
        cute.arch.sync_warp()  # or a lane that is late would miss that phase
        full = self._barrier(self.full, stage)
        if ctx.lane == 0:
            rHeader = cute.make_rmem_tensor(WORDS, Uint32)
            rHeader[0], rHeader[1] = Uint32(header.target), Uint32(header.target >> 32)
            rHeader[2], rHeader[3] = header.weight.bitcast(Uint32), Uint32(header.marks)
            move(plain, [rHeader], [shared_array(self.headers, Uint32)[stage, None]])
            cute.arch.mbarrier_arrive_and_expect_tx(full, nbytes)
            if nbytes > 0:
                bulk(row, part_at(stages.begin, (stage - stages.first) * self.row_bytes(ctx)), nbytes, full)
        last = stage + 1 == stages.first + stages.count
        return PipelineState(cutlass.select_(last, stages.first, stage + 1), state.phase ^ Int32(last))

    @cute.jit
    def take(self, state: PipelineState, rHeader: cute.Tensor) -> None:
        """Wait until the stage is full, and read its header, which `header_of` understands; by a consumer, whose phase
        begins with 0."""
        cute.arch.mbarrier_wait(self._barrier(self.full, state.stage), state.phase)
        move(plain, [shared_array(self.headers, Uint32)[state.stage, None]], [rHeader])

    @cute.jit
    def leave(self, ctx: CombineContext, stage: Int32) -> None:
        """The consumer, a warp, has read what is in a stage."""
        cute.arch.sync_warp()
        if ctx.lane == 0:
            cute.arch.mbarrier_arrive(self._barrier(self.empty, stage))

    def _barrier(self, region: Region, stage: Int32) -> cute.Pointer:
        return element(shared_array(region, Int64), stage)


def header_of(rHeader: cute.Tensor) -> Header:
    """What `Ring.take` has read."""
    target = (Int64(rHeader[1]) << 32) | Int64(rHeader[0])
    return Header(target, rHeader[2].bitcast(Float32), Int32(rHeader[3]))
