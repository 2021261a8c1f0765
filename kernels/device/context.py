"""What every role of a launch starts from: its place, its arguments, its round, its own and its peers' arenas.
`opening` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.device.divide import Divisor, quotient, remainder
from cute_ep.kernels.device.memory import array, part_at, pointer
from cute_ep.kernels.device.sync import (
    Awaited,
    WaitContext,
    block_all,
    load_flag,
    not_aborted,
    report,
    signal,
    twin_all,
    wait_signal,
)
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE, ArenaRegions, StateWord
from cute_ep.layouts.maps.arguments import (
    Batch,
    Grid,
    Group,
    Ids,
    Input,
    Output,
    Rows,
    Scales,
    SharedExpert,
    Sums,
    Wire,
)
from cute_ep.layouts.maps.record import Region
from cute_ep.layouts.maps.routing import INPUT_ERRORS, MASKED_ENTRY, Phase


def owns_shared(shared: SharedExpert, token: Int32) -> Boolean:
    """Whether the shared expert takes this token of the own rank."""
    return (token >= shared.first) & (token < shared.first + shared.rows)


IDS_IN_FLIGHT = 8
"""Expert ids that a thread loads before it counts the first."""


def _words(ids: Ids, entries: Int32) -> cute.Tensor:
    """The 32-bit words of the flat topk_ids, of so many entries."""
    return array(ids.data, Int32, entries << ids.wide)


def given_id(ids: Ids, entries: Int32, index: Int32) -> Int32:
    """Entry `index` of the flat topk_ids, of so many entries; of a 64-bit one the lower half, which all readers take
    for the id. Nothing is computed from it here, so the thread does not wait for the load until it is used."""
    return _words(ids, entries)[Int32(index) << ids.wide]


@cute.jit
def is_beyond(ids: Ids, entries: Int32, index: Int32, given: Int32) -> Boolean:
    """Whether an entry, of which `given_id` is the lower half, does not fit 32 bits."""
    beyond = Boolean(False)
    if ids.wide != 0:
        beyond = _words(ids, entries)[2 * Int32(index) + 1] != given >> 31
    return beyond


@dataclass(frozen=True)
class Context:
    """One CTA's, or twin's, place in a launch, the launch's arguments and its round.

    Frozen, because device control flow only carries values it may not change.

    Attributes:
        cta, ctas: number of this CTA, or twin, and how many there are.
        epoch: number of the round, from 1.
        peer_base: peer `tid`'s arena in the first R threads; `wait_all_ranks` stores it to sPeers, so that its latency
            overlaps with that of the first wait.
        consumed: peer `tid`'s word of `consumed_flags`, read before `griddepcontrol.wait`, so it may be old; 0 in all
            but the first R threads, and where the launch has not looked.
        sPeers: (peer) Int64, the peers' arenas.
        arena: the regions, as byte offsets from any arena's start.
    """

    TWINS: ClassVar = False
    """Whether a wide CTA has twins."""
    EPOCHS: ClassVar[StateWord]
    """Epoch word of the phase's sent rounds; that of received ones follows it."""
    FLAGS: ClassVar[str]
    """The region of `consumed_flags`."""
    CONSUMED: ClassVar[Phase]
    """The wait for them."""

    tid: Int32
    cta: Int32
    ctas: Int32
    epoch: Int64
    peer_base: Int64
    consumed: Int64
    sPeers: cute.Tensor
    group: Group
    arena: ArenaRegions
    grid: Grid
    shared: SharedExpert
    ids: Ids

    @property
    def consumed_flags(self) -> Region:
        """(peer), the last round of the phase that each peer has read."""
        flags: Region = getattr(self.arena, self.FLAGS)
        return flags

    @property
    def base(self) -> Int64:
        """Address of this rank's arena."""
        return self.group.arena

    @property
    def rank(self) -> Int32:
        """This rank's number."""
        return self.group.rank

    @property
    def ranks(self) -> Int32:
        """How many ranks there are."""
        return self.group.ranks

    @property
    def experts(self) -> Int32:
        """Experts of all ranks."""
        return self.group.experts

    @property
    def local_experts(self) -> Int32:
        """Experts of one rank."""
        return self.group.local_experts

    @property
    def top_k(self) -> Int32:
        """Experts of one token."""
        return self.group.top_k

    @property
    def by_ranks(self) -> Divisor:
        return Divisor(self.group.ranks, self.group.ranks_magic)

    @property
    def by_top_k(self) -> Divisor:
        return Divisor(self.group.top_k, self.group.top_k_magic)

    @property
    def by_local_experts(self) -> Divisor:
        return Divisor(self.group.local_experts, self.group.local_experts_magic)

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
        return WaitContext(self.group.timeout_ns, self.group.status, self.state_word(StateWord.ABORT))

    def here(self, region: Region, *coord: Int32 | Int64 | int) -> Int64:
        """Address of an element of this rank's arena."""
        return region.address(self.base, *coord)

    def there(self, peer: Int32, region: Region, *coord: Int32 | Int64 | int) -> Int64:
        """Address of an element of a peer's arena."""
        return region.address(self.sPeers[peer], *coord)

    def at_peer(self, peer: Int32, offset: Int64) -> Int64:
        """Address in a peer's arena."""
        return part_at(self.sPeers[peer], offset)

    def expert_of(self, given: Int32) -> Int32:
        """Index among the group's experts of an id that the caller gave; MASKED_ENTRY when it is not among
        them, so that no address is formed from an unchecked id."""
        index = given - self.group.first_expert
        inside = (index >= 0) & (index < self.experts)
        return cutlass.select_(inside, index, Int32(MASKED_ENTRY))

    def state_word(self, word: StateWord) -> Int64:
        """Address of one of this rank's state words."""
        return self.here(self.arena.state, int(word))

    def complete(self, word: StateWord, epoch: Int64) -> None:
        """Count round `epoch` as completed; by one thread of the last CTA out."""
        cute.arch.store(pointer(self.state_word(word), Int64), epoch)

    @cute.jit
    def wait_all_ranks(self, sent: Int64 | None) -> Boolean:
        """CTA barrier: wait until each peer has signaled in `consumed_flags` that it has read the round that is two
        before the one that this launch sends. The peer table may be read after it. Returns False, in every thread,
        after a timeout here or anywhere else on this rank, now or in an earlier launch.

        sent: of a fused launch, how many rounds its rank had sent before: all before this one, or the result is False,
        and the host is told.
        """
        alive = Boolean(True)
        tid, sPeers = self.tid, self.sPeers
        if tid < self.ranks:
            alive = self.wait_consumed(self.epoch - 2)
            if cutlass.const_expr(sent is not None):
                before = self.epoch - 1
                if alive & (sent != before):  # after a timeout, which was reported, the counts may differ
                    report(self.wait_context, Awaited(self.rank, Phase.ORDER, Int32(int(self.EPOCHS))), before, sent)
                    alive = Boolean(False)
            sPeers[tid] = self.peer_base
        return self.block_all(alive)

    def wait_consumed(self, due: Int64) -> Boolean:
        """Wait, in thread `tid` of the first R, until peer `tid` has signaled round `due`; fails as `wait_signal`."""
        awaited = Awaited(self.tid, self.CONSUMED, Int32(0))
        return wait_signal(self.wait_context, self.here(self.consumed_flags, self.tid), due, awaited)

    def block_all(self, verdict: Boolean) -> Boolean:
        """`sync.block_all`, of the thread's twin where there are any."""
        return twin_all(verdict) if self.TWINS else block_all(verdict)

    def has_signaled(self, flag: Int64, epoch: Int64) -> Boolean:
        """One acquire load of a flag."""
        return load_flag(flag) >= epoch

    def not_aborted(self) -> Boolean:
        """Whether no wait of this rank has failed."""
        return not_aborted(self.wait_context.abort)

    def report_input(self, phase: Phase, index: Int32, expected: Int32, seen: Int32) -> None:
        """Tell the host which of INPUT_ERRORS this rank's input has; the round goes on."""
        record = self.ranks + INPUT_ERRORS.index(phase)
        report(self.wait_context, Awaited(record, phase, index), expected, seen)

    @cute.jit
    def acknowledge(self, received: Int64, cta: Int32) -> None:
        """Let the peers overwrite what this rank has read: signal the rounds that it had completed at launch.

        Comes before any wait of the launch, since a peer may wait for it. Earlier launches have ended, so their reads
        have; the release orders their clearing of Lamport words. By one CTA, away from those that carry the first
        messages.
        """
        tid = self.tid
        if self.cta == cta and tid < self.ranks:
            signal(self.consumed_flags.address(self.peer_base, self.rank), received)


