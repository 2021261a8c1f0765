"""Which flags of a rank's arena, and of its mail, are behind, from copies of their words.

Rows need flags only where a source has many tokens: a Lamport row is its own flag, and a word that has been taken looks
like one that has not come. Which rows come home depends on `topk_ids`, which the arena does not have. What a wait for
either has missed stands in the status record (`status`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.flags import Flag, Flags
from cute_ep.layouts.maps.arena import (
    LAMPORT_TOKENS,
    LL_BYTES,
    Arena,
    HeaderWord,
    StateWord,
    chunk_of,
    message_slices_log2,
)
from cute_ep.layouts.maps.mail import PARITIES, Channel, Piece, RoundWord
from cute_ep.layouts.maps.record import Region
from cute_ep.layouts.maps.routing import MASKED_ENTRY, entry_expert

COUNTED = {
    "dispatches sent": StateWord.DISPATCH_SEND_EPOCH,
    "dispatches received": StateWord.DISPATCH_RECV_EPOCH,
    "combines sent": StateWord.COMBINE_SEND_EPOCH,
    "combines received": StateWord.COMBINE_RECV_EPOCH,
}

MAILED = {Channel.FRAMES: ("dispatch", "frames", 1), Channel.SUMS: ("combine", "sums", PARITIES)}
"""Of a channel: its operation, what its mails are, and after how many rounds one lands where another one has."""


def flag_bytes(arena: Arena) -> int:
    """Bytes of an arena, from its start, that hold flags, counters and LL words."""
    return arena.returns.offset


def find_behind(cfg: EPConfig, rank: int, content: bytes) -> Flags:
    """The flags that are behind.

    Args:
        content: the first `flag_bytes` of the rank's arena.
    """
    words = torch.frombuffer(bytearray(content), dtype=torch.int64)
    completed = {what: int(words[cfg.arena.state.offset // LL_BYTES + word]) for what, word in COUNTED.items()}
    return Flags(rank, completed, tuple(_Reader(cfg, rank, words, completed).behind()))


def over_nodes(cfg: EPConfig, rank: int, node: Flags, words: Sequence[int], second: Sequence[int] = ()) -> Flags:
    """The flags of a rank over nodes: those of its node, and those of its mail.

    Args:
        node: of the own node's communicator, whose ranks count from 0.
        words: the 64-bit words of the rank's mail, up to the payload.
        second: those that count the sums that land second, where `words` count only the first.
    """
    completed = dict(node.completed)
    behind = [replace(flag, peer=rank - node.rank + flag.peer) for flag in node.behind]
    counted = [(int(channel), channel, words) for channel in Channel]
    counted += [(len(Channel), Channel.SUMS, second)] if second else []
    for number, channel, some in counted:
        what = MAILED[channel][1]
        for mails, count in zip((f"{what} sent", f"{what} received"), _mail_rounds(cfg, channel, some), strict=True):
            completed[mails] = completed.get(mails, 0) + count
        for other in range(cfg.nodes):
            if other != cfg.node(rank):
                peer = other * cfg.peers + node.rank
                late = _mail_behind(cfg, channel, (number, other), peer, some)
                behind += map(_of_landing, late) if second and channel == Channel.SUMS else late
    return Flags(rank, completed, tuple(behind))


def _of_landing(flag: Flag) -> Flag:
    """A flag of sums whose landings are counted apart, with rounds of a landing: its words of `free` begin with -1."""
    return replace(flag, seen=flag.seen + 1, needed=flag.needed + 1) if flag.name == "free" else flag


def _mail_rounds(cfg: EPConfig, channel: Channel, words: Sequence[int]) -> tuple[int, int]:
    """How many mails of a channel were sent and received."""
    sent, received = (
        words[cfg.mail.rounds.at(channel, one) // LL_BYTES] for one in (RoundWord.SENT, RoundWord.RECEIVED)
    )
    return sent, received


def _mail_behind(
    cfg: EPConfig, channel: Channel, place: tuple[int, int], peer: int, words: Sequence[int]
) -> Iterator[Flag]:
    """The words of a channel that `peer` has not stored, or of its second landing, which not every round uses.
    `place`: the number of what is counted, and the node of `peer`. Neighbouring pieces of which the same round came
    last are one flag."""
    operation, _, landings = MAILED[channel]
    sent, received = _mail_rounds(cfg, channel, words)
    number, other = place
    seen = words[cfg.mail.free.at(channel, other) // LL_BYTES]
    if seen <= sent - landings:
        yield Flag("free", place, 1, operation, sent + 1, peer, seen, sent + 1 - landings)
    if number not in set(Channel) and sent == received:
        return
    pieces = [int(Piece.ROUTES)]
    if channel == Channel.FRAMES:
        pieces = [int(piece) for piece in Piece if piece != Piece.SCALES or cfg.mail.scale_bytes]
    arrived = {piece: words[cfg.mail.arrived.at(channel, other, piece) // LL_BYTES] for piece in pieces}
    for seen, late in groupby(pieces, arrived.__getitem__):
        first, *more = late
        if seen <= received:
            yield Flag("arrived", (*place, first), 1 + len(more), operation, received + 1, peer, seen, received + 1)


class _Reader:
    """A rank's words, and what they should be."""

    def __init__(self, cfg: EPConfig, rank: int, words: torch.Tensor, completed: dict[str, int]) -> None:
        self.cfg, self.rank, self.words, self.completed = cfg, rank, words, completed
        self.peers = [rank] if cfg.skip_a2a else list(range(cfg.world_size))

    def behind(self) -> Iterator[Flag]:
        arena, completed = self.cfg.arena, self.completed
        yield from self._consumed("dispatch", arena.dispatch_consumed, completed["dispatches sent"] + 1)
        for place, peer in enumerate(self.peers):
            yield from self._dispatch(place, peer, completed["dispatches received"] + 1)
        yield from self._consumed("combine", arena.combine_consumed, completed["combines sent"] + 1)
        number = completed["combines received"] + 1
        for place, peer in enumerate(self.peers if len(self.peers) > 1 else []):
            rounds = self._of(arena.return_rounds)[number & 1, place]
            yield from self._late(Flag("return_rounds", (number & 1, place), 1, "combine", number, peer, 0, 0), rounds)

    def _of(self, region: Region) -> torch.Tensor:
        """A region's words, as it is indexed."""
        begin = region.offset // LL_BYTES
        return torch.as_strided(self.words, region.shape, region.stride, begin)

    def _consumed(self, operation: str, region: Region, number: int) -> Iterator[Flag]:
        """Peers that have not read the round before last."""
        for place, peer in enumerate(self.peers):
            seen = int(self._of(region)[place])
            if seen < number - 2:
                yield Flag(region.name, (place,), 1, operation, number, peer, seen, number - 2)

    def _late(
        self, flag: Flag, words: torch.Tensor, place: Callable[[int], tuple[int, ...]] | None = None
    ) -> Iterator[Flag]:
        """`flag` for the LL words that are not of its round; `place`: index of the first of them, from its number."""
        rounds = (words.reshape(-1) >> 32) & 0xFFFFFFFF
        late = (rounds != flag.round & 0xFFFFFFFF).nonzero()[:, 0].tolist()
        if late:
            index = flag.index if place is None else place(late[0])
            seen = int(rounds[late[0]])
            yield Flag(flag.name, index, len(late), flag.operation, flag.round, flag.peer, seen, flag.round)

    def _dispatch(self, place: int, peer: int, number: int) -> Iterator[Flag]:
        """What a source has not sent of a dispatch."""
        cfg, arena, parity = self.cfg, self.cfg.arena, number & 1
        columns = len(HeaderWord) + (1 if cfg.is_rank_major else cfg.local_experts)
        table = self._of(arena.table)[parity, place, :columns]
        late = list(self._late(self._flag("table", number, peer), table, lambda index: (parity, place, index)))
        if late:
            yield from late
            return
        header = table & 0xFFFFFFFF
        tokens = int(header[HeaderWord.TOKENS])
        entries = self._of(arena.entries)[parity, place, :tokens]
        late = list(
            self._late(
                self._flag("entries", number, peer),
                entries,
                lambda index: (parity, place, *divmod(index, cfg.top_k)),
            )
        )
        yield from late
        if late or tokens <= LAMPORT_TOKENS or peer == self.rank:  # a fused launch may send its own rank no message
            return
        values = (entries << 32) >> 32  # the low half, with its sign
        local = torch.where(values == MASKED_ENTRY, -1, entry_expert(values) // cfg.local_experts)
        here = (local == cfg.place(self.rank)[0]).any(dim=1).nonzero()[:, 0]
        slices_log2 = message_slices_log2(int(header[HeaderWord.MESSAGES]))
        chunks = torch.unique(chunk_of(here << slices_log2))
        flags = self._of(arena.message_ready)[place][chunks]
        if (missing := (flags < number).nonzero()[:, 0]).numel():
            first = int(missing[0])
            index = place, int(chunks[first])
            seen = int(flags[first])
            yield Flag("message_ready", index, missing.numel(), "dispatch", number, peer, seen, number)

    def _flag(self, name: str, number: int, peer: int) -> Flag:
        return Flag(name, (), 1, "dispatch", number, peer, 0, number)
