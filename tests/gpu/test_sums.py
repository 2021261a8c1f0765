"""Sums of a token's rows by the kernel, against loops over entries."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.runtime.sums import sum_rows
from cute_ep.testing.workloads import ROUTINGS, make_inputs
from tests.changed_batches import changed as with_tensors
from tests.runtime.test_sums import CFG, batches, check, random_rows

from .conftest import LIBRARY


def on_gpu(batch: Dispatched) -> Dispatched:
    """What `sum_rows` reads, and rows of `row_map` behind a source's tokens that it must not."""
    row_map = batch.row_map.clone()
    for source, count in enumerate(batch.headers[:, 0].tolist()):
        row_map[source, count:] = 1 << 30
    moved = {"row_map": row_map.cuda(), "topk_ids": batch.topk_ids.cuda(), "tokens": batch.tokens.cuda()}
    changed = batch.derived(**moved)
    return with_tensors(changed, headers=batch.headers.cuda())


def poison(rows: torch.Tensor, batch: Dispatched) -> None:
    """Fill the memory that the next sums and their map are likely to get."""
    places = batch.row_map.numel() // batch.row_map.shape[2]
    sums = torch.full((min(len(rows), places), rows.shape[1]), 0x7A7A, dtype=torch.int16, device="cuda")
    last_map = torch.full(batch.row_map.shape, 0x7A7A7A7A, dtype=torch.int32, device="cuda")
    del sums, last_map


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", [None, 8])
def test_the_kernel_sums_as_a_loop(routing: str, capacity: int | None) -> None:
    for rank, batch in enumerate(batches(routing, capacity)):
        rows = random_rows(len(batch.tokens), CFG.hidden, rank)
        given, on_device = on_gpu(batch), rows.cuda()
        poison(rows, batch)
        check(*sum_rows(on_device, given, library=str(LIBRARY)), rows, batch)


@pytest.mark.parametrize(("hidden", "tokens", "top_k"), [(7168, 128, 8), (8, 40, 3), (2056, 700, 32), (7168, 1500, 1)])
def test_rows_of_any_width_and_number(hidden: int, tokens: int, top_k: int) -> None:
    cfg = EPConfig(hidden, 64, top_k, tokens, 2)
    inputs = make_inputs(cfg, (tokens, tokens // 3), "uniform", 1)
    made = reference.dispatch(cfg, [one.x for one in inputs], [one.topk_ids for one in inputs])
    for batch in made:
        rows = random_rows(len(batch.tokens), hidden, hidden)
        poison(rows, batch)
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
