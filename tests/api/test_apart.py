"""An output shares no memory with what its call reads, on either backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_ep import connect_local, reference
from cute_ep.api.errors import EPInputError
from tests.fake_gpu import Launches, MakeRank

from .one_rank import ONE_RANK, inputs_of


@pytest.mark.parametrize(
    ("fmt", "read", "written"),
    [
        ("bf16", "x", "src_info"),
        ("bf16", "router_weights", "weights"),
        ("fp8", "x", "tokens"),
        ("fp8", "scales", "row_weights"),
        ("nvfp4_row", "row_scales", "row_weights"),
        ("nvfp4_row", "scales", "scales"),
    ],
)
def test_an_output_lies_apart_from_all_that_a_dispatch_reads(
    make_rank: MakeRank, launches: Launches, fmt: str, read: str, written: str
) -> None:
    cfg = replace(ONE_RANK, dispatch_format=fmt)
    x, ids, weights = (one[:1] for one in inputs_of(cfg))
    given = {"x": x, "router_weights": weights}
    if fmt != "bf16":
        rows = reference.quantize(x, fmt)
        given |= {"x": rows.payload, "scales": rows.scales, "row_scales": rows.row_scales}
    for rank in (make_rank(cfg), connect_local(cfg, ["cpu"])[0]):
        out = rank.allocate()
        rank.dispatch(topk_ids=ids, out=out, **given)
        wanted = given[read]
        memory = getattr(out, written).flatten().view(wanted.dtype)
        within = {read: memory[: wanted.numel()].view(wanted.shape)}
        rule = rf"out\.{written}: shares memory with {read}, which the call reads"
        with launches.forbidden(), pytest.raises(EPInputError, match=rule):
            rank.dispatch(topk_ids=ids, out=out, **given | within)
