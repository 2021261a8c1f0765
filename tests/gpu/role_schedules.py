"""How launches of role tests are shaped: which CTAs send and receive, on how many SMs, in how many slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import MANY_SLICES, has_whole_segments
from cute_ep.runtime.launch_cache import LaunchShape
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning

from .arena_images import FEW_TOKENS

SHAPES = ((1, 32, 1), (7, 1, 4), (MANY, 4, 2), (33, 16, 1), (MANY, 2, 8))
"""(CTAs at most, slices of a row of few tokens, of many), by turns."""
Slices = Callable[[EPConfig, int, int], tuple[int, int]]
"""log2 of the slices of a message and of a returned row of a configuration, for a number of tokens of which so many
would come home as Lamport rows."""


class Schedule(NamedTuple):
    """How CTAs share the work of a rank's launches.

    Attributes:
        sms: as of `connect`.
        senders, joins: as of `Entry`.
    """

    sms: int | None = None
    senders: float = 0
    joins: bool = False

    def shapes(self, turn: int) -> tuple[Tuning, Slices]:
        """The launch shapes of a turn, and what they say."""
        chosen = [SHAPES[(turn + step) % len(SHAPES)] for step in (0, 2)]

        def entry(tokens: int, grid: int, slices: int) -> Entry:
            return Entry(tokens, grid, self.senders, slices, packed=turn % 2 == 1, split_from=1, joins=self.joins)

        tables = ((entry(FEW_TOKENS, grid, few), entry(MANY, grid, many)) for grid, few, many in chosen)

        def slices(cfg: EPConfig, tokens: int, lamport: int) -> tuple[int, int]:
            is_few = (tokens or cfg.max_tokens_per_rank) <= FEW_TOKENS
            message, returned = (few if is_few else many for _, few, many in chosen)
            returned = min(returned, MANY_SLICES) if tokens > lamport else returned
            message = message if has_whole_segments(cfg.format) else 1
            return message.bit_length() - 1, returned.bit_length() - 1

        return Tuning(*tables), slices


HALVES = Schedule()
"""Of halves, all of whose CTAs do the same."""


def adds_up(shape: LaunchShape, mode: str) -> bool:
    """Whether pipelines of a combine add up what comes home, and rows of own tokens stay."""
    every = shape.grid.send_ctas == shape.ctas and shape.grid.receive_from == 0
    return every and shape.grid.ring_bytes > 0 and shape.flagged and mode != "unweighted"
