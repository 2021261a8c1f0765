"""The exchange of counts among more ranks than a token may have entries: 3 virtual nodes of 11 ranks."""

from __future__ import annotations

import torch

from cute_ep.runtime.counts import Counting, counting_config
from cute_ep.testing.compare import assert_bits

from .conftest import connected

RANKS, PER_NODE, WORDS = 33, 11, 104


def test_every_rank_gets_the_counts_of_all() -> None:
    """Again and again: each exchange overwrites the table of the one before."""
    cfg = counting_config(WORDS, RANKS, 20.0, PER_NODE)
    assert cfg.max_tokens_per_rank == 2
    with connected(cfg, ["cuda:0"] * RANKS) as communicators:
        made = [Counting(communicator) for communicator in communicators]
        for number in range(5):
            whole = torch.arange(RANKS * WORDS, dtype=torch.int32).view(RANKS, WORDS) + number * 0x01010101
            given = whole.to("cuda:0")
            for counting, own in zip(made, given, strict=True):
                counting.exchange(own)
            for communicator in communicators:
                communicator.synchronize()
            for rank, counting in enumerate(made):
                assert_bits(counting.by_rank().cpu(), whole, f"exchange {number}, rank {rank}")
