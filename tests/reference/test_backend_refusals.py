"""What the reference communicator refuses. A refused call joins no round: the next one is as if there had been none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.reference.backend import ReferenceCommunicator, connect_reference
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs, make_inputs
from tests.reference.ranks import check_filled, dispatch_all, expected, poisoned, rows_for, small

CFG = small()


@dataclass
class Group:
    """Three ranks that make one round; rank 0 is given what is wrong before."""

    ranks: list[ReferenceCommunicator]
    inputs: list[RankInputs]

    @property
    def first(self) -> ReferenceCommunicator:
        return self.ranks[0]

    @property
    def want(self) -> list[Dispatched]:
        return expected(CFG, self.inputs)

    def dispatch(self, *, weights: bool = True) -> list[Dispatched]:
        """The round, which comes out right."""
        calls = zip(self.ranks, self.inputs, strict=True)
        batches = [
            one.dispatch(i.x, i.topk_ids, i.router_weights if weights else None, out=poisoned(one)) for one, i in calls
        ]
        for rank, (batch, want) in enumerate(zip(batches, expected(CFG, self.inputs, weights=weights), strict=True)):
            check_filled(CFG, batch, want, f"rank {rank}")
        return batches


@pytest.fixture
def group() -> Group:
    return Group(connect_reference(CFG), make_inputs(CFG, [5, 5, 5], "uniform", 0))


# ---- dispatch


@dataclass
class Tokens:
    """Good arguments of rank 0, of which cases take some."""

    x: torch.Tensor
    ids: torch.Tensor
    ready: QuantizedRows
    buffers: DispatchBuffers


def bytes_of(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        pytest.param("x.dtype", lambda one, t: one.dispatch(t.x.float(), t.ids), id="x in float32"),
        pytest.param(
            "input_scale = 0.0: must be a number",
            lambda one, t: one.dispatch(t.x, t.ids, input_scale=0.0),
            id="scale 0",
        ),
        pytest.param(
            "input_scale = 0.0: must be a number",
            lambda one, t: one.dispatch(t.x, t.ids, input_scale=torch.zeros(1)),
            id="scale 0 in a tensor",
        ),
        pytest.param(
            "input_scale", lambda one, t: one.dispatch(t.x, t.ids, input_scale=torch.zeros(2)), id="two scales"
        ),
        pytest.param(
            "x.shape",
            lambda one, t: one.dispatch(t.x, t.ids, scales=bytes_of(5, 2)),
            id="scale factors of rows that are not quantised",
        ),
        pytest.param(
            "scales.shape",
            lambda one, t: one.dispatch(t.ready.payload, t.ids, scales=bytes_of(5, 3)),
            id="too many scale factors",
        ),
        pytest.param(
            "must be None",
            lambda one, t: one.dispatch(t.ready.payload, t.ids, None, 2.0, scales=t.ready.scales),
            id="a global scale of quantised rows",
        ),
        pytest.param(
            "row_scales",
            lambda one, t: one.dispatch(t.ready.payload, t.ids, scales=t.ready.scales, row_scales=t.x),
            id="row scales in a format without",
        ),
        pytest.param("out = tuple", lambda one, t: one.dispatch(t.x, t.ids, out=(1,)), id="out is a tuple"),
        pytest.param(
            "out.src_info.shape",
            lambda one, t: one.dispatch(t.x, t.ids, out=replace(t.buffers, src_info=torch.zeros(4, 2).int())),
            id="out with too long src_info",
        ),
        pytest.param(
            "out.scales.shape",
            lambda one, t: one.dispatch(t.x, t.ids, out=replace(t.buffers, scales=t.buffers.scales[:1])),
            id="out with too few scale factors",
        ),
    ],
)
def test_a_refused_dispatch_joins_no_round(group: Group, match: str, call: Callable) -> None:
    given = group.inputs[0]
    tokens = Tokens(given.x, given.topk_ids, reference.quantize(given.x, "nvfp4"), group.first.allocate(3))
    with pytest.raises(EPInputError, match=match):
        call(group.first, tokens)
    group.first.synchronize()
    group.dispatch()


def test_bf16_takes_no_global_scale() -> None:
    first = connect_reference(small(dispatch_format="bf16"))[0]
    with pytest.raises(EPInputError, match="no global scale"):
        first.dispatch(torch.zeros(1, 32).bfloat16(), torch.zeros(1, 2).int(), input_scale=1.0)


# ---- combine


@pytest.mark.parametrize(
    ("match", "call"),
    [
        pytest.param(
            "at least num_rows",
            lambda one, rows, batch: one.combine(rows[: batch.num_rows.item() - 1], batch),
            id="too few rows",
        ),
        pytest.param("rows.dtype", lambda one, rows, batch: one.combine(rows.float(), batch), id="rows in float32"),
        pytest.param(
            "out.shape",
            lambda one, rows, batch: one.combine(rows, batch, out=torch.empty(4, 32).bfloat16()),
            id="out with too few tokens",
        ),
        pytest.param(
            "partial combine has no epilogue here",
            lambda one, rows, batch: one.combine(rows, batch, epilogue_data=rows),
            id="data of an epilogue",
        ),
        pytest.param(
            "dtype = torch.float64: must be one of",
            lambda one, rows, batch: one.combine(rows, batch, dtype=torch.float64),
            id="sums in float64",
        ),
        pytest.param(
            "dtype = torch.int16",
            lambda one, rows, batch: one.combine(rows, batch, out=torch.empty(5, 32, dtype=torch.int16)),
            id="out in int16",
        ),
        pytest.param(
            "out.shape",
            lambda one, rows, batch: one.combine(rows, batch, mode="unweighted", out=torch.empty(5, 32)),
            id="out without slots in unweighted mode",
        ),
    ],
)
def test_a_refused_combine_joins_no_round(group: Group, match: str, call: Callable) -> None:
    batches = group.dispatch()
    rows = rows_for(batches, CFG)
    with pytest.raises(EPInputError, match=match):
        call(group.first, rows[0], batches[0])
    got = [one.combine(r, b) for one, r, b in zip(group.ranks, rows, batches, strict=True)]
    for rank, want in enumerate(reference.combine(CFG, rows, group.want)):
        assert_bits(got[rank], want, f"rank {rank}")


def test_a_batch_of_another_rank_is_refused(group: Group) -> None:
    batches = group.dispatch()
    with pytest.raises(EPInputError, match=r"dispatched\.rank = 1: must be 0"):
        group.first.combine(rows_for(batches, CFG)[0], group.want[1])


def test_a_wait_that_was_refused_may_be_repeated(group: Group) -> None:
    batches = group.dispatch()
    rows = rows_for(batches, CFG)
    sent = [one.combine_async(r, b) for one, r, b in zip(group.ranks, rows, batches, strict=True)]
    with pytest.raises(EPInputError, match="partial combine has no epilogue here"):
        group.first.combine_wait(sent[0], epilogue_data=rows[0])
    assert_bits(group.first.combine_wait(sent[0]), reference.combine(CFG, rows, group.want)[0], "rank 0")


def test_a_shared_expert_has_no_unweighted_rows() -> None:
    cfg = small(fused_shared_expert=True)
    communicators, batches, _ = dispatch_all(cfg)
    rows = rows_for(batches, cfg)
    for call in (communicators[0].combine, communicators[0].combine_async):
        with pytest.raises(EPInputError, match="shared expert"):
            call(rows[0], batches[0], mode="unweighted")
    communicators[0].synchronize()


# ---- weights


@dataclass
class Bare:
    """Rank 0's rows, its batches without and with weights, and the weights."""

    first: ReferenceCommunicator
    rows: torch.Tensor
    bare: Dispatched
    full: Dispatched
    weights: torch.Tensor


