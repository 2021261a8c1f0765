"""Exchanges of counts among more ranks than a token may have entries, 3 virtual nodes of 11 ranks on one GPU:
`CUDA_DEVICE_MAX_CONNECTIONS=32 python -m tests.gpu.many_counts`."""

from __future__ import annotations

import torch

from cute_ep.runtime.counts import Counting, ReceiveCounts, counting_config
from cute_ep.testing.compare import assert_bits

from .conftest import connected

RANKS, PER_NODE, WORDS, LOCAL = 33, 11, 104, 2
EXPERTS = RANKS * LOCAL


def main() -> None:
    """AssertionError or EPTimeout when something is wrong. Each exchange overwrites the table of the one before, and
    the host waits for every second one."""
    cfg = counting_config(WORDS, RANKS, 20.0, PER_NODE)
    assert cfg.max_tokens_per_rank == 2
    with connected(cfg, ["cuda:0"] * RANKS) as communicators:
        made = [Counting(communicator) for communicator in communicators]
        for number in range(6):
            whole = torch.arange(RANKS * WORDS, dtype=torch.int32).view(RANKS, WORDS) + number * 0x10001
            given, told = whole.to("cuda:0"), number % 2 == 1
            begun = [
                counting.exchange(own, EXPERTS, ends=number > 2, told=told)
                for counting, own in zip(made, given, strict=True)
            ]
            for rank, one in enumerate(begun if told else ()):
                first = RANKS + LOCAL * rank
                entries = whole[:, first : first + LOCAL].sum(0).tolist()
                want = ReceiveCounts(entries, int(whole[:, RANKS + EXPERTS].max()), int(whole[:, rank].sum()))
                assert one.wait() == want, f"exchange {number}, rank {rank}"
            for communicator in communicators:
                communicator.synchronize()
            ends = whole[:, :RANKS].cumsum(0, dtype=torch.int32)
            for rank, counting in enumerate(made):
                where = f"exchange {number}, rank {rank}"
                assert_bits(counting.by_rank().cpu(), whole, where)
                assert (begun[rank].ends is None) == (number <= 2)
                if begun[rank].ends is not None:
                    assert_bits(begun[rank].ends.cpu(), ends, where)
    for counting in made:
        counting.free()


if __name__ == "__main__":
    main()
