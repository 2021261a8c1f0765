"""What role tests run: configurations, turns, and schedules."""

from __future__ import annotations

from typing import NamedTuple

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.scales import FEW_WORDS, SCATTERED_LAMPORT_WORDS, SCATTERED_WORDS

from .role_launch import Turn
from .role_schedules import HALVES, Schedule
from .role_stage import SINGLE

ME = 1
"""The rank that launches; the others are played."""
RANKS, TOP_K, LOCAL_EXPERTS = 3, 4, 4
FEW, MANY = 64, 1061
"""Most tokens of a rank: of Lamport rows, and more, no multiple of a chunk."""
HIDDEN = {"bf16": 1400, "fp8": 1408, "fp8_pow2": 1408, "mxfp6_e2m3": 1472, "mxfp6_e3m2": 1472}
"""Of others 1440: no row is a multiple of a segment, nor are scale factors of vectors or, of most, of words."""


def config(fmt: str, most: int = FEW, ranks: int = RANKS, **changes: object) -> EPConfig:
    values: dict[str, object] = {"hidden": HIDDEN.get(fmt, 1440), "num_experts": LOCAL_EXPERTS * ranks, "top_k": TOP_K}
    values |= {"max_tokens_per_rank": most, "world_size": ranks, "dispatch_format": fmt, "timeout_s": 10}
    return EPConfig(**(values | changes))  # type: ignore[arg-type]


TURNS = {
    FEW: (
        Turn(1, (0, 1, 64), "uniform"),
        Turn(2, (37, 64, 0), "masked"),
        Turn(3, (64, 0, 5), "one_rank"),
        Turn(8, (5, 17, 64), "repeated"),
        Turn(2**31, (64, 37, 64), "one_expert"),
        Turn(2**32 + 5, (1, 64, 0), "zipf"),
        Turn(12, (17, 37, 64), SINGLE, alike=True),
    ),
    MANY: (
        Turn(1, (1061, 1024, 0), "uniform"),
        Turn(2, (0, 1061, 1025), "repeated"),
        Turn(2**32 - 1, (5, 1025, 1024), "one_expert"),
        Turn(6, (1024, 1024, 1024), "masked"),
        Turn(7, (1061, 1061, 37), SINGLE, alike=True),
    ),
}
"""By the most tokens: rounds of both parities, the first, and those around which a word of 32 bits has no room."""
IDLE = Turn(4, (MANY, 0, 300), "uniform")
"""Where the launching rank has no tokens and others have many, after the turns of fused launches of these."""


TILED = Turn(3, (), "one_rank", index=2, alike=True)
"""A turn of `tiled_config`, but for its tokens."""


def tiled_config(tokens: int) -> EPConfig:
    """Where scale factors are written by tiles, of so many tokens of each of two ranks that all go to the last one."""
    hidden, words_of_token = (2688, SCATTERED_LAMPORT_WORDS) if tokens <= LAMPORT_TOKENS else (1344, SCATTERED_WORDS)
    cfg = EPConfig(hidden, 16, 8, tokens, 2, "nvfp4", timeout_s=10)
    words = cfg.format.scale_bytes(hidden) // 4 * cfg.top_k
    assert words > words_of_token and words * 2 * tokens > FEW_WORDS
    return cfg


class Case(NamedTuple):
    """A rank of a configuration, and the schedule of its launches."""

    cfg: EPConfig
    schedule: Schedule = HALVES
    me: int = ME


BUDGET, JOINING = Schedule(24), Schedule(24, 1 / 2, True)
DISPATCHES = {
    "own tokens stay": Case(config("bf16")),
    "many own tokens stay": Case(config("bf16", MANY, hidden=640)),
    "own tokens travel, or come quantised and stay": Case(config("nvfp4_row")),
    "many travel, or come quantised and stay": Case(config("fp8", MANY, hidden=640)),
    "some send": Case(config("bf16", MANY, hidden=640), Schedule(None, 1 / 4)),
    "senders join": Case(config("nvfp4", MANY, hidden=640), Schedule(None, 1 / 4, True)),
    "twins": Case(config("mxfp6_e2m3"), BUDGET),
    "twins of many": Case(config("bf16", MANY, hidden=640), BUDGET),
    "twins by source rank": Case(config("bf16", MANY, hidden=640, row_order="rank_major"), BUDGET),
    "some twins send": Case(config("fp8", MANY, hidden=640, fused_shared_expert=True), Schedule(24, 3 / 8)),
    "twins join": Case(config("bf16", hidden=3400), JOINING),
    "many twins join": Case(config("bf16", MANY, 2, hidden=3400, top_k=2), JOINING, me=0),
    "twins join by source rank": Case(config("nvfp4", MANY, hidden=640, row_order="rank_major"), JOINING),
    "twins join, blocks": Case(config("nvfp4", block_rows=896), JOINING),
    "twins of a rank alone": Case(config("bf16", MANY, 1, hidden=640), BUDGET, me=0),
}
"""Fused dispatches. Rows of 3400 elements are long enough that the last slices are drawn in parts."""
COMBINES = {
    "all send and receive": Case(config("bf16")),
    "many, some send": Case(config("bf16", MANY, hidden=640), Schedule(None, 1 / 2)),
    "pipelines": Case(config("bf16", MANY, hidden=640), BUDGET),
    "pipelines of the last rank": Case(config("bf16", MANY, hidden=640), BUDGET, me=2),
    "pipelines between ranks": Case(config("bf16", MANY, 4, hidden=640, top_k=6), BUDGET, me=2),
    "pipelines of long rows": Case(config("bf16", MANY, 2, hidden=1800), BUDGET),
    "pipelines of a rank alone": Case(config("bf16", MANY, 1, hidden=640), BUDGET, me=0),
    "pipelines that only send": Case(config("bf16", MANY, hidden=640), Schedule(24, 1 / 2)),
}
"""Fused combines. A rank with two lower ones puts its own sums aside; rows of 1800 elements have more segments than one
consumer takes."""


def turns_of(cfg: EPConfig) -> list[Turn]:
    return [turn._replace(index=index) for index, turn in enumerate(TURNS[cfg.max_tokens_per_rank])]


def fused_turns(case: Case) -> list[Turn]:
    """Those of its configuration that have their expert, and one where the launching rank has nothing to send."""
    turns = [turn for turn in turns_of(case.cfg) if turn.routing != SINGLE or case.cfg.world_size > 1]
    if any(turn.tokens_of(case.me) == 0 for turn in turns):
        return turns
    assert IDLE.tokens_of(case.me) == 0
    return [*turns, IDLE._replace(index=len(turns))]
