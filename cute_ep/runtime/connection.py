"""Making communicators: all ranks in this process, or one process a rank."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig, check_config, is_integer
from cute_ep.api.errors import EPConfigError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.provenance import Origin
from cute_ep.api.validate import check_devices
from cute_ep.layouts.maps.launch import CTAS_PER_SM, FREE_SMS
from cute_ep.layouts.maps.mail import MAX_NODES
from cute_ep.layouts.maps.variants import NO_HOOKS, Hooks
from cute_ep.reference.backend import connect_reference
from cute_ep.reference.processes import connect_processes
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import Allocation, PlainAllocation, enable_all_peers, has_clusters, resident_ctas
from cute_ep.runtime.gpus import FEW_FREE_SMS, check_gpu, ring_bytes, sm_budget, sms_over_nodes
from cute_ep.runtime.join_nodes import Rail, join_nodes, join_rail
from cute_ep.runtime.join_shmem import join_shmem
from cute_ep.runtime.local_kernels import load_local_kernels
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.nodes import NodesCommunicator, node_config
from cute_ep.runtime.parts import RankParts, load_kernels, make_arena, unload_kernels
from cute_ep.runtime.places import Place, check_initialised, check_member, check_places
from cute_ep.runtime.rails.network import slow_network, warn_of_slow_mail
from cute_ep.runtime.rails.transport import NCCL, check_same_transport, check_transport, chosen_transport
from cute_ep.runtime.symmetric import Sharing
from cute_ep.runtime.trial import choose
from cute_ep.tuning.file import find_tuning
from cute_ep.tuning.launch_shape import Tuning

LOG = logging.getLogger(__name__)

LEAST_PATIENCE_S = 10.0
"""Least time that ranks wait for each other when they close, however short `timeout_s` is."""


def connect_local(
    cfg: EPConfig,
    devices: Sequence[str | torch.device],
    *,
    sms: int | None = None,
    library: Path | str | None = None,
    hooks: Hooks = NO_HOOKS,
    tuning: Tuning | None = None,
) -> list[EPCommunicator]:
    """One communicator a rank, all in this process.

    Args:
        cfg: the group's configuration.
        devices: one device a rank: several GPUs; one GPU named `world_size` times (virtual ranks, each on its own
            stream with its share of the SMs); or "cpu" everywhere for the reference backend. "cuda" is the current one.
        sms: SMs that one rank's kernels may take from others: N of them run at most N CTAs, one on each. Default: all,
            with two CTAs on each; where ranks share a GPU, an equal part of all but FREE_SMS, with one.
        library: folder of compiled kernels to look in first, before the package's own and ~/.cache/cute_ep
            (in $XDG_CACHE_HOME, where that is set). A kernel that is in none of them is compiled into the last, where
            the DSL is installed.
        hooks: functions compiled into the kernels (`cute_ep.kernels.hooks`); none on the reference backend.
        tuning: launch shapes, which change times only; None: what `cute-ep tune` found on this machine, else the
            built-in tables (`cute_ep.tuning.builtin`).

    The reference backend checks `sms`, `library` and `tuning`, which it has no use for.

    Raises:
        EPConfigError: wrong number or mix of devices, GPUs without a peer path, an option that breaks its rule, or a
            damaged file of `cute-ep tune`.
        VariantMissing: a kernel is not in the library; the message says how to build it.
    """
    options = _Options(sms, library, hooks, tuning)
    check_config(cfg)
    chosen = check_devices(devices, cfg.world_size)
    options.check()
    if all(device.type == "cpu" for device in chosen):
        options.check_reference()
        return list(connect_reference(cfg))
    found = Library(library)
    if any(device.type != "cuda" for device in chosen):
        raise EPConfigError(f"devices = {[str(device) for device in chosen]}: must be all CUDA or all cpu")
    here = torch.cuda.current_device()
    chosen = [torch.device("cuda", here if device.index is None else device.index) for device in chosen]
    for device in chosen:
        check_gpu("devices", device.index)
    return connect_gpus(cfg, chosen, options, found)


def connect_gpus(
    cfg: EPConfig, devices: Sequence[torch.device], options: _Options, found: Library
) -> list[EPCommunicator]:
    """`connect_local` on GPUs, of arguments that were checked; nodes are then parts of this process."""
    node = _on_gpus(cfg, options.hooks)
    sharing = Counter(devices)
    ctas = {device: _max_ctas(device, options.sms, ranks) for device, ranks in sharing.items()}  # nothing allocated yet
    enable_all_peers(sharing)
    name = torch.cuda.get_device_name(devices[0])
    rings = {device: ring_bytes(device, ctas[device], ranks) for device, ranks in sharing.items()}
    kinds = {device: (ctas[device], rings[device] > 0) for device in sharing}
    tunings = {
        (count, twins): options.tuning or find_tuning(node, name, len(sharing), count, twins=twins)
        for count, twins in set(kinds.values())
    }
    shares = {
        device: _Share(ctas[device], tunings[kinds[device]], rings[device], ranks) for device, ranks in sharing.items()
    }
    open_ranks: list[EPCommunicator] = []
    one_at_a_time, joined = Lock(), object()

    def release(communicator: EPCommunicator) -> None:
        """Free everything once the last rank is closed and all kernels have ended, those that gave up a wait included:
        until then a peer's kernel may write to any arena."""
        with one_at_a_time:
            open_ranks.remove(communicator)
            if open_ranks:
                return
        for device in sharing:
            torch.cuda.synchronize(device)
        everything.close()

    with ExitStack() as undo:
        load_local_kernels([device.index for device in sharing], found)
        parts = []
        for rank, device in enumerate(devices):
            who = Origin(node, cfg.place(rank)[0] if cfg.nodes > 1 else rank, device, options.hooks)
            parts.append(_prepare_rank(who, shares[device], found, undo, first_rank=rank - who.rank))
        addresses = [one.arena.address for one in parts]
        made = []
        for rank, own in enumerate(parts):
            first = own.first_rank
            peers = [addresses[rank]] if cfg.skip_a2a else addresses[first : first + node.peers]
            freed = release if cfg.nodes == 1 else lambda _: None
            communicator = Communicator(own, peers, group=joined, release=freed)
            undo.callback(communicator.free)
            made.append(communicator)
        open_ranks += made if cfg.nodes == 1 else join_nodes(cfg, made, found, undo, release)
        everything = undo.pop_all()
    return list(open_ranks)


