"""What every kernel of the group starts from: its arguments, its own and its peers' arenas, its timeout."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_ep.kernels.device.block import shared_array
from cute_ep.kernels.device.divide import Divisor, quotient, remainder
from cute_ep.kernels.device.memory import DeviceRegion, array, pointer
from cute_ep.kernels.device.slices import packed_cta
from cute_ep.kernels.device.sync import WaitContext, block_all, not_aborted, report, signal, wait_signal
from cute_ep.layouts.maps.arena import ANY_ARENA, StateWord, arena_of, is_wide
from cute_ep.layouts.maps.record import Region, RegionMap
from cute_ep.layouts.maps.routing import INPUT_ERRORS, MASKED_ENTRY, MAX_RANKS, Phase

ArenaArgs = make_dataclass(
    "ArenaArgs", [(name, Int64 if is_wide(name) else Int32) for name in ANY_ARENA.arguments()], frozen=True
)
"""Where the regions of an arena are (`Arena.arguments`)."""


@dataclass(frozen=True)
class GroupArgs(ArenaArgs):  # type: ignore[valid-type, misc]
    """Arguments that all kernels of a group share. Addresses are 64-bit; sizes and counts 32-bit.

    arena: this rank's arena. status: host-visible records, (R + len(INPUT_ERRORS)) x 16 bytes. *_magic: the
    `division_magic` of the count before it.

    pdl: 1 where the next launch may start while this one runs, to wait for its end.

    experts: those that the group's ranks own together, ids first_expert .. first_expert + experts - 1 out of
    all_experts. They are all of them, except with `skip_a2a`, where each rank is a group of its own.
    """

    arena: Int64
    status: Int64
    timeout_ns: Int64
    rank: Int32
    ranks: Int32
    ranks_magic: Uint32
    experts: Int32
    first_expert: Int32
    all_experts: Int32
    local_experts: Int32
    local_experts_magic: Uint32
    top_k: Int32
    top_k_magic: Uint32
    max_tokens: Int32
    hidden: Int32
    pdl: Int32


@dataclass(frozen=True)
class SharedExpertArgs:
    """The shared expert's part of a launch: tokens shared_first .. shared_first + shared_rows - 1 of this rank are the
    rows of group 0. shared_groups: 1 with a shared expert, else 0 (then shared_rows is 0 too)."""

    shared_groups: Int32
    shared_first: Int32
    shared_rows: Int32


def owns_shared(args: SharedExpertArgs, token) -> Boolean:
    """Whether the shared expert takes this token of the own rank."""
    return (token >= args.shared_first) & (token < args.shared_first + args.shared_rows)


@dataclass(frozen=True)
class IdArgs:
    """topk_ids: [T, K] expert ids, of 32 bits, or of 64 where topk_ids_wide is 1 (else it is 0)."""

    topk_ids: Int64
    topk_ids_wide: Int32


def given_id(args: IdArgs, index) -> Int32:
    """Entry `index` of the flat topk_ids; of a wide one the lower half, which all readers take for the id. Nothing is
    computed from it here, so nobody waits for the load before it is used."""
    return array(args.topk_ids, Int32, Int32(1 << 30))[Int32(index) << args.topk_ids_wide]


@cute.jit
def is_beyond(args: IdArgs, index, given: Int32) -> Boolean:
    """Whether an entry, of which `given_id` is the lower half, does not fit 32 bits."""
    beyond = Boolean(False)
    if args.topk_ids_wide != 0:
        beyond = array(args.topk_ids, Int32, Int32(1 << 30))[2 * Int32(index) + 1] != given >> 31
    return beyond


@dataclass(frozen=True)
class GroupView:
    """One CTA's place in the group. Frozen, because device control flow only carries values it may not change."""

    tid: Int32
    cta: Int32
    ctas: Int32
    rank: Int32
    ranks: Int32
    experts: Int32
    first_expert: Int32
    all_experts: Int32
    local_experts: Int32
    top_k: Int32
    max_tokens: Int32
    hidden: Int32
    status: Int64
    timeout_ns: Int64
    base: Int64
    peer_base: Int64
    arena: SimpleNamespace
    by_ranks: Divisor
    by_top_k: Divisor
    by_local_experts: Divisor
    sPeers: cute.Tensor

    @property
    def lane(self) -> Int32:
        """Number of the thread within its warp."""
        return remainder(self.tid, 32)

    @property
    def warp(self) -> Int32:
        """Number of the warp within its CTA."""
        return quotient(self.tid, 32)

    @property
    def wait_context(self) -> WaitContext:
        """For the waits of `sync`. Made where it is needed: it takes no registers elsewhere."""
        state = replace(self.arena.state, offset=self.base + self.arena.state.offset)  # by address
        return WaitContext(self.timeout_ns, self.status, state.at(int(StateWord.ABORT)))

    def expert_of(self, given: Int32) -> Int32:
        """Index among the group's experts of an id that the caller gave; MASKED_ENTRY when it is none of them, so
        that no address is formed from an unchecked id."""
        index = given - self.first_expert
        inside = (index >= 0) & (index < self.experts)
        return cutlass.select_(inside, index, Int32(MASKED_ENTRY))

    def state_word(self, word: StateWord) -> Int64:
        """Address of one of this rank's state words."""
        return self.base + self.arena.state.at(int(word))

    def sent_and_received(self, word: StateWord) -> tuple[Int64, Int64]:
        """Rounds of a phase, whose first epoch word is `word`, that this rank has sent, and received: one access."""
        gWords = cute.make_tensor(pointer(self.state_word(word), Int64, align=16), cute.make_layout(2))
        words = gWords.load()
        return words[0], words[1]

    def complete(self, word: StateWord, epoch: Int64) -> None:
        """Count the round as completed; by one thread of the last CTA out."""
        cute.arch.store(pointer(self.state_word(word), Int64), epoch)

    @cute.jit
    def wait_all_ranks(self, flags: Region, epoch: Int64, phase: cutlass.Constexpr, sent, word) -> Boolean:
        """CTA barrier: wait until each peer's word of the own `flags` holds at least `epoch`, two rounds before the one
        that this launch sends. The peer table may be read after it.

        False, in every thread, after a timeout here or anywhere else on this rank, now or in an earlier launch; and of
        a fused launch, for which `sent` rounds of epoch word `word` were sent before, if this round is one of them.
        """
        alive = Boolean(True)
        tid, sPeers = self.tid, self.sPeers
        if tid < self.ranks:
            flag = self.base + flags.at(tid)
            alive = wait_signal(self.wait_context, flag, epoch, tid, phase, Int32(0))
            if cutlass.const_expr(sent is not None):
                if alive & (sent != epoch + 1):  # behind a timeout the counts may well differ: that was told
                    report(self.wait_context, self.rank, Phase.ORDER, Int32(int(word)), epoch + 1, sent)
                    alive = Boolean(False)
            sPeers[tid] = self.peer_base
        return block_all(alive)

    def has_signaled(self, flag: Int64, epoch: Int64) -> Boolean:
        """One look at a flag; orders it before all that happens after."""
        return cute.arch.load(pointer(flag, Int64), Int64, sem="acquire", scope="sys") >= epoch

    def not_aborted(self) -> Boolean:
        """Whether no wait of this rank has failed."""
        return not_aborted(self.wait_context.abort)

    def report_input(self, phase: Phase, index, expected, seen) -> None:
        """Tell the host which of INPUT_ERRORS this rank's input has; the round goes on."""
        report(self.wait_context, self.ranks + INPUT_ERRORS.index(phase), phase, index, expected, seen)

    @cute.jit
    def acknowledge(self, consumed: Region, received: Int64, cta) -> None:
        """Let the peers overwrite what this rank has read: signal the rounds that it had completed at launch.

        Comes before any wait of the launch, since a peer may wait for it. Earlier launches have ended, so their reads
        have; the release orders their clearing of Lamport words. By one CTA, away from those that carry the first
        messages.
        """
        tid = self.tid
        if self.cta == cta and tid < self.ranks:
            signal(self.peer_base + consumed.at(self.rank), received)


