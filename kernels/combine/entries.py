"""What a sending warp of combine needs to know of a token: its entries, and where its step of a span is.

Lane k holds the row and the weight of entry k. A warp that carries a slice loads them itself. Those of a span come
through shared memory, with what all its steps share, in one of two stages: of the span that is carried, and of the
next.

    entries of a span     (stage, token, k)    (2, T, K) : (WIDE_WARPS MAX_TOP_K, K, 1)    rows, and weights of a sum
    facts of a span       (stage, fact)        (2, 8) : (8, 1)

A CTA barrier stands between the last read of a stage and the next write into it, and between a write and the first
read (`send`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_ep.kernels.combine.schedule import Span, row_vectors
from cute_ep.kernels.device.atoms import fetch, move, plain
from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.divide import Divisor, division_magic, quotient
from cute_ep.kernels.device.lamport import region_of
from cute_ep.kernels.device.memory import WORDS, array, row_address, share, words_at
from cute_ep.kernels.device.slices import SEGMENT
from cute_ep.layouts.maps.arena import RETURN_TOKEN
from cute_ep.layouts.maps.launch import WIDE_WARPS
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import MAX_TOP_K, NO_ROW
from cute_ep.layouts.maps.scales import WORD_BYTES

STAGES = 2
"""Spans whose entries are in shared memory: of the one that is carried, and of the next."""
STEP_TURNS = 2
"""Times that a warp takes `segments` segments in a step. Finding a step takes about half as many instructions as one of
these."""


class Fact(IntEnum):
    """What the steps of a span share: its tokens, steps of a token and their `magic`, bytes from token to token, first
    segment, and the first vector that is beyond."""

    TOKENS = 0
    STEPS = 1
    STEPS_MAGIC = 2
    PITCH = 3
    FIRST = 4
    END = 5


FACT_WORDS = 8
"""Room for the facts of a span, in whole vectors."""


def _fact(rFacts: cute.Tensor, fact: Fact) -> Int32:
    return Int32(rFacts[int(fact)])


@dataclass(frozen=True)
class Step:
    """A step of a span: step `index` of its `token`-th token. Properties compute their values when they are used, since
    a warp that has no step, or no entries, needs none of them.

    Attributes:
        rFacts: (Fact) of the span.
        sHome: address of slot 0 of the span's first token.
        segments: of each turn of a step.
    """

    rFacts: cute.Tensor
    sHome: cute.Tensor
    token: Int32
    index: Int32
    segments: int

    @property
    def exists(self) -> Boolean:
        """Whether the span has it."""
        return self.token < _fact(self.rFacts, Fact.TOKENS)

    @property
    def home(self) -> Int64:
        """Address of slot 0 of the token."""
        return row_address(self.sHome[0], self.token, _fact(self.rFacts, Fact.PITCH))

    @property
    def segment(self) -> Int32:
        """Its first segment."""
        return _fact(self.rFacts, Fact.FIRST) + self.index * (self.segments * STEP_TURNS)

    @property
    def end(self) -> Int32:
        """The first vector that is beyond the span's part of a row."""
        return _fact(self.rFacts, Fact.END)


@dataclass(frozen=True)
class Entries:
    """A token's entries of this rank: lane k holds row and weight of entry k, bit k of `wanted` is set where it has
    one. `once`: loaded rows are the first to leave the caches."""

    row: Int32
    weight: Float32
    wanted: Uint32
    once: Boolean


