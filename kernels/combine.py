"""Combine: expert rows go home to their source rank and are summed with the router weights in float32.

    expert rank d                                   source rank s
    -------------                                   -------------
    wait combine_consumed[all] >= m-2
    send slices of tokens of s                --->  arena.returns[m & 1][token][slot]
    signal return_ready[d][chunk] = m         --->  wait return_ready[owners][chunk] >= m, sum, write out
                                              <---  signal combine_consumed[s] = m  (start of s's next launch)

While a source has few tokens its returns take arena.lamport_returns and need no signal: see `lamport`.

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

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_ep.kernels.device.block import launch_config, shared_array
from cute_ep.kernels.device.group import GroupArgs, GroupView, IdArgs, SharedExpertArgs, open_group, peer_table
from cute_ep.kernels.device.slices import control_cta
from cute_ep.kernels.device.sync import block_all, count_exit
from cute_ep.kernels.hooks import WeightReader
from cute_ep.kernels.roles.combine_recv import CombineRecv
from cute_ep.kernels.roles.combine_send import CombineSend
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.record import RegionMap
from cute_ep.layouts.maps.routing import NO_ROW, Phase


@dataclass(frozen=True)
class CombineArgs(GroupArgs, IdArgs, SharedExpertArgs):
    """Run-time arguments of the combine kernels, in parameter order.

    Send: rows [capacity, hidden] bf16; row_map, headers, weights of the dispatch output; CTAs below send_ctas send.
    Receive: out [T, hidden] (unweighted [T, K, hidden]) of out_type (`OutputType`), the own router_weights, tokens T,
    log2 of the slices of a returned row, as dispatched, rows for the shared expert; CTAs from receive_from receive.
    """

    rows: Int64
    row_map: Int64
    headers: Int64
    weights: Int64
    capacity: Int32
    send_ctas: Int32
    out: Int64
    router_weights: Int64
    epilogue_data: Int64
    out_type: Int32
    tokens: Int32
    return_slices: Int32
    receive_from: Int32


class Combine:
    """One of combine (send and receive in one launch), combine_async (send), combine_wait (receive).

    Args:
        mode: "exact", "partial" or "unweighted".
        send, receive: which halves this kernel runs.
        segments: of `CombineSend` and `CombineRecv`.
        router_weights, epilogue: the user's hooks, or None.
    """

    args_type = CombineArgs

    def __init__(
        self, *, mode: str, send: bool, receive: bool, segments: int, router_weights=None, epilogue=None
    ) -> None:
        self.send, self.receive = send, receive
        shared = RegionMap(alignment=16)
        self.peers = peer_table(shared)
        self.epoch = shared.add("epoch", 8, 1)
        self.send_role = CombineSend(mode == "partial", segments, self.epoch, shared)
        self.recv_role = CombineRecv(mode, segments, WeightReader(router_weights), epilogue, shared)
        self.shared_bytes = shared.nbytes

    @cute.jit
    def __call__(self, args: CombineArgs, grid: Int32):
        self.kernel(args).launch(**launch_config(grid, self.shared_bytes))

    @cute.kernel
    def kernel(self, args: CombineArgs):
        group = open_group(args, self.peers, Int32(0))
        sent, received = group.sent_and_received(StateWord.COMBINE_SEND_EPOCH)
        epoch = received + 1
        if cutlass.const_expr(not self.receive):
            epoch, sent = sent + 1, None
        sEpoch = shared_array(self.epoch, Int64)  # for what needs it seldom: registers are short
        if group.tid == 0:
            sEpoch[0] = epoch
        control = control_cta(args.send_ctas if self.send else group.ctas)
        group.acknowledge(group.arena.combine_consumed, received, control)
        if cutlass.const_expr(self.send):
            self.send_role.schedule.clear_counters(group, epoch + 1, control)
        self.recv_role.tickets.open(group.tid)
        alive, staggered = Boolean(True), Boolean(False)
        if cutlass.const_expr(not self.send):
            alive = block_all(group.not_aborted())  # Lamport rows have no wait that begins with this
        if cutlass.const_expr(self.send):
            row, weight = Int32(NO_ROW), Float32(0.0)
            if group.cta < args.send_ctas:
                row, weight = self.send_role.prepare(group, args)
            word = StateWord.COMBINE_SEND_EPOCH
            alive = group.wait_all_ranks(group.arena.combine_consumed, epoch - 2, Phase.COMBINE_CONSUMED, sent, word)
            if group.cta < args.send_ctas and alive:
                self.send_role.run(group, args, row, weight)
                staggered = self.send_role.schedule.are_staggered(args)
        if cutlass.const_expr(self.receive):
            if group.cta >= args.receive_from and alive:
                first, count = group.cta - args.receive_from, group.ctas - args.receive_from
                alive = self.recv_role.run(group, args, epoch, first, count, staggered)
        self._leave(group, alive)

    @cute.jit
    def _leave(self, group: GroupView, alive: Boolean) -> None:
        """Last CTA out: count the round as completed, unless a wait timed out."""
        counter = StateWord.COMBINE_SEND_DONE if self.send else StateWord.COMBINE_RECV_DONE
        last, complete = count_exit(group.state_word(counter), group.ctas, block_all(alive), Boolean(False), group.tid)
        sEpoch = shared_array(self.epoch, Int64)
        if last and complete:
            if cutlass.const_expr(self.send):
                group.complete(StateWord.COMBINE_SEND_EPOCH, sEpoch[0])
            if cutlass.const_expr(self.receive):
                group.complete(StateWord.COMBINE_RECV_EPOCH, sEpoch[0])
