"""Ranks in processes of their own that share a GPU, where there are fewer GPUs than ranks.

Kernels of two processes do not run side by side: a rank that waits for another one spins until the GPU gives the other
process its turn. A round takes milliseconds, so times say nothing. NCCL and `connect` refuse such ranks; `share_gpu`
has them accepted. `python -m tests.sharing RANKS` prints what to put before PYTHONPATH so that programs that name a GPU
a rank run on this machine: nothing where it has as many GPUs.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cute_ep.runtime.places import Place

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "gpu" / "one_gpu"
"""Has a `sitecustomize` that calls `share_gpu`."""


def needed(ranks: int) -> bool:
    """Whether this machine has GPUs, but not one a rank."""
    return 0 < torch.cuda.device_count() < ranks


def share_gpu() -> torch.device:
    """Make GPU 0 this process's where it asks LOCAL_RANK, sets a device or names one of a process group, and nobody
    else's in the eyes of NCCL and `connect`.

    Returns:
        That GPU, the current one.
    """
    device, own, init = torch.device("cuda", 0), f"process {os.getpid()}", dist.init_process_group
    os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": own, "NCCL_SOCKET_IFNAME": "lo"}  # NCCL goes by hosts: by sockets
    set_device, place_of = torch.cuda.set_device, Place.of

    @functools.wraps(init)
    def init_process_group(*args: Any, **options: Any) -> None:
        if options.get("device_id") is not None:
            options["device_id"] = device
        init(*args, **options)

    dist.init_process_group = init_process_group
    torch.cuda.set_device = lambda _: set_device(device)  # type: ignore[assignment]
    Place.of = lambda *given: replace(place_of(*given), gpu=own)  # type: ignore[method-assign]
    return device


if __name__ == "__main__":
    sys.stdout.write(os.pathsep.join([str(FOLDER), str(ROOT), ""]) if needed(int(sys.argv[1])) else "")
