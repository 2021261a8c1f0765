"""Rows that lie apart, or are one and the same, are dispatched from where they are; others are refused by one rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cute_ep import EPCommunicator, connect_local, reference
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.api.tensors import overlap, takes_strides
from cute_ep.distributed import DistributedEPDispatch
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.testing.compare import assert_bits
from tests.fake_gpu import Launches, MakeRank
from tests.reference.ranks import check_filled, poisoned
from tests.strided_rows import REFUSED, TAKEN

from .one_rank import ONE_RANK, inputs_of

SCALED = [name for name, fmt in FORMATS.items() if fmt.scale]
every_view = pytest.mark.parametrize("view", TAKEN.values(), ids=TAKEN)
every_refusal = pytest.mark.parametrize(("view", "rule"), REFUSED.values(), ids=REFUSED)

CALLS: dict[str, Callable[..., Dispatched]] = {
    "dispatch": lambda ep, out, *given, **scales: ep.dispatch(*given, out=out, **scales),
    "plan_dispatch": lambda ep, out, *given, **scales: ep.plan_dispatch(*given, out=out, **scales).launch(),
    "dispatch_async": lambda ep, out, *given, **scales: ep.dispatch_wait(ep.dispatch_async(*given, **scales), out),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_view
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_reference_sends_the_rows_of_a_view(fmt: str, view: Callable) -> None:
    cfg = replace(ONE_RANK, dispatch_format=fmt)
    x, ids, weights = inputs_of(cfg)
    x = view(x)
    ids, weights = ids[: len(x)], weights[: len(x)]
    want, of_view = (reference.dispatch(cfg, [rows], [ids], None, [weights])[0] for rows in (x.contiguous(), x))
    check_filled(cfg, of_view, want, "reference")
    (ep,) = connect_local(cfg, ["cpu"])
    for name, call in CALLS.items():
        check_filled(cfg, call(ep, poisoned(ep), x, ids, weights), want, name)


@every_view
@pytest.mark.parametrize("fmt", SCALED)
def test_the_reference_sends_quantised_rows_of_a_view(fmt: str, view: Callable) -> None:
    cfg = replace(ONE_RANK, dispatch_format=fmt)
    x, ids, weights = inputs_of(cfg)
    payload, scales, row_scales = reference.quantize(x, fmt)
    payload = view(payload)
    rest = [None if factors is None else factors[: len(payload)] for factors in (scales, row_scales)]
    ids, weights = ids[: len(payload)], weights[: len(payload)]
    want, of_view = (
        reference.dispatch(cfg, [None], [ids], None, [weights], [QuantizedRows(rows, *rest)])[0]
        for rows in (payload.contiguous(), payload)
    )
    check_filled(cfg, of_view, want, "reference")
    (ep,) = connect_local(cfg, ["cpu"])
    for name, call in CALLS.items():
        given = dict(zip(("scales", "row_scales"), rest, strict=True))
        check_filled(cfg, call(ep, poisoned(ep), payload, ids, weights, **given), want, name)


@every_view
@every_call
def test_a_gpu_is_told_how_far_rows_are_apart(
    make_rank: MakeRank, launches: Launches, call: Callable, view: Callable
) -> None:
    rank = make_rank(ONE_RANK)
    x, ids, _ = inputs_of()
    x = view(x)
    call(rank, None, x, ids[: len(x)])
    sent = launches.first("dispatch")
    vectors = 0 if len(x) < 2 else x.stride(0) * 2 // 16
    assert sent.values("input.x", "input.x_stride") == (x.data_ptr(), vectors)


@pytest.mark.parametrize("fmt", SCALED)
def test_a_gpu_is_told_how_far_quantised_rows_are_apart(make_rank: MakeRank, launches: Launches, fmt: str) -> None:
    rank = make_rank(replace(ONE_RANK, dispatch_format=fmt))
    x, ids, _ = inputs_of()
    ready = reference.quantize(x, fmt)
    wide = torch.cat([ready.payload.view(torch.uint8)] * 2, 1).view(ready.payload.dtype)
    payload = wide[:, : ready.payload.shape[1]]
    rank.dispatch(payload, ids, scales=ready.scales, row_scales=ready.row_scales)
    assert launches.only().values("input.x", "input.x_stride") == (payload.data_ptr(), wide.shape[1] // 16)


@every_refusal
@every_call
def test_other_strides_are_refused_by_the_same_rule_everywhere(
    lone_rank: EPCommunicator, view: Callable, rule: str, call: Callable
) -> None:
    x, ids, weights = inputs_of()
    x = view(x)
    with pytest.raises(EPInputError, match=rule):
        call(lone_rank, None, x, ids[: len(x)], weights[: len(x)])
    call(lone_rank, None, x.clone(memory_format=torch.contiguous_format), ids[: len(x)], weights[: len(x)])


@every_refusal
def test_the_reference_and_lists_of_ranks_refuse_them_too(view: Callable, rule: str) -> None:
    x, ids, _ = inputs_of()
    x = view(x)
    with pytest.raises(EPInputError, match=rule):
        reference.dispatch(ONE_RANK, [x], [ids[: len(x)]])
    with pytest.raises(EPInputError, match=rule):
        DistributedEPDispatch(connect_local(ONE_RANK, ["cpu"]))([x], [ids[: len(x)]])


@pytest.mark.parametrize("fmt", SCALED)
def test_other_strides_of_quantised_rows_are_refused(make_rank: MakeRank, launches: Launches, fmt: str) -> None:
    cfg = replace(ONE_RANK, dispatch_format=fmt)
    x, ids, _ = inputs_of()
    ready = reference.quantize(x, fmt)
    given = {"scales": ready.scales, "row_scales": ready.row_scales}
    for rank in (make_rank(cfg), connect_local(cfg, ["cpu"])[0]):
        with launches.forbidden(), pytest.raises(EPInputError, match=REFUSED["a transposed matrix"][1]):
            rank.dispatch(ready.payload.view(torch.uint8).t().contiguous().t().view(ready.payload.dtype), ids, **given)


@pytest.mark.parametrize("skip", [False, True])
def test_a_wide_matrix_of_two_ranks(skip: bool) -> None:
    """Of ranks that exchange tokens, and of ranks that have the same ones, one of which gives a view."""
    cfg = replace(ONE_RANK, world_size=2, skip_a2a=skip)
    x, ids, weights = inputs_of(cfg)
    wide, batches = torch.cat([x, x], 1)[:, : cfg.hidden], []
    for views in ((x, x), (wide, x)):
        ranks = connect_local(cfg, ["cpu"] * 2)
        made = [one.dispatch(rows, ids, weights) for one, rows in zip(ranks, views, strict=True)]
        batches.append([one.tokens[: int(one.num_rows)].clone() for one in made])
    for one, other in zip(*batches, strict=True):
        assert_bits(one, other, "tokens")


# ---- the rule


@pytest.mark.parametrize(
    ("view", "taken"), [(v, True) for v in TAKEN.values()] + [(v, False) for v, _ in REFUSED.values()]
)
def test_a_caller_may_ask_whether_a_copy_is_needed(view: Callable, taken: bool) -> None:
    assert takes_strides(view(inputs_of()[0])) is taken


def test_rows_32_gib_apart_are_too_far() -> None:
    x = torch.empty_strided((2, 128), (2**34, 1), dtype=torch.bfloat16, device="meta")
    assert not takes_strides(x) and takes_strides(x[:1])
    near = torch.empty_strided((2, 128), (2**34 - 8, 1), dtype=torch.bfloat16, device="meta")
    assert takes_strides(near)


def test_memory_is_shared_where_some_row_is() -> None:
    """Against every pair of bytes: rows apart, overlapping or the same, before, within, between and behind others."""
    memory = torch.zeros(64, dtype=torch.uint8)
    for rows, step, start in ((1, 9, 20), (3, 9, 20), (3, 2, 20), (3, 0, 20), (2, 30, 0), (0, 9, 20), (4, 5, 0)):
        read = memory[start:].as_strided((rows, 4), (step, 1))
        own = {start + row * step + column for row in range(rows) for column in range(4)}
        for first in range(60):
            for nbytes in (0, 1, 3, 5, 20):
                written = memory[first : first + nbytes]
                assert overlap(read, written) == bool(own & set(range(first, first + len(written))))


def test_an_output_may_lie_between_rows_but_not_over_them(make_rank: MakeRank, launches: Launches) -> None:
    cfg = ONE_RANK
    _, ids, weights = inputs_of(cfg)
    for rank in (make_rank(cfg), connect_local(cfg, ["cpu"])[0]):
        out = rank.allocate(16)
        memory = torch.zeros(8, 4096, dtype=torch.bfloat16)
        over, between = (
            replace(out, tokens=memory.flatten()[first : first + 16 * 128].view(16, 128)) for first in (4096 - 8, 128)
        )
        with launches.forbidden(), pytest.raises(EPInputError, match=r"out\.tokens: shares memory with x"):
            rank.dispatch(memory[:5, :128], ids, weights, out=over)
        rank.dispatch(memory[:5, :128], ids, weights, out=between)
