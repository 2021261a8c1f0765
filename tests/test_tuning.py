"""Launch shapes: what every choice must satisfy for a kernel to be correct, over all deployments."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_ep.config import EPConfig
from cute_ep.layouts.routing import MAX_CHUNK_ENTRIES
from cute_ep.layouts.variants import COMBINE_KERNELS, COMBINE_MODES, DISPATCH_KERNELS
from cute_ep.tuning import CTAS_PER_SM, launch_shape, tokens_per_chunk

from .strategies import configs

OPERATIONS = ("dispatch", "dispatch_async", "dispatch_wait", "combine", "combine_async", "combine_wait")

launches = st.builds(
    lambda cfg, share, ctas: (cfg, int(share * cfg.max_tokens_per_rank), ctas),
    configs,
    st.floats(0, 1),
    st.integers(1, 296),
)


@given(launches)
def test_chunk(launch: tuple[EPConfig, int, int]) -> None:
    """A chunk's entries fit the shared-memory tables, and its flag has a place in the arena."""
    cfg, tokens, _ = launch
    chunk = tokens_per_chunk(cfg, tokens)
    assert chunk >= 1
    assert chunk * (cfg.top_k + cfg.fused_shared_expert) <= MAX_CHUNK_ENTRIES
    assert -(-tokens // chunk) <= cfg.max_tokens_per_rank


@given(launches, st.sampled_from(OPERATIONS))
def test_shape(launch: tuple[EPConfig, int, int], operation: str) -> None:
    """The grid is resident together, and each half that runs has at least one CTA."""
    cfg, tokens, max_ctas = launch
    shape = launch_shape(operation, cfg, tokens, tokens_per_chunk(cfg, tokens), max_ctas)
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
    chunk = tokens_per_chunk(cfg, tokens)
    grids = [launch_shape(operation, cfg, tokens, chunk, ctas).grid for ctas in (max_ctas, max_ctas + 1, 2 * max_ctas)]
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
