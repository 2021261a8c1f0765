"""Bytes computed from the routing, against a count by hand and against the reference's own outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.bench.traffic import LAUNCHES, count_routing, per_expert_receive_bytes, traffic
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import ATOM
from tests.cases import CASES


def test_bytes_of_a_round_by_hand() -> None:
    cfg = EPConfig(hidden=64, num_experts=4, top_k=3, max_tokens_per_rank=2, world_size=2)
    ids = [torch.tensor([[0, 1, 2], [-1, -1, 3]], dtype=torch.int32), torch.tensor([[2, 3, -1]], dtype=torch.int32)]
    counts = count_routing(cfg, ids)
    assert counts.entries.tolist() == [[2, 2], [0, 2]]
    assert counts.pairs.tolist() == [[1, 2], [0, 1]]
    row = 128
    sent = traffic(cfg, counts, "dispatch")
    assert sent.remote.tolist() == [[0, 2 * row], [0, 0]]
    assert sent.logical == 6 * row
    # rank 0: reads 2 tokens, writes 2 rows; rank 1: 1 token, 2 messages of the other rank in and out, 4 rows
    assert sent.memory == ((2 + 2) * row, (1 + 4 + 4) * row)
    # where a format encodes, own tokens are messages too: 1 of rank 0, 1 of rank 1
    encoded = traffic(replace(cfg, hidden=128, dispatch_format="fp8"), counts, "dispatch").memory
    token, message, made = 256, 144, 132  # 128 bytes and a scale factor, padded or not
    assert encoded == (2 * token + 2 * message + 2 * made, token + 6 * message + 4 * made)
    exact, partial = (traffic(cfg, counts, f"combine_{mode}") for mode in ("exact", "partial"))
    assert exact.remote.tolist() == [[0, 0], [2 * row, 0]]
    assert partial.remote.tolist() == [[0, 0], [2 * row, 0]]
    # rank 0: reads 2 rows of its own token, 2 more come in and go out, 2 sums; rank 1: 2 rows of its own, and 2 to send
    assert exact.memory == partial.memory == ((2 + 2 * 2 + 2) * row, (2 + 2 + 1) * row)
    assert sent.busiest_link(["cuda:0", "cuda:1"]) == 2 * row
    assert sent.busiest_memory(["cuda:0", "cuda:0"]) == sum(sent.memory)
    assert per_expert_receive_bytes(cfg) == 4 * 2 * row
    with pytest.raises(EPInputError, match="operation = 'combine'"):
        traffic(cfg, counts, "combine")


def test_the_busiest_link_by_hand() -> None:
    """Of three ranks, one expert each, on GPUs of their own: the one that receives most, or the one that sends most."""
    cfg, row = EPConfig(hidden=64, num_experts=3, top_k=2, max_tokens_per_rank=1, world_size=3), 128
    to_one = [torch.tensor([ids], dtype=torch.int32) for ids in ([2, -1], [2, -1], [2, -1])]
    from_one = [torch.tensor([ids], dtype=torch.int32) for ids in ([1, 2], [1, -1], [2, -1])]
    for ids, remote in (
        (to_one, [[0, 0, row], [0, 0, row], [0, 0, 0]]),
        (from_one, [[0, row, row], [0, 0, 0], [0, 0, 0]]),
    ):
        counts = count_routing(cfg, ids)
        sent, returned = traffic(cfg, counts, "dispatch"), traffic(cfg, counts, "combine_exact")
        assert sent.remote.tolist() == remote and returned.remote.tolist() == torch.tensor(remote).T.tolist()
        for moved in (sent, returned):
            assert moved.busiest_link(["cuda:0", "cuda:1", "cuda:2"]) == 2 * row


def test_bytes_with_a_shared_expert_by_hand() -> None:
    """A token that no expert of its rank takes still makes one local message; nothing more leaves the rank."""
    cfg = EPConfig(64, 4, 3, 2, 2, fused_shared_expert=True, row_alignment=4)
    ids = [torch.tensor([[0, 1, 2], [-1, -1, 3]], dtype=torch.int32), torch.tensor([[2, 3, -1]], dtype=torch.int32)]
    plain, counts = count_routing(replace(cfg, fused_shared_expert=False), ids), count_routing(cfg, ids)
    assert counts.messages.tolist() == [[2, 2], [0, 1]] and plain.messages.tolist() == [[1, 2], [0, 1]]
    assert counts.pairs.tolist() == plain.pairs.tolist() and counts.shared == (2, 1)
    # rank 0: 2 shared rows, experts 0 and 1 with a row each; rank 1: 1 shared row, 2 rows for each expert
    assert counts.rows == (12, 12) and plain.rows == (8, 8)
    row = 128
    sent = traffic(cfg, counts, "dispatch")
    assert sent.remote.tolist() == traffic(cfg, plain, "dispatch").remote.tolist() == [[0, 2 * row], [0, 0]]
    assert sent.logical == (6 + 3) * row
    assert sent.memory == ((2 + 12) * row, (1 + 2 * 2 + 12) * row)
    exact = traffic(cfg, counts, "combine_exact")
    assert exact.remote.tolist() == [[0, 0], [2 * row, 0]] and exact.logical == 6 * row
    assert exact.memory == ((2 + 2 + 2 * 2 + 2) * row, (4 + 1 + 1) * row)


def test_with_skip_a2a_no_byte_leaves_a_rank() -> None:
    cfg = EPConfig(64, 4, 3, 3, 2, fused_shared_expert=True, skip_a2a=True)
    ids = torch.tensor([[0, 1, 2], [-1, -1, 3], [2, 3, -1]], dtype=torch.int32)
    counts = count_routing(cfg, [ids, ids])
    assert counts.entries.tolist() == [[2, 0], [0, 4]] and counts.pairs.tolist() == [[1, 0], [0, 3]]
    assert counts.shared == (2, 1) and counts.messages.tolist() == [[2, 0], [0, 3]]
    assert counts.rows == (2 + 2, 1 + 4)
    for operation in LAUNCHES:
        moved = traffic(cfg, counts, operation)
        assert moved.remote_bytes == 0 and min(moved.memory) > 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_message_has_payload_scales_and_row_scale_padded(fmt: str) -> None:
    """Payload, scale factors and row scale, each padded to 16 bytes on the wire and packed in the output, where atoms
    of scale factors have 128 rows."""
    cfg = EPConfig(128, 2, 1, 1, 2, fmt, row_alignment=FORMATS[fmt].row_alignment)
    counts = count_routing(cfg, [torch.tensor([[1]]), torch.tensor([[-1]])])
    sent = traffic(cfg, counts, "dispatch")
    payload, scales, row_scale = {
        "bf16": (256, 0, 0),
        "fp8": (128, 4, 0),
        "fp8_pow2": (128, 4, 0),
        "mxfp8": (128, 4, 0),
        "mxfp6_e2m3": (96, 4, 0),
        "mxfp6_e3m2": (96, 4, 0),
        "mxfp4": (64, 4, 0),
        "nvfp4": (64, 8, 0),
        "nvfp4_row": (64, 8, 2),
    }[fmt]
    message = payload + 16 * (scales > 0) + 16 * (row_scale > 0)
    assert sent.remote.tolist() == [[0, message], [0, 0]]
    rows = FORMATS[fmt].row_alignment
    scale_rows = 128 if cfg.scales_as == ATOM else rows
    assert sent.memory[1] == 256 + 2 * message + rows * (payload + row_scale) + scale_rows * scales
    sent = traffic(replace(cfg, zero_padding=False), counts, "dispatch")
    assert sent.memory[1] == 256 + 2 * message + payload + rows * row_scale + scale_rows * scales


@pytest.mark.parametrize("case", [case for case in CASES if case.hidden <= 256], ids=lambda case: case.id)
def test_counts_agree_with_the_reference(case) -> None:
    inputs = case.inputs()
    ids = [one.topk_ids for one in inputs]
    received = reference.dispatch(case.cfg, [one.x for one in inputs], ids)
    counts = count_routing(case.cfg, ids)
    for order in ({"row_order": "rank_major"}, {"block_rows": 256}):
        if not case.shared and not (order.get("block_rows") and case.alignment):
            cfg = replace(case.cfg, **order)
            rows = [batch.num_rows.item() for batch in reference.dispatch(cfg, [one.x for one in inputs], ids)]
            assert list(count_routing(cfg, ids).rows) == rows
    for rank, batch in enumerate(received):
        assert counts.rows_received(rank) == batch.num_rows.item()
        if batch.scales_offsets is not None:
            blocks = [-(-count // 128) for count in batch.row_counts.tolist()]
            assert counts.scale_rows[rank] == 128 * sum(blocks)
        sources = [rank] if case.skip else range(len(ids))
        arrived = (batch.row_map >= 0).any(dim=2).sum(dim=1).tolist()
        assert counts.pairs[sources, rank].tolist() == arrived and counts.pairs[:, rank].sum() == sum(arrived)
        own = {token for token, slot in batch.src_info.tolist() if slot == case.top_k}
        own |= set((batch.row_map[0 if case.skip else rank] >= 0).any(dim=1).nonzero().flatten().tolist())
        assert counts.messages[rank, rank] == len(own)
