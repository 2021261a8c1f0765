"""Pairs of batches: ranks tell each other which dispatch round the rows that they return belong to, and compare.

A source whose peers return rows of another round than its own batch would sum those of other tokens, or wait for rows
that no rank sends. Each rank stores the round of its batch at every one, as an LL word beside the rows. A source that
has tokens waits for the words of all ranks, and compares: to find out first which of them own experts of its tokens
takes code that costs few tokens more time than it saves.

One CTA tells, before its first row. One warp compares while others receive: the words come before the rows.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.slices import from_lane
from cute_ep.kernels.device.sync import Awaited, report, store_ll, wait_ll, warp_all
from cute_ep.layouts.maps.record import Region
from cute_ep.layouts.maps.routing import Phase


class CombinePairs:
    """Whether all rows that come home are of one dispatch round.

    epoch, base: shared memory that has them. Read from there they cost the roles that move rows no registers; otherwise
    the compiler would keep what it computes from them for all places that read it.
    """

    def __init__(self, epoch: Region, base: Region) -> None:
        self.epoch, self.base = epoch, base

    @cute.jit
    def tell(self, ctx: CombineContext, dispatch_round: Int32) -> None:
        """Tell every rank which dispatch round the rows belong to. By one CTA, after the wait for
        `combine_consumed`."""
        sEpoch = shared_array(self.epoch, Int64)
        if ctx.tid < ctx.ranks:
            word = ctx.there(ctx.tid, ctx.arena.return_rounds, sEpoch[0] & 1, ctx.rank, 0)
            store_ll(word, dispatch_round, sEpoch[0])

    @cute.jit
    def compare(self, ctx: CombineContext) -> Boolean:
        """Wait for the rounds of all ranks, and compare; by one warp. False, in every lane, after a timeout or where
        one differs, which is reported."""
        sEpoch, sBase = shared_array(self.epoch, Int64), shared_array(self.base, Int64)
        ctx = replace(ctx, epoch=sEpoch[0], group=ctx.group._replace(arena=sBase[0]))
        dispatch_round, came = Int32(0), Boolean(True)
        if ctx.lane < ctx.ranks:
            # stored by `tell` on rank `lane`
            word = ctx.here(ctx.arena.return_rounds, ctx.epoch & 1, ctx.lane, 0)
            awaited = Awaited(ctx.lane, Phase.RETURN_ROUND, Int32(0))
            dispatch_round, came = wait_ll(ctx.wait_context, word, ctx.epoch, awaited)
        wanted = from_lane(dispatch_round, ctx.rank)
        differs = came & (dispatch_round != wanted) & (dispatch_round != 0) & (wanted != 0)
        if differs:
            awaited = Awaited(ctx.lane, Phase.PAIR, Int32(ctx.epoch))
            report(ctx.wait_context, awaited, wanted, dispatch_round)
        return warp_all(came & ~differs)
