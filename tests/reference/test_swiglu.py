"""Gates in float64 against numpy, and their bounds against float32 evaluations with the worst errors that are
allowed."""

import math

import numpy as np
import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPInputError
from cute_ep.api.gates import Gate
from cute_ep.testing.compare import assert_bits

from .oracle import ALL_BF16

FLOAT = np.float32
UPS = (1.0, -1.0, 0.0, 3.3895313892515355e38, -(2.0**-133), 1.7, -300.0, torch.inf, torch.nan)
PLAIN = Gate()
GATES = [
    PLAIN, Gate(alpha=1.702, limit=7, offset=1), Gate(alpha=1, limit=1e38, offset=1), Gate(alpha=-0.5, limit=0.25),
    Gate(alpha=100, limit=3, offset=1), Gate(limit=7), Gate(alpha=1.702), Gate(offset=1),
    Gate("gelu_tanh"), Gate("gelu_tanh", limit=7, offset=1), Gate("relu2"),
]  # fmt: skip


def every_gate(up: float) -> torch.Tensor:
    """[64, 2 * 1024]: every bfloat16 as gate beside one up projection."""
    gate = ALL_BF16.reshape(64, 1024)
    return torch.cat([gate, torch.full_like(gate, up)], dim=1)


def flush(value: np.ndarray) -> np.ndarray:
    return np.where(np.abs(value) < FLOAT(2.0**-126), np.copysign(FLOAT(0), value), value)


def in_float32(x: torch.Tensor, gate: Gate, errors: tuple[float, int]) -> torch.Tensor:
    """The kernels' order of float32 operations; `errors` are the relative error of ex2 in units of 2**-22 and that of
    rcp in units in the last place."""
    g, up = (half.float().numpy() for half in x.chunk(2, dim=1))
    with np.errstate(all="ignore"):
        if gate.columns == 1:
            return torch.from_numpy(np.square(np.maximum(x.float().numpy(), FLOAT(0))))
        if gate.limit is not None:
            g, up = np.minimum(g, FLOAT(gate.limit)), np.clip(up, FLOAT(-gate.limit), FLOAT(gate.limit))
        z = g if gate.alpha is None else FLOAT(gate.alpha) * g
        if gate.kind == "gelu_tanh":
            square = np.minimum(g * g, np.finfo(FLOAT).max)
            z = g * (FLOAT(1.5957691216057308) + FLOAT(0.044715 * 1.5957691216057308) * square)
        power = flush(-z * FLOAT(1.4426950408889634))
        exponential = flush((np.exp2(power.astype(np.float64)) * (1 + errors[0] * 2.0**-22 * 0.999)).astype(FLOAT))
        denominator = FLOAT(1) + exponential
        reciprocal = FLOAT(1) / denominator
        for _ in range(abs(errors[1])):
            towards = FLOAT(math.copysign(math.inf, errors[1]))
            # an infinite denominator, and a reciprocal of exactly 1, are exact
            reciprocal = np.where(np.isinf(denominator), reciprocal, np.nextafter(reciprocal, towards))
        y = g * flush(reciprocal).astype(FLOAT) * (up + FLOAT(gate.offset))
    return torch.from_numpy(y.astype(FLOAT))


