"""Hypothesis strategies that several test files draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from cute_ep.config import EPConfig
from cute_ep.layouts.formats import FORMATS
from cute_ep.layouts.routing import MAX_RANKS, MAX_TOKENS_PER_RANK, MAX_TOP_K

configs = st.builds(
    lambda blocks, per_rank, world, k, tokens, fmt: EPConfig(
        hidden=32 * blocks,
        num_experts=per_rank * world,
        top_k=min(k, per_rank * world),
        max_tokens_per_rank=tokens,
        world_size=world,
        dispatch_format=fmt,
    ),
    st.integers(1, 1024),
    st.integers(1, 32),
    st.integers(1, MAX_RANKS),
    st.integers(1, MAX_TOP_K),
    st.integers(1, MAX_TOKENS_PER_RANK),
    st.sampled_from(sorted(FORMATS)),
)
"""Deployments over the whole range of every field, in every format."""
