"""Exchanges of counts among many virtual ranks, on all GPUs in turn:
`CUDA_DEVICE_MAX_CONNECTIONS=32 python -m tests.gpu.many_counts RANKS PER_NODE`."""

from __future__ import annotations

import sys

import torch

from cute_ep.layouts.maps.routing import MAX_TOP_K
from cute_ep.runtime.counts import ENDS, Counting, ReceiveCounts, counting_config, memory_of_ends
from cute_ep.testing.compare import assert_bits

from .conftest import connected

WORDS, LOCAL = 104, 2


def main(ranks: int, per_node: int) -> None:
    """AssertionError or EPTimeout when something is wrong. Each exchange overwrites the table of the one before, and
    the host waits for every second one."""
    cfg = counting_config(WORDS, ranks, 20.0, per_node)
    assert cfg.max_tokens_per_rank == 1 + (ranks > MAX_TOP_K)
    gpus, experts = torch.cuda.device_count(), ranks * LOCAL
    devices = [f"cuda:{rank % gpus}" for rank in range(ranks)]
    with connected(cfg, devices) as communicators:
        made = [Counting(communicator) for communicator in communicators]
        for number in range(6):
            whole = torch.arange(ranks * WORDS, dtype=torch.int32).view(ranks, WORDS) + number * 0x10001
            given, told = [row.to(device) for row, device in zip(whole, devices, strict=True)], number % 2 == 1
            ends = [memory_of_ends(ranks, device) if number > 2 else None for device in devices]
            begun = [
                counting.exchange(own, experts, ends=to, told=told)
                for counting, own, to in zip(made, given, ends, strict=True)
            ]
            for rank, one in enumerate(begun if told else ()):
                first = ranks + LOCAL * rank
                entries = whole[:, first : first + LOCAL].sum(0).tolist()
                want = ReceiveCounts(entries, int(whole[:, ranks + experts].max()), int(whole[:, rank].sum()))
                assert one.wait() == want, f"exchange {number}, rank {rank}"
            for communicator in communicators:
                communicator.synchronize()
            want_ends = whole[:, :ranks].cumsum(0, dtype=torch.int32)
            for rank, (counting, to) in enumerate(zip(made, ends, strict=True)):
                where = f"exchange {number}, rank {rank}"
                assert_bits(counting.by_rank().cpu(), whole, where)
                if to is not None:
                    assert_bits(to.tensor(ENDS).cpu(), want_ends, where)
    for counting in made:
        counting.free()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
