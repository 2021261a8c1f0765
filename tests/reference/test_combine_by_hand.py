"""Reference combine of one token whose elements are all the same: sums made by hand, where the order, the separate
rounding of products and the number of casts decide the result."""

import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.testing.compare import assert_bits

from .combine_model import MODES


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


# ---- order and rounding


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
], ids=str)  # fmt: skip
def test_exact_adds_by_slot_and_partial_by_rank_with_a_cast_each(experts, outputs, exact, partial, mode):
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
], ids=str)  # fmt: skip
def test_zeros_infinities_and_nan_have_these_bits(experts, weights, outputs, bits, mode):
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
], ids=str)  # fmt: skip
def test_sums_are_rounded_once_to_the_type_of_the_output(mode, dtype, value, bits):
    """The weight is the value, the row 1."""
    got = one_token([2, -1], [value, 0.0], [1.0, 0.0], mode, dtype=dtype)
    assert got.view(torch.int32 if dtype == torch.float32 else torch.int16).item() & (1 << 8 * got.itemsize) - 1 == bits


def test_bfloat16_roundoff_is_reached():
    """1 + 2**-8 is a tie that rounds to 1: the error is the whole unit roundoff 2**-8 of the exact bound."""
    got, value, bound = one_token([0], [1 + 2.0**-8], [1.0], "exact", bound=True)
    assert (got.item(), value.item()) == (1.0, 1 + 2.0**-8)
    assert 2.0**-8 <= bound.item() < 2.0**-8 * 1.01


# ---- shared expert, skip_a2a


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
