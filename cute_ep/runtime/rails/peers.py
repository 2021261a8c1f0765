"""The rail of ranks in one process: copies between GPUs that reach each other's memory, and our own signals."""

from __future__ import annotations

from collections.abc import Sequence

from cute_ep.runtime import driver_calls
from cute_ep.runtime.mail import Put, RankMail, words_of
from cute_ep.torch_internals import current_stream


class PeerCopies:
    """Copies in stream order; the words of a channel are signaled behind the last."""

    def __init__(self, mails: Sequence[RankMail]) -> None:
        """mails: of the rail's ranks, by node, as they become known."""
        self.mails = mails

    def put(self, mail: RankMail, channel: int, pieces: Sequence[Put]) -> None:
        """As of `Engine`."""
        stream = current_stream(mail.memory.device.index) if mail.memory.is_cuda else 0
        for node, other in enumerate(self.mails):
            if node != mail.node:
                for one in pieces:
                    source = mail.base + one.source + node * one.step
                    driver_calls.copy(other.base + one.to, source, one.nbytes, stream)
        mail.signal(channel, mail.map.arrived.at(channel, mail.node), words_of(pieces), healthy=False)
