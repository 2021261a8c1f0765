"""How the ranks of a node share memory.

| kind | memory | what goes to the peers | reaches |
| --- | --- | --- | --- |
| FABRIC | cuMemCreate | 64 bytes, through the meeting | an NVLink domain, with an IMEX channel |
| DESCRIPTOR | cuMemCreate | a file descriptor, by `cute_ep.runtime.descriptors` | a machine and network namespace |
| IPC | cuMemAlloc | 64 bytes, through the meeting | a machine |

Memory of cuMemCreate is mapped at addresses that were reserved, and each device is given access to it there, its own
device too. The owner keeps its handle, to export it, until it frees the memory. A peer releases what it has imported as
soon as that is mapped, since the mapping keeps the memory alive, and closes the descriptor. Before the owner frees it
all peers have unmapped it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from typing import Any, ClassVar

import torch

from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.record import align_up
from cute_ep.runtime import driver_calls
from cute_ep.runtime.descriptors import Address, Inbox, leave
from cute_ep.runtime.driver import Allocation, PlainAllocation, allocate, on_device

TRIAL_BYTES = 2 << 20
REFUSALS = (EPError, RuntimeError, OSError)
"""By which the driver, cuda-python without a function of it, and the operating system say no."""


class Kind(StrEnum):
    """What memory goes to peers by."""

    FABRIC = "fabric handles"
    DESCRIPTOR = "file descriptors"
    IPC = "CUDA IPC"


class MappedAllocation:
    """Memory of cuMemCreate on the current device, an ordinal, mapped at `address`.

    Attributes:
        nbytes: its size, a multiple of the driver's granularity.
        memory: its handle.
    """

    def __init__(self, device: int, nbytes: int, *, fabric: bool) -> None:
        self.nbytes = align_up(nbytes, driver_calls.granularity(device, fabric))
        self.memory = allocate(self.nbytes, lambda size: driver_calls.create_memory(device, size, fabric))
        try:
            self.address = _map(self.memory, self.nbytes, device)
        except BaseException:
            driver_calls.release_memory(self.memory)
            raise

    def free(self) -> None:
        _unmap(self.address, self.nbytes)
        driver_calls.release_memory(self.memory)


def _map(memory: int, nbytes: int, device: int) -> int:
    """Where a device may read and write memory from now on."""
    address = driver_calls.reserve_addresses(nbytes)
    with ExitStack() as undo:
        undo.callback(driver_calls.free_addresses, address, nbytes)
        driver_calls.map_memory(address, nbytes, memory)
        undo.callback(driver_calls.unmap_memory, address, nbytes)
        driver_calls.allow_access(address, nbytes, device)
        undo.pop_all()
    return address


def _unmap(address: int, nbytes: int) -> None:
    driver_calls.unmap_memory(address, nbytes)
    driver_calls.free_addresses(address, nbytes)


class Sharing:
    """How a rank shares memory of its device with its peers, named by their ranks of the process group; this one does
    not."""

    kind: ClassVar[Kind | None] = None

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank

    def begin(self) -> Any:
        """What peers must know before they `offer`; can be pickled, as offers can."""

    def introduce(self, peers: Mapping[int, Any]) -> None:
        """What peers have said at their `begin`."""

    def take(self, nbytes: int) -> Allocation:
        """Memory of the current device, which is that of this rank."""
        return PlainAllocation(nbytes)

    def offer(self, allocation: Any) -> Any:
        """What a peer needs to `open` an allocation that was taken here; each can once."""

    def open(self, peer: int, offer: Any) -> int:
        """Map what a peer has offered. All peers must have offered theirs, and its owner must not free it before
        `shut`. Returns its address here."""
        raise NotImplementedError

    def shut(self, address: int) -> None:
        """Undo `open`; no kernel may be using the memory."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing more is offered or opened."""


