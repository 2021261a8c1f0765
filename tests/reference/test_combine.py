"""Reference combine against a scalar float32 model, a float64 evaluation and hand-made sums where the order,
the separate rounding of products and the number of casts decide the result."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.reference import formats as reference_formats
from cute_ep.testing.compare import assert_bits
from tests.cases import CASES, Case

from .oracle import ALL_BF16

MODES = ["exact", "partial"]
NUMPY_TYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: np.float32}
NAN_BITS = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}


def expert_outputs(batches, hidden: int, seed: int = 0, excess: int = 0) -> list[torch.Tensor]:
    """Random rows of mixed magnitude and sign; padding and the `excess` rows at the end are NaN."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for batch in batches:
        count = batch.num_rows.item()
        rows = torch.randn(count, hidden, generator=generator)
        rows *= torch.randint(-6, 6, (count, 1), generator=generator).exp2()
        rows[batch.src_info[:, 0] < 0] = torch.nan
        results.append(torch.cat([rows, torch.full((excess, hidden), torch.nan)]).bfloat16())
    return results


def signed_weights(ids: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(one.shape, generator=generator) for one in ids]


def dispatched(case: Case, weights: bool = True):
    inputs = case.inputs()
    ids = [one.topk_ids for one in inputs]
    given = signed_weights(ids) if weights else None
    if weights and case.skip:
        given = [given[0].clone() for _ in given]
    return reference.dispatch(case.cfg, [one.x for one in inputs], ids, None, given)


