"""What one rank on a GPU is made of before it knows its peers: kernels by name, an arena, launch options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from cute_ep.aot.library import Library
from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arguments import COMBINE_CALL, DISPATCH_CALL
from cute_ep.layouts.maps.formats import BF16
from cute_ep.layouts.maps.variants import (
    COMBINE_KERNELS,
    DISPATCH_OPERATIONS,
    PIPED_KERNELS,
    RANK_MAJOR_SUFFIX,
    SEND_KERNELS,
    Hooks,
)
from cute_ep.runtime.driver import Allocation, DeviceMemory, Kernel, PlainAllocation, architecture, on_device
from cute_ep.tuning.launch_shape import Tuning


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
    for the stages of PIPED_KERNELS; if there are any, wide CTAs of dispatch have shared memory for twins.

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
