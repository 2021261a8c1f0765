"""What role tests run: configurations, turns, and launches of one rank of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.scales import FEW_WORDS, SCATTERED_LAMPORT_WORDS, SCATTERED_WORDS

from .arena_images import FEW_TOKENS
from .conftest import connected
from .role_launch import Launch, Turn
from .role_schedules import HALVES, Schedule
from .role_stage import SINGLE, Stage

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


def turns_of(cfg: EPConfig) -> list[Turn]:
    return [turn._replace(index=index) for index, turn in enumerate(TURNS[cfg.max_tokens_per_rank])]


@contextmanager
def staged(case: Case) -> Iterator[Stage]:
    with connected(case.cfg, ["cuda:0"] * case.cfg.world_size, sms=case.schedule.sms) as communicators:
        yield Stage(communicators, case.me)


def check_turns(name: str, case: Case, turns: list[Turn], prepare: Callable[[Stage, Turn], Launch]) -> None:
    """All turns of a case, and in the end that each comparison notices one byte."""
    assert FEW_TOKENS == LAMPORT_TOKENS
    with staged(case) as stage:
        for turn in turns:
            launch = prepare(stage, turn)
            before = launch.run(f"{name}, {turn}")
        stage.check_notices(launch.images, before, seed=1)
