"""Role tests' cases on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cute_ep.layouts.maps.arena import LAMPORT_TOKENS

from .arena_images import FEW_TOKENS
from .conftest import connected
from .role_cases import Case
from .role_launch import Launch, Turn
from .role_stage import Stage


@contextmanager
def staged(case: Case) -> Iterator[Stage]:
    """Where there is a budget, a GPU that is too small for twins or pipelines would test less."""
    sms = case.schedule.sms
    with connected(case.cfg, ["cuda:0"] * case.cfg.world_size, sms=sms) as communicators:
        stage = Stage(communicators, case.me)
        assert sms is None or (stage.rank.max_ctas == sms and stage.rank.ring_bytes > 0), "the GPU has too few SMs"
        yield stage


def check_turns(name: str, case: Case, turns: Sequence[Turn], prepare: Callable[[Stage, Turn], Launch]) -> None:
    """All turns of a case, and in the end that each comparison notices one byte."""
    assert FEW_TOKENS == LAMPORT_TOKENS
    with staged(case) as stage:
        for turn in turns:
            launch = prepare(stage, turn)
            before = launch.run(f"{name}, {turn}")
        stage.check_notices(launch.images, before, seed=1)
