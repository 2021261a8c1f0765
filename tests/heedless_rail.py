"""An engine for tests whose copies the host has queued, as a library's are: they are made whatever kernels have found.
Ranks on the CPU, or on one GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from cute_ep.layouts.maps.mail import Channel
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.rails.engine import Put
from cute_ep.runtime.rails.peers import PeerStores
from tests.storm_rail import of_round


class Heedless(PeerStores):
    """A rank that has given up brings its old mail again, as that of further rounds."""

    def __init__(self) -> None:
        self.mails: list[RankMail] = []
        self.sent: dict[tuple[int, Channel], int] = defaultdict(int)

    def prepare(self, mails: Sequence[RankMail]) -> None:
        """Be the engine of a rail's ranks, before their first call, and make every copy once: on a GPU a first one may
        wait for a kernel that waits."""
        self.mails += mails
        for mail in mails:
            mail.engine = self
            most = mail.cfg.max_tokens_per_rank
            for one in (*mail.frame_puts(most, most), mail.sums_put(most, 0)):
                mail.memory[one.source : one.source + one.nbytes].clone()
            words = mail.memory.new_zeros(8, dtype=torch.int64)
            for word in range(len(words)):  # kernels differ by what an address is a multiple of
                words[word : word + 1].add_(1)
            if mail.memory.is_cuda:
                torch.cuda.synchronize(mail.memory.device)

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        """As of `Engine`, except that a word counts how often its piece has come."""
        rank = mail.parts.rank
        self.sent[rank, channel] += 1
        for other in self.mails:
            if other is not mail:
                for one in (of_round(piece, self.sent[rank, channel]) for piece in pieces):
                    source = one.source + other.node * one.step
                    landing = other.memory[one.to : one.to + one.nbytes]
                    landing.copy_(mail.memory[source : source + one.nbytes], non_blocking=True)
                    word = other.map.arrived.at(channel, mail.node, one.piece)
                    other.memory[word : word + 8].view(torch.int64).add_(1)
