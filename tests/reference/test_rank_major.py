"""Rank-major rows, one per (token, rank), against plain loops over the ranks' tokens, on CPU ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.types import ROW_IDS, RowIds
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs

from .ranks import is_poison, poisoned

CFG = EPConfig(256, 6, 3, 9, world_size=3, row_order="rank_major")
TOKENS = (9, 0, 7)
LAYOUTS = [(name, layout) for name, fmt in FORMATS.items() for layout in fmt.scale_layouts or (None,)]


def round_of(cfg: EPConfig, given: list[RankInputs], weighted: bool = True) -> tuple[list, list]:
    """(communicators, batches in poisoned memory)."""
    ranks = connect_reference(cfg)
    batches = [
        ep.dispatch(one.x, one.topk_ids, one.router_weights if weighted else None, out=poisoned(ep))
        for ep, one in zip(ranks, given, strict=True)
    ]
    return ranks, batches


def expected(cfg: EPConfig, rank: int, given: list[RankInputs]) -> list[list[tuple[int, list[int], list[float]]]]:
    """Per source, in row order: (token, local expert of each entry or -1, its weight or 0)."""
    sources = []
    for one in given:
        rows = []
        for token, (ids, weights) in enumerate(zip(one.topk_ids.tolist(), one.router_weights.tolist(), strict=True)):
            local = [i % cfg.local_experts if i >= 0 and i // cfg.local_experts == rank else -1 for i in ids]
            if max(local) >= 0:
                rows.append((token, local, [w if i >= 0 else 0.0 for i, w in zip(local, weights, strict=True)]))
        sources.append(rows)
    return sources


@pytest.mark.parametrize("ids", ROW_IDS)
@pytest.mark.parametrize("size", [None, 9], ids=["dense", "blocks"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_rank_has_a_row_for_each_token_that_it_serves(routing: str, size: int | None, ids: RowIds) -> None:
    """Rows, what stands beside them, counts, and what combine reads; unused rows have no experts."""
    cfg = replace(CFG, block_rows=size, row_ids=ids)
    given = make_inputs(cfg, TOKENS, routing, 3)
    _, batches = round_of(cfg, given)
    for rank, batch in enumerate(batches):
        sources, used, begin = expected(cfg, rank, given), [], 0
        row_map = torch.full((3, 9, 3), -1, dtype=torch.int32)
        for source, rows in enumerate(sources):
            begin = source * size if size else begin
            assert int(batch.row_offsets[source]) == begin
            for row, (token, local, weights) in enumerate(rows, begin):
                assert_bits(batch.tokens[row], given[source].x[token], f"row {row}")
                slot = max(k for k, expert in enumerate(local) if expert >= 0)
                assert batch.src_info[row].tolist() == [token, slot]
                assert_bits(batch.row_expert_ids[row], torch.tensor(local, dtype=getattr(torch, ids)), f"row {row}")
                assert batch.row_weights[row].tolist() == weights
                row_map[source, token, slot] = row
                used.append(row)
            begin += len(rows)
        counts = [len(rows) for rows in sources]
        assert batch.row_counts.tolist() == counts
        assert int(batch.num_rows) == (3 * size if size else sum(counts))
        assert_bits(batch.row_map, row_map, "row_map")
        assert_bits(batch.weights, (row_map >= 0).float(), "weights")
        rest = sorted(set(range(len(batch.tokens))) - set(used))
        assert (batch.row_expert_ids[rest] == -1).all()
        assert all(is_poison(tensor[rest]) for tensor in (batch.tokens, batch.src_info, batch.row_weights))


@pytest.mark.parametrize("fmt, layout", LAYOUTS)
def test_rows_are_those_of_the_format(fmt: str, layout: str | None) -> None:
    """What payload and scale factors say, against rows in expert-major order."""
    plain = replace(CFG, dispatch_format=fmt, scale_layout=layout, row_order="expert_major")
    given = make_inputs(plain, TOKENS, "masked", 3)
    _, wanted = round_of(plain, given)
    _, batches = round_of(replace(plain, row_order="rank_major"), given)

    def numbers(batch: Dispatched) -> torch.Tensor:
        return reference.dequantize(batch, fmt, scale_layout=layout) if layout else batch.tokens

    for want, got in zip(wanted, batches, strict=True):
        has = got.row_map >= 0
        assert_bits(numbers(got)[got.row_map[has].long()], numbers(want)[want.row_map[has].long()], "numbers")
        if want.row_scales is not None:
            assert_bits(got.row_scales[got.row_map[has].long()], want.row_scales[want.row_map[has].long()], "scales")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_combine_adds_a_tokens_rows_over_ranks(routing: str, weighted: bool) -> None:
    given = make_inputs(CFG, TOKENS, routing, 3)
    ranks, batches = round_of(CFG, given, weighted)
    if not weighted:
        assert all(((b.row_weights == 1) == (b.row_expert_ids >= 0))[: int(b.num_rows)].all() for b in batches)
    rows = [torch.randn(27, CFG.hidden).bfloat16() for _ in ranks]
    outs = [ep.combine(row, batch, mode="partial") for ep, row, batch in zip(ranks, rows, batches, strict=True)]
    for source, out in enumerate(outs):
        want = torch.zeros(out.shape)
        for row, batch in zip(rows, batches, strict=True):
            place = batch.row_map[source, : len(out)].amax(1)
            want = torch.where(place[:, None] >= 0, want + row[place.clamp(min=0).long()].float(), want)
        assert_bits(out, want.bfloat16(), f"rank {source}")


def test_rows_without_room_are_reported_and_come_home_as_nan() -> None:
    cfg = replace(CFG, block_rows=5)
    given = make_inputs(cfg, TOKENS, "one_expert", 3)
    ranks, batches = round_of(cfg, given)
    assert batches[0].row_counts.tolist() == [5, 0, 5]
    assert (batches[0].row_map == LOST_ROW).sum() == 4 + 2
    with pytest.raises(EPInputError, match="rank 0: the block of group 0 holds 5 rows, but 9 have arrived"):
        ranks[0].synchronize()
    rows = [torch.ones(15, cfg.hidden, dtype=torch.bfloat16) for _ in ranks]
    outs = [ep.combine(row, batch, mode="partial") for ep, row, batch in zip(ranks, rows, batches, strict=True)]
    assert outs[0].isnan().any(1).tolist() == outs[0].isnan().all(1).tolist() == [False] * 5 + [True] * 4

    ranks = connect_reference(CFG)
    small = [DispatchBuffers.allocate(CFG, "cpu", 8) for _ in ranks]
    batches = [ep.dispatch(g.x, g.topk_ids, out=out) for ep, g, out in zip(ranks, given, small, strict=True)]
    assert int(batches[0].num_rows) == 0 and (batches[0].row_expert_ids == -1).all()


@pytest.mark.parametrize("mode", ["exact", "unweighted"])
def test_other_sums_are_refused(mode: str) -> None:
    given = make_inputs(CFG, TOKENS, "uniform", 3)
    ranks, (batch, *_) = round_of(CFG, given)
    with pytest.raises(EPInputError, match=f"mode = '{mode}': must be 'partial' for rank-major rows"):
        ranks[0].combine(batch.tokens, batch, mode=mode)


REFUSED = [
    (dict(row_order="by_rank"), "row_order = 'by_rank': must be one of expert_major, rank_major"),
    (dict(row_order=None), "row_order = None: must be one of"),
    (dict(fused_shared_expert=True), "fused_shared_expert = True: must be False with rank-major rows"),
]


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text.partition(":")[0] for _, text in REFUSED])
def test_configurations_without_rank_major_rows_are_refused(changes: dict, text: str) -> None:
    with pytest.raises(EPConfigError, match="^" + text):
        replace(CFG, **changes)


def test_buffers_have_room_for_every_token_once() -> None:
    assert CFG.max_rows == 27 and replace(CFG, block_rows=11).max_rows == 33
    assert replace(CFG, row_alignment=16).max_rows == 80
    assert replace(CFG, skip_a2a=True).groups == 1
