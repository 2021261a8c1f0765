"""What the allocation of a rank's arena holds, byte for byte: as a test writes it, and as it must be after a launch.

The arena's map says where regions are. All else, what a word means and which bytes of a row are whose, is written here
and in `role_model` once more, from docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.record import Region
from cute_ep.testing.verify import POISON

LL, FLAG = 8, 8
"""Bytes of an LL word and of a flag."""
FEW_TOKENS = 1024
"""Most tokens of a rank whose rows are Lamport rows."""
SHOWN = 6
"""Differences that a message lists."""


def signed(number: int, bits: int) -> int:
    """The number with the same lowest bits that a signed integer of so many holds."""
    low = number & (1 << bits) - 1
    return low - (1 << bits) if low >> bits - 1 else low


class Image:
    """One rank's allocation.

    Args:
        cfg: the group's configuration, of one node.
        rank: whose it is.
        arenas: addresses of all ranks' arenas.

    Attributes:
        content: [bytes of the allocation] uint8; POISON but for the addresses of the peers.
        undefined: [the same] bool, bytes that a launch may leave with anything.
    """

    def __init__(self, cfg: EPConfig, rank: int, arenas: Sequence[int]) -> None:
        self.cfg, self.rank, self.arena = cfg, rank, cfg.arena
        self.begin = int(self.arena.begin(rank))
        self.content = torch.full((int(self.arena.allocation),), POISON, dtype=torch.uint8)
        self.undefined = torch.zeros(self.content.shape, dtype=torch.bool)
        self.words(self.arena.peers.at(), len(arenas)).copy_(torch.tensor(arenas))

    def copy(self) -> Image:
        made = Image(self.cfg, self.rank, [])
        made.content, made.undefined = self.content.clone(), self.undefined.clone()
        return made

    def span(self, offset: int, nbytes: int) -> torch.Tensor:
        """A view of bytes from an offset in the arena on."""
        return self.content[self.begin + offset :][:nbytes]

    def words(self, offset: int, count: int) -> torch.Tensor:
        """A view of 64-bit words."""
        return self.span(offset, 8 * count).view(torch.int64)

    def signal(self, offset: int, number: int, count: int = 1) -> None:
        """Flags side by side hold a round's number."""
        self.words(offset, count).fill_(number)

    def tell(self, offset: int, values: torch.Tensor, number: int) -> None:
        """LL words side by side: 32-bit values, and above each the low 32 bits of the round's number."""
        halves = self.span(offset, LL * values.numel()).view(torch.int32).view(-1, 2)
        halves[:, 0] = values.flatten().int()
        halves[:, 1] = signed(number, 32)

    def leave_open(self, offset: int, nbytes: int, is_open: bool = True) -> None:
        """These bytes may hold anything, or no longer."""
        self.undefined[self.begin + offset :][:nbytes] = is_open

    def messages(self, number: int, source: int, tokens: int) -> tuple[torch.Tensor, int]:
        """A view [tokens, bytes of a message] of what a source of so many tokens sends in a round, and its offset."""
        region = self.arena.lamport_messages if tokens <= FEW_TOKENS else self.arena.messages
        offset, pitch = region.at(number & 1, source), region.shape[-1]
        return self.span(offset, tokens * pitch).view(tokens, pitch), offset

    def slots(self, number: int, tokens: int, *, flagged: bool, partial: bool) -> torch.Tensor:
        """A view [tokens, slots, bytes of a row] of what comes home to this rank, of so many tokens, in a round."""
        region = self.arena.returns if flagged else self.arena.lamport_returns
        _, _, slots, row = region.shape
        slots = self.cfg.world_size if partial else slots
        return self.span(region.at(number & 1), tokens * slots * row).view(tokens, slots, row)

    def await_few(self, region: Region, number: int) -> None:
        """All words of a Lamport region of a round's parity say that they have not come."""
        self.span(region.at(number & 1), region.nbytes // 2).fill_(0xFF)

    def place(self, offset: int) -> str:
        """What a byte of the allocation belongs to."""
        at = offset - self.begin
        if not 0 <= at < self.arena.nbytes:
            return f"{'before' if at < 0 else 'behind'} the arena"
        before = [one for one in self.arena.regions.values() if one.offset <= at and one.nbytes]
        region = max(before, key=lambda one: one.offset)
        rest, coord = at - region.offset, []
        if rest >= region.nbytes:
            return f"behind {region.name}"
        for stride in region.stride:
            index, rest = divmod(rest, stride * region.itemsize)
            coord.append(index)
        return f"{region.name}{coord}" + (f" byte {rest}" if region.itemsize > 1 else "")

    def check(self, found: torch.Tensor, when: str) -> None:
        """AssertionError unless the allocation holds what it must: says which bytes differ, and of what."""
        __tracebackhide__ = True
        wrong = (found != self.content) & ~self.undefined
        if not wrong.any():
            return
        offsets = wrong.nonzero().flatten()
        first_of_word = offsets[torch.cat([torch.tensor([True]), offsets.diff() > 3])]
        lines = [
            f"  +{at:#x} {self.place(at)}: is {found[at:][:8].tolist()}, expected {self.content[at:][:8].tolist()}"
            for at in first_of_word[:SHOWN].tolist()
        ]
        names = [self.place(at).split("[")[0] for at in first_of_word[:: max(1, len(first_of_word) // 5000)].tolist()]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        more = f"{len(offsets)} bytes differ, sampled by region {counts}; the first:"
        raise AssertionError("\n".join([f"{when}, arena of rank {self.rank}: {more}", *lines]))
