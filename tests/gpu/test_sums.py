"""Sums of a token's rows by the kernel, against loops over entries."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.runtime.sums import sum_rows
from cute_ep.testing.workloads import ROUTINGS, make_inputs
from tests.runtime.test_sums import CFG, batches, check

from .conftest import LIBRARY


def on_gpu(batch: Dispatched) -> Dispatched:
    """What `sum_rows` reads, and rows of `row_map` behind a source's tokens that it must not."""
    row_map = batch.row_map.clone()
    for source, count in enumerate(batch.headers[:, 0].tolist()):
        row_map[source, count:] = 1 << 30
    moved = {"row_map": row_map.cuda(), "topk_ids": batch.topk_ids.cuda(), "tokens": batch.tokens.cuda()}
    changed = batch.derived(**moved)
    return changed._changed({"headers": batch.headers.cuda()})


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", [None, 8])
def test_the_kernel_sums_as_a_loop(routing: str, capacity: int | None) -> None:
    for rank, batch in enumerate(batches(routing, capacity)):
        rows = torch.randn(len(batch.tokens), CFG.hidden, generator=torch.Generator().manual_seed(rank)).bfloat16()
        given = on_gpu(batch)
        for _ in range(2):  # memory of the pass before is used again
            check(*sum_rows(rows.cuda(), given, library=str(LIBRARY)), rows, batch)


@pytest.mark.parametrize(("hidden", "tokens", "top_k"), [(7168, 128, 8), (8, 40, 3), (2056, 700, 32), (7168, 1500, 1)])
def test_sizes(hidden: int, tokens: int, top_k: int) -> None:
    cfg = EPConfig(hidden, 64, top_k, tokens, 2)
    inputs = make_inputs(cfg, (tokens, tokens // 3), "uniform", 1)
    made = reference.dispatch(cfg, [one.x for one in inputs], [one.topk_ids for one in inputs])
    for batch in made:
        rows = torch.randn(len(batch.tokens), hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16()
        assert check(*sum_rows(rows.cuda(), on_gpu(batch), library=str(LIBRARY)), rows, batch)


def test_a_graph_sums_the_rows_of_each_replay() -> None:
    batch = batches("uniform")[0]
    rows, given = torch.zeros(len(batch.tokens), CFG.hidden, dtype=torch.bfloat16, device="cuda"), on_gpu(batch)
    sum_rows(rows, given, library=str(LIBRARY))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = sum_rows(rows, given, library=str(LIBRARY))
    for _ in range(3):
        rows.normal_()
        graph.replay()
        torch.cuda.synchronize()
        check(*made, rows, batch)
