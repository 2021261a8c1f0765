"""Communicators of process groups, made when a call first needs one."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist

from cute_ep.api.config import LONGEST_S, EPConfig
from cute_ep.api.errors import EPConfigError, EPError, EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.integrations.counts import Counting, ReceiveCounts, counting_config
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK, ROW_ALIGNMENTS
from cute_ep.runtime.connection import connect
from cute_ep.runtime.gpus import sms_or_beside_nccl
from cute_ep.runtime.meeting import Meeting, group_timeout
from cute_ep.runtime.routes import RouteCounts

LOG = logging.getLogger(__name__)
config_of = lru_cache(maxsize=1024, typed=True)(EPConfig)
"""An EPConfig, made once for the same arguments: its checks take as long as a dispatch (50 us of the host)."""
LEAST_TOKENS = 64
"""Tokens per rank that communicators are made for at least; then powers of two, so that few are made."""


class Connections:
    """Finds the communicator for a call, or connects it: then the call is collective. All ranks make the same calls
    with the same sizes, so they connect at the same time.

    Attributes:
        rank, size: of this process in the group.
        device: where tensors of calls are: the current GPU, or the CPU if there is none.
        timeout_s: `timeout_of` the group, when it was first used: a framework may shorten it later.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        here = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.device = torch.device("cpu") if here is None else torch.device("cuda", here)
        self.timeout_s = timeout_of(group)
        self._meeting: Meeting | None = None  # of `barrier`
        self._open: dict[EPConfig, EPCommunicator] = {}
        self._found: dict[EPConfig, EPCommunicator] = {}  # what `get` has answered
        self._counting: dict[EPConfig, Counting] = {}  # made anew they would be empty in a graph's capture

    def get(self, cfg: EPConfig, sms: int | None = None) -> EPCommunicator:
        """A communicator of this configuration, or of one for more tokens.

        Args:
            sms: as of `connect`, where there is none yet.

        Raises:
            EPConfigError, EPError: as of `connect`.
            EPError: there is none yet, and a CUDA graph is being captured.
        """
        if (known := self._found.get(cfg)) is not None:
            return known
        for own, communicator in self._open.items():
            if own.max_tokens_per_rank >= cfg.max_tokens_per_rank and own == replace(
                cfg, max_tokens_per_rank=own.max_tokens_per_rank
            ):
                self._found[cfg] = communicator
                return communicator
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise EPError(f"there is no communicator for {cfg} yet: make this call once before capturing a CUDA graph")
        LOG.info("rank %d connects for %s", self.rank, cfg)
        made = self._open[cfg] = connect(cfg, self._group, sms=sms)
        return made

    def for_tokens(
        self,
        sizes: tuple[int, int, int],
        tokens: int,
        remedy: str,
        *,
        row_alignment: int | None = None,
        sms: int | None = None,
    ) -> EPCommunicator:
        """A communicator for calls in which no rank has more tokens; it waits for late ranks as long as the group does.

        Args:
            sizes: hidden, experts of all ranks, top-k.
            remedy, row_alignment, sms: as of `check_tokens`, `EPConfig` and `connect`; sms None: `sms_beside_nccl`.

        Raises:
            EPInputError: as `check_tokens`.
            EPConfigError, EPError: as `get`.
        """
        check_tokens(tokens, remedy)
        room = room_for(tokens)
        cfg = config_of(*sizes, room, self.size, timeout_s=self.timeout_s, row_alignment=row_alignment)
        return self.get(cfg, sms_or_beside_nccl(self.device, sms))

    def counting(self, words: int, *, sms: int | None = None, timeout_s: float | None = None) -> Counting:
        """What exchanges counts of so many words between the ranks.

        Args:
            words: a multiple of 4, as of `RouteCounts.counts`.
            sms: as of `connect`, where there is no communicator yet; None: `sms_beside_nccl`.
            timeout_s: as of `EPConfig`; None: this one's.

        Raises:
            EPConfigError, EPError: as `get`.
        """
        cfg = counting_config(words, self.size, self.timeout_s if timeout_s is None else timeout_s)
        communicator = self.get(cfg, sms_or_beside_nccl(self.device, sms))
        found = self._counting.get(cfg)
        if found is None or found.communicator is not communicator:
            found = self._counting[cfg] = Counting(communicator)
        return found

    def exchange_counts(
        self, routes: RouteCounts, experts: int, *, sms: int | None = None, timeout_s: float | None = None
    ) -> ReceiveCounts:
        """Send all ranks the counts of this one's tokens, for `experts` experts of all ranks, and wait on the host for
        theirs: collective.

        Args:
            sms, timeout_s: as of `counting`.

        Raises:
            EPConfigError, EPError: as `get`.
            EPTimeout: a rank did not come in time.
        """
        counting = self.counting(routes.counts.size(0), sms=sms, timeout_s=timeout_s)
        counting.exchange(routes.counts)
        return counting.wait(experts)

    def barrier(self) -> None:
        """Wait on the host until all ranks have called this: collective.

        Raises:
            EPError: a rank does not come within the group's timeout, or has ended; says which.
        """
        meeting, self._meeting = self._meeting, None  # after an error the ranks meet anew
        if meeting is None:
            meeting = Meeting(self._group, "call barrier")
        else:
            meeting.wait(meeting.patience_s, "call barrier")
        self._meeting = meeting

    def synchronize(self) -> None:
        """`EPCommunicator.synchronize` of all communicators."""
        for communicator in self._open.values():
            communicator.synchronize()

    def close(self) -> None:
        """Close all communicators; collective."""
        self._found.clear()
        self._counting.clear()
        while self._open:
            self._open.pop(next(iter(self._open))).close()


