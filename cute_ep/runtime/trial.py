"""By which kind the ranks of a node share memory: the first one that works on all of them.

No attribute of a device tells what works. So ranks try a kind: each creates TRIAL_BYTES, exports them, and maps those
of its peers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from cute_ep.api.errors import EPConfigError
from cute_ep.runtime.driver import Allocation, on_device
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.symmetric import REFUSALS, SHARINGS, TRIAL_BYTES, Kind, Sharing, in_words

LOG = logging.getLogger(__name__)

ON_ONE_MACHINE: tuple[Kind, ...] = (Kind.DESCRIPTOR, Kind.IPC)
OVER_MACHINES: tuple[Kind, ...] = (Kind.FABRIC,)
"""What a node tries, in this order."""


def choose(meeting: Meeting, together: int, machines: Sequence[str], device: torch.device) -> Sharing:
    """How this rank shares memory with its node; collective over all ranks. Logs what was taken and why.

    Args:
        together: ranks of a node, which follow one another.
        machines: of all ranks.

    Raises:
        EPConfigError: on all ranks, where some node has no kind that works; says what was tried, and why it failed.
        EPError: a rank has left.
    """
    if together == 1:
        return Sharing(device, meeting.rank)
    nodes = [_Node(first, machines[first : first + together]) for first in range(0, meeting.size, together)]
    own = nodes[meeting.rank // together]
    chosen = Sharing(device, meeting.rank)
    with ExitStack() as undo:
        for turn in range(max(len(node.kinds) for node in nodes)):
            trying = own.trying(turn)
            sharing = SHARINGS[trying](device, meeting.rank) if trying else Sharing(device, meeting.rank)
            undo.callback(sharing.close)
            failures = _try(sharing, meeting, own.ranks)
            for node in nodes:
                node.judge(turn, failures)
            if trying and own.taken:
                chosen = sharing
            else:
                sharing.close()
            if all(node.taken for node in nodes):
                break
        for node in nodes:
            node.check()
        undo.pop_all()
    because = f"; it cannot by {', '.join(own.said)}" if own.said else ""
    LOG.info("rank %d shares memory by %s%s", meeting.rank, own.taken, because)
    return chosen


class _Node:
    """What is known of a node, the same on all ranks.

    Attributes:
        kinds: what it tries, one a turn.
        taken: what it has taken.
        said: what has failed, and why.
    """

    def __init__(self, first: int, machines: Sequence[str]) -> None:
        self.ranks = range(first, first + len(machines))
        self.machines = len(set(machines))
        self.kinds = ON_ONE_MACHINE if self.machines == 1 else OVER_MACHINES
        self.taken: Kind | None = None
        self.said: list[str] = []

    def trying(self, turn: int) -> Kind | None:
        """What it tries in a turn; None: it has a kind, or there is no other."""
        return self.kinds[turn] if self.taken is None and turn < len(self.kinds) else None

    def judge(self, turn: int, failures: Sequence[str | None]) -> None:
        """Take what it has tried in a turn unless a rank of it failed. `failures`: of all ranks of the meeting."""
        kind = self.trying(turn)
        if kind is None:
            return
        why = ", ".join(f"rank {rank}: {failures[rank]}" for rank in self.ranks if failures[rank])
        if why:
            self.said.append(f"{kind} ({why})")
        else:
            self.taken = kind

    def check(self) -> None:
        """EPConfigError unless it has a kind."""
        if self.taken:
            return
        ranks, tried = f"ranks {self.ranks[0]} to {self.ranks[-1]}", ", ".join(self.said)
        if self.machines == 1:
            raise EPConfigError(f"{ranks} are on one machine, but cannot share memory by {tried}")
        raise EPConfigError(
            f"ranks_per_node = {len(self.ranks)}: {ranks} are on {self.machines} machines, and cannot share memory by "
            f"{tried}: must be the ranks of one machine, unless nvidia-imex runs on all of them and each process has "
            "an IMEX channel (/dev/nvidia-caps-imex-channels)"
        )


def _try(sharing: Sharing, meeting: Meeting, node: Sequence[int]) -> list[str | None]:
    """What went wrong on each rank of the meeting when its node tried a kind. All take part in as many steps. Where
    ranks lose each other memory stays, since a peer may have it mapped."""
    failures: list[str | None] = [None] * meeting.size
    peers = [rank for rank in node if rank != meeting.rank]
    held: list[Allocation] = []

    def step(work: Callable[[], Any]) -> list:
        made = failure = None
        if sharing.kind and not any(failures[rank] for rank in node):
            try:
                made = work()
            except REFUSALS as error:
                failure = in_words(error)
        told = meeting.gather((made, failure), doing="find how to share memory")
        failures[:] = [before or now for before, (_, now) in zip(failures, told, strict=True)]
        return [one for one, _ in told]

    def export() -> Any:
        with on_device(sharing.device):
            held.append(sharing.take(TRIAL_BYTES))
        return sharing.offer(held[0])

    def map_each() -> None:
        for peer in peers:
            sharing.shut(sharing.open(peer, offers[peer]))

    said = step(sharing.begin)
    sharing.introduce({peer: said[peer] for peer in peers})
    offers = step(export)
    step(map_each)
    with on_device(sharing.device):
        for allocation in held:
            allocation.free()
    return failures
