"""Making communicators of ranks that are all in this process; `process_connection` has a process a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig, is_integer
from cute_ep.api.config_rules import check_config
from cute_ep.api.errors import EPConfigError
from cute_ep.api.host import refuse_capture
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.provenance import Origin
from cute_ep.api.validate import check_devices
from cute_ep.layouts.maps.mail import MAX_NODES
from cute_ep.layouts.maps.variants import NO_HOOKS, Hooks
from cute_ep.reference.backend import connect_reference
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import enable_all_peers
from cute_ep.runtime.gpus import check_gpu
from cute_ep.runtime.join_nodes import join_nodes
from cute_ep.runtime.local_kernels import load_local_kernels
from cute_ep.runtime.nodes import node_config
from cute_ep.runtime.parts import prepare_rank, share_of
from cute_ep.tuning.file import find_tuning
from cute_ep.tuning.launch_shape import Tuning


@dataclass(frozen=True)
class Options:
    """What `connect` and `connect_local` may be told, which describe it."""

    sms: int | None = None
    library: Path | str | None = None
    hooks: Hooks = NO_HOOKS
    tuning: Tuning | None = None
    transport: str | None = None

    def check(self) -> None:
        """EPConfigError for what is wrong on any device."""
        if self.sms is not None and not (is_integer(self.sms) and self.sms > 0):
            raise EPConfigError(f"sms = {self.sms!r}: must be an integer from 1 to the number of SMs, or None for all")
        if not isinstance(self.tuning, Tuning | None):
            raise EPConfigError(f"tuning = {type(self.tuning).__name__}: must be a Tuning")
        if not isinstance(self.hooks, Hooks):
            raise EPConfigError(f"hooks = {type(self.hooks).__name__}: must be Hooks, without arguments for none")

    def finder(self, cfg: EPConfig, device: torch.device, gpus: int) -> Callable[..., Tuning]:
        """`find_tuning` for `cfg` on so many GPUs as this one, which reads each table once; or what gives `tuning`."""
        if self.tuning is not None:
            given = self.tuning
            return lambda ctas, *, ring_bytes: given
        return cache(partial(find_tuning, cfg, torch.cuda.get_device_name(device), gpus))

    def check_reference(self) -> None:
        """EPConfigError for what is wrong with those that the reference backend has no use for."""
        Library(self.library)
        if self.hooks != NO_HOOKS:
            raise EPConfigError(f"hooks = {self.hooks}: must be Hooks(), there are none on the reference backend")


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
        sms: SMs that one rank's kernels may take from others: N of them run at most N CTAs, one on each. Default, and
            where N is all: all SMs, with two CTAs on each. Where ranks share a GPU, each has at most an equal part of
            all but FREE_SMS, with one CTA on each.
        library: folder of compiled kernels to look in first, before the package's own and ~/.cache/cute_ep
            (in $XDG_CACHE_HOME, where that is set). A kernel that is in none of them is compiled into the last, where
            the DSL is installed.
        hooks: functions compiled into the kernels (`cute_ep.kernels.hooks`); none on the reference backend.
        tuning: launch shapes, which change times only; None: what `cute-ep tune` found on this machine, else the
            built-in tables (`cute_ep.tuning.builtin`).

    The reference backend has no use for `sms`, `library` and `tuning`. It checks them, but for how many SMs there are.

    Raises:
        EPConfigError: wrong number or mix of devices, GPUs without a peer path, an option that breaks its rule, or a
            damaged file of `cute-ep tune`.
        VariantMissing: a kernel is not in the library; the message says how to build it.
    """
    options = Options(sms, library, hooks, tuning)
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
        refuse_capture(device, "connect_local")
    return connect_gpus(cfg, chosen, options, found)


def connect_gpus(
    cfg: EPConfig, devices: Sequence[torch.device], options: Options, found: Library
) -> list[EPCommunicator]:
    """`connect_local` on GPUs, of arguments that were checked; nodes are then parts of this process."""
    node = on_gpus(cfg, options.hooks)
    sharing = Counter(devices)
    find = options.finder(node, devices[0], len(sharing))
    # refuses a wrong budget before anything is allocated
    shares = {device: share_of(device, options.sms, find, ranks=ranks) for device, ranks in sharing.items()}
    enable_all_peers(sharing)
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
            parts.append(prepare_rank(who, shares[device], found, undo, first_rank=rank - who.rank))
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


def on_gpus(cfg: EPConfig, hooks: Hooks) -> EPConfig:
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
