"""Rows that pad an expert, on CPU ranks: zeros, or as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs

from .ranks import is_poison, poisoned

CFG = EPConfig(256, 8, 3, 9, 4, row_alignment=16)
TOKENS = (9, 0, 5, 9)
KINDS: dict[str, dict[str, Any]] = {
    "shared expert": {"fused_shared_expert": True},
    "rank-major": {"row_order": "rank_major"},
    "all experts here": {"skip_a2a": True},
    "nodes": {"ranks_per_node": 2},
    "linear": {"scale_layout": "linear"},
}


def round_of(cfg: EPConfig) -> tuple[list, list]:
    """(communicators, batches in poisoned memory)."""
    tokens = (9,) * 4 if cfg.skip_a2a else TOKENS
    ranks, given = connect_reference(cfg), make_inputs(cfg, tokens, "uniform", 1)
    outs = [poisoned(ep) for ep in ranks]
    return ranks, [
        ep.dispatch(one.x, one.topk_ids, one.router_weights, out=out)
        for ep, one, out in zip(ranks, given, outs, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4", "nvfp4_row"])
def test_tokens_of_padding_are_zeros_or_stay_as_they_are(fmt: Any, kind: str) -> None:
    """What lies beside them is the same, and so are all other rows, and what comes home."""
    if fmt == "bf16" and "scale_layout" in KINDS[kind]:
        pytest.skip("bf16 has no scale factors")
    cfg = replace(CFG, dispatch_format=fmt, **KINDS[kind])
    (ranks, wanted), (others, found) = (round_of(replace(cfg, zero_padding=zeros)) for zeros in (True, False))
    for rank, (want, got) in enumerate(zip(wanted, found, strict=True)):
        padding = want.src_info[: int(want.num_rows), 0] < 0
        assert padding.any() and not padding.all()
        assert not want.tokens[: len(padding)][padding].float().any()
        assert is_poison(got.tokens[: len(padding)][padding])
        assert_bits(got.tokens[: len(padding)][~padding], want.tokens[: len(padding)][~padding], f"rank {rank} tokens")
        for name in ("scales", "row_scales", "src_info", "row_weights", "row_offsets", "row_counts", "source_ranges"):
            if getattr(want, name) is not None:
                assert_bits(getattr(got, name), getattr(want, name), f"rank {rank} {name}")
    sums = []
    for side, batches in ((ranks, wanted), (others, found)):
        rows = [torch.ones(len(one.tokens), cfg.hidden, dtype=torch.bfloat16) for one in batches]
        for own, one in zip(rows, batches, strict=True):
            own[one.src_info[:, 0] < 0] = 0 if side is ranks else torch.nan
        sums.append([ep.combine(own, one, mode="partial") for ep, own, one in zip(side, rows, batches, strict=True)])
    for rank, (first, second) in enumerate(zip(*sums, strict=True)):
        assert_bits(second, first, f"rank {rank}")


@pytest.mark.parametrize("value", [0, 1, None, "no"])
def test_zero_padding_is_true_or_false(value: Any) -> None:
    with pytest.raises(EPConfigError, match=f"zero_padding = {value!r}: must be True or False"):
        replace(CFG, zero_padding=value)


def test_memory_says_whether_padding_becomes_zero() -> None:
    """Made for a configuration, it may differ in that from the communicator."""
    for zeros in (True, False):
        cfg = replace(CFG, zero_padding=not zeros)
        ranks, given = connect_reference(cfg), make_inputs(cfg, TOKENS, "uniform", 1)
        outs = [DispatchBuffers.carve(replace(cfg, zero_padding=zeros), "cpu") for _ in ranks]
        for out in outs:
            out.tokens.fill_(3)
        for ep, one, out in zip(ranks, given, outs, strict=True):
            ep.dispatch(one.x, one.topk_ids, out=out)
        for ep, out in zip(ranks, outs, strict=True):
            padding = out.tokens[: int(out.num_rows)][out.src_info[: int(out.num_rows), 0] < 0]
            assert padding.numel() and bool((padding == (0 if zeros else 3)).all())
            assert out.zeroed_by(ep.cfg) == zeros