@dataclass(frozen=True)
class DispatchContext(Context):
    """A launch of dispatch."""

    EPOCHS: ClassVar = StateWord.DISPATCH_SEND_EPOCH
    FLAGS: ClassVar = "dispatch_consumed"
    CONSUMED: ClassVar = Phase.DISPATCH_CONSUMED
    TWINS: ClassVar = True

    wire: Wire
    input: Input
    out: Output
    scales: Scales

    @property
    def entries(self) -> Int32:
        """Entries of this rank's tokens."""
        return self.input.tokens * self.top_k


@dataclass(frozen=True)
class CombineContext(Context):
    """A launch of combine."""

    EPOCHS: ClassVar = StateWord.COMBINE_SEND_EPOCH
    FLAGS: ClassVar = "combine_consumed"
    CONSUMED: ClassVar = Phase.COMBINE_CONSUMED

    rows: Rows
    batch: Batch
    sums: Sums

    @cute.jit
    def wait_consumed(self, due: Int64) -> Boolean:
        """As in `Context`, with `consumed` for a first look. Only combine has one: a dispatch of 16 tokens would take
        7.7 us instead of 6.6 (2 x H200, 2026-11-29)."""
        alive = (self.consumed >= due) & self.not_aborted()
        if not alive:
            alive = Context.wait_consumed(self, due)
        return alive

    @property
    def warps(self) -> Int32:
        """Warps of a CTA, which the host chooses. An instruction takes a parameter as an operand, and must wait for the
        block's dimensions."""
        return self.grid.warps

    @property
    def row_bytes(self) -> Int32:
        """Bytes of an expert row, and of one that comes home."""
        return Int32(self.group.hidden * COMBINE_ITEMSIZE)

    @property
    def gets_lamport(self) -> Boolean:
        """Whether rows that come home are Lamport rows."""
        return self.sums.flagged == 0

    @property
    def entries(self) -> Int32:
        """Entries of this rank's tokens."""
        return self.sums.tokens * self.top_k
