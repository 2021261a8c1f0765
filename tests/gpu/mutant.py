"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass

from tests.edits import Edit


@dataclass(frozen=True)
class Mutant:
    """Attributes:
    schedule: name out of `schedules.CASES` or `mail_schedules.NODES`.
    edits: the mistake, in files of the package.
    promised: whether that schedule must find it. A mistake that only an order of memory accesses tells, which the
        model allows and the hardware at hand never shows, cannot be promised.
    hangs: whether the schedule does not end, since warps wait at a barrier, where there is no deadline.
    """

    schedule: str
    edits: tuple[Edit, ...]
    promised: bool = True
    hangs: bool = False
