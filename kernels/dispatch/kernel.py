"""Dispatch: every token goes once to each rank that owns one of its experts, and lands by expert or by source rank.

    source rank s                                   expert rank d
    -------------                                   -------------
    wait dispatch_consumed[all] >= n-2
    route:  entries, weights, counts, header  --->  arena.entries/weights/table[n & 1][s], tagged n:
                                                    wait for each word, scan counts to row bases
    send:   encode slices of tokens           --->  arena.messages[n & 1][s][token]
            signal message_ready[s][chunk] = n --->  wait message_ready[s][chunk] >= n, copy to expert rows
                                              <---  signal dispatch_consumed[d] = n  (start of d's next launch)

What moves, as axes and shape : stride. R ranks, T tokens of a rank (Lamport rows: at most LAMPORT_TOKENS), M bytes from
one message to the next, V vectors of 16 payload bytes in a row, N rows of the output:

    x, after encoding       (token, vector)                   (T, V)       : (V, 1)            vectors
    arena.messages          (parity, source, token, byte)     (2, R, T, M) : (R T M, T M, M, 1)
    a warp's row            (lane, (word, segment))           (32, (4, V / 32)) : (4, (1, 128))  words of 4 bytes
    arena.entries, .weights (parity, source, token, k)        (2, R, T, K) : (R T K, T K, K, 1)  LL words
    out.tokens              (row, vector)                     (N, V)       : (V, 1)            vectors

While a source has few tokens its messages take arena.lamport_messages and need no signal: see `lamport`. Where a fused
launch encodes nothing, a rank is no destination of its own tokens: it receives them from x (`given_rows`).

Ordering: a signal follows a CTA barrier that follows the stores of a chunk of slices, so the stores are visible
to whoever sees the flag; routing words carry their own epoch, Lamport words are their own flags. Nothing of round n + 2
can land on round n because its stores wait for dispatch_consumed. `docs/protocol.md` and `docs/memory_model.md` have
the full argument.

A role is done by CTAs, or within a budget of SMs by halves of them (`twins`). Receivers take slices in an order that is
known before, or draw them, together with senders that have sent (`recv_schedule`). Scale factors of many tokens are
placed behind a grid barrier, when all rows have come (`scale_tiles`).

The output's row order needs no atomics: see `layouts/maps/routing.py`. One CTA writes offsets and `num_rows`; when any
wait of the launch timed out, the last CTA out overwrites them with zeros.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.codec import Codec
from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.context import DispatchContext
from cute_ep.kernels.device.opening import open_dispatch, peer_table
from cute_ep.kernels.device.slices import control_cta
from cute_ep.kernels.device.sync import count_exit, reset_counter
from cute_ep.kernels.device.twins import TwinMap
from cute_ep.kernels.dispatch.recv import DispatchRecv
from cute_ep.kernels.dispatch.route import Route
from cute_ep.kernels.dispatch.send import DispatchSend
from cute_ep.kernels.hooks import HookFunctions, WeightReader
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.arguments import DispatchArgs
from cute_ep.layouts.maps.launch import WIDE_THREADS


class Dispatch:
    """One of dispatch (send and receive in one launch), dispatch_async (send), dispatch_wait (receive).

    Args:
        codec: device code of the wire format; None for a kernel that only receives.
        receive: whether this kernel runs the receiving half.
        rank_major: the order of rows (`EPConfig.row_order`).
        ahead: as in `Prefetch`.
        hooks: the user's functions.
    """

    def __init__(
        self,
        codec: Codec | None,
        *,
        receive: bool,
        rank_major: bool,
        ahead: bool,
        hooks: HookFunctions,
    ) -> None:
        self.send, self.receive = codec is not None, receive
        direct = receive and codec is not None and codec.fmt.scale is None
        shared = TwinMap()
        self.peers = peer_table(shared)
        if codec is not None:
            self.route_role = Route(WeightReader(hooks.router_weights), rank_major, shared)
            self.send_role = DispatchSend(codec, hooks.input_scale, ahead, direct, shared)
        self.recv_role = DispatchRecv(rank_major, direct, receive and self.send, shared)
        self.shared_bytes = shared.nbytes

    @cute.jit
    def __call__(self, args: DispatchArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid, self.shared_bytes, WIDE_THREADS, 1, fixed=False))

    @cute.kernel
    def kernel(self, args: DispatchArgs) -> None:
        ctx, rounds = open_dispatch(args, self.peers, self.receive)
        control = control_cta(ctx.grid.send_ctas if self.send else ctx.ctas)
        ctx.acknowledge(rounds.received, control)
        alive = Boolean(True)
        if cutlass.const_expr(self.send):
            alive = self._send_half(ctx, rounds.sent if self.receive else None)
        if cutlass.const_expr(self.receive):
            if ctx.cta >= ctx.grid.receive_from and alive:
                receiver, receivers = ctx.cta - ctx.grid.receive_from, ctx.ctas - ctx.grid.receive_from
                alive = self.recv_role.run(ctx, receiver, receivers)
        self._leave(ctx, alive)

    @cute.jit
    def _send_half(self, ctx: DispatchContext, sent: Int64 | None) -> Boolean:
        """Route and send; returns whether to go on. A fused launch receives what it sends, so the round must not be one
        of those that were `sent`."""
        alive = self.route_role.run(ctx, sent)
        if ctx.cta < ctx.grid.send_ctas and alive:
            self.send_role.run(ctx)
        return alive

    @cute.jit
    def _leave(self, ctx: DispatchContext, alive: Boolean) -> None:
        """Last CTA out: count the round as completed, or retract the publication after a timeout."""
        counter = StateWord.DISPATCH_SEND_DONE if self.send else StateWord.DISPATCH_RECV_DONE
        publishes = Boolean(False)
        if cutlass.const_expr(self.receive):
            publishes = ctx.cta - ctx.grid.receive_from == control_cta(ctx.ctas - ctx.grid.receive_from)
        last, complete = count_exit(ctx.state_word(counter), ctx.ctas, ctx.block_all(alive), publishes, ctx.tid)
        if last:
            if cutlass.const_expr(self.send):
                reset_counter(ctx.state_word(StateWord.DISPATCH_TICKETS))
            if cutlass.const_expr(self.receive):
                reset_counter(ctx.state_word(StateWord.DISPATCH_BARRIER))
                if cutlass.const_expr(self.send):
                    reset_counter(ctx.state_word(StateWord.DISPATCH_SLICES))
            if complete:
                if cutlass.const_expr(self.send):
                    ctx.complete(StateWord.DISPATCH_SEND_EPOCH, ctx.epoch)
                if cutlass.const_expr(self.receive):
                    ctx.complete(StateWord.DISPATCH_RECV_EPOCH, ctx.epoch)
            else:
                if cutlass.const_expr(self.receive):
                    self.recv_role.outputs.retract(ctx)
