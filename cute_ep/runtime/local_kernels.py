"""Kernels that involve one GPU only: where they are found, and when they are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from cute_ep.aot.library import Library, LibraryEntry
from cute_ep.layouts.maps.variants import LOCAL_KERNELS
from cute_ep.runtime.driver import Kernel, architecture, on_device

_given: dict[int, Library] = {}
"""By device, the library of the last `connect` or `connect_local` there."""


@cache
def local_kernel(device: int, name: str, fmt: str | None, folder: str | None) -> Kernel:
    """A kernel from a folder, from the library of the last connection on the device (an ordinal) where there is no
    folder, from the default library before the first connection."""
    library = Library(folder) if folder else _given.get(device) or Library()
    return _load(device, library.find(name, architecture(torch.device("cuda", device)), fmt))


@cache
def _load(device: int, entry: LibraryEntry) -> Kernel:
    with on_device(device):
        return Kernel(entry)


def load_local_kernels(devices: Iterable[int], library: Library) -> None:
    """Take a library as that of some devices (ordinals), and load what `local_kernel` may find in it and in the default
    one: a load that comes later could wait for a kernel that waits for a rank which this process has yet to launch."""
    entries = [*library.entries.values(), *Library().entries.values()]
    for device in devices:
        _given[device] = library
        arch = architecture(torch.device("cuda", device))
        for entry in entries:
            if entry.variant.arch == arch and entry.variant.kernel in LOCAL_KERNELS:
                _load(device, entry)
    local_kernel.cache_clear()
