"""Ranks in threads, each with a process group and perhaps a DeepEP buffer, as their processes would run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.interface import EPCommunicator
from cute_ep.integrations.deep_ep import Buffer
from cute_ep.reference.processes import connect_processes
from cute_ep.runtime import group_pool, process_connection
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.connection import connect_local
from cute_ep.testing.workloads import RankInputs
from tests.reference.ranks import at_once

LIBRARY = Path(__file__).parents[2] / "build" / "library"
CPU = torch.device("cpu")


class ThreadGroup:
    """One rank's view of a process group, as far as an adapter asks it."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: list) -> None:
        self._rank, self._size, self._barrier, self._given = rank, size, barrier, given

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def meet(self) -> None:
        """Wait until all ranks have come."""
        self._barrier.wait()

    def on_all_ranks(
        self, make: Callable, share: Callable = lambda made: None, undo: Callable | None = None, doing: str = ""
    ) -> tuple:
        made = make()
        self._given[self._rank] = share(made)
        self._barrier.wait()
        shared = list(self._given)
        self._barrier.wait()
        return made, shared


def connect(check: Callable, cfg: EPConfig, group: ThreadGroup, *, sms: int | None = None) -> EPCommunicator:
    """In place of `connect_checked`; all ranks must give the same configuration."""
    _, cfgs = group.on_all_ranks(lambda: cfg, lambda made: made)
    assert cfgs == [cfg] * group.size(), cfgs
    return connect_processes(cfg, group.rank(), group.on_all_ranks)


def connect_on_gpu(check: Callable, cfg: EPConfig, group: ThreadGroup, *, sms: int | None = None) -> EPCommunicator:
    """In place of `connect_checked`, for ranks that share the current GPU. As with a GPU of its own, a rank's kernels
    run on the current stream, so each thread has another one. As there, nothing is made before all ranks have come: the
    load of a kernel waits for those that run, and holds up launches of the ranks that these wait for."""
    _, cfgs = group.on_all_ranks(lambda: cfg, lambda made: made)
    assert cfgs == [cfg] * group.size(), cfgs

    def make() -> list[Communicator]:
        return connect_local(cfg, ["cuda"] * group.size(), sms=sms, library=LIBRARY) if group.rank() == 0 else []

    _, (ranks, *_) = group.on_all_ranks(make, lambda made: made)
    ranks[group.rank()]._shared_device = False
    return ranks[group.rank()]


def on_groups(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    program: Callable[[ThreadGroup], Any],
    device: torch.device = CPU,
    *,
    ranks_per_node: int | None = None,
) -> list:
    """What program(group) returns on each rank, of nodes of so many ranks, None: of one. Several ranks on a GPU need
    CUDA_MODULE_LOADING=EAGER, since CUDA may load a kernel only once the GPU is idle, and it never is while a rank
    waits for another one, and CUDA_DEVICE_MAX_CONNECTIONS=32, since launches of two streams with one queue wait for
    each other."""
    monkeypatch.setattr(process_connection, "connect_checked", connect if device.type == "cpu" else connect_on_gpu)
    monkeypatch.setattr(group_pool, "gather", lambda group, one: group.on_all_ranks(lambda: one, lambda made: made)[1])
    monkeypatch.setattr(group_pool, "count_ranks", lambda group, call: ranks_per_node or group.size())
    barrier, given = threading.Barrier(ranks, timeout=30), [None] * ranks

    def run(rank: int) -> Any:
        try:
            with torch.cuda.stream(None if device.type == "cpu" else torch.cuda.Stream(device)):
                found = program(ThreadGroup(rank, ranks, barrier, given))
                if device.type != "cpu":
                    torch.cuda.current_stream(device).synchronize()
                return found
        except BaseException:
            barrier.abort()
            raise

    made = at_once(range(ranks), run)
    for one in made:
        if isinstance(one, Exception):
            raise one
    return made


def on_buffers(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    program: Callable[[Any], Any],
    make: Callable[[Any], Any] = Buffer,
    device: torch.device = CPU,
    ranks_per_node: int | None = None,
) -> list:
    """What program(buffer) returns on each rank, as `on_groups`; `make` makes a buffer of a group."""

    def run(group: ThreadGroup) -> Any:
        buffer = make(group)
        buffer._pool.device = device
        try:
            found = program(buffer)
            if device.type != "cpu":
                torch.cuda.current_stream(device).synchronize()
                for communicator in buffer._pool.communicators:
                    communicator.synchronize()  # EPTimeout, which no later call would raise
                group.meet()  # to give pinned memory back waits for kernels of all ranks, and holds up their launches
            return found
        finally:
            buffer.destroy()

    return on_groups(monkeypatch, ranks, run, device, ranks_per_node=ranks_per_node)


def entries(num_experts: int, ranks: int, rank: int, ids: list[torch.Tensor]) -> list[tuple[int, int, dict[int, int]]]:
    """(source, token, {slot: local expert}) of each token that has experts of `rank`, by source, then token."""
    local, found = num_experts // ranks, []
    for source, own in enumerate(ids):
        for token, chosen in enumerate(own.tolist()):
            here = {slot: expert - rank * local for slot, expert in enumerate(chosen) if expert // local == rank}
            if here:
                found.append((source, token, here))
    return found


def wide_ids(given: list[RankInputs]) -> list[torch.Tensor]:
    """Expert ids as DeepEP takes them."""
    return [one.topk_ids.long() for one in given]


def calc_diff(one: torch.Tensor, other: torch.Tensor) -> float:
    """1 minus the cosine-like similarity of two tensors, by which DeepEP's tests compare."""
    one, other = one.double() + 1, other.double() + 1
    return 0.0 if not one.numel() else float(1 - 2 * (one * other).sum() / (one * one + other * other).sum())
