"""The ranks on which a command works: all in this process, or one in each."""

from __future__ import annotations

from collections.abc import Sequence

from cute_ep.api.config import EPConfig


class Ranks:
    """The ranks that take part, of which some are in this process.

    Attributes:
        devices: of those.
        count: of all.
        per_node: of one node; None: there is one.
    """

    devices: list[str]
    count: int
    per_node: int | None = None

    def connect(self, cfg: EPConfig) -> Sequence:
        """Communicators of those in this process."""
        raise NotImplementedError

    def errors(self, own: str | None) -> list[str]:
        """What went wrong on all ranks, of which each knows its own, if anything."""
        return [own] if own else []


class LocalRanks(Ranks):
    """All are in this process."""

    def __init__(self, devices: list[str], library: str | None) -> None:
        self.devices, self.count, self._library = devices, len(devices), library

    def connect(self, cfg: EPConfig) -> Sequence:
        from cute_ep.runtime.connection import connect_local

        return connect_local(cfg, self.devices, library=self._library)


class OneRank(Ranks):
    """One is in this process, as in the others of the default process group."""

    def __init__(self, count: int, per_node: int, library: str | None) -> None:
        import torch

        self.count, self.per_node, self._library = count, per_node if per_node < count else None, library
        self.devices = ["cuda" if torch.cuda.is_available() else "cpu"]

    def connect(self, cfg: EPConfig) -> Sequence:
        from cute_ep.runtime.process_connection import connect

        return [connect(cfg, library=self._library)]

    def errors(self, own: str | None) -> list[str]:
        import torch.distributed as dist

        found: list[str | None] = [None] * self.count
        dist.all_gather_object(found, own)
        return [f"rank {rank}: {error}" for rank, error in enumerate(found) if error]
