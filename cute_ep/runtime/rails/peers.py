"""The rail of ranks in one process: our own copies between GPUs that reach each other's memory, and our own signals."""

from __future__ import annotations

from collections.abc import Sequence

from cute_ep.layouts.maps.mail import Channel, RoundWord
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.rails.engine import Put, words_of


class PeerStores:
    """A kernel copies, and another one signals the words of all pieces. Neither does anything after a failure."""

    queued, one_sided, entries_refused = False, True, "in one process"

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        """As of `Engine`."""
        mail.put(channel, pieces)
        mail.signal(channel, mail.map.arrived.at(channel, mail.node), words_of(pieces), RoundWord.SENT)

    def tell_exchanged(self, mail: RankMail, channel: Channel) -> None:
        """As of `Engine`: nobody asks."""

    def free(self, mail: RankMail, channel: Channel, landing: int) -> None:
        """As of `Engine`."""
        mail.signal(channel, mail.map.free.at(channel, mail.node), 1, RoundWord.RECEIVED)

    def progress(self, channel: Channel) -> int:
        """As of `Engine`: kernels wait, and give up by themselves."""
        return 0
