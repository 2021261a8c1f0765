"""One rank of a group that shares memory: `python -m tests.runtime.sharing_worker STORE RANK WORLD PROGRAM`, on a
machine without GPUs whose memory is files. The last rank is the one that something happens to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cute_ep.api.errors import EPError
from cute_ep.runtime import symmetric, trial
from cute_ep.runtime.process_connection import connect
from cute_ep.runtime.symmetric import Kind
from tests.processes import join_group

from .as_threads import RANKS
from .fake_machine import CFG, NOTHING, Machine


def open_files() -> tuple[int, int]:
    """How many sockets of inboxes this process has open, and how many handles of memory."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.lexists(link)]
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inboxes = {f"socket:[{line[6]}]" for line in lines if line[-1].startswith("@cute_ep/")}
    return len(inboxes.intersection(files)), sum(file.startswith("/memfd:memory") for file in files)


def shares(machine: Machine, rank: int) -> None:
    """What a rank stores in a peer's arena is there, by each kind of mapped memory; nothing is left."""
    for kind in (Kind.DESCRIPTOR, Kind.FABRIC):
        trial.ON_ONE_MACHINE = (kind,)
        communicator: Any = connect(CFG)
        own = communicator.parts.arena.address
        for peer, address in enumerate(communicator.peers):
            ctypes.c_uint64.from_address(address + 8 * rank).value = 100 * rank + peer + 1
        dist.barrier()
        words = [ctypes.c_uint64.from_address(own + 8 * peer).value for peer in range(RANKS)]
        assert words == [100 * peer + rank + 1 for peer in range(RANKS)], words
        dist.barrier()
        communicator.close()
        assert machine.held == NOTHING and open_files() == (0, 0)


def killed_before(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[Machine, int], None]:
    """The last rank is killed before it maps for the `number`-th time what others have exported. These keep the memory
    that it may have mapped."""

    def program(machine: Machine, rank: int) -> None:
        opened = [0]
        real = symmetric.DescriptorSharing.open

        def dies(self: Any, peer: int, offer: int) -> int:
            opened[0] += 1
            if rank == RANKS - 1 and opened[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, peer, offer)

        monkeypatch.setattr(symmetric.DescriptorSharing, "open", dies)
        with pytest.raises(EPError, match=rf"rank\(s\) \[{RANKS - 1}\] ended before they could "):
            connect(CFG)
        assert open_files() == (0, 1)

    return program


def main() -> None:
    """Run from the command line."""
    store, rank, world, name = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    assert world == RANKS
    join_group(store, rank, world)
    with pytest.MonkeyPatch.context() as monkeypatch:
        programs = {
            "shares": shares,
            "killed in the trial": killed_before(monkeypatch, 1),
            "killed before it maps arenas": killed_before(monkeypatch, RANKS),
        }
        programs[name](Machine(monkeypatch), rank)
    if "killed" not in name:
        dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ok\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