def in_float64(x: torch.Tensor, gate: Gate) -> np.ndarray:
    """The formulas of docs/numerics.md."""
    x = x.double().numpy()
    if gate.columns == 1:
        return np.square(np.maximum(x, 0)).astype(FLOAT).astype(np.float64)
    g, up = np.split(x, 2, axis=1)
    if gate.limit is not None:
        bound = np.float64(FLOAT(gate.limit))
        g, up = np.minimum(g, bound), np.clip(up, -bound, bound)
    if gate.kind == "gelu_tanh":
        inside = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
        half = np.where(g < 0, 1 / (1 + np.exp(-2 * inside)), (1 + np.tanh(inside)) / 2)  # 1 + tanh would cancel
        return g * half * (up + gate.offset)
    return g / (1 + np.exp(-g * np.float64(FLOAT(1 if gate.alpha is None else gate.alpha)))) * (up + gate.offset)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_swiglu_is_numpys_in_float64(gate):
    for up in UPS[: None if gate.columns == 2 else 1]:
        x = every_gate(up)
        with np.errstate(all="ignore"):
            want = in_float64(x, gate)
        got = reference.swiglu(x, gate=gate)
        assert got.dtype == torch.float64 and got.shape == (64, 2048 // gate.columns)
        finite = np.isfinite(want)
        assert np.allclose(got.numpy()[finite], want[finite], rtol=1e-12, atol=0)
        assert np.array_equal(got.isnan().numpy(), np.isnan(want))


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_a_bias_is_added_in_one_float32_addition(gate):
    """So it is what a row of that sum would give, if the sum were a bfloat16."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-64, 64, (8, 64), generator=generator).bfloat16()
    bias = torch.randint(-64, 64, (8, 64), generator=generator).bfloat16()
    for function in (reference.swiglu, reference.swiglu_bound):
        assert_bits(function(whole, gate=gate, bias=bias), function(whole + bias, gate=gate), function.__name__)
    x, small = torch.ones(1, 2).bfloat16(), torch.full((1, 2), 2.0**-24).bfloat16()  # a tie, to even
    assert_bits(reference.swiglu(x, gate=gate, bias=small), reference.swiglu(x, gate=gate), "rounded")


def test_swiglu_by_hand():
    x = torch.tensor([[1.0, -2.0, 0.0, 3.0, 0.5, 7.0]]).bfloat16()
    want = [1 / (1 + math.exp(-1)) * 3, -2 / (1 + math.exp(2)) * 0.5, 0.0]
    assert reference.swiglu(x)[0].tolist() == pytest.approx(want, rel=1e-15)
    mixed = x.view(1, 2, 3).transpose(1, 2).reshape(1, 6).contiguous()
    assert mixed.tolist() == [[1.0, 3.0, -2.0, 0.5, 0.0, 7.0]]
    assert_bits(reference.swiglu(mixed, interleaved=True), reference.swiglu(x), "interleaved")
    assert_bits(reference.swiglu_bound(mixed, interleaved=True), reference.swiglu_bound(x), "interleaved bound")
    clamped = reference.swiglu(
        torch.tensor([[9.0, 1.0, -50.0, 2.0]]).bfloat16(), gate=Gate(alpha=0.5, limit=4, offset=1)
    )
    assert clamped[0].tolist() == pytest.approx([-3 * 4 / (1 + math.exp(-2)), 3 / (1 + math.exp(-0.5))], rel=1e-15)


@pytest.mark.parametrize("gate, up, want", [
    (torch.inf, 2.0, torch.inf), (torch.inf, -2.0, -torch.inf), (torch.inf, 0.0, torch.nan),
    (-torch.inf, 1.0, torch.nan), (torch.nan, 0.0, torch.nan), (0.0, torch.nan, torch.nan),
    (0.0, torch.inf, torch.nan), (2.0, torch.inf, torch.inf), (-2.0, torch.inf, -torch.inf), (-1e30, 1e30, 0.0),
])  # fmt: skip
def test_special_values_have_these_results_and_finite_bounds(gate, up, want):
    x = torch.tensor([[gate, up]]).bfloat16()
    value, bound = reference.swiglu(x), reference.swiglu_bound(x)
    assert value.item() == want or (value.isnan() and want != want)
    assert bound.item() == 0 or math.isfinite(want)


def test_clamp_lets_nan_through():
    for gate, up in ((torch.nan, 1.0), (1.0, torch.nan)):
        assert reference.swiglu(torch.tensor([[gate, up]]).bfloat16(), gate=Gate(alpha=1, limit=1, offset=1)).isnan()


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("errors", [(0.0, 0), (1.0, -1), (-1.0, 1), (1.0, 1)], ids=str)
def test_the_bound_covers_the_worst_float32(gate, errors):
    for up in UPS[: None if gate.columns == 2 else 1]:
        x = every_gate(up)
        y = in_float32(x, gate, errors)
        value = reference.swiglu(x, gate=gate)
        for dtype in (torch.float32, torch.bfloat16):
            got = reference.round_to(y, dtype)
            bound = reference.swiglu_bound(x, gate=gate, dtype=dtype)
            assert not bound.isnan().any() and (bound >= 0).all()
            ok = reference.within(got, value, bound)
            assert ok.all(), (up, got[~ok][0], value[~ok][0], bound[~ok][0])


def test_the_bound_is_tight():
    """Little more than one bfloat16 rounding, and before that little more than what float32 does in the worst case."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(256, 2048, generator=generator) * 4).bfloat16()
    value, bound = reference.swiglu(x), reference.swiglu_bound(x)
    rounded = reference.round_to(in_float32(x, PLAIN, (0.0, 0)), torch.bfloat16)
    assert (bound <= 2.0**-8 * 1.001 * value.abs() + 2.0**-130).all()
    assert ((rounded.double() - value).abs() / bound).max() > 0.99
    broken = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
    assert (~reference.within(broken, value, bound)).double().mean() > 0.4
    precise = reference.swiglu_bound(x, dtype=torch.float32)
    worst = [(in_float32(x, PLAIN, errors).double() - value).abs() for errors in ((1.0, -1), (-1.0, 1))]
    assert (torch.maximum(*worst) / precise).max() > 0.7


@pytest.mark.parametrize("gate", [-87.5, -88.0, -88.5, -89.0, -100.0, -127.5, -129.0, -1000.0])
def test_an_exponential_that_overflows_is_within_the_bound(gate):
    """The sigmoid becomes 0 and y a zero; the exact y, up to 60, is within the bound."""
    x = torch.tensor([[gate, 3e38], [gate, -3e38]]).bfloat16()
    value, bound = reference.swiglu(x), reference.swiglu_bound(x)
    for zero in (0.0, -0.0):
        assert reference.within(torch.full((2, 1), zero), value, bound).all()
    assert (value[0] <= 0).all() and (bound < 1e4).all()


@pytest.mark.parametrize("x, options, match", [
    (torch.zeros(2, 4), {}, "x.dtype"), (torch.zeros(4).bfloat16(), {}, "x.shape"),
    (torch.zeros(2, 3).bfloat16(), {}, r"x\.shape\[1\] = 3: must be even"),
    (torch.zeros(2, 4).bfloat16(), {"bias": torch.zeros(4).bfloat16()}, r"bias\.shape = \(4,\)"),
], ids=["float32", "a row without a batch", "an odd number of columns", "a bias of no row"])  # fmt: skip
def test_arguments_that_break_a_rule_are_refused(x, options, match):
    for function in (reference.swiglu, reference.swiglu_bound):
        with pytest.raises(EPInputError, match=match):
            function(x, **options)
