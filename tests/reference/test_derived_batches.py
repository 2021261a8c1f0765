"""Batches that were put together from tensors, or derived from others, on the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import READ_BY_COMBINE, Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.variants import COMBINE_MODES, CombineMode
from cute_ep.reference.backend import connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import make_inputs
from tests.changed_batches import changed

from .ranks import rows_for

CFG = EPConfig(hidden=32, num_experts=8, top_k=3, max_tokens_per_rank=9, world_size=4)
TOKENS = (9, 0, 7, 4)

Batches = list[Dispatched]


def round_of(routing: str = "masked", cfg: EPConfig = CFG) -> tuple[list, Batches, list[torch.Tensor]]:
    """(communicators, batches, expert outputs over the whole capacity) of a round."""
    ranks, given = connect_reference(cfg), make_inputs(cfg, TOKENS, routing, 5)
    batches = [ep.dispatch(one.x, one.topk_ids, one.router_weights) for ep, one in zip(ranks, given, strict=True)]
    return ranks, batches, rows_for(batches, cfg)


def combined(ranks: list, rows: list[torch.Tensor], batches: Batches, mode: CombineMode) -> list[torch.Tensor]:
    sums = [ep.combine(row, batch, mode=mode) for ep, row, batch in zip(ranks, rows, batches, strict=True)]
    for ep in ranks:
        ep.synchronize()
    return sums


def from_tensors(batch: Dispatched, names: tuple[str, ...] = READ_BY_COMBINE + ("weights",)) -> Dispatched:
    own = {
        "topk_ids": batch.topk_ids,
        "router_weights": batch.router_weights,
        "return_slices_log2": batch.return_slices_log2,
    }
    return Dispatched.of_tensors({name: getattr(batch, name) for name in names}, rank=batch.rank, **own)


# ---- of tensors


@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_a_batch_of_tensors_comes_home_as_the_batch_itself(mode: CombineMode) -> None:
    ranks, batches, rows = round_of()
    want = combined(ranks, rows, batches, mode)
    for rank, total in enumerate(combined(ranks, rows, [from_tensors(batch) for batch in batches], mode)):
        assert_bits(total, want[rank], f"rank {rank}")


def test_some_ranks_may_give_a_batch_of_tensors_and_others_their_own() -> None:
    """The round that a batch of tensors is of is not known, so it is not compared."""
    ranks, batches, rows = round_of()
    want = combined(ranks, rows, batches, "exact")
    mixed = [from_tensors(batch) if batch.rank % 2 else batch for batch in batches]
    for rank, total in enumerate(combined(ranks, rows, mixed, "exact")):
        assert_bits(total, want[rank], f"rank {rank}")


def test_a_batch_of_tensors_is_refused_before_all_ranks_have_dispatched() -> None:
    ranks, given = connect_reference(CFG), make_inputs(CFG, TOKENS, "uniform", 5)
    batch = ranks[0].dispatch(given[0].x, given[0].topk_ids, given[0].router_weights)
    rows = torch.zeros(batch.tokens.shape).bfloat16()
    with pytest.raises(EPInputError, match="dispatched: all ranks must dispatch before rank 0 combines"):
        ranks[0].combine(rows, from_tensors(batch))


@pytest.mark.parametrize("name", READ_BY_COMBINE)
def test_a_batch_of_tensors_has_all_that_combine_reads(name: str) -> None:
    _, (batch, *_), _ = round_of()
    with pytest.raises(EPInputError, match=rf"tensors\['{name}'\] = None: must be what dispatch wrote"):
        from_tensors(batch, tuple(one for one in READ_BY_COMBINE if one != name))


def test_a_batch_of_tensors_has_no_others() -> None:
    _, (batch, *_), _ = round_of()
    with pytest.raises(EPInputError, match=r"tensors\['rows'\]: must be one of tokens, scales"):
        Dispatched.of_tensors(
            tensors_of(batch) | {"rows": batch.tokens}, rank=0, topk_ids=batch.topk_ids, router_weights=None,
            return_slices_log2=0,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param({"rank": 1}, r"dispatched\.rank = 1: must be 0", id="rank"),
        pytest.param(
            {"return_slices_log2": 6},
            r"dispatched\.return_slices_log2 = 6: must be an int.* \[0, 5\]",
            id="slices",
        ),
        pytest.param({"return_slices_log2": None}, r"dispatched\.return_slices_log2 = None", id="no slices"),
        pytest.param({"row_offsets": torch.zeros(3)}, r"dispatched\.row_offsets\.dtype", id="offsets"),
        pytest.param({"num_rows": torch.zeros(2, dtype=torch.int32)}, r"dispatched\.num_rows\.shape", id="num_rows"),
        pytest.param({"tokens": torch.zeros(())}, r"dispatched\.tokens\.shape = \(\)", id="tokens"),
        pytest.param({"headers": torch.zeros(4, 4)}, r"dispatched\.headers\.dtype", id="headers"),
    ],
)  # fmt: skip
def test_combine_checks_a_batch_of_tensors(change: dict, rule: str) -> None:
    ranks, (batch, *_), (rows, *_) = round_of()
    with pytest.raises(EPInputError, match=rule):
        ranks[0].combine(rows, changed(from_tensors(batch), **change))


def test_partial_combine_needs_what_dispatch_wrote() -> None:
    ranks, (batch, *_), (rows, *_) = round_of()
    without = from_tensors(batch, READ_BY_COMBINE)
    with pytest.raises(EPInputError, match=r"dispatched\.weights = None: must be what dispatch wrote"):
        ranks[0].combine(rows, without, mode="partial")


# ---- derived


def ones(batch: Dispatched) -> Dispatched:
    assert batch.weights is not None
    weights = torch.ones(batch.topk_ids.shape)
    return batch.derived(weights=torch.ones_like(batch.weights), router_weights=weights)


@pytest.mark.parametrize("sources", [(), (0, 3)], ids=["nobody gives weights", "some ranks give weights"])
def test_batches_hold_weights_of_one_where_a_source_gave_none(sources: tuple) -> None:
    """Also where the buffers hold the weights of an earlier batch. Put together by hand, the batch has weights."""
    ranks, given = connect_reference(CFG), make_inputs(CFG, TOKENS, "masked", 5)
    outs = [ep.allocate() for ep in ranks]
    for out in outs:
        out.weights.fill_(9)
    weights = [one.router_weights if rank in sources else None for rank, one in enumerate(given)]
    batches = [
        ep.dispatch(one.x, one.topk_ids, own, out=out)
        for ep, one, own, out in zip(ranks, given, weights, outs, strict=True)
    ]
    rows = rows_for(batches, CFG)
    unit = [torch.ones(one.topk_ids.shape) if own is None else own for one, own in zip(given, weights, strict=True)]
    want = reference.combine(CFG, rows, batches, unit, "partial")
    for rank, total in enumerate(combined(ranks, rows, [from_tensors(batch) for batch in batches], "partial")):
        assert_bits(total, want[rank], f"rank {rank}")


@pytest.mark.parametrize("made", [lambda batch: batch, from_tensors], ids=["own", "of tensors"])
@pytest.mark.parametrize("mode", ["exact", "partial"])
def test_weights_of_a_derived_batch_are_what_rows_are_multiplied_by(mode: CombineMode, made: Callable) -> None:
    ranks, batches, rows = round_of()
    unit = [torch.ones(batch.topk_ids.shape) for batch in batches]
    want = reference.combine(CFG, rows, batches, unit, mode)
    for rank, total in enumerate(combined(ranks, rows, [ones(made(batch)) for batch in batches], mode)):
        assert_bits(total, want[rank], f"rank {rank}")


def test_partial_combine_multiplies_where_the_experts_are() -> None:
    """By the weights that the experts' ranks have, whatever the source has in the meantime."""
    ranks, batches, rows = round_of()
    want = reference.combine(CFG, rows, batches, [batch.router_weights * 4 for batch in batches], "partial")
    derived = [batch.derived(weights=batch.weights * 4) for batch in batches]
    for rank, total in enumerate(combined(ranks, rows, derived, "partial")):
        assert_bits(total, want[rank], f"rank {rank}")


