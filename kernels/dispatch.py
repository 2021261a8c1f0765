"""Dispatch: every token goes once to each rank that owns one of its experts, and lands expert-major.

    source rank s                                   expert rank d
    -------------                                   -------------
    wait dispatch_consumed[all] >= n-2
    route:  entries, weights, counts, header  --->  arena.entries/weights/table[n & 1][s], tagged n:
                                                    wait for each word, scan counts to row bases
    send:   encode slices of tokens           --->  arena.messages[n & 1][s][token]
            signal message_ready[s][chunk] = n --->  wait message_ready[s][chunk] >= n, copy to expert rows
                                              <---  signal dispatch_consumed[d] = n  (start of d's next launch)

While a source has few tokens its messages take arena.lamport_messages and need no signal: see `lamport`.

Ordering: a signal follows a CTA barrier that follows the stores of a chunk of slices, so the stores are visible
to whoever sees the flag; routing words carry their own epoch, Lamport words are their own flags. Nothing of round n + 2
can land on round n because its stores wait for dispatch_consumed. `docs/protocol.md` and `docs/memory_model.md` have
the full argument.

The output's row order needs no atomics: see `layouts/maps/routing.py`. One CTA writes offsets and `num_rows`; when any
wait of the launch timed out, the last CTA out overwrites them with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.codec import Codec
from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.group import GroupArgs, GroupView, IdArgs, SharedExpertArgs, open_group, peer_table
from cute_ep.kernels.device.scale_rows import ScaleArgs
from cute_ep.kernels.device.slices import control_cta
from cute_ep.kernels.device.sync import block_all, count_exit, reset_counter
from cute_ep.kernels.hooks import WeightReader
from cute_ep.kernels.roles.dispatch_recv import DispatchRecv
from cute_ep.kernels.roles.dispatch_send import DispatchSend
from cute_ep.kernels.roles.route import Route
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.record import RegionMap


@dataclass(frozen=True)
class DispatchArgs(GroupArgs, IdArgs, SharedExpertArgs, ScaleArgs):
    """Run-time arguments of the three dispatch kernels, in parameter order.

    Rows on the wire and in the output: payload_bytes, scale_bytes, row_scale_bytes (0: none); in a message the scales
    are at scales_at, the row's own scale at row_scale_at.
    Send: x [T, hidden] bf16, or rows that need no encoding with their scales [T, scale_bytes] and given_row_scales [T]
    bf16; router_weights [T, K] f32 or 0, global_scale f32[1] or 0, tokens T, log2 of the
    slices of a message and of a returned row, scale words of a segment, send_ctas (CTAs below it send), packed (of
    `open_group`).
    Receive: the outputs of `DispatchBuffers`, row_alignment (a power of two), capacity (rows of tokens and src_info),
    receive_from (CTAs from it receive), has_tiles (`layouts.scales.has_tiles` of out_scales).
    """

    payload_bytes: Int32
    scale_bytes: Int32
    row_scale_bytes: Int32
    scales_at: Int32
    row_scale_at: Int32
    x: Int64
    scales: Int64
    given_row_scales: Int64
    router_weights: Int64
    global_scale: Int64
    tokens: Int32
    message_slices: Int32
    return_slices: Int32
    segment_words: Int32
    send_ctas: Int32
    packed: Int32
    out_tokens: Int64
    out_row_scales: Int64
    row_offsets: Int64
    row_counts: Int64
    scales_offsets: Int64
    expert_ids: Int64
    src_info: Int64
    num_rows: Int64
    row_map: Int64
    headers: Int64
    weights: Int64
    row_alignment: Int32
    capacity: Int32
    receive_from: Int32
    has_tiles: Int32


class Dispatch:
    """One of dispatch (send and receive in one launch), dispatch_async (send), dispatch_wait (receive).

    Args:
        codec: device code of the wire format; None for a kernel that only receives.
        receive: whether this kernel runs the receiving half.
        ahead: of `Prefetch`.
        router_weights, input_scale: the user's hooks, or None.
    """

    args_type = DispatchArgs

    def __init__(
        self, codec: Codec | None, *, receive: bool, ahead: bool, router_weights=None, input_scale=None
    ) -> None:
        self.send, self.receive = codec is not None, receive
        shared = RegionMap(alignment=16)
        self.peers = peer_table(shared)
        if codec is not None:
            self.route_role = Route(WeightReader(router_weights), shared)
            self.send_role = DispatchSend(codec, input_scale, ahead, shared)
        self.recv_role = DispatchRecv(shared)
        self.shared_bytes = shared.nbytes

    @cute.jit
    def __call__(self, args: DispatchArgs, grid: Int32):
        self.kernel(args).launch(**launch_config(grid, self.shared_bytes))

    @cute.kernel
    def kernel(self, args: DispatchArgs):
        group = open_group(args, self.peers, args.packed)
        sent, received = group.sent_and_received(StateWord.DISPATCH_SEND_EPOCH)
        epoch = received + 1
        if cutlass.const_expr(not self.receive):
            epoch, sent = sent + 1, None
        control = control_cta(args.send_ctas if self.send else group.ctas)
        group.acknowledge(group.arena.dispatch_consumed, received, control)
        alive = Boolean(True)
        if cutlass.const_expr(self.send):
            alive = self._send_half(group, args, epoch, sent)
        if cutlass.const_expr(self.receive):
            if group.cta >= args.receive_from and alive:
                first = group.cta - args.receive_from
                alive = self.recv_role.run(group, args, epoch, first, group.ctas - args.receive_from)
        self._leave(group, args, epoch, alive)

    @cute.jit
    def _send_half(self, group: GroupView, args: DispatchArgs, epoch: Int64, sent) -> Boolean:
        """Route and send; returns whether to go on. A fused launch receives what it sends, so the round must not be one
        of those that were `sent`."""
        alive = self.route_role.run(group, args, epoch, sent)
        if group.cta < args.send_ctas and alive:
            self.send_role.run(group, args, epoch)
        return alive

    @cute.jit
    def _leave(self, group: GroupView, args: DispatchArgs, epoch: Int64, alive: Boolean) -> None:
        """Last CTA out: count the round as completed, or retract the publication after a timeout."""
        counter = StateWord.DISPATCH_SEND_DONE if self.send else StateWord.DISPATCH_RECV_DONE
        publishes = Boolean(False)
        if cutlass.const_expr(self.receive):
            publishes = group.cta - args.receive_from == control_cta(group.ctas - args.receive_from)
        last, complete = count_exit(group.state_word(counter), group.ctas, block_all(alive), publishes, group.tid)
        if last:
            if cutlass.const_expr(self.send):
                reset_counter(group.state_word(StateWord.DISPATCH_TICKETS))
            if cutlass.const_expr(self.receive):
                reset_counter(group.state_word(StateWord.DISPATCH_BARRIER))
            if complete:
                if cutlass.const_expr(self.send):
                    group.complete(StateWord.DISPATCH_SEND_EPOCH, epoch)
                if cutlass.const_expr(self.receive):
                    group.complete(StateWord.DISPATCH_RECV_EPOCH, epoch)
            else:
                if cutlass.const_expr(self.receive):
                    self.recv_role.publish.retract(group, args)
