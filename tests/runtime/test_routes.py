"""Counts of a rank's routes on the CPU, against a loop over entries; `tests/gpu/test_routes.py` has the kernel."""

from __future__ import annotations

import re

import pytest
import torch

from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.local_arguments import CountArgs
from cute_ep.runtime import routes as routes_module
from cute_ep.runtime.routes import RouteCounts, count_routes
from cute_ep.testing.compare import assert_bits

BEYOND = 2**31 - 1


def check(got: RouteCounts, given: torch.Tensor, experts: int, ranks: int, mask: bool = False) -> None:
    """By loops over tokens and entries."""
    local, by_expert, goes = -(-experts // ranks), [0] * experts, torch.zeros(len(given), ranks, dtype=torch.bool)
    last_ids = torch.full(given.shape, -1, dtype=torch.int32)
    for token, entries in enumerate(given.tolist()):
        for slot, expert in enumerate(entries):
            if 0 <= expert < experts:
                by_expert[expert] += 1
                goes[token, expert // local] = True
                if all(not 0 <= e < experts or e // local != expert // local for e in entries[slot + 1 :]):
                    last_ids[token, slot] = expert
    numbers = [*goes.sum(0).tolist(), *by_expert, len(given)]
    counts = torch.tensor(numbers + [0] * (-len(numbers) % 4), dtype=torch.int32)
    assert_bits(got.counts, counts, "counts")
    assert_bits(got.by_rank, counts[:ranks], "by_rank")
    assert_bits(got.by_expert, counts[ranks : ranks + experts], "by_expert")
    assert_bits(got.goes, goes, "goes")
    assert_bits(got.last_ids, last_ids, "last_ids")
    ids = [[expert if -(2**31) <= expert < 2**31 else BEYOND for expert in entries] for entries in given.tolist()]
    if mask:
        ids = [[expert if 0 <= expert < experts else -1 for expert in entries] for entries in ids]
    assert_bits(got.ids, torch.tensor(ids, dtype=torch.int32).view(given.shape), "ids")


def entries(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Ids of all kinds: repeated, masked, beyond the experts, and beyond 32 bits where the type has them."""
    generator = torch.Generator().manual_seed(tokens * 64 + top_k)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=generator, dtype=dtype)
    ids[tokens // 2 :, -1] = ids[tokens // 2 :, 0]
    if dtype == torch.int64 and tokens > 3:
        ids[1, 0], ids[2, -1], ids[3, 0] = (3 << 32) + 1, -(1 << 40), 1 << 31
    return ids


PARTS = ("counts", "by_rank", "by_expert", "goes", "ids", "last_ids", "weights")
"""What `RouteCounts` has."""
SIZES = [
    (0, 2, 4, 2),
    (1, 1, 1, 1),
    (9, 3, 12, 3),
    (30, 2, 6, 4),
    (8, 2, 2, 5),
    (70, 8, 64, 4),
    (33, 32, 1024, 32),
    (40, 9, 40, 8),
    (33, 8, 1024, 64),
    (9, 3, 150, 48),
]


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts", "ranks"), SIZES)
def test_counts_are_those_of_a_loop(
    tokens: int, top_k: int, experts: int, ranks: int, dtype: torch.dtype, mask: bool
) -> None:
    given = entries(tokens, top_k, experts, dtype)
    check(count_routes(given, experts, ranks, mask=mask), given, experts, ranks, mask)
    if tokens:
        strided = given.t().contiguous().t()
        check(count_routes(strided, experts, ranks), given, experts, ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_weights_of_any_type_become_float32(dtype: torch.dtype) -> None:
    given = torch.tensor([[0.1, -0.0], [float("inf"), 3e-41]]).to(dtype)
    routes = count_routes(torch.zeros(2, 2, dtype=torch.int64), 4, 2, weights=given)
    assert routes.weights is not None
    assert_bits(routes.weights, given.float(), "weights")
    assert count_routes(torch.zeros(2, 2, dtype=torch.int64), 4, 2).weights is None


def test_no_shape_depends_on_ids() -> None:
    """For such a shape a host would wait for the device. Tensors on `meta` have no elements."""
    routes = count_routes(torch.zeros(5, 3, dtype=torch.int64, device="meta"), 150, 48, mask=True)
    assert routes.goes.shape == (5, 48) and routes.counts.shape == (200,)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "ranks"), [one for one in SIZES if one[3] <= 32])
def test_the_kernel_is_told_where_the_tensors_are(
    monkeypatch: pytest.MonkeyPatch, tokens: int, top_k: int, experts: int, ranks: int
) -> None:
    """In one memory, in which none shares a byte with another; each begins where the kernel can write it."""
    launched: list[CountArgs] = []
    for name, fake in {
        "_has_kernel": lambda device, ranks: True,
        "local_kernel": lambda *wanted: None,
        "launch_on": lambda device, kernel, grid, given: launched.append(given),
    }.items():
        monkeypatch.setattr(routes_module, name, fake)
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    routes = count_routes(ids, experts, ranks, mask=True, weights=torch.zeros(tokens, top_k).bfloat16())
    (given,) = launched
    assert given.ids == (ids.data_ptr(), 1) and given.words == routes.words == routes.counts.shape[0]
    assert (given.tokens, given.top_k, given.ranks, given.experts, given.mask) == (tokens, top_k, ranks, experts, 1)
    assert given.local_experts == -(-experts // ranks)
    parts = {"counts": routes.counts, "ids_out": routes.ids, "last_ids": routes.last_ids, "goes": routes.goes}
    end = routes.sent.data_ptr()
    for name, part in parts.items():
        begin = getattr(given, name)
        assert begin >= end and begin % 4 == 0 and (not part.numel() or begin == part.data_ptr()), name
        end = begin + part.nbytes
    assert end <= routes.memory.data_ptr() + routes.memory.nbytes
    assert routes.weights is not None and given.weights_out == routes.weights.data_ptr()


def test_ids_are_copied() -> None:
    given = torch.tensor([[0, 3]], dtype=torch.int32)
    routes = count_routes(given, 4, 2)
    given.fill_(1)
    assert routes.ids.tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("ids", "experts", "ranks", "rule"),
    [
        (torch.zeros(3), 4, 2, "topk_ids: torch.float32 of shape (3,): must be [T, K]"),
        (torch.zeros(3, 2), 4, 2, "topk_ids: torch.float32"),
        (torch.zeros(3, 2).int(), 0, 2, "num_experts = 0: must be in [1, 1024]"),
        (torch.zeros(3, 2).int(), 64, 1025, "ranks = 1025 in [1, 1024]"),
        (torch.zeros(3, 2).int(), 2048, 2, "num_experts = 2048"),
    ],
)
def test_arguments_that_break_a_rule_are_refused(ids: torch.Tensor, experts: int, ranks: int, rule: str) -> None:
    with pytest.raises(EPInputError, match=re.escape(rule)):
        count_routes(ids, experts, ranks)


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        (torch.zeros(3, 1), "weights: (3, 1) on cpu: must be (3, 2) on cpu, as the ids"),
        (torch.zeros(3, 2).int(), "weights.dtype = torch.int32: must be a floating type"),
        (torch.zeros(3, 2).requires_grad_(), "weights.requires_grad = True: must be False"),
    ],
)
def test_weights_that_break_a_rule_are_refused(weights: torch.Tensor, rule: str) -> None:
    with pytest.raises(EPInputError, match=re.escape(rule)):
        count_routes(torch.zeros(3, 2).int(), 4, 2, weights=weights)