@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_rows_in_blocks_of_fixed_size_come_home_as_dense_ones(mode: CombineMode) -> None:
    """Row r of expert e at e * block + r - row_offsets[e]: more rows than `num_rows`, with gaps."""
    ranks, batches, rows = round_of()
    want, block = combined(ranks, rows, batches, mode), sum(TOKENS)
    blocks, derived = [], []
    for batch, row in zip(batches, rows, strict=True):
        expert = torch.searchsorted(batch.row_offsets[1:], batch.row_map, right=True).clamp(max=CFG.local_experts - 1)
        there = (expert * block + batch.row_map - batch.row_offsets[expert]).int()
        row_map = torch.where(batch.row_map >= 0, there, -1)
        moved = torch.full((CFG.local_experts * block, CFG.hidden), torch.nan).bfloat16()
        moved[row_map[row_map >= 0].long()] = row[batch.row_map[batch.row_map >= 0].long()]
        blocks.append(moved)
        derived.append(batch.derived(row_map=row_map, tokens=moved))
    for rank, total in enumerate(combined(ranks, blocks, derived, mode)):
        assert_bits(total, want[rank], f"rank {rank}")


def rank_major(batch: Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_map with one row a (source, token) at its first entry here, whether a (source, token) has one)."""
    live = batch.row_map >= 0
    has, first = live.any(2), live.int().argmax(2, keepdim=True)
    row = (has.flatten().cumsum(0) - 1).int().view(has.shape)
    row_map = torch.full_like(batch.row_map, -1)
    return row_map.scatter_(2, first, torch.where(has, row, -1)[..., None]), has


def test_one_row_a_token_and_rank_is_enough_in_partial_mode() -> None:
    """Fewer rows than `num_rows`; entries without a row are left out of the sum."""
    ranks, batches, _ = round_of("repeated")
    rows, derived, home = [], [], [torch.zeros(tokens, CFG.hidden) for tokens in TOKENS]
    for batch in batches:
        row_map, has = rank_major(batch)
        rows.append(torch.randint(-8, 8, (int(has.sum()), CFG.hidden)).bfloat16())
        for row, (source, token) in zip(rows[-1], has.nonzero().tolist(), strict=True):
            home[source][token] += row
        derived.append(ones(batch).derived(row_map=row_map, tokens=rows[-1]))
        assert len(rows[-1]) < int(batch.num_rows)
    for total, want in zip(combined(ranks, rows, derived, "partial"), home, strict=True):
        assert torch.equal(total.float(), want)


def test_masked_ids_of_a_derived_batch_do_not_come_home() -> None:
    ranks, batches, rows = round_of("uniform")
    kept = []
    for batch in batches:
        ids = batch.topk_ids.clone()
        ids[:, 1:] = -1
        kept.append(batch.derived(topk_ids=ids))
    every = combined(ranks, rows, batches, "unweighted")
    for total, own in zip(combined(ranks, rows, kept, "unweighted"), every, strict=True):
        assert torch.equal(total[:, 0], own[:, 0]) and not total[:, 1:].any()


@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_a_row_that_its_source_would_wait_for_is_asked_for(mode: CombineMode) -> None:
    ranks, batches, rows = round_of("uniform")
    derived = [batch.derived(row_map=torch.full_like(batch.row_map, -1)) for batch in batches]
    for ep, row, batch in zip(ranks, rows, derived, strict=True):
        if batch.rank < 3:
            ep.combine(row, batch, mode=mode)
    with pytest.raises(EPInputError, match=r"dispatched\.row_map of rank \d: has no row for topk_ids\[\d"):
        ranks[3].combine(rows[3], derived[3], mode=mode)


@pytest.mark.parametrize("name", ["row_map", "topk_ids", "weights", "router_weights"])
def test_what_a_batch_is_derived_with_has_the_shape_of_what_it_replaces(name: str) -> None:
    _, (batch, *_), _ = round_of()
    with pytest.raises(EPInputError, match=rf"{name}\.shape = \(3,\): must be .*, as in the batch"):
        batch.derived(**{name: torch.zeros(3)})


def test_too_few_rows_for_a_derived_batch_are_refused() -> None:
    ranks, (batch, *_), (rows, *_) = round_of("uniform")
    row_map = torch.where(batch.row_map >= 0, batch.row_map + 100, -1)
    with pytest.raises(
        EPInputError, match=r"rows\.shape\[0\] = .*: must be at least dispatched\.row_map\.max\(\) \+ 1"
    ):
        ranks[0].combine(rows, batch.derived(row_map=row_map))


def test_a_derived_batch_is_as_old_as_its_buffers() -> None:
    cfg = replace(CFG, world_size=1)
    (ep,), (given,) = connect_reference(cfg), make_inputs(cfg, (5,), "uniform", 0)
    buffers = ep.allocate()
    early = ep.dispatch(given.x, given.topk_ids, given.router_weights, out=buffers)
    derived, rows = early.derived(topk_ids=early.topk_ids.clone()), torch.zeros(early.tokens.shape).bfloat16()
    ep.combine(rows, derived)
    ep.dispatch(given.x, given.topk_ids, given.router_weights, out=buffers)
    with pytest.raises(EPInputError, match="a later dispatch was given them as `out`"):
        ep.combine(rows, derived)
