"""Communicators of process groups, made when a call first needs one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import torch
import torch.distributed as dist

from cute_ep.api.config import LONGEST_S, EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.api.interface import EPCommunicator
from cute_ep.integrations.common.checks import Names, check_group, check_integer, in_words, own_device, roomy_config
from cute_ep.integrations.common.counts import Counting, ReceiveCounts, counting_config
from cute_ep.integrations.common.reports import Words
from cute_ep.layouts.maps.routing import ROW_ALIGNMENTS
from cute_ep.runtime.connection import connect
from cute_ep.runtime.gpus import sms_or_beside_nccl
from cute_ep.runtime.meeting import Meeting, group_timeout
from cute_ep.runtime.routes import RouteCounts

LOG = logging.getLogger(__name__)
SAME: Mapping[str, str] = MappingProxyType({})
"""Names of an interface that calls the fields of EPConfig as it does."""


class Connections:
    """Finds the communicator for a call, or connects it: then the call is collective. All ranks make the same calls
    with the same sizes, so they connect at the same time.

    Attributes:
        rank, size: of this process in the group.
        device: where tensors of calls are: the current GPU of the first call, or the CPU if there is none.
        timeout_s: `timeout_of` the group, when it was first used: a framework may shorten it later.

    Raises:
        EPConfigError: `group` is no process group, or too large.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        check_group("group", group)
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self.timeout_s = timeout_of(group)
        self._meeting: Meeting | None = None  # of `barrier`
        self._open: dict[EPConfig, EPCommunicator] = {}
        self._found: dict[EPConfig, EPCommunicator] = {}  # what `get` has answered
        self._counting: dict[EPConfig, Counting] = {}  # made anew they would be empty in a graph's capture

    @cached_property
    def device(self) -> torch.device:
        """See above: a process may choose its GPU after a framework has made this."""
        return own_device()

    def get(self, cfg: EPConfig, sms: int | None = None, names: Names = SAME) -> EPCommunicator:
        """A communicator of this configuration, or of one with more room (`serves`).

        Args:
            sms: as of `connect`, where there is none yet.
            names: what an interface calls the fields of EPConfig, for errors.

        Raises:
            EPConfigError, EPError: as of `connect`.
            EPError: there is none yet, and a CUDA graph is being captured.
        """
        if (known := self._found.get(cfg)) is not None:
            return known
        found = [own for own in self._open if serves(own, cfg)]
        if found:
            made = self._open[max(found, key=lambda own: own.max_tokens_per_rank)]
        else:
            if self.capturing():
                raise EPError("the first call of its sizes connects the ranks: make it before capturing a CUDA graph")
            LOG.info("rank %d connects for %s", self.rank, cfg)
            made = self._open[cfg] = self._connect(cfg, sms, names)
        self._found[cfg] = made
        return made

    def _connect(self, cfg: EPConfig, sms: int | None, names: Names) -> EPCommunicator:
        try:
            return connect(cfg, self._group, sms=sms)
        except EPConfigError as error:
            raise EPConfigError(in_words(str(error), names)) from None

    def capturing(self) -> bool:
        """Whether what the current stream is given goes into a CUDA graph."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def raise_found(self, words: Words) -> None:
        """Raise what is known by now to be wrong with earlier calls' input, once, without waiting (`reports`). To be
        called before a call sends anything.

        Raises:
            EPInputError: an expert id was out of range, or more rows came than there was room for.
        """
        for communicator in self._open.values():
            if found := communicator.take_input_errors():
                words.raise_found(communicator, found)

    def config(
        self, names: Names, sizes: tuple[int, int, int], tokens: int, row_alignment: int | None = None
    ) -> EPConfig:
        """That of `for_tokens`. EPInputError: an argument breaks its rule."""
        return roomy_config(names, *sizes, tokens, self.size, timeout_s=self.timeout_s, row_alignment=row_alignment)

    def for_tokens(
        self,
        names: Names,
        sizes: tuple[int, int, int],
        tokens: int,
        *,
        row_alignment: int | None = None,
        sms: int | None = None,
    ) -> EPCommunicator:
        """A communicator for calls in which no rank has more tokens; it waits for late ranks as long as the group does.

        Args:
            names: as of `get`.
            sizes: hidden, experts of all ranks, top-k.
            row_alignment, sms: as of `EPConfig` and `connect`; sms None: `sms_beside_nccl`.

        Raises:
            EPInputError: a size breaks a rule of EPConfig.
            EPConfigError, EPError: as `get`.
        """
        cfg = self.config(names, sizes, tokens, row_alignment)
        return self.get(cfg, sms_or_beside_nccl(self.device, sms), names)

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

    def synchronize(self, words: Words) -> None:
        """Wait for this rank's work on all communicators, and raise what was found wrong: EPInputError as of
        `raise_found`, EPTimeout as of `EPCommunicator.synchronize`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.raise_found(words)
        for communicator in self._open.values():
            communicator.synchronize()

    def close(self) -> None:
        """Close all communicators; collective. What was found wrong with their input, and not told, is logged."""
        self._found.clear()
        self._counting.clear()
        while self._open:
            self._close(next(iter(self._open)))

    def _close(self, cfg: EPConfig) -> None:
        """Close one; collective."""
        communicator = self._open.pop(cfg)
        if found := communicator.take_input_errors():
            LOG.warning("rank %d: wrong input was found, and no later call has told: %s", self.rank, found)
        communicator.close()


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


def serves(own: EPConfig, cfg: EPConfig) -> bool:
    """Whether a communicator of configuration `own` takes the calls of `cfg`: with room for as many tokens, and in
    blocks as large; all else is the same. Blocks are as large as the call's buffers."""
    blocks = own.block_rows
    if own.max_tokens_per_rank < cfg.max_tokens_per_rank or (blocks is None) != (cfg.block_rows is None):
        return False
    if blocks is not None and cfg.block_rows is not None and blocks < cfg.block_rows:
        return False
    return own == replace(cfg, max_tokens_per_rank=own.max_tokens_per_rank, block_rows=blocks)


def alignment_for(multiple: int, name: str = "padding") -> int:
    """`row_alignment` of a communicator whose experts want their rows padded to a multiple of this.

    Args:
        name: what an interface calls the multiple.

    Raises:
        EPConfigError: there is none.
    """
    check_integer(name, multiple, error=EPConfigError)
    for alignment in ROW_ALIGNMENTS:
        if alignment % multiple == 0:
            return alignment
    raise EPConfigError(f"{name} = {multiple}: must be a divisor of {ROW_ALIGNMENTS[-1]}")
