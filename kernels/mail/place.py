"""What the kernels of a channel start from: the channel's words."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.device.divide import quotient, remainder
from cute_ep.kernels.device.memory import array, pointer, row_address
from cute_ep.kernels.device.sync import (
    Awaited,
    WaitContext,
    block_all,
    count_exit,
    not_aborted,
    wait_signal,
    word_address,
)
from cute_ep.layouts.maps.mail import MailHeader, RoundWord
from cute_ep.layouts.maps.mail_arguments import MailGroup
from cute_ep.layouts.maps.routing import Phase


@dataclass(frozen=True)
class Place:
    """One CTA's place in a launch of a channel. `group` as in the launch's arguments."""

    group: MailGroup
    tid: Int32

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
        """For the waits of `sync`."""
        return WaitContext(self.group.timeout_ns, self.group.status, self.group.abort)

    def not_aborted(self) -> Boolean:
        """Whether no wait of this rank has failed."""
        return not_aborted(self.group.abort)

    def round_word(self, word: RoundWord) -> Int64:
        """Address of one of the channel's round words."""
        return word_address(self.group.rounds, int(word))

    def rounds(self, word: RoundWord) -> Int64:
        """How many rounds are counted in a word: the launch before has ended."""
        return cute.arch.load(pointer(self.round_word(word), Int64), Int64)

    @cute.jit
    def batch(self) -> Int32:
        """The dispatch round of the batch whose sums these are; 0: unknown."""
        found = Int32(0)
        if self.group.batch != 0:
            found = cute.arch.load(pointer(self.group.batch, Int32), Int32)
        return found

    @cute.jit
    def wait_free(self, epoch: Int64, phase: Phase) -> Boolean:
        """CTA barrier: wait until every other node's rank has read this rank's mail of round `epoch`.

        False, in every thread, after a timeout here or anywhere else on this rank.
        """
        alive = self.not_aborted()
        tid, group = self.tid, self.group
        if (tid < group.nodes) & (tid != group.node):
            word = word_address(group.free, tid)
            alive = wait_signal(self.wait_context, word, epoch, Awaited(tid, phase, Int32(0)))
        return block_all(alive)

    @cute.jit
    def finish(self, alive: Boolean, epoch: Int64, headers: Int64, pitch: Int64, frame: Int32) -> None:
        """Count this CTA out; the last one, if all were alive and none has failed since, writes the headers, counts
        the round as sent and tells the host. `headers`: of node 0's mail; `pitch`: 0 where there is one header."""
        cute.arch.sync_threads()
        ctas = cute.arch.grid_dim()[0]
        last, complete = count_exit(self.round_word(RoundWord.DONE), ctas, alive, Boolean(False), self.tid)
        if last & complete & self.not_aborted():
            count = cutlass.select_(pitch == Int64(0), Int32(1), self.group.nodes)
            for node in cutlass.range(count, unroll=1):
                gHeader = array(row_address(headers, node, pitch), Int32, len(MailHeader))
                gHeader[int(MailHeader.FRAME)] = frame
                gHeader[int(MailHeader.BATCH)] = self.batch()
                gHeader[int(MailHeader.ROUND)] = Int32(epoch)
            cute.arch.store(pointer(self.round_word(RoundWord.SENT), Int64), epoch)
            self.tell(0, epoch)

    @cute.jit
    def tell(self, word: cutlass.Constexpr[int], epoch: Int64) -> None:
        """Tell the host, if it asks, which round was packed last (word 0) or exchanged last (1)."""
        if self.group.progress != 0:
            cute.arch.store(pointer(word_address(self.group.progress, word), Int64), epoch, sem="relaxed", scope="sys")


@cute.jit
def open_channel(group: MailGroup) -> Place:
    """The place of the CTA that calls, once the launch before has ended."""
    tid = cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()
    return Place(group, tid)
