"""One rank of a group on this machine's GPUs that shares memory by one kind: `python -m tests.gpu.sharing_worker STORE
RANK WORLD PROGRAM KIND`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError, EPTimeout
from cute_ep.runtime import trial
from cute_ep.runtime.process_connection import connect
from cute_ep.runtime.symmetric import Kind
from tests.sharing import needed, share_gpu

from .conftest import LIBRARY
from .worker import check_rounds

WARM_UPS, CONNECTS = 3, 100
MOST_ROUNDS = 4
"""Rounds of which one must time out when a rank is gone: what it had sent by then is still received."""


def config(timeout_s: float = 60) -> EPConfig:
    world = dist.get_world_size()
    return EPConfig(2048, 8 * world, 2, 32, world, timeout_s=timeout_s)


def rounds() -> None:
    """Bit for bit as the reference."""
    for fmt, hidden in (("bf16", 2048), ("nvfp4", 4096)):
        check_rounds(fmt, hidden)


def connects() -> None:
    """No descriptor is left by CONNECTS; some the driver opens once."""

    def open_files() -> list[str]:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sorted(os.readlink(link) for link in links if os.path.lexists(link))

    for _ in range(WARM_UPS):
        connect(config(), library=LIBRARY).close()
    before = open_files()
    for _ in range(CONNECTS):
        connect(config(), library=LIBRARY).close()
    assert len(open_files()) == len(before), (before, open_files())


def killed() -> None:
    """The last rank is killed after a round: the others name it, and their devices are as before."""
    last = dist.get_world_size() - 1
    communicator = connect(config(timeout_s=3), library=LIBRARY)
    x = torch.ones(32, 2048, device="cuda").bfloat16()
    ids = torch.arange(64, device="cuda", dtype=torch.int32).view(32, 2) % communicator.cfg.num_experts

    def one() -> None:
        batch = communicator.dispatch(x, ids, torch.full((32, 2), 0.5, device="cuda"))
        out = communicator.combine(batch.tokens, batch)
        communicator.synchronize()
        assert torch.equal(out, x)

    one()
    dist.barrier()
    if dist.get_rank() == last:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(MOST_ROUNDS):
            one()
    except EPTimeout as error:
        assert error.missing == (last,), error
    else:
        raise AssertionError("no EPTimeout though a rank was killed")
    torch.cuda.synchronize()
    assert int(torch.arange(1000, device="cuda").sum()) == 499500
    try:
        communicator.close()
    except EPError as error:
        assert f"[{last}]" in str(error), error
    else:
        raise AssertionError("closed without the rank that was killed")


PROGRAMS: tuple[Callable[[], None], ...] = (rounds, connects, killed)


def main() -> None:
    """Run from the command line."""
    store, rank, world, program, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    trial.ON_ONE_MACHINE = (Kind[kind],)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if needed(world):
        share_gpu()
    torch.cuda.set_device(rank)
    {one.__name__: one for one in PROGRAMS}[program]()
    sys.stdout.write(f"rank {rank} ok\n")
    sys.stdout.flush()
    if program == "killed":
        os._exit(0)  # without the last rank its process group does not end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
