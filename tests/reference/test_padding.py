"""Rows that pad an expert, on CPU ranks: zeros, or as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs

from .ranks import is_poison, poisoned

CFG = EPConfig(256, 6, 3, 9, 3, row_alignment=16, fused_shared_expert=True)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4", "nvfp4_row"])
def test_tokens_of_padding_are_zeros_or_stay_as_they_are(fmt: str) -> None:
    """What lies beside them is the same, and so are all other rows."""
    given, sides = make_inputs(CFG, [9, 0, 5], "uniform", 1), []
    for zeros in (True, False):
        ranks = connect_reference(replace(CFG, dispatch_format=fmt, zero_padding=zeros))
        outs = [poisoned(ep) for ep in ranks]
        sides.append(
            [
                ep.dispatch(one.x, one.topk_ids, one.router_weights, out=out)
                for ep, one, out in zip(ranks, given, outs, strict=True)
            ]
        )
    for rank, (want, got) in enumerate(zip(*sides, strict=True)):
        padding = want.src_info[: int(want.num_rows), 0] < 0
        assert padding.any() and not padding.all()
        assert not want.tokens[: len(padding)][padding].float().any()
        assert is_poison(got.tokens[: len(padding)][padding])
        assert_bits(got.tokens[: len(padding)][~padding], want.tokens[: len(padding)][~padding], f"rank {rank} tokens")
        for name in ("scales", "row_scales", "src_info", "row_weights", "row_offsets", "row_counts", "source_ranges"):
            if getattr(want, name) is not None:
                assert_bits(getattr(got, name), getattr(want, name), f"rank {rank} {name}")
