"""Every error that cute_ep raises on purpose."""

from __future__ import annotations


class EPError(Exception):
    """Base class of all cute_ep errors."""


class EPConfigError(EPError, ValueError):
    """A configuration that no rank could run: says which field, its value and the rule."""


class EPInputError(EPError, ValueError):
    """An argument of one call that breaks the contract: says which, its value and the rule."""


class EPTimeout(EPError, TimeoutError):
    """Peers did not arrive within the configured time. The communicator is unusable afterwards.

    Attributes:
        phase: what was waited for, as `cute_ep.layouts.routing.Phase` names with " / " between them.
        rank: the rank that waited.
        missing: the ranks that did not arrive; of GRID the own rank, whose CTAs were not resident together.
        details: one line a missing rank with the index waited for and the epochs, of GRID the CTAs, expected and seen.
    """

    def __init__(self, phase: str, rank: int, missing: tuple[int, ...], details: tuple[str, ...] = ()) -> None:
        self.phase, self.rank, self.missing, self.details = phase, rank, missing, details
        lines = "".join(f"\n  {line}" for line in details)
        super().__init__(f"rank {rank} gave up waiting in phase {phase} for rank(s) {list(missing)}{lines}")

    def __reduce__(self) -> tuple:
        return type(self), (self.phase, self.rank, self.missing, self.details)


class VariantMissing(EPError, LookupError):
    """No compiled kernel fits: carries the command that builds it."""