def _on_gpus(cfg: EPConfig, hooks: Hooks) -> EPConfig:
    """The configuration of one node; EPConfigError for what nodes on GPUs do not bring."""
    if cfg.nodes == 1:
        return cfg
    if hooks != NO_HOOKS:
        raise EPConfigError(f"hooks = {hooks}: must be Hooks() over {cfg.nodes} nodes")
    if cfg.nodes > MAX_NODES:
        raise EPConfigError(f"ranks_per_node = {cfg.ranks_per_node}: must leave at most {MAX_NODES} nodes on GPUs")
    return node_config(cfg)


@contextmanager
def connected(cfg: EPConfig, devices: Sequence[str | torch.device], **options: Any) -> Iterator[list]:
    """What `connect_local` returns, all of them closed at the end; arguments and errors are the same."""
    communicators = connect_local(cfg, devices, **options)
    try:
        yield communicators
    finally:
        for communicator in communicators:
            communicator.close()


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
        return _connect(check, cfg, meeting, _Options(**options))


def _connect(check: Callable[[], None], cfg: EPConfig, meeting: Meeting, options: _Options) -> EPCommunicator:
    """`connect_checked` of ranks that have met."""

    def look_around() -> tuple[Place, str, tuple[torch.device, _Share] | None]:
        check_config(cfg)
        check()
        options.check()
        transport = chosen_transport(cfg, options.transport)
        if meeting.size != cfg.world_size:
            raise EPConfigError(f"world_size = {cfg.world_size}: the process group has {meeting.size} ranks")
        if not torch.cuda.device_count():
            options.check_reference()
            return Place.of(cfg, None), transport, None
        node, sms = _on_gpus(cfg, options.hooks), options.sms
        device = torch.device("cuda", torch.cuda.current_device())
        if cfg.nodes > 1:
            check_transport(transport)
            sms = sms_over_nodes(device, sms)
        most = _max_ctas(device, sms, 1)
        name, ring = torch.cuda.get_device_name(device), ring_bytes(device, most, 1)
        found = options.tuning or find_tuning(node, name, node.world_size, most, twins=ring > 0)
        return Place.of(cfg, device), transport, (device, _Share(most, found, ring))

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

    def __init__(self, cfg: EPConfig, meeting: Meeting, options: _Options, device: torch.device, share: _Share) -> None:
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
            parts = _prepare_rank(self.who, share, found, undo, first_rank=self.first)
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


