"""Dispatch: every token goes once to each rank that owns one of its experts, and lands expert-major.

    source rank s                                   expert rank d
    -------------                                   -------------
    wait dispatch_consumed[all] >= n-2
    route:  entries, weights, counts, header  --->  arena.entries/weights/counts/header[n & 1][s]
            post route_ready[s] = n           --->  wait route_ready[all] >= n, scan counts to row bases
    send:   encode chunk of tokens            --->  arena.messages[n & 1][s][token]
            post message_ready[s][chunk] = n  --->  wait message_ready[s][chunk] >= n, copy to expert rows
                                              <---  post dispatch_consumed[d] = n  (last CTA out)

Ordering: a post follows a CTA barrier that follows the CTA's stores, so the stores are visible to whoever sees the
flag; route_ready is posted by the last route CTA in, after it acquired the others' arrivals. Nothing of round n + 2
can land on round n because its stores wait for dispatch_consumed. `docs/protocol.md` has the full argument.

The output's row order needs no atomics: see `layouts/routing.py`. Offsets and `num_rows` are written by the last CTA
out and only when every wait succeeded; after a timeout they are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cute_ep.kernels.block import CTAS_PER_SM, THREADS, scan_scratch
from cute_ep.kernels.codec import Codec
from cute_ep.kernels.expand import Expand
from cute_ep.kernels.group import GroupArgs, GroupView, open_group, peer_table
from cute_ep.kernels.route import Route
from cute_ep.kernels.send import Send
from cute_ep.kernels.sync import arrive_last
from cute_ep.layouts.arena import StateWord
from cute_ep.layouts.record import RegionMap
from cute_ep.layouts.routing import Phase
from cutlass import Boolean, Int32, Int64


@dataclass(frozen=True)
class DispatchArgs(GroupArgs):
    """Run-time arguments of the three dispatch kernels, in parameter order.

    Send: x [T, hidden] bf16, topk_ids [T, K] i32, router_weights [T, K] f32 or 0, global_scale f32[1] or 0, tokens T,
    chunk (tokens that share a flag), send_ctas (CTAs below it send).
    Receive: the outputs of `DispatchBuffers`, capacity (rows of tokens and src_info), receive_from (CTAs from it
    receive).
    """

    x: Int64
    topk_ids: Int64
    router_weights: Int64
    global_scale: Int64
    tokens: Int32
    chunk: Int32
    send_ctas: Int32
    out_tokens: Int64
    out_scales: Int64
    row_offsets: Int64
    scales_offsets: Int64
    expert_ids: Int64
    src_info: Int64
    num_rows: Int64
    row_map: Int64
    headers: Int64
    weights: Int64
    capacity: Int32
    receive_from: Int32


class Dispatch:
    """One of dispatch (send and receive in one launch), dispatch_async (send), dispatch_wait (receive).

    Args:
        codec: device code of the wire format.
        send, receive: which halves this kernel runs.
        hidden, top_k: fixed at compile time when given, else run-time arguments.
    """

    args_type = DispatchArgs

    def __init__(self, codec: Codec, *, send: bool, receive: bool, hidden: int | None, top_k: int | None) -> None:
        self.codec, self.send, self.receive, self.hidden, self.top_k = codec, send, receive, hidden, top_k
        shared = RegionMap(alignment=16)
        self.sPeers = peer_table(shared)
        scan = scan_scratch(shared)
        self.route_role = Route(shared)
        self.send_role = Send(codec, shared)
        self.expand_role = Expand(codec.fmt, shared, scan)
        self.shared_bytes = shared.nbytes

    @cute.jit
    def __call__(self, args: DispatchArgs, grid: Int32):
        self.kernel(args).launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=50,
        )

    @cute.kernel
    def kernel(self, args: DispatchArgs):
        group = open_group(args, self.codec.fmt, self.hidden, self.top_k, self.sPeers)
        alive = not group.aborted()
        if cutlass.const_expr(self.send):
            alive = self._send_half(group, args, alive)
        if cutlass.const_expr(self.receive):
            if group.cta >= args.receive_from:
                self._receive_half(group, args, alive)

    @cute.jit
    def _send_half(self, group: GroupView, args: DispatchArgs, alive: Boolean) -> Boolean:
        """Route and send; returns whether to go on."""
        epoch = group.next_epoch(StateWord.DISPATCH_SEND_EPOCH)
        if alive:
            alive = group.wait_all_ranks(group.arena.dispatch_consumed, epoch - 2, Phase.DISPATCH_CONSUMED)
        if alive:
            self.route_role.run(group, args, epoch)
            if group.cta < args.send_ctas:
                self.send_role.run(group, args, epoch)
        last = arrive_last(group.state_word(StateWord.DISPATCH_SEND_DONE), group.ctas, group.tid)
        if last and group.tid == 0:
            group.finish_epoch(StateWord.DISPATCH_SEND_EPOCH, epoch)
        return alive

    @cute.jit
    def _receive_half(self, group: GroupView, args: DispatchArgs, alive: Boolean) -> None:
        """Expand what arrives; the last CTA out announces the result and lets the senders reuse the buffers."""
        epoch = group.next_epoch(StateWord.DISPATCH_RECV_EPOCH)
        first = group.cta - args.receive_from
        count = group.ctas - args.receive_from
        if alive:
            alive = group.wait_all_ranks(group.arena.route_ready, epoch, Phase.ROUTE)
        if alive:
            self.expand_role.run(group, args, epoch, first, count)
        last = arrive_last(group.state_word(StateWord.DISPATCH_RECV_DONE), count, group.tid)
        if last:
            complete = not group.aborted()
            self.expand_role.announce(group, args, epoch, complete)
            if complete:
                group.post_all_ranks(group.arena.dispatch_consumed, epoch)
            if group.tid == 0:
                group.finish_epoch(StateWord.DISPATCH_RECV_EPOCH, epoch)