def as_torch(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float32 numbers converted by numpy, with the one NaN."""
    with np.errstate(over="ignore"):
        converted = values.astype(NUMPY_TYPES[dtype])
    bits = torch.from_numpy(converted.view(np.int32 if dtype == torch.float32 else np.int16).copy())
    bits[torch.from_numpy(np.isnan(values))] = NAN_BITS[dtype]
    return bits.view(dtype)


def served_slots(cfg: EPConfig, batches, source: int) -> list[list[tuple[int, int, int]]]:
    """Per token of `source` the (slot, owner, row) that come home."""
    local = cfg.num_experts // cfg.world_size
    found = []
    for token, experts in enumerate(batches[source].topk_ids.tolist()):
        owners = [(slot, expert // local) for slot, expert in enumerate(experts) if expert >= 0]
        if cfg.skip_a2a:
            owners = [(slot, owner) for slot, owner in owners if owner == source]
        place = 0 if cfg.skip_a2a else source
        found.append([(slot, owner, int(batches[owner].row_map[place, token, slot])) for slot, owner in owners])
    return found


def combine_scalar(cfg: EPConfig, rows, batches, weights, mode: str, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """The definition, one token at a time: numpy float32 operations round each product and each sum."""
    arrays = [one.float().numpy() for one in rows]
    results = []
    for source, factors in enumerate(weights):
        info = batches[source].src_info.tolist()
        shared = {token: row for row, (token, slot) in enumerate(info) if slot == cfg.top_k}
        out = np.zeros((batches[source].topk_ids.shape[0], cfg.hidden), dtype=np.float32)
        for token, served in enumerate(served_slots(cfg, batches, source)):
            owners = sorted({owner for _, owner, _ in served})
            groups = [owners] if mode == "exact" else [[owner] for owner in owners]
            partials = [np.zeros(cfg.hidden, dtype=np.float32)]
            for group in groups:
                total = np.zeros(cfg.hidden, dtype=np.float32)
                for slot, owner, row in served:
                    if owner in group:
                        product = np.float32(factors[token, slot].item()) * arrays[owner][row]
                        total = total + product
                partials.append(total if mode == "exact" else total.astype(ml_dtypes.bfloat16).astype(np.float32))
            for partial in partials[1:]:
                out[token] = out[token] + partial
            if token in shared:
                out[token] = out[token] + arrays[source][shared[token]]
        results.append(as_torch(out, dtype))
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case: Case, mode: str):
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
def test_unweighted_cases(case: Case):
    """Every slot's own row; the weights do not matter, nor whether there are any."""
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


def test_bfloat16_roundoff_is_reached():
    """1 + 2**-8 is a tie that rounds to 1: the error is the whole unit roundoff 2**-8 of the exact bound."""
    got, value, bound = one_token([0], [1 + 2.0**-8], [1.0], "exact", bound=True)
    assert (got.item(), value.item()) == (1.0, 1 + 2.0**-8)
    assert 2.0**-8 <= bound.item() < 2.0**-8 * 1.01


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


# ---- one token, every element the same: sums made by hand


def one_token(
    experts: list[int],
    weights: list[float],
    outputs: list[float],
    mode: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bound: bool = False,
):
    """Combine one token of rank 0 over 4 ranks of one expert; `outputs[k]` is the value of slot k's row."""
    top_k = len(experts)
    cfg = EPConfig(hidden=8, num_experts=4, top_k=top_k, max_tokens_per_rank=1, world_size=4)
    x, none = torch.zeros(1, 8).bfloat16(), torch.zeros(0, 8).bfloat16()
    ids = [torch.tensor([experts]).int()] + [torch.zeros(0, top_k).int()] * 3
    factors = [torch.tensor([weights])] + [torch.zeros(0, top_k)] * 3
    batches = reference.dispatch(cfg, [x, none, none, none], ids, None, factors)
    rows = [torch.zeros(batch.num_rows.item(), 8).bfloat16() for batch in batches]
    for slot, expert in enumerate(experts):
        if expert >= 0:
            rows[expert][batches[expert].row_map[0, 0, slot]] = outputs[slot]
    out = reference.combine(cfg, rows, batches, mode=mode, dtype=dtype)[0][0]
    assert_bits(out, out[:1].repeat(8), "equal columns")
    if not bound:
        return out[0]
    ((value, limit), *_) = reference.combine_error_bound(cfg, rows, batches, mode=mode)
    return out[0], value[0, 0], limit[0, 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("experts, outputs, exact, partial", [
    # 2**25 swallows a 1 added to it: exact goes by slot, partial by rank
    ([3, 0, 1], [1.0, 2.0**25, -(2.0**25)], 0.0, 1.0),
    ([3, 1, 0], [1.0, 2.0**25, -(2.0**25)], 0.0, 1.0),
    ([1, 3, 0], [2.0**25, -(2.0**25), 1.0], 1.0, 0.0),
    ([0, 1, 3], [2.0**25, -(2.0**25), 1.0], 1.0, 1.0),
    ([0, 1, 3], [2.0**25, 1.0, -(2.0**25)], 0.0, 0.0),
    ([0, 0, 0], [2.0**25, 1.0, -(2.0**25)], 0.0, 0.0),
    # partial casts each rank's sum: 256 + 1 is no bfloat16
    ([2, 2, 1], [256.0, 1.0, -256.0], 1.0, 0.0),
    ([2, -1, 1], [256.0, torch.nan, 1.0], 256.0, 256.0),
])  # fmt: skip
def test_order_and_casts(experts, outputs, exact, partial, mode):
    assert one_token(experts, [1.0] * 3, outputs, mode).item() == (exact if mode == "exact" else partial)


@pytest.mark.parametrize("mode", MODES)
def test_products_are_rounded_before_they_are_added(mode):
    """w0 * -1 is the negative of the rounded w1 * x1: a fused multiply-add would leave the rounding error."""
    w1, x1 = np.float32(1.1), np.float32(torch.tensor(1.3).bfloat16().item())
    assert np.float64(w1) * np.float64(x1) != np.float64(w1 * x1)
    out = one_token([2, 2], [float(w1 * x1), float(w1)], [-1.0, float(x1)], mode)
    assert_bits(out, torch.tensor(0.0).bfloat16(), "sum")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("experts, weights, outputs, bits", [
    ([-1, -1], [torch.nan, torch.inf], [1.0, 1.0], 0x0000),
    ([1, -1], [-1.0, torch.nan], [0.0, 0.0], 0x0000),  # +0 + -0
    ([1, -1], [-(2.0**-140), 0.0], [1.0, 0.0], {"exact": 0x8000, "partial": 0x0000}),  # partial: +0 + -0
    ([1, 3], [1.0, 1.0], [torch.inf, -torch.inf], 0x7FFF),
    ([1, 3], [torch.nan, 1.0], [1.0, 1.0], 0x7FFF),
    ([1, 3], [-torch.nan, 1.0], [1.0, 1.0], 0x7FFF),
    ([1, 3], [0.0, 1.0], [torch.inf, 1.0], 0x7FFF),
    ([1, 3], [2.0**127, 2.0**127], [1.0, 1.0], 0x7F80),
    ([1, -1], [-3.4028234663852886e38, 0.0], [1.0, 1.0], 0xFF80),  # the cast overflows
    ([1, -1], [1.0, 1.0], [2.0**-133, 0.0], 0x0001),
])  # fmt: skip
def test_special_values(experts, weights, outputs, bits, mode):
    want = bits[mode] if isinstance(bits, dict) else bits
    assert one_token(experts, weights, outputs, mode).view(torch.int16).item() & 0xFFFF == want


@pytest.mark.parametrize("mode, dtype, value, bits", [
    ("exact", torch.float16, 65519.0, 0x7BFF), ("exact", torch.float16, 65520.0, 0x7C00),
    ("exact", torch.float16, -1e30, 0xFC00), ("exact", torch.float16, 2.0**-25, 0x0000),
    ("exact", torch.float16, 2.0**-24, 0x0001), ("exact", torch.float16, torch.nan, 0x7FFF),
    ("exact", torch.float32, torch.nan, 0x7FFFFFFF), ("exact", torch.float32, 2.0**-149, 0x00000001),
    ("exact", torch.float32, 1 + 2.0**-23, 0x3F800001),
    ("exact", torch.bfloat16, 1 + 2.0**-8, 0x3F80), ("exact", torch.bfloat16, 1 + 3 * 2.0**-8, 0x3F82),
    # partial sums are bfloat16 before that
    ("partial", torch.float16, 65519.0, 0x7C00), ("partial", torch.float16, 65280.0, 0x7BF8),
    ("partial", torch.float32, 1 + 2.0**-8, 0x3F800000), ("partial", torch.float32, -torch.nan, 0x7FFFFFFF),
])  # fmt: skip
def test_output_types(mode, dtype, value, bits):
    """One rounding at the end: the weight is the value, the row 1."""
    got = one_token([2, -1], [value, 0.0], [1.0, 0.0], mode, dtype=dtype)
    assert got.view(torch.int32 if dtype == torch.float32 else torch.int16).item() & (1 << 8 * got.itemsize) - 1 == bits


# ---- shared expert, epilogue, skip_a2a


def shared_case(mode: str, skip: bool, shared_output: float, outputs: list[float], weights: list[float]) -> list:
    """Both ranks' sums of one token (the same token with skip_a2a), slot k at expert k of 2 ranks, as numbers."""
    cfg = EPConfig(
        hidden=8, num_experts=2, top_k=2, max_tokens_per_rank=1, world_size=2, fused_shared_expert=True, skip_a2a=skip
    )
    x, ids, factors = torch.zeros(1, 8).bfloat16(), torch.tensor([[0, 1]]).int(), torch.tensor([weights])
    batches = reference.dispatch(cfg, [x, x], [ids, ids], None, [factors, factors])
    rows = []
    for rank, batch in enumerate(batches):
        values = [shared_output if slot == 2 else outputs[rank] for slot in batch.src_info[:, 1].tolist()]
        rows.append(torch.tensor(values)[:, None].repeat(1, 8).bfloat16())
    return [out[0, 0].item() for out in reference.combine(cfg, rows, batches, mode=mode)]


@pytest.mark.parametrize("mode", MODES)
def test_shared_row_comes_after_the_weighted_ones(mode):
    """2**25 swallows the 1 of the shared expert unless the other slot has taken it back before."""
    assert shared_case(mode, False, 1.0, [2.0**25, -(2.0**25)], [1.0, 1.0]) == [1.0, 1.0]
    assert shared_case(mode, False, 2.0**25, [1.0, -(2.0**25)], [1.0, 1.0]) == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_shared_row_has_no_weight_and_one_cast(mode):
    """1 + 2**-8 + 2**-8 has a bfloat16, which a cast before the shared row would miss."""
    assert shared_case(mode, False, 2.0**-8, [1.0, 1.0], [1.0, 2.0**-8]) == [1 + 2.0**-7] * 2
    assert shared_case(mode, False, 3.0, [1.0, 1.0], [0.0, 0.0]) == [3.0, 3.0]


@pytest.mark.parametrize("mode", MODES)
def test_skip_a2a_sums_what_a_rank_owns(mode):
    """Rank 0 has slot 0 and the one token's shared row, rank 1 slot 1."""
    assert shared_case(mode, True, 16.0, [1.0, 3.0], [0.5, 2.0]) == [16.5, 6.0]


@pytest.mark.parametrize("shared", [False, True])
def test_skip_a2a_partial_sums_add_up(shared):
    """The ranks' sums in float32 together are the sum that all ranks' rows give."""
    case = Case(96, 8, 4, 16, (13,) * 4, "bf16", "masked", shared=shared, skip=True)
    batches = dispatched(case)
    rows = expert_outputs(batches, 96)
    total = sum(out.double() for out in reference.combine(case.cfg, rows, batches, dtype=torch.float32))
    pairs = reference.combine_error_bound(case.cfg, rows, batches, dtype=torch.float32)
    assert ((total - sum(value for value, _ in pairs)).abs() <= sum(bound for _, bound in pairs)).all()
    weights = batches[0].router_weights.double()
    want = torch.zeros(13, 96, dtype=torch.float64)
    for rank, batch in enumerate(batches):
        for row, (token, slot) in enumerate(batch.src_info.tolist()):
            if token >= 0:
                factor = 1.0 if slot == 4 else weights[token, slot].item()
                want[token] += factor * rows[rank][row].double()
    assert ((total - want).abs() <= 1e-5 * want.abs() + 1e-4).all()


@pytest.mark.parametrize("mode", MODES)
def test_epilogue_changes_the_float32_sums(mode):
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


# ---- whole path and arguments


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
def test_chunks_do_not_matter(mode, monkeypatch):
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


def test_bad_arguments():
    case = Case(64, 8, 2, 16, (5, 16), "bf16", "uniform")
    batches, bare = dispatched(case), dispatched(case, weights=False)
    rows = expert_outputs(batches, 64)
    weights = [batch.router_weights for batch in batches]
    cfg = case.cfg

    def fails(match, *args, **kwargs):
        for function in (reference.combine, reference.combine_error_bound):
            with pytest.raises(EPInputError, match=match):
                function(cfg, *args, **kwargs)

    fails("mode = 'sum': must be one of exact, partial, unweighted", rows, batches, mode="sum")
    fails("must be given to dispatch or to combine", rows, bare)
    fails("must be given to dispatch or to combine", rows, bare, [weights[0], None])
    fails("router_weights.shape", rows, batches, [weights[0][:1], weights[1]])
    fails("router_weights.dtype", rows, batches, [weights[0].double(), weights[1]])
    fails("must be world_size = 2", rows, batches, weights[:1])
    fails("must be world_size = 2", rows[:1], batches)
    fails("must be world_size = 2", rows, batches[:1])
    fails(r"rows\[1\]\.shape\[0\] = .*at least num_rows", [rows[0], rows[1][:-1]], batches)
    fails("rows.dtype", [rows[0].float(), rows[1]], batches)
    fails("rows.shape", [rows[0][:, :32].contiguous(), rows[1]], batches)
    fails("dtype = torch.float64: must be one of", rows, batches, dtype=torch.float64)
    fails("rows.stride", [rows[0], torch.stack([rows[1]] * 2, dim=-1)[..., 0]], batches)


def test_bad_unweighted_arguments():
    case = Case(64, 8, 2, 16, (5, 16), "bf16", "uniform")
    batches = dispatched(case)
    rows = expert_outputs(batches, 64)
    with pytest.raises(EPInputError, match="epilogue = function: must be None in unweighted mode"):
        reference.combine(case.cfg, rows, batches, mode="unweighted", epilogue=lambda rank, total: total)
    shared = replace(case, shared=True)
    batches = dispatched(shared)
    for function in (reference.combine, reference.combine_error_bound):
        with pytest.raises(EPInputError, match="shared expert"):
            function(shared.cfg, expert_outputs(batches, 64), batches, mode="unweighted")
