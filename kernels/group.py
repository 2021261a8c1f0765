"""What every kernel of the group starts from: its arguments, its own and its peers' arenas, its deadline."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cute_ep.kernels.block import shared_array
from cute_ep.kernels.sync import block_all, now_ns, post, wait_or_report
from cute_ep.layouts.arena import PARITIES, Arena, StateWord
from cute_ep.layouts.device import array, device_arena, pointer
from cute_ep.layouts.formats import Format
from cute_ep.layouts.record import Region, RegionMap
from cute_ep.layouts.routing import MAX_RANKS
from cutlass import Boolean, Int32, Int64


@dataclass(frozen=True)
class GroupArgs:
    """Arguments that all kernels of a group share. Addresses are 64-bit; sizes and counts 32-bit.

    peers: int64[R], every rank's arena as this device maps it. status: host-visible records, (R + 1) x 16 bytes.
    slots: return rows a token (`return_slots`).
    """

    peers: Int64
    status: Int64
    timeout_ns: Int64
    rank: Int32
    ranks: Int32
    experts: Int32
    top_k: Int32
    max_tokens: Int32
    hidden: Int32
    slots: Int32


@dataclass(frozen=True)
class GroupView:
    """One CTA's place in the group. Frozen, because device control flow only carries values it may not change."""

    tid: Int32
    cta: Int32
    ctas: Int32
    rank: Int32
    ranks: Int32
    experts: Int32
    local_experts: Int32
    top_k: Int32
    max_tokens: Int32
    hidden: Int32
    status: Int64
    deadline: Int64
    base: Int64
    fmt: Format | None
    arena: Arena
    sPeers: cute.Tensor

    def state_word(self, word: StateWord) -> Int64:
        """Address of one of this rank's state words."""
        return self.base + self.arena.state.at(int(word))

    def next_epoch(self, word: StateWord) -> Int64:
        """The epoch that this launch works on: rounds completed so far, plus one."""
        return cute.arch.load(pointer(self.state_word(word), Int64), Int64) + 1

    def finish_epoch(self, word: StateWord, epoch: Int64) -> None:
        """Count the round as done; by one thread of the last CTA out."""
        cute.arch.store(pointer(self.state_word(word), Int64), epoch)

    def aborted(self) -> Boolean:
        """Whether some wait of this rank has timed out, now or in an earlier launch."""
        word = pointer(self.state_word(StateWord.ABORT), Int64)
        return cute.arch.load(word, Int64, sem="relaxed", scope="gpu") != 0

    @cute.jit
    def wait_all_ranks(self, flags: Region, epoch: Int64, phase) -> Boolean:
        """CTA-wide: wait until every peer's word of the own `flags` holds at least `epoch`."""
        arrived = Boolean(True)
        if self.tid < self.ranks:
            flag = self.base + flags.at(self.tid)
            state = self.base + self.arena.state.offset
            arrived = wait_or_report(flag, epoch, self.deadline, self.status, state, self.tid, phase, Int32(0))
        return block_all(arrived)

    @cute.jit
    def post_all_ranks(self, flags: Region, epoch: Int64, *index) -> None:
        """Post `epoch` into word (own rank, *index) of every peer's `flags`; after a CTA barrier."""
        if self.tid < self.ranks:
            post(self.sPeers[self.tid] + flags.at(self.rank, *index), epoch)


@cute.jit
def open_group(args: GroupArgs, fmt: Format | None, hidden, top_k, peers: Region) -> GroupView:
    """Read the peer table into shared memory and derive this CTA's view; contains a CTA barrier.

    hidden, top_k: compile-time numbers that replace the run-time arguments, or None.
    """
    if cutlass.const_expr(hidden is None):
        hidden = args.hidden
    if cutlass.const_expr(top_k is None):
        top_k = args.top_k
    tid = cute.arch.thread_idx()[0]
    sPeers = shared_array(peers, Int64)
    gPeers = array(args.peers, Int64, args.ranks)
    if tid < args.ranks:
        sPeers[tid] = gPeers[tid]
    cute.arch.sync_threads()
    return GroupView(
        tid=tid,
        cta=cute.arch.block_idx()[0],
        ctas=cute.arch.grid_dim()[0],
        rank=args.rank,
        ranks=args.ranks,
        experts=args.experts,
        local_experts=args.experts // args.ranks,
        top_k=top_k,
        max_tokens=args.max_tokens,
        hidden=hidden,
        status=args.status,
        deadline=now_ns() + args.timeout_ns,
        base=sPeers[args.rank],
        fmt=fmt,
        arena=device_arena(
            ranks=args.ranks,
            experts=args.experts,
            top_k=top_k,
            max_tokens=args.max_tokens,
            hidden=hidden,
            slots=args.slots,
            fmt=fmt,
        ),
        sPeers=sPeers,
    )


def parity_of(epoch: Int64) -> Int64:
    """Which of the two buffers the epoch uses."""
    return epoch % PARITIES


def peer_table(regions: RegionMap) -> Region:
    """Shared memory for the peers' arena addresses."""
    return regions.add("peers", 8, MAX_RANKS)
