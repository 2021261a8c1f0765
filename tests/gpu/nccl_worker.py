"""One rank of a group whose other stream gathers by NCCL: `python -m torch.distributed.run -m tests.gpu.nccl_worker`.

Rank 0 dispatches and only then gathers, on another stream; the others gather, and dispatch behind that. Rank 0's
dispatch waits for theirs, theirs for rank 0's part of the gathering, which needs SMs.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPTimeout
from cute_ep.runtime.connection import connect
from cute_ep.runtime.gpus import sms_beside_nccl

from .conftest import LIBRARY

TOKENS, HIDDEN = 4096, 7168
"""So many that a dispatch takes all CTAs it may."""


def waits_forever(sms: int | None) -> bool:
    """Whether such a round ends with EPTimeout on any rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = EPConfig(HIDDEN, 32 * world, 8, TOKENS, world, timeout_s=5)
    device = torch.device("cuda", rank)
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    ids = torch.rand(TOKENS, cfg.num_experts, device=device).topk(8).indices
    part = torch.ones(2**24, device=device)
    whole = torch.empty(world * len(part), device=device)
    other = torch.cuda.Stream(device)
    communicator = connect(cfg, library=LIBRARY, sms=sms)
    buffers = communicator.allocate(TOKENS * 8 * 2)
    for _ in range(2):  # all modules are loaded then
        communicator.dispatch(x, ids, out=buffers)
        dist.all_gather_into_tensor(whole, part)
    communicator.synchronize()
    dist.barrier()

    def gather() -> None:
        with torch.cuda.stream(other):
            dist.all_gather_into_tensor(whole, part)

    if rank == 0:
        communicator.dispatch(x, ids, out=buffers)
        time.sleep(1)
        gather()
    else:
        gather()
        torch.cuda.current_stream().wait_stream(other)
        communicator.dispatch(x, ids, out=buffers)
    late = torch.zeros(1, device=device)
    try:
        communicator.synchronize()
    except EPTimeout:
        late.fill_(1)
    torch.cuda.synchronize()
    dist.all_reduce(late)
    assert torch.equal(whole, torch.ones_like(whole))
    communicator.close()
    return bool(late)


def main() -> None:
    dist.init_process_group("nccl", timeout=timedelta(seconds=120))
    torch.cuda.set_device(dist.get_rank())
    assert not waits_forever(sms_beside_nccl(torch.device("cuda", dist.get_rank())))
    assert waits_forever(None), "a dispatch on all SMs left some to NCCL: this test shows nothing"
    sys.stdout.write(f"rank {dist.get_rank()} ok\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
