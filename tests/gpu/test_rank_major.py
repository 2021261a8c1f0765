"""Rows by source rank, one per (token, rank), in every format and scale layout, bit for bit."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.types import ROW_IDS, FormatName, RowIds, ScaleLayout
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import RANK_MAJOR
from cute_ep.layouts.maps.scales import ATOM
from cute_ep.runtime.routes import count_routes
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs

from .conftest import connected

MANY = LAMPORT_TOKENS + 1
TOKENS = ((0, "uniform"), (1, "zipf"), (7, "masked"), (33, "one_rank"), (129, "one_expert"), (MANY, "uniform"))
WIDE = ("bf16", None, "int64"), ("mxfp8", "linear", "int64")
LAYOUTS = [(name, layout) for name, fmt in FORMATS.items() for layout in fmt.scale_layouts or (None,)]


@pytest.mark.parametrize("blocks", [False, True], ids=["dense", "blocks"])
@pytest.mark.parametrize(("fmt", "layout", "ids"), [*((*one, "int32") for one in LAYOUTS), *WIDE])
def test_rank_major(devices: list[str], fmt: FormatName, layout: ScaleLayout | None, ids: RowIds, blocks: bool) -> None:
    """Fused and split; a top-k that no warp divides evenly; what no token has is marked, or left alone."""
    ranks = len(devices)
    size = (-(-MANY // 128) * 128 if layout == ATOM else MANY) if blocks else None
    sizes = 1024, 4 * ranks, 3, MANY, ranks
    cfg = EPConfig(*sizes, fmt, 20, layout, block_rows=size, row_order=RANK_MAJOR, row_ids=ids)
    with connected(cfg, devices) as communicators:
        for turn, (tokens, routing) in enumerate(TOKENS):
            counts = [max(0, tokens - (tokens + 2) * ((rank + turn) % 3) // 2) for rank in range(ranks)]
            at = "combine" if turn == 2 else "dispatch"
            for split in (False, True):
                options = RoundOptions(split, seed=turn, weights_at=at)
                check_round(communicators, make_inputs(cfg, counts, routing, turn), options)


@pytest.mark.parametrize("top_k", [1, 6, 8, 32])
@pytest.mark.parametrize("alignment", [1, 16])
def test_positions_of_tokens_in_warps_and_spans(devices: list[str], top_k: int, alignment: int) -> None:
    """Token counts around a warp's, a span's and all CTAs' entries."""
    ranks = len(devices)
    experts = max(top_k, 4) * ranks
    cfg = EPConfig(128, experts, top_k, 9000, ranks, timeout_s=20, row_alignment=alignment, row_order=RANK_MAJOR)
    in_warp = max(1, 32 // top_k)
    with connected(cfg, devices) as communicators:
        for turn, tokens in enumerate((in_warp, in_warp + 1, 8 * in_warp, 8 * in_warp + 1, 1000, 9000)):
            counts = [max(0, tokens - rank) for rank in range(ranks)]
            for routing in ("uniform", "masked"):
                check_round(communicators, make_inputs(cfg, counts, routing, turn))


def test_alone(devices: list[str]) -> None:
    """`skip_a2a`: each rank keeps the tokens that it serves."""
    ranks = len(devices)
    cfg = EPConfig(256, 4 * ranks, 3, 300, ranks, timeout_s=20, skip_a2a=True, row_order=RANK_MAJOR)
    with connected(cfg, devices) as communicators:
        check_round(communicators, make_inputs(cfg, [257] * ranks, "masked", 1)[:1] * ranks)


@pytest.mark.parametrize("ids", ROW_IDS)
def test_rows_beyond_the_buffers(devices: list[str], ids: RowIds) -> None:
    """No rows are published and no row has experts; the next round is right."""
    ranks = len(devices)
    cfg = EPConfig(256, 2 * ranks, 2, 70, ranks, timeout_s=20, row_order=RANK_MAJOR, row_ids=ids)
    given = make_inputs(cfg, [70] * ranks, "one_expert", 1)
    with connected(cfg, devices) as communicators:
        small = [DispatchBuffers.allocate(cfg, ep.device, 69) for ep in communicators]
        batches = []
        for ep, one, out in zip(communicators, given, small, strict=True):
            tensors = one.x, one.topk_ids, one.router_weights
            batches.append(ep.dispatch(*(tensor.to(ep.device) for tensor in tensors), out=out))
        with pytest.raises(EPInputError, match=f"out holds 69 rows, but those that arrived take {70 * ranks}"):
            communicators[0].synchronize()
        assert int(batches[0].num_rows) == 0 and (batches[0].row_expert_ids == -1).all()
        rows = [torch.ones(69, cfg.hidden, device=ep.device).bfloat16() for ep in communicators]
        outs = [
            ep.combine(row, batch, mode="partial") for ep, row, batch in zip(communicators, rows, batches, strict=True)
        ]
        torch.cuda.synchronize()
        for out, lost in zip(outs, [(one.topk_ids // 2 == 0).any(1) for one in given], strict=True):
            assert out.cpu().isnan().all(1)[lost].all()
        for ep in communicators[1:]:
            with contextlib.suppress(EPInputError):
                ep.synchronize()
        check_round(communicators, make_inputs(cfg, [9] * ranks, "masked", 2))


@pytest.mark.parametrize("tokens", [20, 300])
def test_rows_of_derived_batches_come_home_in_any_mode(devices: list[str], tokens: int) -> None:
    """At the last of a token's entries on each rank, where `derived` masks the others."""
    ranks = len(devices)
    cfg = EPConfig(512, 8 * ranks, 6, 300, ranks, timeout_s=20, row_order=RANK_MAJOR)  # more entries than ranks
    given = make_inputs(cfg, [tokens, *[7] * (ranks - 1)], "masked", 3)
    with connected(cfg, devices) as communicators:
        for _ in range(2):
            batches, rows = [], []
            for ep, one in zip(communicators, given, strict=True):
                batches.append(ep.dispatch(one.x.to(ep.device), one.topk_ids.to(ep.device)))
            torch.cuda.synchronize()
            for ep, one, batch in zip(communicators, given, batches, strict=True):
                rows.append(batch.tokens * (2 + ep.rank))
                last = count_routes(one.topk_ids, cfg.num_experts, ranks).last_ids.to(ep.device)
                batches[ep.rank] = batch.derived(topk_ids=last)
            torch.cuda.synchronize()
            for mode in ("exact", "unweighted"):
                weights = [one.router_weights.to(ep.device) for ep, one in zip(communicators, given, strict=True)]
                each = weights if mode == "exact" else [None] * ranks
                outs = [
                    ep.combine(row, batch, weight, mode=mode)
                    for ep, row, batch, weight in zip(communicators, rows, batches, each, strict=True)
                ]
                torch.cuda.synchronize()
                for rank, (one, batch, out) in enumerate(zip(given, batches, outs, strict=True)):
                    slots = torch.zeros(len(one.x), cfg.top_k, cfg.hidden)
                    for token, ids in enumerate(batch.topk_ids.tolist()):
                        for slot, expert in enumerate(ids):
                            if expert >= 0:
                                slots[token, slot] = (one.x[token] * (2 + expert // 8)).float()
                    if mode == "unweighted":
                        assert_bits(out.cpu(), slots.bfloat16(), f"rank {rank} {mode}")
                        continue
                    total = torch.zeros(out.shape)
                    for slot in range(cfg.top_k):
                        total = total + slots[:, slot] * one.router_weights[:, slot, None]
                    assert_bits(out.cpu() + 0.0, total.bfloat16() + 0.0, f"rank {rank} {mode}")
