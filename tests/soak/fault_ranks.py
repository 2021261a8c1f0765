"""Faults of one process a rank: each function is one rank of a group, in a process of its own on a GPU of its own.

The last rank is the one that something happens to. A function returns what it saw, and raises an error where that is
not what must be seen; a rank that is killed returns nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.errors import EPError, EPTimeout
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.process_connection import connect

from .fault_calls import ROOM
from .group import TIMEOUT_S, Group, expect, small_config, small_input

MOST_ROUNDS = 4
"""Rounds of which one must time out when a rank is gone: what it had sent by then is still received."""


@contextmanager
def _group(library: Path | None) -> Iterator[tuple[int, int, Group]]:
    """(rank, the last rank, a group of this rank) after two rounds that were right. It is not closed at the end."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    communicator = connect(small_config(last + 1), library=library)
    group = Group([communicator], [small_input(last + 1)])
    dist.barrier()
    for number in range(2):
        group.round(Random(number))
    dist.barrier()
    yield rank, last, group


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _survive(group: Group, last: int) -> str:
    """Rounds until one times out for want of the last rank; the device is as before, and close comes to an end."""
    communicator = group.lanes[0].communicator
    started, random = time.monotonic(), Random(1)

    def rounds() -> None:
        for _ in range(MOST_ROUNDS):
            group.round(random)

    said = expect(EPTimeout, f"[{last}]", rounds)
    assert time.monotonic() - started < 3 * TIMEOUT_S, f"it took {time.monotonic() - started:.1f} s"
    torch.cuda.synchronize()
    assert int(torch.arange(1000, device="cuda").sum()) == 499500
    return f"{said}; close: {_close(communicator)}"


def _close(communicator: Communicator) -> str:
    """Close without the last rank, which may be an error, but none of CUDA."""
    try:
        communicator.close()
    except Exception as error:
        assert "CUDA" not in str(error), error
        return type(error).__name__
    return "ended"


def killed_before(library: Path | None) -> str:
    """The last rank is killed between two rounds."""
    with _group(library) as (rank, last, group):
        if rank == last:
            _die()
        return _survive(group, last)


def killed_within(library: Path | None) -> str:
    """The last rank is killed while its dispatch waits for the others."""
    with _group(library) as (rank, last, group):
        batch, lane = group.batches[0], group.lanes[0]
        if rank == last:
            threading.Timer(TIMEOUT_S / 4, _die).start()
            lane.communicator.dispatch(**batch.arguments[rank], out=batch.buffers[rank])
            time.sleep(60)
        time.sleep(TIMEOUT_S / 2)
        return _survive(group, last)


def killed_at_work(library: Path | None) -> str:
    """The last rank is killed at some moment of rounds that follow each other."""
    with _group(library) as (rank, last, group):
        if rank == last:
            threading.Timer(TIMEOUT_S / 4 + Random(os.getpid()).random() / 10, _die).start()
        random = Random(2)

        def rounds() -> None:
            while True:
                group.round(random)

        said = expect(EPTimeout, f"[{last}]", rounds)
        return f"{said}; {_survive(group, last)}"


def killed_between(library: Path | None) -> str:
    """The last rank is killed between the halves of a dispatch."""
    with _group(library) as (rank, last, group):
        if rank == last:
            group.lanes[0].communicator.dispatch_async(**group.batches[0].arguments[rank])
            torch.cuda.synchronize()
            _die()
        time.sleep(TIMEOUT_S / 4)
        return _survive(group, last)


def absent(library: Path | None) -> str:
    """The last rank closes without having called: the others name it, close too, and a new group is right."""
    with _group(library) as (rank, last, group):
        said = "closed"
        if rank != last:
            expect(EPTimeout, f"[{last}]", lambda: group.round(Random(3)))
            said = f"EPTimeout for rank {last}"
        group.lanes[0].communicator.close()
    with _group(library) as (_, _, group):
        group.lanes[0].communicator.close()
    return said


def late(library: Path | None) -> str:
    """The last rank calls half a timeout late: right bytes; twice the timeout: the others name it."""
    with _group(library) as (rank, last, group):
        time.sleep(TIMEOUT_S / 2 if rank == last else 0)
        group.round(Random(4))
        dist.barrier()
        if rank == last:
            time.sleep(TIMEOUT_S * 2)
            try:
                group.round(Random(5))  # right, or
            except EPTimeout:
                said = "EPTimeout"
            else:
                said = "right bytes"
        else:
            said = expect(EPTimeout, f"[{last}]", lambda: group.round(Random(5)))
        group.lanes[0].communicator.close()
    return said


def out_of_memory(library: Path | None) -> str:
    """The last rank's GPU has no room for its arena: an error on all ranks, and smaller ones are right."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    sizes = (EPConfig(7168, 8 * (last + 1), 8, tokens, last + 1) for tokens in range(256, 16384, 256))
    cfg = next(cfg for cfg in sizes if memory_bytes(cfg) > 1.2 * ROOM)
    torch.empty(1, device="cuda")
    ballast = []
    if rank == last:
        ballast.append(torch.empty(torch.cuda.mem_get_info()[0] - ROOM, dtype=torch.uint8, device="cuda"))
    words = "memory" if rank == last else f"rank {last} could not connect"
    said = expect(EPError, words, lambda: connect(cfg, library=library))
    ballast.clear()
    torch.cuda.empty_cache()
    with _group(library) as (_, _, group):
        group.lanes[0].communicator.close()
    return said


def run_rank(act: Callable[[Path | None], str], rank: int, ranks: int, meeting: Path, library: Path | None) -> str:
    """This process is a rank of a group that meets at a file."""
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    return act(library)