@pytest.mark.parametrize(
    ("match", "call"),
    [
        pytest.param(
            "exact combine needs them", lambda b: b.first.combine(b.rows, b.bare, mode="exact"), id="exact without"
        ),
        pytest.param(
            "must be None in unweighted mode",
            lambda b: b.first.combine(b.rows, b.bare, b.weights, "unweighted"),
            id="unweighted with some",
        ),
        pytest.param(
            "router_weights.shape",
            lambda b: b.first.combine(b.rows, b.full, b.weights[:1], "exact"),
            id="too few weights",
        ),
        pytest.param(
            "mode = 'mean'", lambda b: b.first.combine(b.rows, b.full, b.weights, "mean"), id="a mode that is none"
        ),
        pytest.param(
            "mode = 'mean'", lambda b: b.first.combine_async(b.rows, b.full, "mean"), id="half of a mode that is none"
        ),
    ],
)
def test_weights_against_the_rules_of_the_mode_are_refused_and_join_no_round(
    group: Group, match: str, call: Callable
) -> None:
    bare, full = group.dispatch(weights=False), group.dispatch()
    rows = rows_for(bare, CFG)
    with pytest.raises(EPInputError, match=match):
        call(Bare(group.first, rows[0], bare[0], full[0], group.inputs[0].router_weights))
    weights = [one.router_weights for one in group.inputs]
    got = [one.combine(r, b, w, "exact") for one, r, b, w in zip(group.ranks, rows, bare, weights, strict=True)]
    for rank, value in enumerate(reference.combine(CFG, rows, group.want, mode="exact")):
        assert_bits(got[rank], value, f"rank {rank}")


