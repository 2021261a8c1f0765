"""How the processes of one `connect` agree with each other: through the process group's store, so that nothing of it is
a collective that could mix with the caller's."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from cute_ep.api.errors import EPError
from cute_ep.torch_internals import default_store

Made = TypeVar("Made")

PATIENCE_S = 1800.0
"""How long ranks that connect wait for each other; the slowest compiles kernels meanwhile, perhaps."""
LONGEST_LOOK_S = 0.5
"""Longest time without a look at signals, and at whether another rank has given up."""
GAVE_UP = "gave up"
"""Key of who waited in vain for whom: no exchange works from then on."""


class Meeting:
    """The ranks of a process group, one process each; every method is collective, and so is the constructor, which has
    the only collective on the caller's group: a name that no other meeting has.

    Not a group of its own: torch names a group that its members alone make by how many groups a process has, so the
    names of ranks may differ, and be given twice.

    Attributes:
        rank, size: this process's rank in the group, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        names: list = [None] * self.size
        dist.all_gather_object(names, uuid4().hex, group)
        self._store = dist.PrefixStore(f"cute_ep/{names[0]}", default_store())
        self._count = 0

    def gather(self, one: Any, seconds: float = PATIENCE_S) -> list:
        """What every rank gives, in the order of ranks.

        Raises:
            EPError: some give nothing in `seconds`, or a rank has given up before; says which. After that no exchange
                works, on any rank, so that none takes what belongs to another one.
        """
        keys = self._give(one)
        try:
            deadline = time.monotonic() + seconds
            while not self._store.check(keys):
                self._check_together()
                left = deadline - time.monotonic()
                if left <= 0:
                    absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    self._store.set(GAVE_UP, f"rank {self.rank} waited {seconds:g} s for rank(s) {absent}")
                else:
                    self._look(keys, min(left, LONGEST_LOOK_S))
            gathered = [pickle.loads(self._store.get(key)) for key in keys]
            if self._count > 1:  # all ranks have read what came before
                self._store.delete_key(f"{self._count - 1}/{self.rank}")
        except RuntimeError as error:
            raise EPError(f"rank {self.rank} lost the other ranks: {error}") from None
        return gathered

    def _give(self, one: Any) -> list[str]:
        """This rank's part of the next exchange; returns the keys of all."""
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self.size)]
        try:
            self._check_together()
            self._store.set(keys[self.rank], pickle.dumps(one))
        except RuntimeError as error:
            raise EPError(f"rank {self.rank} lost the other ranks: {error}") from None
        return keys

    def _check_together(self) -> None:
        if self._store.check([GAVE_UP]):
            raise EPError(f"rank {self.rank}: {self._store.get(GAVE_UP).decode()}, and the ranks have parted")

    def _look(self, keys: list[str], seconds: float) -> None:
        """Wait for keys, a short time: Python serves no signal meanwhile. To a store 0 milliseconds are for ever."""
        try:
            self._store.wait(keys, timedelta(seconds=max(seconds, 0.01)))
        except RuntimeError:  # the time is over, or the store has ended, which the next call will find
            pass

    def wait(self, seconds: float) -> None:
        """Until every rank is here. EPError as of `gather`."""
        self.gather(None, seconds)

    def on_all_ranks(
        self,
        make: Callable[[], Made],
        share: Callable[[Made], Any] = lambda made: None,
        undo: Callable[[Made], None] = lambda made: None,
    ) -> tuple[Made, list]:
        """This rank's make(), and share() of what every rank made. Where it fails on one rank it fails on all: there
        with the error, elsewhere with EPError that names the rank; what was made is undone by undo(). It stays where
        the ranks lose each other (`gather`), since another one may have it in use."""
        try:
            made = make()
            try:
                shared = share(made)
            except BaseException:
                undo(made)
                raise
        except BaseException as error:  # the others are told first, also of an interrupt
            self._give((None, f"{type(error).__name__}: {error}"))
            raise
        gathered = self.gather((shared, None))
        for peer, (_, failure) in enumerate(gathered):
            if failure is not None:
                undo(made)
                raise EPError(f"rank {peer} could not connect: {failure}")
        return made, [one for one, _ in gathered]
