"""Pools of communicators: how users find one, and when it is opened, kept and closed.

| question | rule |
| --- | --- |
| Who shares a communicator? | Users of one pool. `serves` says which calls one takes; a layer takes its own \
configuration only. Of several the roomiest is found. One that was closed is found no more. |
| What does `sms` mean? | A number is a demand: only what was opened for the same demand is found. None takes any, and \
what is opened then gets as many as `opening` says, over nodes FREE_SMS fewer. |
| What if a rank cannot open? | All ranks raise, the others with the rank's name and reason, and none keeps any. \
What was open before stays. |
| What if a round has failed? | The communicator counts as open, since the round may have failed on this rank only: \
ranks must find alike. Its calls raise until all ranks close it. |
| What of CUDA graphs? | A capture opens nothing. What a graph was captured with stays open until `close`. |
| When does a smaller one give way? | In a pool that grows, when one opens that serves its calls, unless a rank has a \
hold of it or has captured with it. In other pools never: there users keep names, which they do not give back. |
| When is it closed? | By `close`, on all ranks, before the process group is destroyed. A group that was destroyed is \
another one than its successor, so nothing of it is found. The end of a process closes nothing. |

All ranks of a pool make the same requests in the same order, so they find and open alike.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.api.host import is_capturing, refuse_capture
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.launch import FREE_SMS

LOG = logging.getLogger(__name__)
Opening = Callable[[torch.device], "int | None"]
"""Says of a device with how many SMs a communicator is opened for which no number was demanded; None: all."""


def all_sms(device: torch.device) -> None:
    """An `Opening`."""


def serves(own: EPConfig, cfg: EPConfig) -> bool:
    """Whether a communicator of configuration `own` takes the calls of `cfg`: with room for as many tokens, and in
    blocks as large; all else is the same. Blocks are as large as the call's buffers."""
    blocks = own.block_rows
    if own.max_tokens_per_rank < cfg.max_tokens_per_rank or (blocks is None) != (cfg.block_rows is None):
        return False
    if blocks is not None and cfg.block_rows is not None and blocks < cfg.block_rows:
        return False
    return own == replace(cfg, max_tokens_per_rank=own.max_tokens_per_rank, block_rows=blocks)


class Opened(NamedTuple):
    """What was opened together.

    Attributes:
        communicators: of the ranks in this process, which have one configuration.
        sms: what was demanded.
    """

    communicators: tuple[EPCommunicator, ...]
    sms: int | None

    @property
    def first(self) -> EPCommunicator:
        """Stands for all of them."""
        return self.communicators[0]

    def fits(self, cfg: EPConfig, sms: int | None, layer_on: torch.device | None) -> bool:
        """Whether a request finds it (`Pool.find`)."""
        one = self.first
        alike = serves(one.cfg, cfg) if layer_on is None else one.cfg == cfg and one.device == layer_on
        return alike and sms in (None, self.sms) and not one.closed


class Hold:
    """Keeps a communicator open in a pool that grows, as long as it lives, or until it is ended."""

    __slots__ = ("_all", "communicator")

    def __init__(self, communicator: EPCommunicator, everyone: set[int]) -> None:
        """`everyone`: the ids of all holds of the communicator; adding and discarding one is atomic."""
        self.communicator, self._all = communicator, everyone
        everyone.add(id(self))

    def end(self) -> None:
        """From now on a larger communicator may take the place of this one."""
        self._all.discard(id(self))

    __del__ = end