def test_a_wait_without_the_weights_that_it_needs_may_be_repeated_with_them(group: Group) -> None:
    bare, weights = group.dispatch(weights=False), group.inputs[0].router_weights
    rows = rows_for(bare, CFG)
    sent = [one.combine_async(r, b, "exact") for one, r, b in zip(group.ranks, rows, bare, strict=True)]
    with pytest.raises(EPInputError, match="exact combine needs them"):
        group.first.combine_wait(sent[0])
    want = reference.combine(CFG, rows, group.want, mode="exact")[0]
    assert_bits(group.first.combine_wait(sent[0], weights), want, "second attempt")


# ---- halves


@pytest.fixture
def sent(group: Group) -> list:
    """Two dispatches that rank 0 has sent and not received."""
    x, ids = group.inputs[0].x, group.inputs[0].topk_ids
    return [group.first.dispatch_async(x, ids) for _ in range(2)]


@pytest.mark.parametrize(
    ("match", "wait"),
    [
        pytest.param(
            "pending = round 2 of dispatch: must be round 1",
            lambda g, s: g.first.dispatch_wait(s[1]),
            id="not the oldest",
        ),
        pytest.param(
            "dispatch_async of this communicator, rank 1",
            lambda g, s: g.ranks[1].dispatch_wait(s[0]),
            id="of another rank",
        ),
        pytest.param(
            "dispatch_async of this communicator, rank 0", lambda g, s: g.first.dispatch_wait(1), id="no pending"
        ),
        pytest.param(
            "dispatch_async of this communicator, rank 0",
            lambda g, s: connect_reference(CFG)[0].dispatch_wait(s[0]),
            id="of another group",
        ),
        pytest.param(
            "combine_async of this communicator, rank 0", lambda g, s: g.first.combine_wait(s[0]), id="of another phase"
        ),
    ],
)
def test_a_wait_takes_the_oldest_pending_of_its_own(group: Group, sent: list, match: str, wait: Callable) -> None:
    with pytest.raises(EPInputError, match=match):
        wait(group, sent)


def test_a_third_send_and_a_fused_call_wait_for_the_two_rounds_that_are_outstanding(group: Group, sent: list) -> None:
    x, ids = group.inputs[0].x, group.inputs[0].topk_ids
    with pytest.raises(EPInputError, match="2 are outstanding"):
        group.first.dispatch_async(x, ids)
    with pytest.raises(EPInputError, match="2 split round"):
        group.first.dispatch(x, ids)


def test_a_dispatch_is_received_once(group: Group, sent: list) -> None:
    group.first.dispatch_wait(sent[0])
    with pytest.raises(EPInputError, match="rank 0, returned, and not received before"):
        group.first.dispatch_wait(sent[0])
    group.first.dispatch_wait(sent[1])


def test_a_combine_is_received_once_and_by_combine(group: Group) -> None:
    batches = group.dispatch()
    sent = group.first.combine_async(rows_for(batches, CFG)[0], batches[0])
    group.first.combine_wait(sent)
    with pytest.raises(EPInputError, match="rank 0, returned, and not received before"):
        group.first.combine_wait(sent)
    with pytest.raises(EPInputError, match="dispatch_async of this communicator, rank 0"):
        group.first.dispatch_wait(sent)


# ---- the end


def test_a_closed_rank_refuses_every_call_and_ends_no_other() -> None:
    communicators, batches, inputs = dispatch_all(CFG)
    with communicators[0] as first:
        assert first is communicators[0]
    first.close()
    for call in (
        first.synchronize,
        first.allocate,
        lambda: first.dispatch(inputs[0].x, inputs[0].topk_ids),
        lambda: first.combine(rows_for(batches, CFG)[0], batches[0]),
    ):
        with pytest.raises(EPError, match="rank 0: the communicator is closed"):
            call()
    communicators[1].synchronize()
