"""One rank without a GPU: `python -m tests.reference.process_worker STORE RANK WORLD RANKS_PER_NODE`.

The last rank is killed."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPTimeout
from cute_ep.runtime.places import ranks_per_node
from cute_ep.runtime.process_connection import connect
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import check_dispatched, expert_rows, poison, poisoned_buffers
from cute_ep.testing.workloads import make_inputs

ROUNDS = 6


def check_rounds(rank: int, world: int, per_node: int) -> None:
    """Rounds bit for bit, with collectives of the caller in between that come in another order on every rank."""
    cfg = EPConfig(128, 4 * world, 2, 16, world, "nvfp4", timeout_s=60, ranks_per_node=per_node)
    with connect(cfg) as ep:
        for number in range(ROUNDS):
            inputs = make_inputs(cfg, [(5 * number + 3 * peer) % 17 for peer in range(world)], "uniform", number)
            xs, ids, weights = ([getattr(one, name) for one in inputs] for name in ("x", "topk_ids", "router_weights"))
            want = reference.dispatch(cfg, xs, ids, None, weights)
            rows = expert_rows(want, cfg.hidden, number)
            before, total = (number + rank) % 2 == 0, torch.tensor([rank])
            if before:
                dist.all_reduce(total)
            pending = ep.dispatch_async(xs[rank], ids[rank], weights[rank])
            if not before:
                dist.all_reduce(total)
            assert total.item() == world * (world - 1) // 2
            batch = ep.dispatch_wait(pending, poisoned_buffers(ep, int(want[rank].num_rows)))
            check_dispatched(batch, want[rank], cfg, rank)
            work = dist.all_reduce(total, async_op=True) if before else None
            out = poison(torch.empty_like(xs[rank]))
            ep.combine(rows[rank], batch, mode="partial", out=out)
            if work is None:
                dist.all_reduce(total)
            else:
                work.wait()
            assert_bits(out, reference.combine(cfg, rows, want, weights, "partial")[rank], f"rank {rank}")
        ep.synchronize()


def check_refusals(rank: int, world: int) -> None:
    """What ranks do not agree on is an error on all of them."""
    cfg = EPConfig(128, 4 * world, 2, 16, world)
    try:
        connect(replace(cfg, top_k=1) if rank == 1 else cfg)
    except EPConfigError as error:
        others = [peer for peer in range(world) if peer != 1]
        wanted = f"top_k = 2 on rank(s) {others}, 1 on rank(s) [1]: must be the same on all ranks"
        assert str(error) == wanted, error
    else:
        raise AssertionError("two configurations in one group")


def check_killed(rank: int, world: int, per_node: int) -> None:
    """The others name a rank that is killed between two rounds, long before the timeout, and end."""
    cfg = EPConfig(128, 4 * world, 2, 16, world, timeout_s=90, ranks_per_node=per_node)
    x, ids = torch.zeros(1, 128).bfloat16(), torch.zeros(1, 2, dtype=torch.int32)
    with connect(cfg) as ep:
        ep.dispatch(x, ids)
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ep.dispatch(x, ids)
        except EPTimeout as error:
            assert error.missing == (world - 1,), error
        else:
            raise AssertionError("no EPTimeout though a rank was killed")


def main(store: Path, rank: int, world: int, per_node: int) -> None:
    torch.set_num_threads(1)
    rendezvous = {"init_method": f"file://{store}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=world, **rendezvous)
    check_refusals(rank, world)
    assert ranks_per_node() == world  # all are on this machine
    check_rounds(rank, world, per_node)
    check_killed(rank, world, per_node)
    sys.stdout.write(f"rank {rank} ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
