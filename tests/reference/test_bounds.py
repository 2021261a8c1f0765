"""Error bounds: they hold, and are as tight as rounding allows, so a quantiser that is off by a step breaks one."""

from pathlib import Path

import pytest
import torch

from cute_ep import reference
from cute_ep.layouts.maps.formats import E4M3, FORMATS

from . import error_table, oracle
from .oracle import ALL_BF16

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.scale]
FORMATS_AND_SCALES = [(fmt, 1.0) for fmt in QUANTIZED] + [
    ("nvfp4", scale) for scale in (2.0**100, 2.0**-100, 1 / 3, 527.3, 2.0**-20, 2.0**40 * 1.7)
]
NUMERICS = Path(__file__).parents[2] / "docs" / "numerics.md"


@pytest.mark.parametrize("fmt, scale", FORMATS_AND_SCALES)
def test_bounds_hold_and_are_reached(fmt, scale):
    """Every bfloat16 as element and as block maximum; some block comes within 1 % of its bound."""
    tiny = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, -37, 64)[:, None]
    assert max(*error_table.ratios(fmt, scale), error_table.quantization_ratio(tiny.bfloat16(), fmt, scale)) > 0.99


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_bounds_are_finite_for_what_can_be_represented(fmt):
    """No promise for infinities and NaN, nor for maxima whose rounding up leaves float32; else always one."""
    for x in (oracle.rows_of_maxima(fmt), oracle.rows_of_elements(FORMATS[fmt].block, 3e38)):
        bound = reference.quantization_bound(x, fmt)
        assert bound[~x.isfinite()].isposinf().all() and not bound.isnan().any()
        assert bound[x.abs() < 1.9 * 2.0**127].isfinite().all() or fmt in ("mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_row")
        assert bound[x.abs() < 2.0**126].isfinite().all()


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_a_wrong_element_breaks_the_bound(fmt):
    """Moving a code by one step, or a block's scale by the smallest amount that moves something, is noticed."""
    x = oracle.random_rows(8, 1024, binades=3)
    rows = reference.quantize(x, fmt)
    bound = reference.quantization_bound(x, fmt)
    codes = rows.payload.view(torch.uint8)
    wrong = codes.clone()
    if FORMATS[fmt].element is E4M3:
        wrong[:, ::2] = (codes[:, ::2] & 0x80) | ((codes[:, ::2] & 0x7F) - 1)
        expected = torch.arange(1024) % 2 == 0
    else:
        first = {4: (1, 2), 6: (3, 4)}[FORMATS[fmt].bits]  # every so many bytes, and elements, one begins at a byte
        wrong[:, :: first[0]] ^= 1  # their neighbours
        expected = torch.arange(1024) % first[1] == 0
    broken = reference.dequantize(rows._replace(payload=wrong.view(rows.payload.dtype)), fmt)
    noticed = ~reference.within(broken, x.double(), bound)
    assert noticed[:, expected].double().mean() > 0.7 and not noticed[:, ~expected].any()
    scaled = reference.dequantize(rows, fmt) * 2
    assert (~reference.within(scaled, x.double(), bound)).double().mean() > 0.9


def test_the_bound_of_bf16_is_zero():
    bound = reference.quantization_bound(ALL_BF16.reshape(64, 1024), "bf16")
    assert torch.equal(bound == 0, ALL_BF16.isfinite().reshape(64, 1024))


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_round_of_identity_experts_is_within_its_bound_and_near_it(fmt, mode):
    assert 0.3 < error_table.identity_ratio(fmt, mode) <= 1


def test_identity_experts_alone_and_with_masked_slots():
    """The value is the sum of the weights of the slots that count, times x."""
    cfg = error_table.EPConfig(128, 4, 2, 3, 2, "bf16", skip_a2a=True, fused_shared_expert=True)
    x, weights = oracle.random_rows(3, 128), torch.tensor([[0.5, 0.25], [1.0, 2.0], [3.0, 0.125]])
    ids = torch.tensor([[0, 3], [-1, 2], [1, 0]]).int()
    batches = reference.dispatch(cfg, [x, x], [ids, ids], None, [weights, weights])
    rows = [batch.tokens for batch in batches]
    pairs = reference.identity_error_bound(cfg, [x, x], rows, batches)
    factors = torch.tensor([[0.5 + 1, 1.0, 3.125], [0.25, 2.0, 1.0]], dtype=torch.float64)
    factors[0, 1], factors[1, 2] = 0.0 + 1, 0.0 + 1  # tokens 0 and 1 are rank 0's shared ones, token 2 rank 1's
    for rank, out in enumerate(reference.combine(cfg, rows, batches)):
        value, bound = pairs[rank]
        assert torch.equal(value, factors[rank][:, None] * x.double())
        assert reference.within(out, value, bound).all()


def test_within_compares_numbers_nan_and_infinities():
    inf, nan = torch.inf, torch.nan
    actual = torch.tensor([1.0, 1.0, nan, nan, inf, inf, inf, 1.0, nan]).double()
    value = torch.tensor([1.5, 1.5, nan, 1.0, inf, -inf, 1.0, inf, 1.0]).double()
    bound = torch.tensor([0.5, 0.4, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, inf]).double()
    want = [True, False, True, False, True, False, False, False, True]
    assert reference.within(actual, value, bound).tolist() == want


def test_the_table_in_the_documentation_is_what_the_command_prints():
    """Every line that the command prints is in docs/numerics.md."""
    lines = NUMERICS.read_text().splitlines()
    missing = [line for line in error_table.table() if line not in lines]
    assert not missing, "run python -m tests.reference.error_table"