_SHARED: dict[dist.ProcessGroup, tuple[Connections, set[object]]] = {}


def share(group: dist.ProcessGroup, user: object) -> Connections:
    """The connections that all users of a group in this process have in common, until `release`."""
    if group not in _SHARED:
        _SHARED[group] = Connections(group), set()
    connections, users = _SHARED[group]
    users.add(user)
    return connections


def release(group: dist.ProcessGroup, user: object) -> None:
    """End what `share` began; may be called again. With the last user the communicators close, which is collective."""
    if group not in _SHARED:
        return
    connections, users = _SHARED[group]
    users.discard(user)
    if not users:
        del _SHARED[group]
        connections.close()


def connections_of(group: dist.ProcessGroup) -> Connections:
    """Those of `share`, for users that never release them: graphs and backward passes may need them until `close`."""
    return share(group, None)


def close() -> None:
    """Close all communicators of `share` in this process; collective over each group. Call it before
    `destroy_process_group`. A later forward pass connects again; a backward pass through an output from before raises
    EPInputError."""
    for group, (connections, users) in list(_SHARED.items()):
        users.discard(None)
        if not users:
            del _SHARED[group]
        connections.close()


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long the group's own collectives wait for late ranks, as `EPConfig.timeout_s`; its default where torch does
    not say."""
    found = group_timeout(group)
    return EPConfig.timeout_s if found is None else min(found, LONGEST_S)


def check_tokens(tokens: int, remedy: str) -> None:
    """EPInputError, with what to do about it: the rank with the most tokens has more than any communicator takes."""
    if tokens > MAX_TOKENS_PER_RANK:
        raise EPInputError(
            f"hidden_states.shape[0] = {tokens}, of the rank with the most tokens: must not exceed "
            f"{MAX_TOKENS_PER_RANK}; {remedy}"
        )


def room_for(tokens: int) -> int:
    """`max_tokens_per_rank` of a communicator for calls with so many tokens, if there is one."""
    return max(LEAST_TOKENS, tokens, min(1 << (tokens - 1).bit_length(), MAX_TOKENS_PER_RANK))


def alignment_for(multiple: int) -> int:
    """`row_alignment` of a communicator whose experts want their rows padded to a multiple of this.

    Raises:
        EPConfigError: there is none.
    """
    for alignment in ROW_ALIGNMENTS:
        if alignment % multiple == 0:
            return alignment
    raise EPConfigError(f"padding to a multiple of {multiple} rows: must be a divisor of {ROW_ALIGNMENTS[-1]}")
