"""A machine without a GPU on which processes `connect`, or threads that stand for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError
from cute_ep.runtime import process_connection
from cute_ep.runtime.parts import RankParts
from cute_ep.runtime.places import Place
from tests.connecting import replace_names
from tests.fake_driver import FakeDriver, cuda

from .as_threads import RANKS

CFG = EPConfig(hidden=128, num_experts=6, top_k=2, max_tokens_per_rank=16, world_size=RANKS)
PLACES = [Place(CFG, "machine", f"GPU-{rank}") for rank in range(RANKS)]
NO_GPU = {"gpu": None}
NOTHING = (0, 0, 0)
TRIALS = 1
"""Allocations of a rank before its arena."""


def dist_rank() -> int:
    """The rank that this thread or process stands for."""
    return process_connection.dist.get_rank(None)


class Machine(FakeDriver):
    """What `connect` takes from a machine and gives back: kernels and communicators by rank, here, and a driver's
    memory; `broken` names (what, rank) that fail. An arena fails, and the last mapping of another's arena."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *broken: tuple[str, int]) -> None:
        super().__init__(monkeypatch)
        self.made: set[tuple] = set()
        self.broken = set(broken)
        self.count = Counter[tuple[str, int]]()
        self.places = list(PLACES)
        fakes = {
            "check_gpu": lambda name, device: None,
            "find_tuning": lambda *args, ring_bytes: None,
            "load_kernels": lambda cfg, device, library, hooks, ring: self.take("kernels"),
            "unload_kernels": lambda kernels, device: self.made.remove(kernels),
            "Communicator": lambda parts, peers, release, **options: self.communicator(parts, peers, release),
            "Library": lambda folder: None,
            "load_local_kernels": lambda devices, library: None,
            "max_ctas": lambda device, sms, ranks: 8,
            "resident_ctas": lambda device: 8,
            "ring_bytes": lambda device, ctas: 0,
        }
        replace_names(monkeypatch, fakes)
        monkeypatch.setattr(
            Place, "of", lambda cfg, device: replace(self.places[dist_rank()], **({} if device else NO_GPU))
        )
        for name, fake in {
            "current_device": lambda: 0,
            "device": lambda device: nullcontext(),
            "device_count": lambda: int(("gpu", dist_rank()) not in self.broken),
            "get_device_name": str,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(process_connection.torch.cuda, name, fake)

    @property
    def held(self) -> tuple[int, int, int]:
        """Kernels and communicators, allocations, mappings of others' memory. What is mapped by handle has a handle of
        its owner, and nobody else's, and addresses."""
        by_handle = self.reserved.keys()
        assert len(self.handles) == len(self.memory.keys() & by_handle)
        assert by_handle <= self.memory.keys() | self.mapped.keys()
        return len(self.made), len(self.memory), len(self.mapped)

    def take(self, what: str) -> tuple:
        if (what, dist_rank()) in self.broken:
            raise EPError(f"no {what}")
        one = (what, dist_rank())
        self.made.add(one)
        return one

    def fails(self, what: str, last: int) -> bool:
        """Whether a call of this rank is the `last` one of its kind, which is broken."""
        self.count[what, dist_rank()] += 1
        return (what, dist_rank()) in self.broken and self.count[what, dist_rank()] == last

    def cuMemAlloc(self, nbytes: int) -> tuple:
        if self.fails("arena", TRIALS + 1):
            return cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, cuda.CUdeviceptr()
        return super().cuMemAlloc(nbytes)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple:
        if self.fails("arena", TRIALS + 1):
            return cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, cuda.CUmemGenericAllocationHandle()
        return super().cuMemCreate(nbytes, properties, flags)

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple:
        if self.fails("mapping", (TRIALS + 1) * (RANKS - 1)):
            return cuda.CUresult.CUDA_ERROR_MAP_FAILED, cuda.CUdeviceptr()
        return super().cuIpcOpenMemHandle(handle, flags)

    def cuMemMap(self, address: int, nbytes: int, offset: int, memory: Any, flags: int) -> tuple:
        if self.fails("mapping", (TRIALS + 1) * RANKS):
            return (cuda.CUresult.CUDA_ERROR_MAP_FAILED,)
        return super().cuMemMap(address, nbytes, offset, memory, flags)

    def communicator(self, parts: RankParts, peers: list[int], release: Callable) -> SimpleNamespace:
        one = self.take("rank")
        made = SimpleNamespace(failed=False, parts=parts, peers=peers, free=lambda: self.made.remove(one))
        made.close = lambda: release(made)
        return made

    def synchronize(self, device: object) -> None:
        if ("synchronize", dist_rank()) in self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
