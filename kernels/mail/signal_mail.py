"""Signal mail: add 1 to words of every other node's rank, after everything before on the stream.

By one CTA, a thread a word. The engine of ranks in one process signals pieces with it; every engine without signals of
its own says with it that this rank has read what has come.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ep.kernels.device.block import launch_config
from cute_ep.kernels.device.memory import array, item_coord, pointer
from cute_ep.kernels.mail.place import place_of
from cute_ep.layouts.maps.mail_arguments import SignalMailArgs

WORDS = 4
"""Words of a rank at most."""


class SignalMail:
    """One CTA."""

    shared_bytes = 0

    @cute.jit
    def __call__(self, args: SignalMailArgs, grid: Int32) -> None:
        self.kernel(args).launch(**launch_config(grid))

    @cute.kernel
    def kernel(self, args: SignalMailArgs) -> None:
        place = place_of(args.group)
        word, node = item_coord(place.tid, WORDS)
        healthy = place.not_aborted() | Boolean(args.healthy == 0)
        if healthy & (node < args.group.nodes) & (node != args.group.node) & (((args.words >> word) & 1) != 0):
            there = array(args.mails, Int64, args.group.nodes)[node] + args.word + word * 8
            cute.arch.atomic_add(pointer(there, Int64), Int64(1), sem="release", scope="sys")
