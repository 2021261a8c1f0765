"""Making communicators: all ranks in this process, or one process a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from cute_ep.communicator import Communicator, load_kernels
from cute_ep.config import EPConfig, memory_bytes
from cute_ep.driver import DeviceMemory, close_handle, enable_peer_access, open_handle
from cute_ep.errors import EPConfigError
from cute_ep.layouts.variants import NO_HOOKS, Hooks
from cute_ep.library import Library
from cute_ep.reference_backend import ReferenceCommunicator, connect_reference
from cute_ep.tuning import CTAS_PER_SM, Tuning
from cute_ep.tuning_file import find_tuning


def connect_local(
    cfg: EPConfig,
    devices: Sequence[str | torch.device],
    *,
    sms: int | None = None,
    library: Path | str | None = None,
    hooks: Hooks = NO_HOOKS,
    tuning: Tuning | None = None,
) -> list[Communicator] | list[ReferenceCommunicator]:
    """One communicator a rank, all in this process.

    Args:
        cfg: the group's configuration.
        devices: one device a rank: several GPUs; one GPU named `world_size` times (virtual ranks, each on its own
            stream with its share of the SMs); or "cpu" everywhere for the reference backend.
        sms: SMs that one rank's kernels may use; default all (shared equally by ranks on one GPU).
        library: folder of compiled kernels to look in first.
        hooks: functions compiled into the kernels (`cute_ep.kernels.hooks`); none on the reference backend.
        tuning: launch shapes, which change times only; None: what `cute-ep tune` found on this machine, else the
            built-in tables (`cute_ep.tuning`).

    Raises:
        EPConfigError: wrong number or mix of devices, GPUs without a peer path, or a damaged file of `cute-ep tune`.
        VariantMissing: a kernel is not in the library; the message says how to build it.
    """
    chosen = [torch.device(device) for device in devices]
    if len(chosen) != cfg.world_size:
        raise EPConfigError(f"devices = {len(chosen)} entries: must be world_size = {cfg.world_size}")
    if all(device.type == "cpu" for device in chosen):
        if hooks != NO_HOOKS:
            raise EPConfigError(f"hooks = {hooks}: must be none on the reference backend")
        return connect_reference(cfg)
    if any(device.type != "cuda" for device in chosen):
        raise EPConfigError(f"devices = {[str(device) for device in chosen]}: must be all CUDA or all cpu")
    chosen = [torch.device("cuda", device.index or 0) for device in chosen]
    sharing = Counter(chosen)
    ctas = {device: _max_ctas(device, sms, ranks) for device, ranks in sharing.items()}  # before anything is allocated
    for device in sharing:
        for peer in sharing:
            enable_peer_access(device.index, peer.index)
    tuning = tuning or find_tuning(cfg, torch.cuda.get_device_name(chosen[0]), len(sharing))
    found = Library(library)
    kernels = [load_kernels(cfg, device, found, hooks) for device in chosen]
    arenas = [_make_arena(cfg, device) for device in chosen]
    addresses = [arena.address for arena in arenas]
    open_ranks: list[Communicator] = []

    def release(communicator: Communicator) -> None:
        """Free everything once the last rank is closed: until then a peer's kernel may write to any arena."""
        open_ranks.remove(communicator)
        if open_ranks:
            return
        for device in sharing:
            torch.cuda.synchronize(device)
        if any(member.failed for member in members):
            return
        for member in members:
            member.free()
            member.arena.free()

    for rank, device in enumerate(chosen):
        open_ranks.append(
            Communicator(
                cfg,
                rank,
                device,
                arenas[rank],
                [addresses[rank]] if cfg.skip_a2a else addresses,
                kernels=kernels[rank],
                hooks=hooks,
                max_ctas=ctas[device],
                tuning=tuning,
                shared_device=sharing[device] > 1,
                release=release,
            )
        )
    members = tuple(open_ranks)
    return list(members)


def connect(
    cfg: EPConfig,
    group: dist.ProcessGroup | None = None,
    *,
    sms: int | None = None,
    library: Path | str | None = None,
    hooks: Hooks = NO_HOOKS,
    tuning: Tuning | None = None,
) -> Communicator:
    """This process's communicator, on its current CUDA device; collective over `group`, and so is its `close`.

    Memory is exchanged by CUDA IPC, so all ranks must be on one machine.

    Args:
        cfg: the group's configuration; must be the same on every rank.
        group: an initialised process group of `world_size` ranks; None: the default group.
        sms, library, hooks, tuning: as in `connect_local`; ranks may have different `tuning`.

    Raises:
        EPConfigError: the group's size or another rank's configuration differs, or a damaged file of `cute-ep tune`.
        VariantMissing: a kernel is not in the library.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world != cfg.world_size:
        raise EPConfigError(f"world_size = {cfg.world_size}: the process group has {world} ranks")
    device = torch.device("cuda", torch.cuda.current_device())
    tuning = tuning or find_tuning(cfg, torch.cuda.get_device_name(device), world)
    gathered: list = [None] * world
    dist.all_gather_object(gathered, cfg, group)
    for peer, other in enumerate(gathered):
        if other != cfg:
            raise EPConfigError(f"rank {peer} was configured with {other}, rank {rank} with {cfg}")
    kernels = load_kernels(cfg, device, Library(library), hooks)
    arena = _make_arena(cfg, device)
    handles: list = [None] * world
    dist.all_gather_object(handles, arena.handle(), group)
    peers = {} if cfg.skip_a2a else {peer: handle for peer, handle in enumerate(handles) if peer != rank}
    mapped = {peer: open_handle(device, handle) for peer, handle in peers.items()}
    addresses = [arena.address] if cfg.skip_a2a else [mapped.get(peer, arena.address) for peer in range(world)]

    def release(communicator: Communicator) -> None:
        """Collective: unmap and free when every rank ended well; keep all memory when some rank's wait failed."""
        torch.cuda.synchronize(device)
        failed: list = [None] * world
        dist.all_gather_object(failed, communicator.failed, group)
        if any(failed):
            return
        for address in mapped.values():
            close_handle(device, address)
        dist.barrier(group)
        communicator.free()
        arena.free()

    communicator = Communicator(
        cfg,
        rank,
        device,
        arena,
        addresses,
        kernels=kernels,
        hooks=hooks,
        max_ctas=_max_ctas(device, sms, 1),
        tuning=tuning,
        shared_device=False,
        release=release,
    )
    dist.barrier(group)
    return communicator


def _make_arena(cfg: EPConfig, device: torch.device) -> DeviceMemory:
    """A rank's arena as the first round must find it."""
    blank = [(int(region.offset), int(region.nbytes)) for region in cfg.arena.blank]
    return DeviceMemory(device, memory_bytes(cfg), ones=blank)


def _max_ctas(device: torch.device, sms: int | None, ranks_on_device: int) -> int:
    """CTAs of one rank that are sure to be resident together."""
    have = torch.cuda.get_device_properties(device).multi_processor_count
    if sms is not None and not 1 <= sms <= have:
        raise EPConfigError(f"sms = {sms}: must be in [1, {have}], the SMs of {device}")
    ctas = (sms or have) * CTAS_PER_SM
    share = have * CTAS_PER_SM // ranks_on_device
    return max(1, min(ctas, share))
