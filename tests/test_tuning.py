"""Launch shapes and pieces: what every choice must satisfy for a kernel to be correct, over all deployments."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_ep.config import EPConfig
from cute_ep.layouts.arena import MAX_PIECES, PIECED_TOKENS, piece_slots
from cute_ep.layouts.routing import MAX_TOKENS_PER_RANK
from cute_ep.layouts.variants import COMBINE_KERNELS, COMBINE_MODES, DISPATCH_KERNELS
from cute_ep.tuning import CTAS_PER_SM, launch_shape, pieces_log2

from .strategies import configs

OPERATIONS = ("dispatch", "dispatch_async", "dispatch_wait", "combine", "combine_async", "combine_wait")

launches = st.builds(
    lambda cfg, share, ctas: (cfg, int(share * cfg.max_tokens_per_rank), ctas),
    configs,
    st.floats(0, 1),
    st.integers(1, 296),
)


@given(launches)
def test_every_piece_has_a_flag(launch: tuple[EPConfig, int, int]) -> None:
    """Whatever the number of tokens in a call, its pieces fit the flags that the arena has for a rank."""
    cfg, most, _ = launch
    for tokens in {0, 1, most // 2, most, min(most, PIECED_TOKENS), min(most, PIECED_TOKENS + 1)}:
        for log2 in pieces_log2(cfg, tokens):
            assert 1 <= 1 << log2 <= MAX_PIECES
            assert tokens << log2 <= piece_slots(cfg.max_tokens_per_rank)


def test_few_tokens_are_carried_by_many_warps() -> None:
    """One token is cut in both directions, the most tokens are in neither."""
    cfg = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=MAX_TOKENS_PER_RANK, world_size=4)
    assert all(log2 > 0 for log2 in pieces_log2(cfg, 1))
    assert pieces_log2(cfg, MAX_TOKENS_PER_RANK) == (0, 0)


@given(launches, st.sampled_from(OPERATIONS))
def test_shape(launch: tuple[EPConfig, int, int], operation: str) -> None:
    """The grid is resident together, and each half that runs has at least one CTA."""
    cfg, tokens, max_ctas = launch
    shape = launch_shape(operation, cfg, tokens, max_ctas)
    sends, receives = not operation.endswith("_wait"), not operation.endswith("_async")
    assert 1 <= shape.grid <= max_ctas
    if sends:
        assert 1 <= shape.send_ctas <= shape.grid
    if receives:
        assert 0 <= shape.receive_from < shape.grid
    if sends and receives:
        assert shape.receive_from <= shape.send_ctas, "a CTA that neither sends nor receives"


@given(launches, st.sampled_from(OPERATIONS))
def test_more_ctas_never_shrink_the_grid(launch: tuple[EPConfig, int, int], operation: str) -> None:
    cfg, tokens, max_ctas = launch
    grids = [launch_shape(operation, cfg, tokens, ctas).grid for ctas in (max_ctas, max_ctas + 1, 2 * max_ctas)]
    assert grids == sorted(grids)


def test_operations_cover_the_kernels() -> None:
    ends = "|".join(f"_{mode}" for mode in COMBINE_MODES)
    assert {re.sub(f"({ends})$", "", name) for name in (*DISPATCH_KERNELS, *COMBINE_KERNELS)} == set(OPERATIONS)


def test_residency_agrees_with_the_kernels() -> None:
    """The runtime may not import the kernels, so the two constants are compared here."""
    pytest.importorskip("cutlass")
    from cute_ep.driver import THREADS
    from cute_ep.kernels import block

    assert (CTAS_PER_SM, THREADS) == (block.CTAS_PER_SM, block.THREADS)
