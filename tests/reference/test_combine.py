"""Reference combine against a scalar float32 model, a float64 evaluation and hand-made sums where the order,
the separate rounding of products and the number of casts decide the result."""

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.compare import assert_bits
from cute_ep.config import EPConfig
from cute_ep.errors import EPInputError
from tests.cases import CASES, Case

MODES = ["exact", "partial"]


def expert_outputs(batches, hidden: int, seed: int = 0, excess: int = 0) -> list[torch.Tensor]:
    """Random rows of mixed magnitude and sign; `excess` rows of NaN follow the valid ones."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for batch in batches:
        count = batch.num_rows.item()
        rows = torch.randn(count, hidden, generator=generator)
        rows *= torch.randint(-6, 6, (count, 1), generator=generator).exp2()
        results.append(torch.cat([rows, torch.full((excess, hidden), torch.nan)]).bfloat16())
    return results


def signed_weights(ids: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(one.shape, generator=generator) for one in ids]


def dispatched(case: Case, weights: bool = True):
    inputs = case.inputs()
    ids = [one.topk_ids for one in inputs]
    given = signed_weights(ids) if weights else None
    return reference.dispatch(case.cfg, [one.x for one in inputs], ids, None, given)


def combine_scalar(cfg: EPConfig, rows, batches, weights, mode: str) -> list[torch.Tensor]:
    """The definition, one token at a time: numpy float32 operations round each product and each sum."""
    local = cfg.num_experts // cfg.world_size
    arrays = [one.float().numpy() for one in rows]
    results = []
    for source, factors in enumerate(weights):
        ids = batches[source].topk_ids.tolist()
        out = np.zeros((len(ids), cfg.hidden), dtype=ml_dtypes.bfloat16)
        for token, experts in enumerate(ids):
            owners = sorted({expert // local for expert in experts if expert >= 0})
            groups = [owners] if mode == "exact" else [[owner] for owner in owners]
            partials = []
            for group in groups:
                total = np.zeros(cfg.hidden, dtype=np.float32)
                for slot, expert in enumerate(experts):
                    if expert >= 0 and expert // local in group:
                        owner = expert // local
                        row = arrays[owner][batches[owner].row_map[source, token, slot]]
                        product = np.float32(factors[token, slot].item()) * row
                        total = total + product
                partials.append(total.astype(ml_dtypes.bfloat16))
            if mode == "exact":
                out[token] = partials[0]
            else:
                total = np.zeros(cfg.hidden, dtype=np.float32)
                for partial in partials:
                    total = total + partial.astype(np.float32)
                out[token] = total.astype(ml_dtypes.bfloat16)
        results.append(torch.from_numpy(out.view(np.int16)).view(torch.bfloat16))
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case: Case, mode: str):
    batches = dispatched(case)
    rows = expert_outputs(batches, case.hidden, excess=3)
    weights = [batch.router_weights for batch in batches]
    got = reference.combine(case.cfg, rows, batches, mode=mode)
    for rank, want in enumerate(combine_scalar(case.cfg, rows, batches, weights, mode)):
        assert_bits(got[rank], want, f"rank {rank}")
    for rank, (value, bound) in enumerate(reference.combine_error_bound(case.cfg, rows, batches, mode=mode)):
        error = (got[rank].double() - value).abs()
        assert (error <= bound).all(), f"rank {rank}: {(error / bound).max()}"


@pytest.mark.parametrize("mode", MODES)
def test_error_bound_is_tight(mode):
    """Within a factor of two of the largest error seen, so one lost bit breaks it."""
    case = Case(1024, 8, 4, 256, (256, 256), "bf16", "uniform")
    batches = dispatched(case)
    rows = expert_outputs(batches, case.hidden)
    ratios = [
        ((got.double() - value).abs() / bound).max().item()
        for got, (value, bound) in zip(
            reference.combine(case.cfg, rows, batches, mode=mode),
            reference.combine_error_bound(case.cfg, rows, batches, mode=mode),
            strict=True,
        )
    ]
    assert 0.5 < max(ratios) <= 1


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


def one_token(experts: list[int], weights: list[float], outputs: list[float], mode: str, *, bound: bool = False):
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
    out = reference.combine(cfg, rows, batches, mode=mode)[0][0]
    assert (out.view(torch.int16) == out.view(torch.int16)[0]).all()
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
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 700)
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

    fails("mode = 'sum': must be one of exact, partial", rows, batches, mode="sum")
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
    fails("rows.stride", [rows[0], torch.stack([rows[1]] * 2, dim=-1)[..., 0]], batches)
