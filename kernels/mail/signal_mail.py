"""Signal mail: store a round in words of every other node's rank, after everything before on the stream.

By one CTA, a thread a word. It says which pieces have been put, or that this rank has read what has come. After a
failure nothing is signaled.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.memory import array, item_coord, part_at, pointer
from cute_ep.kernels.device.sync import signal, word_address
from cute_ep.kernels.mail.place import open_channel
from cute_ep.layouts.maps.mail import WORDS_OF_NODE
from cute_ep.layouts.maps.mail_arguments import SignalMailArgs


class SignalMail:
    """One CTA."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: SignalMailArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: SignalMailArgs) -> None:
        place = open_channel(args.group)
        word, node = item_coord(place.tid, WORDS_OF_NODE)
        if (
            place.not_aborted()
            & (node < args.group.nodes)
            & (node != args.group.node)
            & (((args.words >> word) & 1) != 0)
        ):
            mail = array(args.mails, Int64, args.group.nodes)[node]
            signal(
                word_address(part_at(mail, args.word), word),
                cute.arch.load(pointer(args.round_at, Int64), Int64),
            )
