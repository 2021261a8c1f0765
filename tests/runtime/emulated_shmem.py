"""The rail over NVSHMEM without a GPU: a heap of all PEs in this process, and ranks on the CPU with a rail each."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cute_ep.api.config import EPConfig
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.runtime.rails.shmem import ShmemRail
from cute_ep.runtime.rails.shmem_library import Addition

from .emulated_mail import word
from .emulated_nodes import connected


class Heap:
    """Symmetric memory of PEs, as one of them sees it by the library's functions; what is queued happens at once.

    Attributes:
        bases, sizes: of the PEs' memory, which all share.
    """

    adding = threading.Lock()

    def __init__(self, pe: int, bases: list[int], nbytes: int) -> None:
        self.pe, self.bases, self.nbytes = pe, bases, nbytes
        self.asked: list[tuple[int, int]] = []

    def at(self, address: int, pe: int, nbytes: int) -> int:
        """Where another PE has what is at an address here."""
        offset = address - self.bases[self.pe]
        assert 0 <= offset and offset + nbytes <= self.nbytes, "outside of the symmetric heap"
        return self.bases[pe] + offset

    def put(self, to: int, source: int, nbytes: int, signal: Addition, stream: int) -> None:
        assert signal.pe != self.pe
        self.asked.append((signal.pe, nbytes))
        ctypes.memmove(self.at(to, signal.pe, nbytes), source, nbytes)
        self.signal(signal, stream)

    def signal(self, addition: Addition, stream: int) -> None:
        with self.adding:
            word(self.at(addition.word, addition.pe, 8)).add_(addition.amount)


def symmetric(mail: RankMail) -> RankMail:
    """A mail like that one, with words of the second landing."""
    second = mail.map.allocation
    parts = mail.parts.__class__(
        **{
            **vars(mail.parts),
            "memory": torch.zeros(second + mail.map.payload.at(), dtype=torch.uint8),
            "second": second,
        }
    )
    return RankMail(parts, mail.engine)


@contextmanager
def over_shmem(
    cfg: EPConfig, heap: type[Heap] = Heap, rail: type[ShmemRail] = ShmemRail
) -> Iterator[list[NodesCommunicator]]:
    """The ranks of `connected` with a rail over NVSHMEM each, of which the library is `heap`."""
    with connected(cfg, landings_apart=True) as made:
        for ep in made:
            ep.mail = symmetric(ep.mail)
        bases = [ep.mail.base for ep in made]
        for ep in made:
            library = heap(ep.rank, bases, ep.mail.memory.numel())
            pes = ep._status.peers
            ep.mail.engine = rail(library, torch.device("cpu"), pes)  # type: ignore[arg-type]
            ep.mail.engine.introduce(ep.mail)
        yield made
