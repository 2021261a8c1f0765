"""The order of calls in compiled code on a GPU, and on two ranks whose numbers of tokens differ (`tests/ops`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

from cute_ep.api.interface import EPCommunicator
from cute_ep.testing.compare import assert_bits
from tests.ops.patterns import OTHER, PATTERNS, SIZES, run
from tests.ops.ranks import ALONE
from tests.ops.test_processes import run_on_two

from .conftest import connected


@pytest.fixture
def communicators() -> Iterator[list[EPCommunicator]]:
    torch._dynamo.reset()
    with connected(ALONE, ["cuda:0"]) as first, connected(OTHER, ["cuda:0"]) as second:
        yield [*first, *second]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", PATTERNS)
def test_compiled_calls_come_in_the_order_of_eager_ones(
    name: str, backend: str, communicators: list[EPCommunicator]
) -> None:
    want, _ = run(PATTERNS[name], SIZES[-1], communicators)
    compiled = torch.compile(PATTERNS[name], backend=backend, fullgraph=True)
    for tokens in SIZES:
        assert run(PATTERNS[name], tokens, communicators)[0] == want, f"eager, {tokens} tokens"
        assert run(compiled, tokens, communicators)[0] == want, f"{tokens} tokens"
    for ep in communicators:
        ep.synchronize()


@pytest.mark.parametrize("name", PATTERNS)
def test_reduced_overhead_keeps_its_graphs(name: str, communicators: list[EPCommunicator]) -> None:
    """Forward and backward passes are CUDA graphs, with the tensor that orders them, and give the same bits each
    time."""
    with inductor_config.patch("triton.cudagraph_or_error", True):  # else it may leave them out
        compiled = torch.compile(PATTERNS[name], mode="reduce-overhead", fullgraph=True)
        steps = []
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            steps.append(run(compiled, SIZES[-1], communicators))
    (first, want), *others = steps
    assert first and all(made == ["backward"] for made, _ in (steps[-2], steps[-1])), "calls beside the graphs"
    for _, made in others:
        for part, wanted in zip(made, want, strict=True):
            assert_bits(part, wanted, name)
    for ep in communicators:
        ep.synchronize()


def test_two_ranks_agree(tmp_path: Path) -> None:
    """All patterns, in both backends, with other numbers of tokens on each rank."""
    run_on_two("compiled_ranks_agree", tmp_path)
