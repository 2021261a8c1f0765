"""Deployments, launches and tables for the tests of launch shapes."""

from __future__ import annotations

from hypothesis import strategies as st

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK
from cute_ep.tuning.file import Setting, find_tuning
from cute_ep.tuning.launch_shape import MANY, Entry, Tuning, slices_for
from tests.fake_gpu import GPU
from tests.strategies import configs

OPERATIONS = ("dispatch", "dispatch_async", "dispatch_wait", "combine", "combine_async", "combine_wait")
CFG = EPConfig(hidden=7168, num_experts=256, top_k=8, max_tokens_per_rank=MAX_TOKENS_PER_RANK, world_size=4)
MINE = (Entry(64, 100, 0.25, 2), Entry(MANY, 200, 0, 1))
"""A table that is none of the package's."""

launches = st.builds(
    lambda cfg, share, ctas: (cfg, max(1, int(share * cfg.max_tokens_per_rank)), ctas),
    configs,
    st.floats(0, 1),
    st.integers(1, 296),
)
"""(configuration, tokens of a call, CTAs that are resident together)."""


def has_flags(cfg: EPConfig, tokens: int, slices: int) -> bool:
    """Whether the arena has a flag for the last slice of a call, or for its chunk."""
    last = tokens * slices - 1
    return (last if tokens <= 1024 else last // 16) < cfg.arena.message_ready.shape[1]


@st.composite
def entries(draw: st.DrawFn, most: int = MANY) -> Entry:
    tokens = draw(st.integers(1, most))
    senders = draw(st.floats(0, 1, exclude_max=True))
    slices = draw(st.sampled_from(slices_for(tokens)))
    grid, most_senders, split_from = (draw(st.integers(1, 300)) for _ in range(3))
    return Entry(tokens, grid, senders, slices, draw(st.booleans()), most_senders, split_from, draw(st.booleans()))


@st.composite
def tables(draw: st.DrawFn) -> tuple[Entry, ...]:
    some = {entry.tokens: entry for entry in draw(st.lists(entries(MAX_TOKENS_PER_RANK), max_size=5))}
    return (*(some[tokens] for tokens in sorted(some)), Entry(MANY, draw(st.integers(1, 300)), 0.3, 1))


tunings = st.builds(Tuning, tables(), tables())


def setting(
    family: str = "dispatch", cfg: EPConfig = CFG, gpu: str = GPU, gpus: int = 4, ctas: int = 264, ring: int = 0
) -> Setting:
    return Setting.of(family, cfg, gpu, gpus, ctas, ring_bytes=ring)


def find(cfg: EPConfig = CFG, gpu: str = GPU, gpus: int = 4, ctas: int = 264, ring: int = 0) -> Tuning:
    return find_tuning(cfg, gpu, gpus, ctas, ring_bytes=ring)
