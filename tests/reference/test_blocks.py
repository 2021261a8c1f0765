"""Blocks of fixed size against the rows of a batch without blocks, on CPU ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import LOST_ROW
from cute_ep.layouts.maps.variants import COMBINE_MODES
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs

from .ranks import is_poison, poison_all, poisoned, rows_for

CFG = EPConfig(hidden=256, num_experts=6, top_k=3, max_tokens_per_rank=9, world_size=3)
TOKENS = (9, 0, 7)
LAYOUTS = [(name, layout) for name, fmt in FORMATS.items() for layout in fmt.scale_layouts or (None,)]


def round_of(cfg: EPConfig, given: list[RankInputs]) -> tuple[list, list]:
    """(communicators, batches in poisoned memory)."""
    ranks = connect_reference(cfg)
    pairs = list(zip(ranks, given, strict=True))
    return ranks, [ep.dispatch(one.x, one.topk_ids, one.router_weights, out=poisoned(ep)) for ep, one in pairs]


def of_blocks(batch: DispatchBuffers, rows: int) -> list[int]:
    """The rows of blocks of `rows` rows that hold something, in order."""
    return [expert * rows + row for expert, count in enumerate(batch.row_counts.tolist()) for row in range(count)]


@pytest.mark.parametrize("routing", ["uniform", "masked", "one_expert"])
@pytest.mark.parametrize("fmt, layout", LAYOUTS)
def test_a_block_has_the_rows_of_its_expert(fmt: str, layout: str | None, routing: str) -> None:
    """Bytes of rows, what their scale factors say, and places; rows behind are left alone."""
    size = 128 if layout == "atom128x4" else 27
    plain = replace(CFG, dispatch_format=fmt, scale_layout=layout)
    given = make_inputs(plain, TOKENS, routing, 3)
    _, ragged = round_of(plain, given)
    _, blocks = round_of(replace(plain, block_rows=size), given)
    for want, got in zip(ragged, blocks, strict=True):
        counts = want.row_counts.tolist()
        assert got.row_offsets.tolist() == [0, size, 2 * size] and int(got.num_rows) == 2 * size
        assert got.row_counts.tolist() == counts
        assert_bits(got.source_ranges, want.source_ranges, "source_ranges")
        places, begin = of_blocks(got, size), want.row_offsets.tolist()
        source = [begin[expert] + row for expert, count in enumerate(counts) for row in range(count)]
        rest = sorted(set(range(2 * size)) - set(places))
        for name in ("tokens", "src_info", "row_scales"):
            if getattr(want, name) is not None:
                bits, other = (getattr(one, name).view(len(one.tokens), -1).view(torch.uint8) for one in (got, want))
                assert_bits(bits[places], other[source], name)
                assert is_poison(bits[rest])
        numbers = [reference.dequantize(one, fmt, scale_layout=layout) if layout else one.tokens for one in (got, want)]
        assert_bits(numbers[0][places], numbers[1][source], "numbers")
        lookup = torch.full((len(want.tokens),), -1, dtype=torch.int32)
        lookup[source] = torch.tensor(places, dtype=torch.int32)
        moved = torch.where(want.row_map >= 0, lookup[want.row_map.clamp(min=0)], want.row_map)
        assert_bits(got.row_map, moved, "row_map")
        assert_bits(got.weights, want.weights, "weights")


@pytest.mark.parametrize("fmt, layout", [pair for pair in LAYOUTS if pair[1]])
def test_scale_factors_behind_the_rows_are_left_alone(fmt: str, layout: str) -> None:
    """All bytes of an empty batch; of a full one no word stays that a row has."""
    size = 128
    cfg = replace(CFG, dispatch_format=fmt, scale_layout=layout, block_rows=size)
    _, empty = round_of(cfg, make_inputs(cfg, (0, 0, 0), "uniform", 3))
    assert all(is_poison(batch.scales) for batch in empty)
    _, batches = round_of(cfg, make_inputs(cfg, TOKENS, "uniform", 3))
    words = -(-cfg.format.scale_bytes(cfg.hidden) // 4)
    for batch in batches:
        changed = batch.scales.contiguous().view(torch.uint8) != 0xA5
        rows = int(batch.row_counts.sum())
        assert 0.9 * rows * words * 4 <= int(changed.sum()) <= rows * words * 4
        if layout == "transposed":
            assert batch.scales.shape == (2, words, size)
            behind = [batch.scales[expert, :, count:] for expert, count in enumerate(batch.row_counts.tolist())]
            assert all(is_poison(one) for one in behind)


@pytest.mark.parametrize("mode", COMBINE_MODES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_combine_takes_rows_from_blocks(routing: str, mode: str) -> None:
    given = make_inputs(CFG, TOKENS, routing, 3)
    sides = []
    for cfg in (CFG, replace(CFG, block_rows=27)):
        ranks, batches = round_of(cfg, given)
        rows = rows_for(batches, cfg)
        if cfg.block_rows is None:
            plain = list(zip(rows, batches, strict=True))
        else:
            for own, batch, (source, ragged) in zip(rows, batches, plain, strict=True):
                own[of_blocks(batch, 27)] = source[: int(ragged.num_rows)]
        sides.append([ep.combine(row, batch, mode=mode) for ep, row, batch in zip(ranks, rows, batches, strict=True)])
    for rank, (want, got) in enumerate(zip(*sides, strict=True)):
        assert_bits(got, want, f"rank {rank}")


def test_rows_that_a_block_has_no_room_for_are_reported_and_come_home_as_nan() -> None:
    cfg = replace(CFG, block_rows=5)
    given = make_inputs(cfg, TOKENS, "one_expert", 3)
    ranks, batches = round_of(cfg, given)
    assert batches[0].row_counts.tolist()[0] == 5
    arrived = [(ids.topk_ids == 0).sum().item() for ids in given]
    assert sum(arrived) == 16
    first = batches[0].row_map[batches[0].row_map >= 0]
    assert (first == LOST_ROW).sum() >= 11
    rows = [torch.ones(10, cfg.hidden, dtype=torch.bfloat16) for _ in ranks]
    with pytest.raises(EPInputError, match="rank 0: the block of group 0 holds 5 rows, but 16 have arrived"):
        ranks[0].synchronize()
    outs = [ep.combine(row, batch) for ep, row, batch in zip(ranks, rows, batches, strict=True)]
    lost = outs[0].isnan().all(1)
    assert lost.tolist() == outs[0].isnan().any(1).tolist() and lost[5:].all()


REFUSED = [
    (dict(block_rows=0), "block_rows = 0: must be None or an integer in [1, "),
    (dict(block_rows=True), "block_rows = True"),
    (dict(block_rows=2**29 + 1), "block_rows = 536870913: must be None or an integer in [1, 536870912]"),
    (dict(block_rows=64, dispatch_format="nvfp4"), "block_rows = 64: must be None or a multiple of 128 in"),
    (dict(block_rows=64, row_alignment=16), "row_alignment = 16: must be None with block_rows"),
    (dict(block_rows=64, fused_shared_expert=True), "fused_shared_expert = True: must be False with block_rows"),
]


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text.partition(":")[0] for _, text in REFUSED])
def test_configurations_that_make_no_blocks_are_refused(changes: dict, text: str) -> None:
    with pytest.raises(EPConfigError, match="^" + text.replace("[", r"\[")):
        replace(CFG, **changes)


def test_buffers_of_fewer_rows_have_smaller_blocks() -> None:
    """Of one row each, too; a number that makes no blocks is refused."""
    cfg = replace(CFG, block_rows=5)
    given = make_inputs(CFG, TOKENS, "uniform", 1)
    for size in (1, 3):
        ranks = connect_reference(cfg)
        outs = [poison_all(ep.allocate(2 * size)) for ep in ranks]
        batches = [ep.dispatch(one.x, one.topk_ids, out=out) for ep, one, out in zip(ranks, given, outs, strict=True)]
        _, wanted = round_of(replace(CFG, block_rows=size), given)
        for batch, want in zip(batches, wanted, strict=True):
            assert batch.row_offsets.tolist() == [0, size, 2 * size]
            for name in ("tokens", "row_counts", "row_map", "src_info"):
                assert_bits(getattr(batch, name), getattr(want, name), name)
    ep = connect_reference(cfg)[0]
    for rows in (0, 9, 12):
        with pytest.raises(EPInputError, match=rf"capacity = {rows}: must be a multiple of 2 in \[2, 10\], 2 blocks"):
            ep.allocate(rows)
    one = given[0]
    with pytest.raises(EPInputError, match=r"out.tokens.shape\[0\] = 15: must be a multiple of 2 in \[2, 10\]"):
        ep.dispatch(one.x, one.topk_ids, out=DispatchBuffers.allocate(CFG, "cpu", 15))
