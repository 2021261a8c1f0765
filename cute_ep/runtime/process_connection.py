"""Making the communicator of this process's rank, with a process a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import check_config
from cute_ep.api.errors import EPConfigError
from cute_ep.api.host import refuse_capture
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.provenance import Origin
from cute_ep.layouts.maps.variants import NO_HOOKS, Hooks
from cute_ep.reference.processes import connect_processes
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.connection import Options, on_gpus
from cute_ep.runtime.gpus import sms_over_nodes
from cute_ep.runtime.join_nodes import Rail, join_rail
from cute_ep.runtime.join_shmem import join_shmem
from cute_ep.runtime.local_kernels import load_local_kernels
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.nodes import NodesCommunicator, node_config
from cute_ep.runtime.parts import RankParts, Share, prepare_rank, share_of
from cute_ep.runtime.places import Place, check_initialised, check_member, check_places
from cute_ep.runtime.rails.network import slow_network, warn_of_slow_mail
from cute_ep.runtime.rails.transport import NCCL, check_same_transport, check_transport, chosen_transport
from cute_ep.runtime.symmetric import Sharing
from cute_ep.runtime.trial import choose
from cute_ep.tuning.launch_shape import Tuning

LEAST_PATIENCE_S = 10.0
"""Least time that ranks wait for each other when they close, however short `timeout_s` is."""


def connect(
    cfg: EPConfig,
    group: dist.ProcessGroup | None = None,
    *,
    sms: int | None = None,
    library: Path | str | None = None,
    hooks: Hooks = NO_HOOKS,
    tuning: Tuning | None = None,
    transport: str | None = None,
) -> EPCommunicator:
    """This process's communicator, on its current CUDA device; collective over `group`, and so is its `close`.

    The ranks meet through the group's store, so it is no collective of the group itself. Groups of the same ranks
    connect in the same order on all of them, also from several threads.

    The ranks of a node are on one machine, and share memory by file descriptors, else by CUDA IPC; or they are in one
    NVLink domain, and share it by fabric handles. The logger `cute_ep` tells which was taken, and why. Between nodes
    NCCL or NVSHMEM carries tokens and sums (docs/nodes.md). Where no rank has a GPU it is the reference backend, on the
    CPU (`cute_ep.reference.processes`), whose calls wait for their results.

    Args:
        cfg: the group's configuration; must be the same on every rank.
        group: an initialised process group of `world_size` ranks; None: the default group.
        sms, library, hooks, tuning: as in `connect_local`; ranks may have different `tuning`. Over nodes `sms` leave
            FREE_SMS to exchanges.
        transport: what carries mail between nodes of GPUs, the same on all ranks: "nccl", or "nvshmem", which brings
            sums of mode "partial" only; None: NCCL. CPU ranks have no use for it, and one node has none.

    Raises:
        EPConfigError: there is no process group, the group's size or another rank's configuration differs, two ranks
            are on one GPU, two of a node on two machines that are not in one NVLink domain, the ranks of a node cannot
            share memory, only some ranks have a GPU, PyTorch has no NCCL for several nodes or `transport` no library,
            an option breaks its rule, or a damaged file of `cute-ep tune`.
        VariantMissing: a kernel is not in the library.
        EPError: another rank could not connect, did not come within the process group's timeout, ended, or took more
            than half an hour from then on; says which and why. Meanwhile the logger `cute_ep` warns of a long wait.
    """
    options = {"sms": sms, "library": library, "hooks": hooks, "tuning": tuning, "transport": transport}
    return connect_checked(lambda: None, cfg, group, **options)


def connect_checked(
    check: Callable[[], None], cfg: EPConfig, group: dist.ProcessGroup | None, **options: Any
) -> EPCommunicator:
    """`connect`, which fails on all ranks where `check` raises on one."""
    if not dist.is_initialized():
        check_config(cfg)
        check_initialised(group, f' (without GPUs: connect_local(cfg, ["cpu"] * {cfg.world_size}))')
    check_member(group)
    with Meeting(group) as meeting:
        return _connect(check, cfg, meeting, Options(**options))


def _connect(check: Callable[[], None], cfg: EPConfig, meeting: Meeting, options: Options) -> EPCommunicator:
    """`connect_checked` of ranks that have met."""

    def look_around() -> tuple[Place, str, tuple[torch.device, Share] | None]:
        check_config(cfg)
        check()
        options.check()
        transport = chosen_transport(cfg, options.transport)
        if meeting.size != cfg.world_size:
            raise EPConfigError(f"world_size = {cfg.world_size}: the process group has {meeting.size} ranks")
        if not torch.cuda.device_count():
            options.check_reference()
            return Place.of(cfg, None), transport, None
        node, sms = on_gpus(cfg, options.hooks), options.sms
        device = torch.device("cuda", torch.cuda.current_device())
        refuse_capture(device, "connect")
        if cfg.nodes > 1:
            check_transport(transport)
            sms = sms_over_nodes(device, sms)
        share = share_of(device, sms, options.finder(node, device, node.world_size))
        return Place.of(cfg, device), transport, (device, share)

    (_, transport, gpu), said = meeting.on_all_ranks(look_around, lambda found: found[:2], doing="look at its device")
    places, transports = zip(*said, strict=True)
    check_places(meeting.rank, places)
    check_same_transport(transports)
    if gpu is None:
        return connect_processes(cfg, meeting.rank, meeting.on_all_ranks)
    if cfg.nodes > 1 and transport == NCCL:
        warn_of_slow_mail(cfg, meeting.rank, places, slow_network())
    return _ProcessRank(cfg, meeting, options, *gpu).connect([one.machine for one in places], transport)


class _ProcessRank:
    """This process's rank, on a GPU of its own: what it has until `release`."""

    def __init__(self, cfg: EPConfig, meeting: Meeting, options: Options, device: torch.device, share: Share) -> None:
        self.cfg, self.meeting, self.options, self.device, self.share = cfg, meeting, options, device, share
        place = meeting.rank if cfg.nodes == 1 else cfg.place(meeting.rank)[0]
        self.node = cfg if cfg.nodes == 1 else node_config(cfg)
        self.first = meeting.rank - place
        self.patience = max(2 * cfg.timeout_s, LEAST_PATIENCE_S)
        self.who = Origin(self.node, place, device, options.hooks)
        self.rail: Rail | None = None

    def connect(self, machines: Sequence[str], transport: str) -> EPCommunicator:
        """Its communicator; collective.

        Args:
            machines: of all ranks, or what stands for the NVLink domain of each.
            transport: between nodes.
        """
        cfg, meeting = self.cfg, self.meeting
        ranks = [meeting.rank] if cfg.skip_a2a else list(range(self.first, self.first + self.node.peers))
        with closing(choose(meeting, len(ranks), machines, self.device)) as sharing, ExitStack() as undo:
            (parts, self.own), offers = meeting.on_all_ranks(
                lambda: self._prepare(sharing),
                lambda made: sharing.offer(made[0].arena.allocation),
                lambda made: made[1].close(),
                "load kernels and allocate memory",
            )
            undo.callback(self._free_unmapped)
            (mapped, self.mappings), _ = meeting.on_all_ranks(
                lambda: self._map(sharing, {peer: offers[peer] for peer in ranks if peer != meeting.rank}),
                undo=lambda made: made[1].close(),
                doing="map the memory of its peers",
            )
            undo.callback(self.mappings.close)
            theirs = {peer: address + self.node.arena.begin(peer - self.first) for peer, address in mapped.items()}
            addresses = [theirs.get(peer, parts.arena.address) for peer in ranks]
            self.communicator, _ = meeting.on_all_ranks(
                lambda: Communicator(parts, addresses, group=meeting, release=self.release),
                undo=lambda made: made.free(),
                doing="finish connecting",
            )
            undo.callback(self.communicator.free)
            if cfg.nodes > 1:
                join = join_rail if transport == NCCL else join_shmem
                self.rail = join(cfg, self.communicator, Library(self.options.library), meeting)
            undo.pop_all()
        if self.rail is None:
            return self.communicator
        return NodesCommunicator(self.communicator, self.rail.mail, self.rail.status, release=self.release)

    def _prepare(self, sharing: Sharing) -> tuple[RankParts, ExitStack]:
        with ExitStack() as undo:
            found = Library(self.options.library)
            load_local_kernels([self.device.index], found)
            share = replace(self.share, take=sharing.take)
            parts = prepare_rank(self.who, share, found, undo, first_rank=self.first)
            return parts, undo.pop_all()

    def _map(self, sharing: Sharing, offers: Mapping[int, Any]) -> tuple[dict[int, int], ExitStack]:
        """Where the memory of each peer is, and what unmaps it."""
        with ExitStack() as undo:
            mapped = {}
            for peer, offer in offers.items():
                mapped[peer] = sharing.open(peer, offer)
                undo.callback(sharing.shut, mapped[peer])
            return mapped, undo.pop_all()

    def _free_unmapped(self) -> None:
        """Nobody frees what a peer has mapped: if the ranks have lost each other, nobody frees."""
        self.meeting.wait(self.patience, "unmap memory")
        self.own.close()

    def release(self, _: EPCommunicator) -> None:
        """Collective: unmap and free once all kernels of every rank have ended, those that gave up a wait included;
        keep all memory when some rank does not come or its device failed, whose error is raised once the others
        know."""
        failure: Exception | None = None
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            failure = error
        keep = True
        try:
            keep = any(self.meeting.gather(failure is not None, self.patience, "close"))
        finally:
            if self.rail is not None:
                try:
                    self.rail.leave(self.patience, abort=keep)
                except Exception as error:  # the others wait for this rank below
                    failure = failure or error
        if not keep:
            try:
                self.mappings.close()
            finally:
                self.meeting.wait(self.patience, "unmap memory")
            self.communicator.free()
            self.own.close()
        if failure is not None:
            raise failure
