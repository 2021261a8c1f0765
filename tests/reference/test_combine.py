"""Reference combine against a scalar float32 model and a float64 evaluation with its error bound."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.reference import formats as reference_formats
from cute_ep.testing.compare import assert_bits
from tests.cases import CASES, Case

from .combine_model import (
    MODES,
    NUMPY_TYPES,
    as_torch,
    combine_scalar,
    dispatched,
    expert_outputs,
    served_slots,
    signed_weights,
)
from .oracle import ALL_BF16

# ---- deployments


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_deployment_has_the_sums_of_the_model_within_the_bound(case: Case, mode: str):
    batches = dispatched(case)
    rows = expert_outputs(batches, case.hidden, excess=3)
    weights = [batch.router_weights for batch in batches]
    dtypes = list(NUMPY_TYPES) if case.hidden < 1000 else [torch.bfloat16]
    for dtype in dtypes:
        got = reference.combine(case.cfg, rows, batches, mode=mode, dtype=dtype)
        for rank, want in enumerate(combine_scalar(case.cfg, rows, batches, weights, mode, dtype)):
            assert_bits(got[rank], want, f"rank {rank}")
        bounds = reference.combine_error_bound(case.cfg, rows, batches, mode=mode, dtype=dtype)
        for rank, (value, bound) in enumerate(bounds):
            assert bound.isfinite().all() and reference.within(got[rank], value, bound).all(), f"rank {rank}"


@pytest.mark.parametrize("case", [case for case in CASES if not case.shared], ids=lambda case: case.id)
def test_unweighted_combine_returns_every_slots_own_row(case: Case):
    """The weights do not matter, nor whether there are any."""
    batches = dispatched(case, weights=False)
    rows = expert_outputs(batches, case.hidden, excess=3)
    for dtype in NUMPY_TYPES:
        got = reference.combine(case.cfg, rows, batches, mode="unweighted", dtype=dtype)
        bounds = reference.combine_error_bound(case.cfg, rows, batches, mode="unweighted", dtype=dtype)
        for source, out in enumerate(got):
            want = torch.zeros(batches[source].topk_ids.shape[0], case.top_k, case.hidden)
            for token, served in enumerate(served_slots(case.cfg, batches, source)):
                for slot, owner, row in served:
                    want[token, slot] = rows[owner][row].float()
            assert_bits(out, as_torch(want.numpy(), dtype), f"rank {source} {dtype}")
            value, bound = bounds[source]
            assert reference.within(out, value, bound).all()
            assert dtype == torch.float16 or not bound.any()
        assert_bits(torch.cat(got), torch.cat(reference.combine(
            case.cfg, rows, dispatched(case), signed_weights([b.topk_ids for b in batches]), "unweighted", dtype
        )), "with weights")  # fmt: skip


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_unweighted_keeps_the_bits_of_a_row(dtype):
    """All 65,536 bfloat16 numbers: bfloat16 as they are, float32 widened with zeros, float16 rounded with one NaN."""
    cfg = EPConfig(hidden=65536, num_experts=1, top_k=1, max_tokens_per_rank=1, world_size=1)
    x, ids = ALL_BF16[None], torch.zeros(1, 1).int()
    batches = reference.dispatch(cfg, [x], [ids])
    (out,) = reference.combine(cfg, [x], batches, mode="unweighted", dtype=dtype)
    if dtype == torch.bfloat16:
        want = x
    elif dtype == torch.float32:
        want = (torch.arange(65536) << 16).to(torch.int32).view(torch.float32)[None]
    else:
        want = as_torch(x.float().numpy(), dtype)
        assert want.isinf().sum() > 100 and want.isnan().sum() == 254
    assert_bits(out, want[None], "row")


@pytest.mark.parametrize("mode", MODES)
def test_identity_experts_return_the_tokens(mode):
    case = Case(96, 16, 4, 40, (40, 17, 3, 0), "bf16", "uniform")
    inputs = case.inputs()
    quarter = [torch.full((tokens, 4), 0.25) for tokens in case.tokens]
    xs = [one.x for one in inputs]
    batches = reference.dispatch(case.cfg, xs, [one.topk_ids for one in inputs])
    for out, x in zip(
        reference.combine(case.cfg, [b.tokens for b in batches], batches, quarter, mode), xs, strict=True
    ):
        assert_bits(out, x + 0.0, "identity")  # -0 comes back as +0


@pytest.mark.parametrize("shared", [False, True])
def test_skip_a2a_partial_sums_add_up(shared):
    """The ranks' sums in float32 together are the sum that all ranks' rows give."""
    case = Case(96, 8, 4, 16, (13,) * 4, "bf16", "masked", shared=shared, skip=True)
    batches = dispatched(case)
    rows = expert_outputs(batches, 96)
    total = sum(out.double() for out in reference.combine(case.cfg, rows, batches, mode="exact", dtype=torch.float32))
    pairs = reference.combine_error_bound(case.cfg, rows, batches, mode="exact", dtype=torch.float32)
    assert ((total - sum(value for value, _ in pairs)).abs() <= sum(bound for _, bound in pairs)).all()
    weights = batches[0].router_weights.double()
    want = torch.zeros(13, 96, dtype=torch.float64)
    for rank, batch in enumerate(batches):
        for row, (token, slot) in enumerate(batch.src_info.tolist()):
            if token >= 0:
                factor = 1.0 if slot == 4 else weights[token, slot].item()
                want[token] += factor * rows[rank][row].double()
    assert ((total - want).abs() <= 1e-5 * want.abs() + 1e-4).all()


# ---- error bounds


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [False, True])
def test_error_bound_is_tight(mode, dtype, shared):
    """Within a factor of two of the largest error seen, so one lost bit breaks it (float32: K roundings of random sign
    reach less)."""
    case = Case(1024, 8, 4, 256, (256, 256), "bf16", "uniform", shared=shared)
    batches = dispatched(case)
    rows = expert_outputs(batches, case.hidden)
    ratios = [
        ((got.double() - value).abs() / bound).max().item()
        for got, (value, bound) in zip(
            reference.combine(case.cfg, rows, batches, mode=mode, dtype=dtype),
            reference.combine_error_bound(case.cfg, rows, batches, mode=mode, dtype=dtype),
            strict=True,
        )
    ]
    assert (0.3 if (mode, dtype) == ("exact", torch.float32) else 0.5) < max(ratios) <= 1


@pytest.mark.parametrize("mode", MODES)
def test_error_bound_covers_underflow(mode):
    """Products and results among the subnormals, where relative bounds alone fail."""
    case = Case(64, 8, 4, 16, (16, 16), "bf16", "uniform")
    batches = dispatched(case)
    rows = [one.float().mul(2.0**-60).bfloat16() for one in expert_outputs(batches, 64)]
    weights = [batch.router_weights * 2.0**-74 for batch in batches]
    got = reference.combine(case.cfg, rows, batches, weights, mode)
    want = combine_scalar(case.cfg, rows, batches, weights, mode)
    for rank, (value, bound) in enumerate(reference.combine_error_bound(case.cfg, rows, batches, weights, mode)):
        error = (got[rank].double() - value).abs()
        assert_bits(got[rank], want[rank], f"rank {rank}")
        assert (error <= bound).all() and (error > 2.0**-8 * value.abs()).any()
        assert (got[rank] != 0).any() and (got[rank] == 0).any()


# ---- weights, epilogue, chunks


@pytest.mark.parametrize("mode", MODES)
def test_given_weights_win_over_dispatched_ones(mode):
    case = Case(64, 8, 2, 16, (5, 16), "bf16", "masked")
    batches, bare = dispatched(case), dispatched(case, weights=False)
    rows = expert_outputs(batches, 64)
    other = signed_weights([batch.topk_ids for batch in batches], seed=7)
    want = reference.combine(case.cfg, rows, bare, other, mode)
    for rank, got in enumerate(reference.combine(case.cfg, rows, batches, other, mode)):
        assert_bits(got, want[rank], f"rank {rank}")
        assert not torch.equal(got, reference.combine(case.cfg, rows, batches, mode=mode)[rank])
    mixed = reference.combine(case.cfg, rows, batches, [other[0], None], mode)
    assert_bits(mixed[0], want[0], "argument")
    assert_bits(mixed[1], reference.combine(case.cfg, rows, batches, mode=mode)[1], "dispatched")


@pytest.mark.parametrize("mode", MODES)
def test_an_epilogue_gets_the_float32_sums_of_each_rank(mode):
    case = Case(96, 8, 4, 16, (13, 0, 16, 2), "bf16", "masked", shared=True)
    batches = dispatched(case)
    rows = expert_outputs(batches, 96)
    sums = reference.combine(case.cfg, rows, batches, mode=mode, dtype=torch.float32)
    seen = []

    def epilogue(rank: int, total: torch.Tensor) -> torch.Tensor:
        seen.append(rank)
        assert_bits(total, sums[rank], f"rank {rank}")
        return total * 3 + rank

    got = reference.combine(case.cfg, rows, batches, mode=mode, dtype=torch.float16, epilogue=epilogue)
    assert seen == [0, 1, 2, 3]
    for rank, out in enumerate(got):
        assert_bits(out, reference.round_to(sums[rank] * 3 + rank, torch.float16), f"rank {rank}")


@pytest.mark.parametrize("mode", MODES)
def test_sums_and_bounds_do_not_depend_on_the_chunk(mode, monkeypatch):
    case = Case(96, 16, 4, 40, (40, 17, 3, 0), "bf16", "masked")
    batches = dispatched(case)
    rows = expert_outputs(batches, 96)
    whole = reference.combine(case.cfg, rows, batches, mode=mode)
    bounds = reference.combine_error_bound(case.cfg, rows, batches, mode=mode)
    monkeypatch.setattr(reference_formats, "CHUNK_ELEMENTS", 700)
    for got, want in zip(reference.combine(case.cfg, rows, batches, mode=mode), whole, strict=True):
        assert_bits(got, want, "chunked")
    for got, want in zip(reference.combine_error_bound(case.cfg, rows, batches, mode=mode), bounds, strict=True):
        assert_bits(torch.stack(got), torch.stack(want), "chunked bound")


# ---- arguments


CASE = Case(64, 8, 2, 16, (5, 16), "bf16", "uniform")


class Good(NamedTuple):
    """Good arguments, of which cases change some: rows, batches with and without weights, and the weights."""

    rows: list
    batches: list
    bare: list
    weights: list


@pytest.mark.parametrize(
    ("match", "change"),
    [
        pytest.param(
            "mode = 'sum': must be one of exact, partial, unweighted",
            lambda good: {"mode": "sum"},
            id="a mode that is none",
        ),
        pytest.param(
            "must be given to dispatch or to combine",
            lambda good: {"dispatched": good.bare},
            id="no weights",
        ),
        pytest.param(
            "must be given to dispatch or to combine",
            lambda good: {"dispatched": good.bare, "router_weights": [good.weights[0], None]},
            id="weights of one rank only",
        ),
        pytest.param(
            "router_weights.shape",
            lambda good: {"router_weights": [good.weights[0][:1], good.weights[1]]},
            id="too few weights",
        ),
        pytest.param(
            "router_weights.dtype",
            lambda good: {"router_weights": [good.weights[0].double(), good.weights[1]]},
            id="weights in float64",
        ),
        pytest.param(
            "must be world_size = 2",
            lambda good: {"router_weights": good.weights[:1]},
            id="weights of too few ranks",
        ),
        pytest.param(
            "must be world_size = 2",
            lambda good: {"rows": good.rows[:1]},
            id="rows of too few ranks",
        ),
        pytest.param(
            "must be world_size = 2",
            lambda good: {"dispatched": good.batches[:1]},
            id="batches of too few ranks",
        ),
        pytest.param(
            r"rows\[1\]\.shape\[0\] = .*at least num_rows",
            lambda good: {"rows": [good.rows[0], good.rows[1][:-1]]},
            id="too few rows",
        ),
        pytest.param(
            "rows.dtype",
            lambda good: {"rows": [good.rows[0].float(), good.rows[1]]},
            id="rows in float32",
        ),
        pytest.param(
            "rows.shape",
            lambda good: {"rows": [good.rows[0][:, :32].contiguous(), good.rows[1]]},
            id="narrow rows",
        ),
        pytest.param(
            "dtype = torch.float64: must be one of",
            lambda good: {"dtype": torch.float64},
            id="sums in float64",
        ),
        pytest.param(
            "rows.stride",
            lambda good: {"rows": [good.rows[0], torch.stack([good.rows[1]] * 2, dim=-1)[..., 0]]},
            id="strided rows",
        ),
    ],
)
@pytest.mark.parametrize("function", [reference.combine, reference.combine_error_bound], ids=["sums", "bounds"])
def test_arguments_that_break_a_rule_are_refused(function: Callable, match: str, change: Callable):
    batches = dispatched(CASE)
    good = Good(
        rows=expert_outputs(batches, 64),
        batches=batches,
        bare=dispatched(CASE, weights=False),
        weights=[batch.router_weights for batch in batches],
    )
    given = {"rows": good.rows, "dispatched": good.batches} | change(good)
    with pytest.raises(EPInputError, match=match):
        function(CASE.cfg, **given)


def test_unweighted_combine_has_no_epilogue_and_no_shared_expert():
    batches = dispatched(CASE)
    rows = expert_outputs(batches, 64)
    with pytest.raises(EPInputError, match="epilogue = function: must be None in unweighted mode"):
        reference.combine(CASE.cfg, rows, batches, mode="unweighted", epilogue=lambda rank, total: total)
    shared = replace(CASE, shared=True)
    batches = dispatched(shared)
    for function in (reference.combine, reference.combine_error_bound):
        with pytest.raises(EPInputError, match="shared expert"):
            function(shared.cfg, expert_outputs(batches, 64), batches, mode="unweighted")
