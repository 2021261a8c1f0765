"""Pools of process groups, of which a process has one rank. `pool` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from cute_ep.api.config import LONGEST_S, EPConfig
from cute_ep.api.config_rules import in_words
from cute_ep.api.errors import EPConfigError
from cute_ep.api.interface import EPCommunicator
from cute_ep.runtime import process_connection
from cute_ep.runtime.counts import CountExchange, Counting, ReceiveCounts, counting_config
from cute_ep.runtime.gpus import sms_beside_nccl
from cute_ep.runtime.meeting import Meeting, group_timeout
from cute_ep.runtime.places import check_member, count_ranks
from cute_ep.runtime.pool import Opened, Opening, Pool, all_sms
from cute_ep.runtime.routes import RouteCounts, count_routes

SAME: Mapping[str, str] = MappingProxyType({})
"""Names of an interface that calls the fields of EPConfig as it does."""
MOST_KEPT = 1024
"""Kinds of calls for which a pool keeps something."""


def own_device() -> torch.device:
    """Where this process's tensors are: the current GPU, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long the group's own collectives wait for late ranks, as `EPConfig.timeout_s`; its default where torch does
    not say."""
    found = group_timeout(group)
    return EPConfig.timeout_s if found is None else min(found, LONGEST_S)


class GroupPool(Pool):
    """Communicators of a process group, of which this process has one rank.

    Attributes:
        group: the process group.
        rank, size: of this process in the group.
        device: where tensors of calls are: the current GPU of the first call, or the CPU if there is none.
        timeout_s: `timeout_of` the group, when it was first used: a framework may shorten it later.
        latest: what users have learnt of the most tokens of a rank in their last call of a configuration.
        owed: exchanges of such calls that ended before this rank had heard the counts, as the others have.
        kept: what users have found out for calls of a kind, until a communicator opens or closes.

    Raises:
        EPConfigError: this process is no rank of the group.
    """

    def __init__(self, group: dist.ProcessGroup, *, grows: bool = False) -> None:
        check_member(group)
        super().__init__(grows=grows)
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.timeout_s = timeout_of(group)
        self.latest: dict[EPConfig, int] = {}
        self.owed: dict[EPConfig, CountExchange] = {}
        self.kept: dict[Hashable, Any] = {}
        self._meeting: Meeting | None = None  # of `barrier`
        self._found: dict[Hashable, EPCommunicator] = {}  # what `get` has answered
        self._counting: dict[EPCommunicator, Counting] = {}  # made anew they would be empty in a graph's capture

    @cached_property
    def device(self) -> torch.device:
        """See above: a process may choose its GPU after a framework has made this."""
        return own_device()

    @cached_property
    def ranks_per_node(self) -> int | None:
        """For `EPConfig.ranks_per_node`; None: all ranks are on one node. The first time it is collective.

        Raises:
            EPConfigError, EPError: as of `cute_ep.ranks_per_node`.
        """
        found = count_ranks(self.group, "connect")
        return None if found == self.size else found

    def get(
        self, cfg: EPConfig, sms: int | None = None, opening: Opening = all_sms, names: Mapping[str, str] = SAME
    ) -> EPCommunicator:
        """The communicator for calls of this configuration; opens one where there is none, then collective.

        Args:
            sms: the number that is demanded, or None.
            opening: SMs of what is opened without a demand.
            names: what an interface calls the fields of EPConfig, for errors.

        Raises:
            EPConfigError, EPError: as of `open`.
        """
        known = self.known(cfg, sms)
        if known is not None:
            return known
        try:
            opened = self.open(cfg, sms, opening)
        except EPConfigError as error:
            raise EPConfigError(in_words(str(error), names)) from None
        self._forget()  # smaller calls find the roomiest
        self._found[cfg, sms] = opened.first
        return opened.first

    def known(self, cfg: EPConfig, sms: int | None = None) -> EPCommunicator | None:
        """What `get` answers without opening anything; None: it would have to. The same on all ranks."""
        key = cfg, sms
        known = self._found.get(key)
        if known is None and (found := self.find(cfg, sms)) is not None:
            known = self._found[key] = found.first
        return known

    def counting(
        self,
        words: int,
        *,
        sms: int | None = None,
        opening: Opening = sms_beside_nccl,
        timeout_s: float | None = None,
        ranks_per_node: int | None = None,
    ) -> Counting:
        """What exchanges counts of so many words between the ranks.

        Args:
            words: a multiple of 4, as of `RouteCounts.counts`.
            sms, opening: as of `get`.
            timeout_s, ranks_per_node: as of `EPConfig`; no timeout: this one's.

        Raises:
            EPConfigError, EPError: as of `open`.
        """
        cfg = counting_config(words, self.size, self.timeout_s if timeout_s is None else timeout_s, ranks_per_node)
        communicator = self.get(cfg, sms, opening)
        found = self._counting.get(communicator)
        if found is None:
            found = self._counting[communicator] = Counting(communicator)
        return found

    def begin_counts(
        self, topk_ids: torch.Tensor, cfg: EPConfig, sms: int | None = None, **options: Any
    ) -> tuple[CountExchange, RouteCounts]:
        """Send all ranks the counts of this one's tokens, before a dispatch by `cfg`: collective, and nothing waits on
        the host. `options`: of `count_routes`.

        Raises:
            EPConfigError, EPError: as of `open`, and of `Counting.exchange`.
            EPInputError: as of `count_routes`.
        """
        routes = count_routes(topk_ids, cfg.num_experts, cfg.world_size, **options)
        key = "counting", routes.words, sms, cfg.timeout_s, cfg.ranks_per_node
        counting: Counting | None = self.kept.get(key)
        if counting is None:
            made: dict[str, Any] = {"timeout_s": cfg.timeout_s, "ranks_per_node": cfg.ranks_per_node}
            counting = self.counting(routes.words, sms=sms, **made)
            self.keep(key, counting)
        return counting.exchange(routes.sent, cfg.num_experts), routes

    def keep(self, kind: Hashable, found: object) -> None:
        """Keep what was found out for calls of a kind."""
        if len(self.kept) >= MOST_KEPT:
            self.kept.clear()
        self.kept[kind] = found

    @contextmanager
    def owing(self, cfg: EPConfig, exchange: CountExchange, heard: Sequence[ReceiveCounts]) -> Iterator[None]:
        """Around what may end, as by an interrupt, before the counts of an exchange were `heard`: then it is `owed`."""
        try:
            yield
        except BaseException:
            if heard:
                self.latest[cfg] = heard[0].tokens
            else:
                self.owed[cfg] = exchange
            raise

    def barrier(self) -> None:
        """Wait on the host until all ranks have called this: collective.

        Raises:
            EPError: a rank does not come within the group's timeout, or has ended; says which.
        """
        meeting, self._meeting = self._meeting, None  # after an error the ranks meet anew
        if meeting is None:
            meeting = Meeting(self.group, "call barrier")
        else:
            meeting.wait(meeting.patience_s, "call barrier")
        self._meeting = meeting

    def _connect(self, cfg: EPConfig, check: Callable[[], None], **options: Any) -> tuple[EPCommunicator, ...]:
        return (process_connection.connect_checked(check, cfg, self.group, **options),)

    def _agree(self, needed: dict[Hashable, bool]) -> list[dict[Hashable, bool]]:
        return gather(self.group, needed)

    def _make_way(self, cfg: EPConfig) -> None:
        super()._make_way(cfg)
        self._forget()  # smaller calls take the larger one from now on

    def _forget(self) -> None:
        self._found.clear()
        self.kept.clear()

    def _close(self, one: Opened) -> None:
        self._forget()
        self.latest.clear()
        self.owed.clear()
        counting = self._counting.pop(one.first, None)
        super()._close(one)
        if counting is not None:
            counting.free()


def gather(group: dist.ProcessGroup, one: Any) -> list:
    """What every rank gives, in the order of ranks; collective. EPError: a rank does not come, or connects instead."""
    call = "agree on which memory to give back"
    with Meeting(group, call) as meeting:
        return meeting.gather(one, meeting.patience_s, call)


class Pools:
    """Pools of process groups, one for each, which its users have in common."""

    def __init__(self) -> None:
        self._pools: dict[dist.ProcessGroup, tuple[GroupPool, set[object]]] = {}

    def __iter__(self) -> Iterator[GroupPool]:
        return (pool for pool, _ in list(self._pools.values()))

    def __bool__(self) -> bool:
        return bool(self._pools)

    def of(self, group: dist.ProcessGroup, user: object = None) -> GroupPool:
        """The pool that all users of a group share, until `release`. Those who name no user never release it, since
        graphs and backward passes may need it until `close`."""
        if (found := self._pools.get(group)) is None:
            found = self._pools.setdefault(group, (GroupPool(group), set()))
        found[1].add(user)
        return found[0]

    def release(self, group: dist.ProcessGroup, user: object) -> None:
        """End what `of` began; may be called again. With the last user the pool closes, which is collective."""
        if group not in self._pools:
            return
        pool, users = self._pools[group]
        if users <= {user}:
            pool.check_may_close()
        users.discard(user)
        if not users:
            del self._pools[group]
            pool.close()

    def close(self) -> None:
        """Close all communicators, collective over each group; users that have not released a pool may call again."""
        for group, (pool, users) in list(self._pools.items()):
            pool.check_may_close()
            users.discard(None)
            if not users:
                del self._pools[group]
            pool.close()
