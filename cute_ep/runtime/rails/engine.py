"""What an engine is that brings mail along a rail (`cute_ep.runtime.mail`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cute_ep.layouts.maps.mail import Channel, Piece

if TYPE_CHECKING:
    from cute_ep.runtime.mail import RankMail


class Put(NamedTuple):
    """A piece on its way, by offsets in maps.

    Attributes:
        source: of what goes to node 0's rank in rounds of parity 0.
        step: from there to what goes to the next node's; 0 where all get the same.
        to: where it goes in the map of each.
        to_step: from there to where that of the next node's rank goes.
        source_turn, to_turn: to those of rounds of parity 1.
        landing: of sums, in which of the two places they land; 0 where kernels choose it.
    """

    piece: Piece
    source: int
    step: int
    to: int
    to_step: int
    nbytes: int
    source_turn: int = 0
    to_turn: int = 0
    landing: int = 0


class Engine(Protocol):
    """What brings pieces of mail to the other ranks of a rail, in stream order.

    Attributes:
        queued: whether the host says where a piece goes when it queues the put, as for a library. Sums then land where
            none are that were not received; else kernels choose the landing by the parity of the round, which also
            graphs count that are replayed.
        one_sided: whether a put comes without its receiver, so that kernels wait for words. One that the host has
            queued also comes after a failure, while a peer may be reading: pieces of any frame then have one place.
        entries_refused: why rows of entries do not travel, in words; "": they do, pieces may be anywhere in memory.
    """

    queued: bool
    one_sided: bool
    entries_refused: str

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        """Bring each piece of this rank's mail, of the round that was packed last, to every other node's rank; then, if
        kernels wait for words, the round to the piece's word of `arrived` there, behind the rounds before. What comes
        behind on the stream may write to the sources."""

    def tell_exchanged(self, mail: RankMail, channel: Channel) -> None:
        """Tell the host that what was put last has been exchanged, if it asks: no await is next, which does so."""

    def free(self, mail: RankMail, channel: Channel, landing: int) -> None:
        """Tell every other node's rank that this rank has read what came there, after all that is on the stream."""

    def progress(self, channel: Channel) -> int:
        """Address of the host-visible words for the rounds that were packed and exchanged last; 0: nobody asks."""


def words_of(pieces: Sequence[Put]) -> int:
    """The words of some pieces, a bit each."""
    return sum(1 << one.piece for one in pieces)
