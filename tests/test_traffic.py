"""Bytes computed from the routing, against a count by hand and against the reference's own outputs."""

from __future__ import annotations

import pytest
import torch

from cute_ep import reference
from cute_ep.config import EPConfig
from cute_ep.traffic import add_traffic, count_routing, per_expert_receive_bytes, traffic
from tests.cases import CASES


def test_by_hand() -> None:
    cfg = EPConfig(hidden=64, num_experts=4, top_k=3, max_tokens_per_rank=2, world_size=2)
    ids = [torch.tensor([[0, 1, 2], [-1, -1, 3]], dtype=torch.int32), torch.tensor([[2, 3, -1]], dtype=torch.int32)]
    counts = count_routing(cfg, ids)
    assert counts.entries.tolist() == [[2, 2], [0, 2]]
    assert counts.pairs.tolist() == [[1, 2], [0, 1]]
    row = 128
    sent = traffic(cfg, counts, "dispatch")
    assert sent.remote.tolist() == [[0, 2 * row], [0, 0]]
    assert sent.logical == 6 * row
    # rank 0: reads 2 tokens, 1 message in and out, writes 2 rows; rank 1: 1 token, 3 messages, 4 rows
    assert sent.memory == ((2 + 2 + 2) * row, (1 + 6 + 4) * row)
    exact, partial = (traffic(cfg, counts, f"combine_{mode}") for mode in ("exact", "partial"))
    assert exact.remote.tolist() == [[0, 0], [2 * row, 0]]
    assert partial.remote.tolist() == [[0, 0], [2 * row, 0]]
    assert exact.memory == ((2 + 2 * 4 + 2) * row, (4 + 2 * 2 + 1) * row)
    assert sent.busiest_link(["cuda:0", "cuda:1"]) == 2 * row
    assert sent.busiest_memory(["cuda:0", "cuda:0"]) == sum(sent.memory)
    assert add_traffic(sent, exact).remote_bytes == 4 * row
    assert per_expert_receive_bytes(cfg) == 4 * 2 * row


@pytest.mark.parametrize("case", [case for case in CASES if case.hidden <= 256], ids=lambda case: case.id)
def test_counts_agree_with_the_reference(case) -> None:
    inputs = case.inputs()
    ids = [one.topk_ids for one in inputs]
    received = reference.dispatch(case.cfg, [one.x for one in inputs], ids)
    counts = count_routing(case.cfg, ids)
    for rank, batch in enumerate(received):
        assert counts.rows_received(rank) == batch.num_rows.item()
        assert counts.pairs[:, rank].tolist() == (batch.row_map >= 0).any(dim=2).sum(dim=1).tolist()
