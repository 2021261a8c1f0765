"""Every error that cute_ep raises on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cute_ep.layouts.maps.routing import BEYOND, INPUT_ERRORS, Phase

if TYPE_CHECKING:
    from cute_ep.api.flags import Flags


class EPError(Exception):
    """Base class of all cute_ep errors."""


class EPConfigError(EPError, ValueError):
    """A configuration that no rank could run: says which field, its value and the rule."""


class EPInputError(EPError, ValueError):
    """An argument of one call that breaks the contract: says which, its value and the rule."""


READING = (
    "Rounds count from 1 on this communicator, dispatch and combine apart. A rank that is named may itself have waited "
    "for another: read its own error first."
)


class EPTimeout(EPError, TimeoutError):
    """Peers did not arrive within the configured time. The communicator is unusable afterwards.

    Attributes:
        phase: what was waited for, as `cute_ep.layouts.maps.routing.Phase` names with " / " between them.
        rank: the rank that waited.
        missing: the ranks that did not arrive; of GRID the own rank, whose CTAs were not resident together.
        details: one line a missing rank: what has not come from it, of which round; of GRID the CTAs.
        flags: what else the rank waited for (`EPCommunicator.flags`); None: it could not be read.
            `flags.write(path)` keeps it for `cute-ep flags`.
    """

    def __init__(
        self,
        phase: str,
        rank: int,
        missing: tuple[int, ...],
        details: tuple[str, ...] = (),
        flags: Flags | None = None,
    ) -> None:
        self.phase, self.rank, self.missing, self.details, self.flags = phase, rank, missing, details, flags
        lines = "".join(f"\n  {line}" for line in (*details, READING)) if details else ""
        super().__init__(f"rank {rank} gave up waiting in phase {phase} for rank(s) {list(missing)}{lines}")

    def __reduce__(self) -> tuple:
        return type(self), (self.phase, self.rank, self.missing, self.details, self.flags)


class VariantMissing(EPError, LookupError):
    """No compiled kernel fits: carries the command that builds it."""


def raise_input_error(rank: int, found: Mapping[Phase, tuple[int, int, int]], others: Sequence[str] = ()) -> None:
    """EPInputError unless both are empty: `found`, (index, expected, seen) of each kind out of INPUT_ERRORS, and what
    else is wrong, in words."""
    texts = []
    for phase in INPUT_ERRORS:
        if phase in found:
            index, expected, seen = found[phase]
            if phase == Phase.ROW_CAPACITY and index:
                texts.append(f"the block of group {index - 1} holds {expected} rows, but {seen} have arrived")
            elif phase == Phase.ROW_CAPACITY:
                texts.append(f"out holds {expected} rows, but those that arrived take {seen}")
            else:
                value = f"{BEYOND} or beyond 32 bits" if seen == BEYOND else seen
                texts.append(f"topk_ids.flatten()[{index}] = {value}: must be -1 or in [0, {expected})")
    if texts or others:
        raise EPInputError(f"rank {rank}: {'; '.join([*texts, *others])}")
