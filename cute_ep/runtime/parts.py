"""What one rank on a GPU is made of before it knows its peers: its share of the device, kernels by name, an arena,
launch options."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.api.provenance import Origin
from cute_ep.layouts.maps.arguments import COMBINE_CALL, DISPATCH_CALL
from cute_ep.layouts.maps.formats import BF16
from cute_ep.layouts.maps.launch import CTAS_PER_SM, FREE_SMS
from cute_ep.layouts.maps.variants import (
    COMBINE_KERNELS,
    DISPATCH_OPERATIONS,
    PIPED_KERNELS,
    RANK_MAJOR_SUFFIX,
    SEND_KERNELS,
    Hooks,
)
from cute_ep.runtime.driver import (
    Allocation,
    DeviceMemory,
    Kernel,
    PlainAllocation,
    architecture,
    has_clusters,
    on_device,
    resident_ctas,
)
from cute_ep.runtime.gpus import FEW_FREE_SMS, ring_bytes, sm_budget
from cute_ep.tuning.launch_shape import Tuning

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankParts:
    """One rank's parts.

    Attributes:
        arena: symmetric memory, as the first round must find it.
        kernels: `load_kernels`.
        hooks: functions compiled into them.
        max_ctas: CTAs of one launch at most, resident together.
        tuning: launch shapes.
        shared_device: whether other ranks are on the same GPU.
        pairs: whether CTAs are launched in clusters of 2, so that the few SMs that they leave to others are whole TPCs.
        whole_sms: whether there is an SM for each CTA.
        ring_bytes: as of `load_kernels`; 0: CTAs may not take all of an SM's shared memory.
        first_rank: what messages call rank 0 of the group, where it is one node of several.
    """

    cfg: EPConfig
    rank: int
    device: torch.device
    arena: DeviceMemory
    kernels: dict[str, Kernel]
    hooks: Hooks
    max_ctas: int
    tuning: Tuning
    shared_device: bool = False
    pairs: bool = False
    whole_sms: bool = False
    ring_bytes: int = 0
    first_rank: int = 0


UNENCODED = "_unencoded"
"""Ends the name of the kernel that sends rows as they are."""


def load_kernels(
    cfg: EPConfig, device: torch.device, library: Library, hooks: Hooks, ring_bytes: int = 0
) -> dict[str, Kernel]:
    """All kernels that one rank of `cfg` may launch, loaded on its device, by operation. ring_bytes: of shared memory
    for the stages of PIPED_KERNELS; if there are any, wide CTAs of dispatch may have twins, with theirs.

    Raises:
        VariantMissing: a kernel is not in the library.
    """
    arch = architecture(device)
    entries = {}
    for operation in DISPATCH_OPERATIONS:
        name = f"{operation}{RANK_MAJOR_SUFFIX}" if cfg.is_rank_major else operation
        sends = name in SEND_KERNELS
        entries[operation] = library.find(name, arch, cfg.dispatch_format if sends else None, hooks)
        if sends and cfg.format.scale:
            entries[f"{operation}{UNENCODED}"] = library.find(name, arch, BF16.name, hooks)
    entries |= {name: library.find(name, arch, None, hooks) for name in (*COMBINE_KERNELS, *PIPED_KERNELS)}
    with on_device(device), ExitStack() as undo:
        kernels: dict[str, Kernel] = {}
        for name, entry in entries.items():
            call = DISPATCH_CALL if name.startswith("dispatch") else COMBINE_CALL
            ring = ring_bytes if name in PIPED_KERNELS else 0
            kernels[name] = Kernel(entry, call, ring, twins=call is DISPATCH_CALL and ring_bytes > 0)
            undo.callback(kernels[name].unload)
        undo.pop_all()
    return kernels


def make_arena(
    cfg: EPConfig, rank: int, device: torch.device, take: Callable[[int], Allocation] = PlainAllocation
) -> DeviceMemory:
    """A rank's arena as the first round must find it, in an allocation of `take`."""
    arena = cfg.arena
    cleared = [(int(region.offset), int(region.nbytes)) for region in arena.cleared]
    return DeviceMemory(device, int(arena.allocation), cleared, begin=arena.begin(cfg.place(rank)[0]), take=take)


def unload_kernels(kernels: Mapping[str, Kernel], device: torch.device) -> None:
    """Give back what `load_kernels` took; none of them may be running."""
    with on_device(device):
        for kernel in kernels.values():
            kernel.unload()


# ---- of a device


@dataclass(frozen=True)
class Share:
    """What a rank has of its device: CTAs at most, launch shapes for as many, shared memory beyond what kernels were
    compiled for (`ring_bytes`), how many ranks are there, and what makes the allocation of its arena."""

    max_ctas: int
    tuning: Tuning
    ring: int
    ranks: int = 1
    take: Callable[[int], Allocation] = PlainAllocation


def share_of(device: torch.device, sms: int | None, find: Callable[..., Tuning], *, ranks: int = 1) -> Share:
    """What each of `ranks` ranks has of its device. sms: as of `connect`, EPConfigError where there are not so many;
    None: also ranks that share a device launch the kernels of ranks that have one each, which have no pipelines. find:
    as `find_tuning`, called with the CTAs and `ring_bytes`."""
    ctas = max_ctas(device, sms, ranks)
    ring = 0 if sms is None else ring_bytes(device, ranks * ctas)
    return Share(ctas, find(ctas, ring_bytes=ring), ring, ranks)


def max_ctas(device: torch.device, sms: int | None, ranks_on_device: int) -> int:
    """CTAs of one rank at most; those of all ranks on a device are sure to be resident together.

    The hardware puts CTAs on idle SMs first, so up to as many as there are SMs have one each. An SM that holds a CTA
    takes those of another kernel only if its split of shared memory and L1 fits them (H200, 2026-11-23: beside a
    spinning dispatch_wait, kernels with 16 KB of shared memory do not start, `dispatch_async` among them). So ranks
    that share a device leave SMs without any, or they would keep out what a peer has to run before it can answer.
    """
    budget = sm_budget(device, sms)
    everything = resident_ctas(device.index)
    have = everything // CTAS_PER_SM
    if budget == have and ranks_on_device == 1:
        return everything
    return budget if ranks_on_device == 1 else max(1, min(budget, (have - FREE_SMS) // ranks_on_device))


def prepare_rank(who: Origin, share: Share, library: Library, undo: ExitStack, *, first_rank: int = 0) -> RankParts:
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
