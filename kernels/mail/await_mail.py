"""Await mail: wait, by one CTA, until the mail of every other node's rank is here, and see that it is of this round.

Each piece has a word with the round that came last. An engine that does not look at ABORT brings old pieces again, as
of the next round: so headers are compared, and a mail of another round is a failure that names its rank. Where the
stream itself waits for the engine, the exchange has ended, and the host is told.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.memory import array, element, item_coord, pointer, row_address
from cute_ep.kernels.device.sync import Awaited, block_all, report, wait_signal, word_address
from cute_ep.kernels.mail.place import Place, open_channel
from cute_ep.layouts.maps.mail import WORDS_OF_NODE, MailHeader, Piece, RoundWord
from cute_ep.layouts.maps.mail_arguments import AwaitMailArgs
from cute_ep.layouts.maps.routing import Phase


class AwaitMail:
    """One CTA, in which a thread waits for a piece."""

    shared_bytes = 0

    def __init__(self, phase: Phase) -> None:
        self.phase = phase

    @cute.jit
    def __call__(self, args: AwaitMailArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: AwaitMailArgs) -> None:
        place = open_channel(args.group)
        epoch = place.rounds(RoundWord.RECEIVED) + 1
        alive = place.not_aborted()
        if (place.tid == 0) & alive:
            place.tell(1, epoch)
        piece, node = item_coord(place.tid, WORDS_OF_NODE)
        if (node < args.group.nodes) & (node != args.group.node) & (((args.pieces >> piece) & 1) != 0):
            word = word_address(args.group.arrived, node * len(Piece) + piece)
            alive = wait_signal(place.wait_context, word, epoch, Awaited(node, self.phase, piece))
        alive = block_all(alive)
        alive = block_all(self._are_of(args, place, epoch, alive))
        if (place.tid == 0) & alive:
            cute.arch.store(pointer(place.round_word(RoundWord.RECEIVED), Int64), epoch)

    @cute.jit
    def _are_of(self, args: AwaitMailArgs, place: Place, epoch: Int64, alive: Boolean) -> Boolean:
        """Whether the mail of the thread's node is of this round, has frames of as many rows, and is of this batch."""
        node = place.tid
        if alive & (node < args.group.nodes) & (node != args.group.node):
            header = row_address(row_address(args.headers, node, args.pitch), epoch & 1, args.turn)
            seen, frame = (self._word(header, word) for word in (MailHeader.ROUND, MailHeader.FRAME))
            if seen != Int32(epoch):
                report(place.wait_context, Awaited(node, self.phase, Int32(len(Piece))), epoch, seen)
                alive = Boolean(False)
            elif frame != args.frame:
                report(place.wait_context, Awaited(node, Phase.FRAME_SIZE, Int32(epoch)), args.frame, frame)
                alive = Boolean(False)
            else:
                own, theirs = place.batch(), self._word(header, MailHeader.BATCH)
                if (own != theirs) & (own != 0) & (theirs != 0):
                    report(place.wait_context, Awaited(node, Phase.PAIR, Int32(epoch)), own, theirs)
                    alive = Boolean(False)
        return alive

    def _word(self, header: Int64, word: MailHeader) -> Int32:
        place = element(array(header, Int32, len(MailHeader)), int(word))
        return cute.arch.load(place, Int32, sem="relaxed", scope="sys")
