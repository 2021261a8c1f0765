"""Blocks of a fixed number of rows per local expert, in every format and scale layout, bit for bit."""

from __future__ import annotations

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.layouts.maps.scales import ATOM
from cute_ep.testing.verify import RoundOptions, check_round
from cute_ep.testing.workloads import make_inputs

from .conftest import connected

MANY = LAMPORT_TOKENS + 1
TOKENS = ((0, "uniform"), (1, "zipf"), (7, "masked"), (33, "one_rank"), (129, "one_expert"), (MANY, "uniform"))


@pytest.mark.parametrize(
    ("fmt", "layout"), [(name, layout) for name, fmt in FORMATS.items() for layout in fmt.scale_layouts or (None,)]
)
def test_blocks(devices: list[str], fmt: str, layout: str | None) -> None:
    """Fused and split, all modes; rows and scale words behind those that came are left alone."""
    ranks = len(devices)
    size = ranks * MANY if layout != ATOM else -(-ranks * MANY // 128) * 128
    cfg = EPConfig(1024, 4 * ranks, 3, MANY, ranks, fmt, 20, layout, block_rows=size)
    with connected(cfg, devices) as communicators:
        for turn, (tokens, routing) in enumerate(TOKENS):
            counts = [max(0, tokens - (tokens + 2) * ((rank + turn) % 3) // 2) for rank in range(ranks)]
            for split in (False, True):
                check_round(communicators, make_inputs(cfg, counts, routing, turn), RoundOptions(split, seed=turn))


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
def test_rows_beyond_a_block(devices: list[str], fmt: str) -> None:
    """They are reported and come home as NaN; other blocks are as they should be, and the next round is right."""
    ranks, size = len(devices), 128
    cfg = EPConfig(1024, 2 * ranks, 2, 70, ranks, fmt, 20, block_rows=size)
    given = make_inputs(cfg, [70] * ranks, "one_expert", 1)
    with connected(cfg, devices) as communicators:
        for _ in range(2):
            batches = []
            for ep, one in zip(communicators, given, strict=True):
                tensors = one.x, one.topk_ids, one.router_weights
                batches.append(ep.dispatch(*(tensor.to(ep.device) for tensor in tensors)))
            arrived = 70 * ranks
            text = f"rank 0: the block of group 0 holds {size} rows, but {arrived} have arrived"
            if arrived > size:
                with pytest.raises(EPInputError, match=text):
                    communicators[0].synchronize()
            for ep in communicators[1:]:
                ep.synchronize()
            assert int(batches[0].row_counts[0]) == min(size, arrived)
            assert int((batches[0].row_map == LOST_ROW).sum()) == max(0, arrived - size)
            rows = [torch.ones(2 * size, cfg.hidden, device=ep.device).bfloat16() for ep in communicators]
            outs = [ep.combine(row, batch) for ep, row, batch in zip(communicators, rows, batches, strict=True)]
            for ep in communicators:
                ep.synchronize()
            first = batches[0].row_map.cpu()
            for rank, out in enumerate(outs):
                lost = (first[rank] == LOST_ROW).any(1)[:70]
                assert torch.equal(out.isnan().any(1).cpu(), lost) and torch.equal(out.isnan().all(1).cpu(), lost)
        fits = make_inputs(cfg, [9] * ranks, "masked", 2)
        check_round(communicators, fits, RoundOptions())
