"""A launch of one rank of a `Stage`, ready to be made: what all memory must hold before it, and what memory and outputs
must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cute_ep.layouts.maps.arena import MANY_SLICES, MAX_SLICES
from cute_ep.testing.workloads import ROUTINGS

from .arena_images import FEW_TOKENS, Image
from .role_model import Home, Sent
from .role_stage import SINGLE, Stage


class Turn(NamedTuple):
    """What a launch carries.

    Attributes:
        number: of the round.
        tokens: of ranks 0, 1, 2; of others in turn again.
        routing: as in ROUTINGS, or SINGLE, of rank 0; of others those that follow, or with `alike` the same.
        index: of the turn, the seed of what is drawn; even and odd ones differ in what a call is given.
    """

    number: int
    tokens: tuple[int, ...]
    routing: str
    index: int = 0
    alike: bool = False

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def routing_of(self, rank: int) -> str:
        names = [*ROUTINGS, SINGLE]
        return names[(names.index(self.routing) + (0 if self.alike else rank)) % len(names)]

    def slices_of(self, rank: int) -> int:
        """A choice of a played rank, as log2."""
        most = MAX_SLICES if self.tokens_of(rank) <= FEW_TOKENS else MANY_SLICES
        return (self.index + 2 * rank) % most.bit_length()

    def home_of(self, rank: int, most: int) -> Home:
        """What a played rank gets back where ranks have at most so many tokens: every second one has flags if there is
        room for such rows, with as few slices as there are flags for."""
        tokens, log2 = self.tokens_of(rank), self.slices_of(rank)
        flagged = tokens > FEW_TOKENS or (most > FEW_TOKENS and (self.index + rank) % 2 == 0)
        return Home.of(tokens, log2, flagged)

    @property
    def received(self) -> int:
        """Rounds that the launching rank has received when it sends a half; in odd turns one is outstanding."""
        return max(self.number - 1 - self.index % 2, 0)


@dataclass
class Launch:
    """A launch.

    Attributes:
        images: what all memory must hold, before the launch and, after `finish`, afterwards.
        start: makes it.
        finish: changes `images` to what it must leave.
        check: AssertionError unless outputs are right; the launch has ended.
        sent: what was sent before, by source, of a receiving dispatch; of a fused one also what this sends.
    """

    stage: Stage
    images: list[Image]
    start: Callable[[], None]
    finish: Callable[[], None]
    check: Callable[[], None]
    sent: tuple[Sent, ...] = ()

    @property
    def own(self) -> Image:
        return self.images[self.stage.me]

    def run(self, when: str) -> list[Image]:
        """Make it, and compare all memory and outputs. Returns what memory held before."""
        before = [image.copy() for image in self.images]
        self.stage.write(self.images)
        self.start()
        self.finish()
        self.stage.check(self.images, when)
        try:
            self.check()
        except AssertionError as error:
            raise AssertionError(f"{when}: {error}") from error
        return before


def in_a_row(first: Launch, second: Launch) -> Launch:
    """Two launches on the same images as one: the host says nothing in between."""

    def both(name: str) -> Callable[[], None]:
        def call() -> None:
            for launch in (first, second):
                getattr(launch, name)()

        return call

    return Launch(first.stage, first.images, both("start"), both("finish"), both("check"), second.sent)