class IpcSharing(Sharing):
    """By CUDA IPC."""

    kind = Kind.IPC

    def offer(self, allocation: PlainAllocation) -> bytes:
        with on_device(self.device):
            return driver_calls.ipc_handle(allocation.address)

    def open(self, peer: int, offer: bytes) -> int:
        with on_device(self.device):
            return driver_calls.open_ipc_handle(offer)

    def shut(self, address: int) -> None:
        with on_device(self.device):
            driver_calls.close_ipc_handle(address)


class _HandleSharing(Sharing):
    """By handles of memory of cuMemCreate."""

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device, rank)
        self._sizes: dict[int, int] = {}

    def take(self, nbytes: int) -> MappedAllocation:
        return MappedAllocation(self.device.index, nbytes, fabric=self.kind is Kind.FABRIC)

    def shut(self, address: int) -> None:
        with on_device(self.device):
            _unmap(address, self._sizes.pop(address))

    def _map(self, memory: int, nbytes: int) -> int:
        """Map what was imported, and release its handle in any case."""
        try:
            address = _map(memory, nbytes, self.device.index)
        finally:
            driver_calls.release_memory(memory)
        self._sizes[address] = nbytes
        return address


class FabricSharing(_HandleSharing):
    """By fabric handles."""

    kind = Kind.FABRIC

    def offer(self, allocation: MappedAllocation) -> tuple[int, bytes]:
        with on_device(self.device):
            return allocation.nbytes, driver_calls.export_fabric(allocation.memory)

    def open(self, peer: int, offer: tuple[int, bytes]) -> int:
        nbytes, handle = offer
        with on_device(self.device):
            return self._map(driver_calls.import_fabric(handle), nbytes)


class DescriptorSharing(_HandleSharing):
    """By file descriptors, which `offer` leaves in the inboxes of all peers."""

    kind = Kind.DESCRIPTOR

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device, rank)
        self._inbox: Inbox | None = None
        self._peers: dict[int, Address] = {}

    def begin(self) -> Address:
        self._inbox = Inbox()
        return self._inbox.address

    def introduce(self, peers: Mapping[int, Address]) -> None:
        self._peers = dict(peers)

    def offer(self, allocation: MappedAllocation) -> int:
        with on_device(self.device):
            descriptor = driver_calls.export_descriptor(allocation.memory)
        try:
            for peer, address in self._peers.items():
                try:
                    leave(descriptor, self.rank, address)
                except ConnectionRefusedError:  # it has failed, or is not reached: it says so itself
                    continue
                except OSError as error:
                    raise EPError(f"the Unix socket of rank {peer}: {error.strerror}") from None
        finally:
            os.close(descriptor)
        return allocation.nbytes

    def open(self, peer: int, offer: int) -> int:
        assert self._inbox is not None
        descriptor = self._inbox.take(peer)
        try:
            with on_device(self.device):
                return self._map(driver_calls.import_descriptor(descriptor), offer)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()


SHARINGS: dict[Kind, type[Sharing]] = {
    Kind.FABRIC: FabricSharing,
    Kind.DESCRIPTOR: DescriptorSharing,
    Kind.IPC: IpcSharing,
}


def refusal(kind: Kind, device: torch.device) -> str | None:
    """Why a device cannot share memory by a kind, of TRIAL_BYTES in this process alone; None: it can, as far as one
    process is told. It cannot be told whether IPC handles are opened."""
    sharing = SHARINGS[kind](device, 0)
    try:
        with on_device(device), ExitStack() as undo:
            sharing.introduce({0: sharing.begin()})
            allocation = sharing.take(TRIAL_BYTES)
            undo.callback(allocation.free)
            offer = sharing.offer(allocation)
            if kind is not Kind.IPC:
                sharing.shut(sharing.open(0, offer))
    except REFUSALS as error:
        return in_words(error)
    finally:
        sharing.close()
    return None


def in_words(error: BaseException) -> str:
    """What one of REFUSALS says."""
    return str(error) or type(error).__name__
