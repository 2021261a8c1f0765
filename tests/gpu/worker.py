"""One rank of the multi-process test: `python -m torch.distributed.run --nproc-per-node N -m tests.gpu.worker`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError, EPTimeout
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.runtime.process_connection import connect
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import check_dispatched, expert_rows, poison, poisoned_buffers
from cute_ep.testing.workloads import make_inputs
from tests.sharing import needed, share_gpu

from .conftest import LIBRARY

ROUNDS = 20


def check_rounds(fmt: str, hidden: int) -> None:
    """ROUNDS rounds with different routing, bit for bit; a rank starts late in some of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    many = max(LAMPORT_TOKENS + 1, 256)
    cfg = EPConfig(hidden, 128, 8, many, world, fmt, timeout_s=60)
    with connect(cfg, library=LIBRARY) as communicator:
        for number in range(ROUNDS):
            counts = [many if (number + peer) % 5 == 0 else (61 * number + 97 * peer) % 257 for peer in range(world)]
            inputs = make_inputs(cfg, counts, ("uniform", "zipf", "masked")[number % 3], number)
            device = communicator.device
            columns = (
                [getattr(one, name).to(device) for one in inputs] for name in ("x", "topk_ids", "router_weights")
            )
            xs, ids, weights = columns
            expected = reference.dispatch(cfg, xs, ids, None, weights)
            rows = expert_rows(expected, cfg.hidden, number)
            buffers = poisoned_buffers(communicator, int(expected[rank].num_rows))
            if number % 7 == rank:
                time.sleep(0.2)
            if number % 2:
                pending = communicator.dispatch_async(xs[rank], ids[rank], weights[rank])
                dispatched = communicator.dispatch_wait(pending, buffers)
            else:
                dispatched = communicator.dispatch(xs[rank], ids[rank], weights[rank], out=buffers)
            communicator.synchronize()
            check_dispatched(dispatched, expected[rank], cfg, rank)
            for mode in ("exact", "partial"):
                out = poison(torch.empty_like(xs[rank]))
                communicator.combine(rows[rank], dispatched, mode=mode, out=out)
                communicator.synchronize()
                assert_bits(out, reference.combine(cfg, rows, expected, weights, mode)[rank], f"rank {rank} {mode}")


def check_absent_rank() -> None:
    """The last rank does not call dispatch: the others name it, and a fresh group works."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = EPConfig(2048, 16, 2, 32, world, "bf16", timeout_s=2)
    x = torch.randn(32, 2048, device="cuda").bfloat16()
    ids = torch.randint(0, 16, (32, 2), dtype=torch.int32, device="cuda")
    communicator = connect(cfg, library=LIBRARY)
    if rank != world - 1:
        communicator.dispatch(x, ids)
        try:
            communicator.synchronize()
        except EPTimeout as error:
            assert error.missing == (world - 1,), error
        else:
            raise AssertionError("no EPTimeout though a rank was absent")
    communicator.close()
    dist.barrier()
    check_rounds("bf16", 2048)


def refused(error: type[Exception], rule: str, **options: object) -> None:
    """`connect` raises `error` with `rule` in its words."""
    cfg = EPConfig(2048, 16, 2, 32, dist.get_world_size(), "bf16")
    try:
        connect(cfg, library=LIBRARY, **options)
    except error as caught:
        assert rule in str(caught), caught
    else:
        raise AssertionError(f"no {error.__name__}: {rule}")


def check_refusals() -> None:
    """What is wrong on one rank is an error on all, and none waits for another."""
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        refused(EPConfigError, "sms = 100000", sms=100000)
    else:
        refused(EPError, f"rank {last} could not connect: EPConfigError: sms = 100000")


def check_one_gpu_for_all() -> None:
    torch.cuda.set_device(0)
    refused(EPConfigError, "rank 0 and rank 1 are both on GPU")


def main() -> None:
    dist.init_process_group("gloo")
    check_one_gpu_for_all()
    if needed(dist.get_world_size()):
        share_gpu()
    torch.cuda.set_device(dist.get_rank())
    check_refusals()
    for fmt, hidden in (("bf16", 7168), ("nvfp4", 4096)):
        check_rounds(fmt, hidden)
    check_absent_rank()
    dist.barrier()
    sys.stdout.write(f"rank {dist.get_rank()} ok\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
