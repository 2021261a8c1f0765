"""Combine: expert rows go home to their source rank and are summed with the router weights in float32.

    expert rank d                                   source rank s
    -------------                                   -------------
    wait combine_consumed[all] >= m-2
    tell the dispatch round of its batch      --->  wait for those of all ranks, compare with its own batch's
    send slices of tokens of s                --->  arena.returns[m & 1][token][slot]
    signal return_ready[d][chunk] = m         --->  wait return_ready[owners][chunk] >= m, sum, write out
                                              <---  signal combine_consumed[s] = m  (start of s's next launch)

While a source has few tokens its returns take arena.lamport_returns and need no signal: see `lamport`. Pipelines that
add up send nothing to their own rank: see `pipeline`.

What moves, as axes and shape : stride. R ranks, T tokens of a rank (Lamport rows: at most LAMPORT_TOKENS), S slots of a
token (max(R, top_k); of partial sums R), B = 2 hidden bytes and V = B / 16 vectors of a row, N expert rows:

    rows, expert-major      (row, vector)                 (N, V)       : (V, 1)            vectors
    arena.returns           (parity, token, slot, byte)   (2, T, S, B) : (T S B, S B, B, 1)
    a warp's row            (lane, (word, segment))       (32, (4, V / 32)) : (4, (1, 128))  words of 4 bytes
    out                     (token, vector)               (T, V)       : (V, 1)            vectors

Three modes, chosen at compile time:

- exact: every expert row travels to slot k of its token; the source computes  sum over k ascending of  w[k] * row,
  multiply and add each rounded to float32, and rounds once to bfloat16.
- partial: an expert rank first computes that sum over its own rows of a token and sends one bfloat16 row to slot d;
  the source adds the ranks' rows in ascending order. Fewer bytes for one more bfloat16 rounding a rank.
- unweighted: rows travel as in exact mode; out[token, k] is the row of slot k itself.

The source knows from its own top-k ids which slots hold data, so nothing but rows travels back. It adds the shared
expert's rows itself. Ordering and reuse as in dispatch; the routing facts an expert rank needs were kept with the
dispatch output, not in the arena.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_ep.kernels.combine.pairs import CombinePairs
from cute_ep.kernels.combine.pipeline import CombinePipelines
from cute_ep.kernels.combine.recv import CombineRecv
from cute_ep.kernels.combine.ring import ALIGNMENT, PipelineParams
from cute_ep.kernels.combine.send import CombineSend
from cute_ep.kernels.device.block import launch_config, shared_array
from cute_ep.kernels.device.context import CombineContext
from cute_ep.kernels.device.opening import Rounds, open_combine, peer_table
from cute_ep.kernels.device.slices import control_cta
from cute_ep.kernels.device.sync import block_all, count_exit
from cute_ep.kernels.hooks import HookFunctions, WeightReader
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.arguments import CombineArgs
from cute_ep.layouts.maps.launch import PIPED_THREADS, WIDE_THREADS
from cute_ep.layouts.maps.record import RegionMap, align_up
from cute_ep.layouts.maps.routing import NO_ROW


class Combine:
    """One of combine (send and receive in one launch), combine_async (send), combine_wait (receive).

    Args:
        mode: "exact", "partial" or "unweighted".
        send, receive: which halves this kernel runs.
        segments: as in `CombineSend` and `CombineRecv`.
        piped: whether rows are sent by pipelines (`CombinePipelines`).
        hooks: the user's functions.
    """

    def __init__(
        self,
        *,
        mode: str,
        send: bool,
        receive: bool,
        segments: int,
        piped: bool,
        hooks: HookFunctions,
    ) -> None:
        self.send, self.receive, self.piped = send, receive, piped
        shared = RegionMap(alignment=16)
        self.peers = peer_table(shared)
        self.epoch, self.base = shared.add("epoch", 8, 1), shared.add("base", 8, 1)
        self.pairs = CombinePairs(self.epoch, self.base)
        if not piped:
            self.send_role = CombineSend(mode == "partial", segments, self.epoch, shared)
        self.recv_role = CombineRecv(mode, segments, WeightReader(hooks.router_weights), hooks.epilogue, shared)
        if piped:
            adds = receive and mode != "unweighted"
            params = PipelineParams(mode == "partial", adds, self.recv_role, self.pairs.compare, self.epoch)
            self.pipelines = CombinePipelines(params, shared)
        self.schedule = self.pipelines.schedule if piped else self.send_role.schedule
        self.shared_bytes = align_up(shared.nbytes, ALIGNMENT) if piped else shared.nbytes

    @cute.jit
    def __call__(self, args: CombineArgs, grid: Int32) -> None:
        threads = PIPED_THREADS if self.piped else WIDE_THREADS
        config = launch_config(grid, self.shared_bytes, threads, 1, fixed=self.piped)
        self.kernel(args).launch(**config)

    @cute.kernel
    def kernel(self, args: CombineArgs) -> None:
        ctx, rounds = open_combine(args, self.peers, self.send, self.receive)
        rHeader = self.schedule.load_header(ctx) if self.send else None
        sEpoch, sBase = (shared_array(one, Int64) for one in (self.epoch, self.base))
        if ctx.tid == 0:  # for what needs them seldom: registers are short
            sEpoch[0], sBase[0] = ctx.epoch, ctx.base
        control = control_cta(ctx.grid.send_ctas if self.send else ctx.ctas)
        ctx.acknowledge(rounds.received, control)
        if cutlass.const_expr(self.send):
            self.schedule.clear_counters(ctx, control)
        self.recv_role.tickets.open(ctx.tid)
        alive, staggered, added_up = Boolean(True), Boolean(False), Boolean(False)
        if cutlass.const_expr(self.send):
            alive, staggered, added_up = self._send_half(ctx, rHeader, rounds, control)
        else:
            alive = block_all(ctx.not_aborted())  # Lamport rows have no wait that begins with this
        if cutlass.const_expr(self.receive):
            if ctx.cta >= ctx.grid.receive_from and alive & ~added_up:
                alive = self._receive_half(ctx, staggered)
        self._leave(ctx, alive)

    @cute.jit
    def _send_half(
        self, ctx: CombineContext, rHeader: cute.Tensor, rounds: Rounds, control: Int32
    ) -> tuple[Boolean, Boolean, Boolean]:
        """By all CTAs: wait for `combine_consumed`; then the sending ones send rows, and `control` tells the dispatch
        round of the batch. rHeader: of `schedule.load_header`.

        Returns:
            False after a timeout; whether warps of the CTA do not end together; whether it has received, too.
        """
        row, weight = Int32(NO_ROW), Float32(0.0)
        staggered, added_up = Boolean(False), Boolean(False)
        if ctx.cta < ctx.grid.send_ctas:
            if cutlass.const_expr(self.piped):
                self.pipelines.prepare(ctx, rHeader)
            else:
                row, weight = self.send_role.prepare(ctx, rHeader)
        alive = ctx.wait_all_ranks(rounds.sent if self.receive else None)
        if ctx.cta < ctx.grid.send_ctas and alive:
            if ctx.cta == control:
                self.pairs.tell(ctx, self.schedule.round(ctx))
            if cutlass.const_expr(self.piped):
                alive, added_up = self.pipelines.run(ctx), self.pipelines.adds_up(ctx)
            else:
                self.send_role.run(ctx, row, weight)
                staggered = self.schedule.are_staggered(ctx)
        return alive, staggered, added_up

    @cute.jit
    def _receive_half(self, ctx: CombineContext, staggered: Boolean) -> Boolean:
        """By the receiving CTAs: a warp compares rounds, the others add up. False after a timeout."""
        alive = Boolean(True)
        receiver, receivers = ctx.cta - ctx.grid.receive_from, ctx.ctas - ctx.grid.receive_from
        compares = (receiver == control_cta(receivers)) & (ctx.ranks > 1) & (ctx.sums.tokens > 0)
        if compares & (ctx.warp == 0):
            alive = self.pairs.compare(ctx)
        else:
            alive = self.recv_role.run(ctx, receiver, receivers, Int32(compares), staggered)
        return alive

    @cute.jit
    def _leave(self, ctx: CombineContext, alive: Boolean) -> None:
        """Last CTA out: count the round as completed, unless a wait timed out."""
        counter = StateWord.COMBINE_SEND_DONE if self.send else StateWord.COMBINE_RECV_DONE
        last, complete = count_exit(ctx.state_word(counter), ctx.ctas, block_all(alive), Boolean(False), ctx.tid)
        sEpoch = shared_array(self.epoch, Int64)
        if last and complete:
            if cutlass.const_expr(self.send):
                ctx.complete(StateWord.COMBINE_SEND_EPOCH, sEpoch[0])
            if cutlass.const_expr(self.receive):
                ctx.complete(StateWord.COMBINE_RECV_EPOCH, sEpoch[0])