class EntryStages:
    """Entries of the tokens that a CTA sends.

    partial, segments: as in `CombineSend`.
    """

    def __init__(self, partial: bool, segments: int, epoch: Region, shared: RegionMap) -> None:
        self.partial, self.segments, self.epoch = partial, segments, epoch
        self.facts = shared.add("return_facts", 4, STAGES, FACT_WORDS)
        self.homes = shared.add("return_homes", 8, STAGES)
        self.rows = shared.add("return_rows", 4, STAGES, WIDE_WARPS * MAX_TOP_K)
        if partial:
            self.weights = shared.add("return_weights", 4, STAGES, WIDE_WARPS * MAX_TOP_K)

    @cute.jit
    def put_facts(self, ctx: CombineContext, span: Span, lamport: Boolean, stage: Int32) -> None:
        """What each step of a span reads, into a stage, by thread 0. lamport: whether its rows are Lamport rows."""
        sFacts, sHomes = shared_array(self.facts, Uint32), shared_array(self.homes, Int64)
        sEpoch = shared_array(self.epoch, Int64)
        if ctx.tid == 0:
            region = region_of(lamport, ctx.arena.lamport_returns, ctx.arena.returns)
            length = self.segments * STEP_TURNS
            steps = cutlass.max(quotient(span.last - span.first + (length - 1), length), Int32(1))
            facts = {
                Fact.TOKENS: span.tokens,
                Fact.STEPS: steps,
                Fact.STEPS_MAGIC: division_magic(Uint32(steps)),
                Fact.PITCH: region.stride[RETURN_TOKEN],
                Fact.FIRST: span.first,
                Fact.END: cutlass.min(row_vectors(ctx), span.last * SEGMENT),
            }
            for fact, value in facts.items():
                sFacts[stage, int(fact)] = Uint32(value)
            sHomes[stage] = ctx.there(span.source, region, sEpoch[0] & 1, span.token)

    def step(self, number: Int32, stage: Int32) -> Step:
        """Step `number` of the staged span: all steps of its first token come first."""
        sFacts, sHomes = shared_array(self.facts, Uint32), shared_array(self.homes, Int64)
        rFacts = cute.make_rmem_tensor(FACT_WORDS, Uint32)
        parts = [
            [cute.local_tile(one, (WORDS,), (part,)) for part in range(2)] for one in (sFacts[stage, None], rFacts)
        ]
        move(plain, *parts)
        index, token = Divisor(_fact(rFacts, Fact.STEPS), rFacts[int(Fact.STEPS_MAGIC)]).split(number)
        return Step(rFacts, cute.local_tile(sHomes, (1,), (stage,)), token, index, self.segments)

    @cute.jit
    def fetch(self, ctx: CombineContext, span: Span, stage: Int32) -> None:
        """Begin to copy the entries of a span into a stage, a word of each array a thread: a span has at most a token a
        warp."""
        nbytes = ctx.group.max_tokens * ctx.top_k * WORD_BYTES
        first, end = span.token * ctx.top_k, (span.token + span.tokens) * ctx.top_k
        arrays = [(ctx.batch.row_map, self.rows)]
        if cutlass.const_expr(self.partial):
            arrays += [(ctx.batch.weights, self.weights)]
        for data, staged in arrays:
            sWords = cute.local_tile(shared_array(staged, Uint32)[stage, None], (1,), (ctx.tid,))
            gWords = words_at(row_address(data, span.source, nbytes), end)
            move(fetch, share(gWords, first + ctx.tid, 1), [sWords])

    @cute.jit
    def staged(self, ctx: CombineContext, token: Int32, stage: Int32) -> Entries:
        """The entries of a token of a span, by number in the span."""
        row, weight = Int32(NO_ROW), Float32(0.0)
        if ctx.lane < ctx.top_k:
            place = stage, token * ctx.top_k + ctx.lane
            row = shared_array(self.rows, Int32)[place]
            if cutlass.const_expr(self.partial):
                weight = shared_array(self.weights, Float32)[place]
        row, weight = checked(ctx, row, weight, self.partial)
        return Entries(row, weight, Uint32(cute.arch.vote_ballot_sync(row >= 0)), Boolean(True))


@cute.jit
def load_entry(
    ctx: CombineContext, source: Int32, token: Int32, due: Boolean, partial: cutlass.Constexpr
) -> tuple[Int32, Float32]:
    """(row, weight) of the token's entry number `lane`; NO_ROW where it has none here. partial: as in `CombineSend`."""
    row, weight = Int32(NO_ROW), Float32(0.0)
    if due & (ctx.lane < ctx.top_k):
        row, weight = entry_at(ctx, source, token * ctx.top_k + ctx.lane, partial)
    return checked(ctx, row, weight, partial)


def entry_at(ctx: CombineContext, source: Int32, index: Int32, partial: bool) -> tuple[Int32, Float32]:
    """(row, weight) of an entry of a source, not `checked`."""
    in_rank = ctx.group.max_tokens * ctx.top_k
    row, weight = array(ctx.batch.row_map, Int32, ctx.ranks, in_rank)[source, index], Float32(0.0)
    if partial:
        weight = Float32(array(ctx.batch.weights, Float32, ctx.ranks, in_rank)[source, index])
    return row, weight


@cute.jit
def checked(ctx: CombineContext, row: Int32, weight: Float32, partial: cutlass.Constexpr) -> tuple[Int32, Float32]:
    """In a sum a row that dispatch had no room for is row 0 with weight NaN."""
    if cutlass.const_expr(partial):
        if row >= ctx.rows.capacity:
            row, weight = Int32(0), Float32(float("nan"))
    return row, weight
