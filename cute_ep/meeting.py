"""How the processes of one `connect` agree with each other: collectives on a process group of their own, which no
collective of the caller can mix with."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from cute_ep.errors import EPError

Made = TypeVar("Made")


class Meeting:
    """The ranks of a process group, one process each; every method is collective.

    Attributes:
        rank, size: this process's rank in the group, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = list(range(self.size)) if group is None else dist.get_process_group_ranks(group)
        self._group = dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def gather(self, one: Any) -> list:
        """What every rank gives, in the order of ranks. EPError: a rank has ended."""
        gathered: list = [None] * self.size
        try:
            dist.all_gather_object(gathered, one, self._group)
        except RuntimeError as error:
            raise EPError(f"rank {self.rank} lost another rank: {error}") from None
        return gathered

    def wait(self, seconds: float) -> None:
        """Until every rank is here.

        Raises:
            EPError: some are not, after `seconds`; says which.
        """
        try:
            dist.monitored_barrier(self._group, timedelta(seconds=seconds), wait_all_ranks=True)
        except (RuntimeError, ValueError) as error:
            raise EPError(f"rank {self.rank} waited {seconds:g} s for the other ranks: {error}") from None

    def leave(self) -> None:
        """Nobody meets here again."""
        dist.destroy_process_group(self._group)

    def on_all_ranks(
        self,
        make: Callable[[], Made],
        share: Callable[[Made], Any] = lambda made: None,
        undo: Callable[[Made], None] = lambda made: None,
    ) -> tuple[Made, list]:
        """This rank's make(), and share() of what every rank made. Where it fails on one rank it fails on all: there
        with the error, elsewhere with EPError that names the rank; what was made is undone by undo()."""
        try:
            made = make()
            try:
                shared = share(made)
            except Exception:
                undo(made)
                raise
        except Exception as error:  # the others are told first
            self.gather((None, f"{type(error).__name__}: {error}"))
            raise
        gathered = self.gather((shared, None))
        for peer, (_, failure) in enumerate(gathered):
            if failure is not None:
                undo(made)
                raise EPError(f"rank {peer} could not connect: {failure}")
        return made, [one for one, _ in gathered]