@cute.jit
def open_group(args: GroupArgs, peers: Region, packed: Int32) -> GroupView:
    """Start reading the peer table, wait for the end of the launch before, and derive this CTA's view.

    packed: 1 for CTA numbers of `packed_cta`, 0 for those of the blocks.

    peer_base is peer `tid`'s arena in the first R threads; `wait_all_ranks` stores it to sPeers, so that its latency
    overlaps with that of the first wait.
    """
    tid = cute.arch.thread_idx()[0]
    sPeers = shared_array(peers, Int64)
    gPeers = array(args.arena + args.peers_at, Int64, args.ranks)
    peer_base = Int64(0)
    if tid < args.ranks:
        peer_base = gPeers[tid]
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    cute.arch.griddepcontrol_wait()
    if args.pdl != 0:
        cute.arch.griddepcontrol_launch_dependents()
    return GroupView(
        tid=tid,
        cta=cutlass.select_(packed != 0, packed_cta(cta, ctas), cta),
        ctas=ctas,
        rank=args.rank,
        ranks=args.ranks,
        experts=args.experts,
        first_expert=args.first_expert,
        all_experts=args.all_experts,
        local_experts=args.local_experts,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
        hidden=args.hidden,
        status=args.status,
        timeout_ns=args.timeout_ns,
        base=args.arena,
        peer_base=peer_base,
        arena=arena_of(args, DeviceRegion),
        by_ranks=Divisor(args.ranks, args.ranks_magic),
        by_top_k=Divisor(args.top_k, args.top_k_magic),
        by_local_experts=Divisor(args.local_experts, args.local_experts_magic),
        sPeers=sPeers,
    )


def peer_table(regions: RegionMap) -> Region:
    """Shared memory for the peers' arena addresses."""
    return regions.add("peers", 8, MAX_RANKS)
