"""`cute_ep.ops.fused_silu`, which compiled code may call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.library import opcheck

import cute_ep
from cute_ep.ops import fused_silu
from cute_ep.testing.compare import assert_bits

ROWS, WIDTH = 7, 256
OFFSETS = torch.tensor([0, 2, ROWS], dtype=torch.int32)
CLAMPED = cute_ep.Gate(alpha=1.5, limit=3.0, offset=1)
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bias": {"bias": torch.randn(2, 2 * WIDTH).bfloat16(), "gate": CLAMPED, "interleaved": True},
    "one column": {"gate": cute_ep.Gate("relu2")},
    "fp8": {"fmt": "fp8"},
    "nvfp4": {"fmt": "nvfp4", "scale_layout": "linear", "input_scales": torch.tensor([0.5, 2.0])},
    "atoms": {"fmt": "nvfp4", "scales_offsets": torch.tensor([0, 128], dtype=torch.int32)},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rows(count: int = ROWS, **options: Any) -> torch.Tensor:
    return torch.randn(count, options.get("gate", CLAMPED).columns * WIDTH).bfloat16()


def parts(made: Any) -> tuple[torch.Tensor, ...]:
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


@pytest.mark.parametrize("case", CASES)
def test_compiled_code_gives_the_same_bits(case: str) -> None:
    """In one graph; also of other numbers of rows, and without groups."""
    options = CASES[case]

    def double(x: torch.Tensor, offsets: torch.Tensor | None) -> Any:
        return fused_silu(x * 2, offsets, **options)

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    for count in (ROWS, ROWS + 3, ROWS + 90):
        x, offsets = rows(count, **options), torch.tensor([0, 2, count], dtype=torch.int32)
        want, got = cute_ep.fused_silu(x * 2, offsets, **options), compiled(x, offsets)
        assert type(got) is type(want)
        for one, other in zip(parts(got), parts(want), strict=True):
            assert one.shape == other.shape
            if case != "atoms":  # these have gaps
                assert_bits(one, other, case)
    if case in ("bf16", "fp8"):
        x = rows(**options)
        for one, other in zip(parts(compiled(x, None)), parts(cute_ep.fused_silu(x * 2, **options)), strict=True):
            assert_bits(one, other, case)


@pytest.mark.parametrize("case", CASES)
def test_the_op_obeys_the_rules_of_torch(case: str) -> None:
    options = CASES[case]
    gate = options.get("gate", cute_ep.Gate())
    names = ("bias", "scales_offsets", "input_scales")
    given = rows(**options), OFFSETS, *(options.get(name) for name in names), options.get("fmt", "bf16")
    numbers = options.get("interleaved", False), options.get("scale_layout"), *vars_of(gate)
    kinds = ("test_schema", "test_faketensor", "test_autograd_registration")
    done = opcheck(torch.ops.cute_ep.fused_silu.default, (*given, *numbers), test_utils=kinds)
    assert set(done.values()) == {"SUCCESS"}


def vars_of(gate: cute_ep.Gate) -> tuple[Any, ...]:
    return gate.kind, gate.alpha, gate.limit, gate.offset


@pytest.mark.parametrize("needed", ["x", "bias"])
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_gradient_is_refused(needed: str, compile_it: bool) -> None:
    """Also by compiled code, which would leave it out without a word."""
    given = {"x": rows(), "bias": torch.zeros(2, 2 * WIDTH).bfloat16()}
    given[needed].requires_grad_()

    def call(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return fused_silu(x, OFFSETS, bias=bias)

    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compile_it else call
    with pytest.raises((cute_ep.EPInputError, RuntimeError), match=rf"{needed}\.requires_grad = True: must be False"):
        function(**given)
    with torch.no_grad():
        function(**given)
