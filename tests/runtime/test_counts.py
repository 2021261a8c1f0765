"""The exchange of counts, on one node and over several, of more ranks than a token has entries too."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.mail import MAX_NODES
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_RANKS, count_words
from cute_ep.runtime import counts
from cute_ep.runtime.connection import connected
from cute_ep.runtime.counts import Counting, counting_config
from cute_ep.runtime.routes import RouteCounts, count_routes
from cute_ep.testing.compare import assert_bits
from tests.reference.ranks import at_once

from .emulated_nccl import over_nccl

TIMEOUT_S = 30.0
TOP_K = 3


def routes_of(rank: int, experts: int, ranks: int) -> RouteCounts:
    """Of a rank's tokens, of which each third rank has none: masked and repeated entries, and no expert's."""
    generator = torch.Generator().manual_seed(rank)
    tokens = rank % 3 * (1 + rank % 5)
    return count_routes(torch.randint(-1, experts + 1, (tokens, TOP_K), generator=generator), experts, ranks)


@pytest.mark.parametrize(
    ("ranks", "per_node", "tokens"),
    [(1, None, 1), (3, None, 1), (4, 2, 1), (5, 1, 1), (33, 11, 2), (48, 16, 2)],
)
def test_every_rank_gets_the_counts_of_all(ranks: int, per_node: int | None, tokens: int) -> None:
    """Against sums of the ranks' own; twice, since a second exchange overwrites the first one's table."""
    local = 2
    experts = ranks * local
    given = [routes_of(rank, experts, ranks) for rank in range(ranks)]
    cfg = counting_config(given[0].counts.shape[0], ranks, TIMEOUT_S, per_node)
    assert cfg.max_tokens_per_rank == tokens
    by_rank = torch.stack([one.by_rank for one in given])
    by_expert = torch.stack([one.by_expert for one in given]).sum(0).view(ranks, local)
    with connected(cfg, ["cpu"] * ranks) as communicators:
        made = [Counting(communicator) for communicator in communicators]
        for sent in ([torch.zeros_like(one.counts) for one in given], [one.counts for one in given]):
            begun = [counting.exchange(own, experts) for counting, own in zip(made, sent, strict=True)]
        for rank, counting in enumerate(made):
            got = begun[rank].wait()
            assert got.entries == by_expert[rank].tolist()
            assert got.arriving == int(by_rank[:, rank].sum())
            assert got.tokens == max(len(one.ids) for one in given)
            assert_bits(counting.by_rank(), torch.stack([one.counts for one in given]), f"table of rank {rank}")


def test_messages_of_several_tokens_travel_by_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the communicators of GPUs, with emulated kernels, where a token may have two entries."""
    monkeypatch.setattr(counts, "MAX_TOP_K", 2)
    counting_config.cache_clear()
    cfg = counting_config(16, 6, TIMEOUT_S, 2)
    counting_config.cache_clear()
    assert (cfg.max_tokens_per_rank, cfg.top_k) == (3, 2)
    given = torch.arange(6 * 16, dtype=torch.int32).view(6, 16)

    def exchange(rank: int) -> torch.Tensor:
        counting = Counting(made[rank])
        for number in range(3):
            counting.exchange(given[rank] + number, 6, told=False)
        return counting.by_rank()

    with over_nccl(cfg) as (made, _):
        for rank, table in enumerate(at_once(range(6), exchange)):
            assert_bits(table, given + 2, f"table of rank {rank}")


def test_any_number_of_nodes_that_gpus_serve_can_count() -> None:
    """Of as many experts as there may be."""
    for per_node in range(1, MAX_RANKS + 1):
        for nodes in range(1, min(MAX_NODES, MAX_EXPERTS // per_node) + 1):
            ranks = nodes * per_node
            cfg = counting_config(count_words(ranks, MAX_EXPERTS), ranks, TIMEOUT_S, per_node)
            assert cfg.max_tokens_per_rank * cfg.top_k >= ranks


def test_more_ranks_of_a_node_than_there_may_be_are_refused() -> None:
    with pytest.raises(EPConfigError, match=r"world_size = 33: must be .* on one node; set ranks_per_node for several"):
        counting_config(64, 33, TIMEOUT_S)
