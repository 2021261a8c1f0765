"""Counts of a rank's routes by the kernel, bit for bit those of the CPU, with guards behind what it writes."""

from __future__ import annotations

import pytest
import torch

from cute_ep.runtime.routes import count_routes
from cute_ep.testing.compare import assert_bits
from tests.runtime.test_routes import PARTS, SIZES, entries

from .conftest import LIBRARY


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "ranks"), [*SIZES, (4096, 8, 256, 8), (513, 8, 256, 4), (1024, 1, 32, 32)]
)
def test_the_kernel_counts_as_the_cpu(tokens: int, top_k: int, experts: int, ranks: int, dtype: torch.dtype) -> None:
    given = entries(tokens, top_k, experts, dtype)
    weights = torch.randn(given.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for mask in (False, True, False):  # memory of the pass before is used again
        got = count_routes(given.cuda(), experts, ranks, weights=weights.cuda(), mask=mask, library=str(LIBRARY))
        want = count_routes(given, experts, ranks, weights=weights, mask=mask)
        for name in PARTS:
            assert_bits(getattr(got, name).cpu(), getattr(want, name), name)


def test_counts_in_a_graph_are_of_the_ids_of_each_replay() -> None:
    given = entries(100, 8, 64, torch.int64).cuda()
    count_routes(given, 64, 4, library=str(LIBRARY))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = count_routes(given, 64, 4, library=str(LIBRARY))
    for seed in range(3):
        other = torch.randint(-1, 64, (100, 8), generator=torch.Generator().manual_seed(seed))
        given.copy_(other)
        graph.replay()
        want = count_routes(other, 64, 4)
        for name in PARTS[:-1]:  # no weights were given
            assert_bits(getattr(got, name).cpu(), getattr(want, name), name)
