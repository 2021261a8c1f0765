"""Hypothesis strategies that several test files draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from cute_ep.api.config import MAX_HIDDEN, EPConfig
from cute_ep.layouts.maps.arena import MAX_SCALED, MAX_STRIDE, message_of
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.routing import MAX_RANKS, MAX_TOKENS_PER_RANK, MAX_TOP_K, ROW_ALIGNMENTS


@st.composite
def deployments(
    draw: st.DrawFn,
    *,
    hidden: int = MAX_HIDDEN,
    per_rank: int = 32,
    ranks: int = MAX_RANKS,
    top_k: int = MAX_TOP_K,
    tokens: int = MAX_TOKENS_PER_RANK,
) -> EPConfig:
    """Configurations in every format with every option; the arguments are the largest values of their fields."""
    fmt = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    world, local = draw(st.integers(1, ranks)), draw(st.integers(1, per_rank))
    unit = fmt.multiple
    width = unit * draw(st.integers(1, hidden // unit))
    size, chosen = message_of(fmt, width).pitch, draw(st.integers(1, min(top_k, local * world)))
    token = 4 * max(world, chosen) * width + world * (3 * size + 32 * chosen)  # bytes of an arena
    most = min(tokens, (MAX_STRIDE - 1) // size, MAX_SCALED // 3 // token)
    return EPConfig(
        hidden=width,
        num_experts=local * world,
        top_k=chosen,
        max_tokens_per_rank=draw(st.integers(1, most)),
        world_size=world,
        dispatch_format=fmt.name,
        scale_layout=draw(st.sampled_from([None, *fmt.scale_layouts])),
        row_alignment=draw(st.sampled_from([None, *(n for n in ROW_ALIGNMENTS if n % fmt.row_alignment == 0)])),
        fused_shared_expert=draw(st.booleans()),
        skip_a2a=draw(st.booleans()),
    )


configs = deployments()
"""Deployments over the whole range of every field, in every format, with every option."""