@dataclass(frozen=True)
class _Options:
    """What `connect` and `connect_local` may be told, which describe it."""

    sms: int | None = None
    library: Path | str | None = None
    hooks: Hooks = NO_HOOKS
    tuning: Tuning | None = None
    transport: str | None = None

    def check(self) -> None:
        """EPConfigError for what is wrong on any device."""
        if self.sms is not None and not (is_integer(self.sms) and self.sms > 0):
            raise EPConfigError(f"sms = {self.sms!r}: must be an integer from 1 to the number of SMs")
        if not isinstance(self.tuning, Tuning | None):
            raise EPConfigError(f"tuning = {type(self.tuning).__name__}: must be a Tuning")
        if not isinstance(self.hooks, Hooks):
            raise EPConfigError(f"hooks = {type(self.hooks).__name__}: must be Hooks, without arguments for none")

    def check_reference(self) -> None:
        """EPConfigError for what is wrong with those that the reference backend has no use for."""
        Library(self.library)
        if self.hooks != NO_HOOKS:
            raise EPConfigError(f"hooks = {self.hooks}: must be Hooks(), there are none on the reference backend")


@dataclass(frozen=True)
class _Share:
    """What a rank has of its device: CTAs at most, launch shapes for as many, shared memory beyond what kernels were
    compiled for (`ring_bytes`), how many ranks are there, and what makes the allocation of its arena."""

    max_ctas: int
    tuning: Tuning
    ring: int
    ranks: int = 1
    take: Callable[[int], Allocation] = PlainAllocation


def _prepare_rank(who: Origin, share: _Share, library: Library, undo: ExitStack, *, first_rank: int = 0) -> RankParts:
    """What one rank needs before it knows its peers, to be given back by `undo`. `first_rank`: of its node."""
    cfg, rank, device, hooks = who
    started = time.monotonic()
    kernels = load_kernels(cfg, device, library, hooks, share.ring)
    undo.callback(unload_kernels, kernels, device)
    LOG.debug("kernels of %s loaded on %s in %.2f s", cfg.dispatch_format, device, time.monotonic() - started)
    arena = make_arena(cfg, rank, device, share.take)
    undo.callback(arena.free)
    free = resident_ctas(device.index) // CTAS_PER_SM - share.max_ctas
    pairs = 0 < free <= FEW_FREE_SMS and has_clusters(device)
    launches = share.max_ctas, share.tuning, share.ranks > 1
    return RankParts(cfg, rank, device, arena, kernels, hooks, *launches, pairs, free >= 0, share.ring, first_rank)


def _max_ctas(device: torch.device, sms: int | None, ranks_on_device: int) -> int:
    """CTAs of one rank at most; those of all ranks on a device are sure to be resident together.

    The hardware puts CTAs on idle SMs first, so up to as many as there are SMs have one each. An SM that holds a CTA
    takes those of another kernel only if its split of shared memory and L1 fits them (H200, 2026-11-23: beside a
    spinning dispatch_wait, kernels with 16 KB of shared memory do not start, `dispatch_async` among them). So ranks
    that share a device leave SMs without any, or they would keep out what a peer has to run before it can answer.
    """
    budget = sm_budget(device, sms)
    everything = resident_ctas(device.index)
    have = everything // CTAS_PER_SM
    if ranks_on_device > 1:
        return max(1, min(budget, (have - FREE_SMS) // ranks_on_device))
    return everything if budget == have else budget