class Pool:
    """What both kinds of pools do.

    Args:
        grows: whether users hold what they need (`hold`, `note_capture`), and all else gives way to what has more room.

    Attributes:
        communicators: all that are open, in the order of opening.
    """

    def __init__(self, *, grows: bool) -> None:
        self.communicators: list[EPCommunicator] = []
        self._grows = grows
        self._open: list[Opened] = []
        self._holds: dict[EPCommunicator, set[int]] = defaultdict(set)
        self._captured: set[EPCommunicator] = set()

    @cached_property
    def device(self) -> torch.device:
        """Where tensors of calls are, of the first rank that this process has."""
        raise NotImplementedError

    def capturing(self) -> bool:
        """As `is_capturing`."""
        return is_capturing(self.device)

    def find(self, cfg: EPConfig, sms: int | None = None, *, layer_on: torch.device | None = None) -> Opened | None:
        """What a request for this configuration finds; None: it must open one. `layer_on`: of a layer on this device,
        which takes its very configuration."""
        found = [one for one in self._open if one.fits(cfg, sms, layer_on)]
        return max(found, key=lambda one: one.first.cfg.max_tokens_per_rank, default=None)

    def open(
        self,
        cfg: EPConfig,
        sms: int | None = None,
        opening: Opening = all_sms,
        check: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> Opened:
        """Open what `find` has not found; collective.

        Args:
            check: raises what keeps this rank from opening, once all ranks have come: so all learn it.
            options: of `connect`, but `sms`.

        Raises:
            EPConfigError, VariantMissing, EPError: as of `connect`; no rank keeps anything.
            EPError: a CUDA graph is being captured.
        """
        if self.capturing():
            raise EPError("the first call of its sizes connects the ranks: make it before capturing a CUDA graph")
        if self._grows:
            self._make_way(cfg)
        LOG.info("connecting for %s", cfg)
        given = opening(self.device) if sms is None else sms
        if sms is None and given is not None and cfg.nodes > 1:  # exchanges between nodes take as many beside others'
            given = max(1, given - FREE_SMS)
        made = Opened(self._connect(cfg, check, sms=given, **options), sms)
        self._open.append(made)
        self.communicators += made.communicators
        return made

    def hold(self, communicator: EPCommunicator) -> Hold:
        """A hold of a communicator that was found, for calls to come."""
        return Hold(communicator, self._holds[communicator])

    def note_capture(self, communicator: EPCommunicator) -> bool:
        """To be called with each launch in a pool that grows: keeps the communicator open for good if the launch goes
        into a CUDA graph. Whether it does."""
        capturing = self.capturing()
        if capturing:
            self._captured.add(communicator)
        return capturing

    def check_may_close(self) -> None:
        """EPError where something is open, and a CUDA graph is being captured."""
        if self._open:
            refuse_capture(self.device, "close")

    def close(self, communicators: Sequence[EPCommunicator] | None = None) -> None:
        """Close these, or all, on all ranks; may be called again. What was found wrong with their input, and not told,
        is logged. EPError: a CUDA graph is being captured; all stay open."""
        self.check_may_close()
        for one in list(self._open):
            if communicators is None or one.first in communicators:
                self._close(one)

    def _connect(self, cfg: EPConfig, check: Callable[[], None], **options: Any) -> tuple[EPCommunicator, ...]:
        raise NotImplementedError

    def _agree(self, needed: dict[Hashable, bool]) -> list[dict[Hashable, bool]]:
        """What every rank needs."""
        return [needed]

    def _make_way(self, cfg: EPConfig) -> None:
        """Close what is smaller and needed by no rank."""
        smaller = {(one.first.cfg, one.sms): one for one in self._open if serves(cfg, one.first.cfg)}
        if smaller:
            wanted = self._agree({key: self._is_needed(one) for key, one in smaller.items()})
            for key, one in smaller.items():
                if not any(needed.get(key, True) for needed in wanted):
                    self._close(one)

    def _is_needed(self, one: Opened) -> bool:
        return one.first in self._captured or bool(self._holds[one.first])

    def _close(self, one: Opened) -> None:
        self._open.remove(one)
        self._holds.pop(one.first, None)
        self._captured.discard(one.first)
        for communicator in one.communicators:
            self.communicators.remove(communicator)
            if found := communicator.take_input_errors():
                LOG.warning("rank %d: wrong input was found, and no later call has told: %s", communicator.rank, found)
            communicator.close()
