"""Fused launches of one rank, whose peers the test plays, with every schedule: own tokens that stay, twins, senders
that join the receivers, pipelines that add up.

As in `test_roles` every byte of every rank's allocation, and of the outputs, is compared with `role_model`: what the
peers get, and that own tokens which stay have left no trace in the rank's own arena. All that the rank waits for was
written before the launch, but in `test_a_launch_waits_for`.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.testing.verify import POISON

from .role_cases import (
    BUDGET,
    COMBINES,
    DISPATCHES,
    JOINING,
    MANY,
    TILED,
    Case,
    fused_turns,
    tiled_config,
)
from .role_fused import combine_fused, dispatch_fused
from .role_launch import Launch, Turn, in_a_row
from .role_runs import check_turns, staged
from .role_schedules import HALVES, Schedule
from .role_stage import Stage
from .role_waits import Find, check_waits, ll_word, message_flag, message_word, read_by_peer, return_flag

MODES: tuple[CombineMode, ...] = ("exact", "partial", "unweighted")


@pytest.mark.parametrize("name", DISPATCHES)
def test_a_dispatch(name: str) -> None:
    """Of `mistakes` it should see OWN_AWAITED and OWN_SLOT where own tokens stay, SPANS_NOT_ADDED in what peers get; of
    slices that are drawn DRAWS_GO_ON in the counter, DRAWS_FROM_NONE and PARTS_NOT_DRAWN in Lamport words."""
    case = DISPATCHES[name]
    check_turns(name, case, fused_turns(case), lambda stage, turn: dispatch_fused(stage, turn, case.schedule))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMBINES)
def test_a_combine(name: str, mode: CombineMode) -> None:
    """Of `mistakes` it should see FLAGS_BY_TOKENS and PIPED_ONE_FLAG in what peers get, PIPED_ONE_COUNTER and
    PIPED_OWN_FIRST in sums, and PIPED_RUNS_GO_ON in the tickets of the next round."""
    case = COMBINES[name]
    check_turns(name, case, fused_turns(case), lambda stage, turn: combine_fused(stage, turn, mode, case.schedule))


@pytest.mark.parametrize("encoded", [True, False], ids=["encoded", "quantised"])
@pytest.mark.parametrize("schedule", [HALVES, BUDGET, JOINING], ids=["all SMs", "twins", "join"])
@pytest.mark.parametrize("tokens", [LAMPORT_TOKENS, LAMPORT_TOKENS + 1])
def test_scale_factors_by_tiles(tokens: int, schedule: Schedule, encoded: bool) -> None:
    """Those of own tokens that stay are set aside, too: of few tokens with others, else where a message has them."""
    with staged(Case(tiled_config(tokens), schedule)) as stage:
        turn = TILED._replace(tokens=(tokens, tokens), index=2 if encoded else 3)
        launch = dispatch_fused(stage, turn, schedule, tiled=True)
        launch.run("by tiles")
        region = stage.cfg.arena.staged_scales
        for source in range(2):
            aside = launch.own.span(region.at(source), region.stride[0])
            assert bool((aside != POISON).any()) == (tokens <= LAMPORT_TOKENS)


IN_A_ROW = (
    "own tokens stay",
    "own tokens travel, or come quantised and stay",
    "twins of many",
    "twins join",
    "many twins join",
    "all send and receive",
    "pipelines",
    "pipelines of the last rank",
)


@pytest.mark.parametrize("name", IN_A_ROW)
def test_two_rounds_in_a_row(name: str) -> None:
    """The host says nothing in between, and the peers have sent both. So counters must be as the second launch needs
    them, each finds its own by the round's parity, and the first one finds flags of the second (EQUAL)."""
    case = (DISPATCHES | COMBINES)[name]
    schedule, turns = case.schedule, fused_turns(case)
    with staged(case) as stage:
        for one, other in pairwise(turns):
            other = other._replace(number=one.number + 1)
            if name in DISPATCHES:
                first = dispatch_fused(stage, one, schedule)
                launch = in_a_row(first, dispatch_fused(stage, other, schedule, first))
            else:
                modes = [MODES[turn.index % 3] for turn in (one, other)]
                first = combine_fused(stage, one, modes[0], schedule)
                launch = in_a_row(first, combine_fused(stage, other, modes[1], schedule, first))
            launch.run(f"{name}, {one}, {other}")


AWAITED: dict[str, tuple[str, CombineMode | None, Find]] = {
    "dispatches read by a peer": ("own tokens stay", None, read_by_peer("dispatch")),
    "a word of few tokens": ("own tokens stay", None, message_word("payload")),
    "a word for joined senders": ("twins join", None, message_word("payload")),
    "a flag of many tokens": ("many own tokens stay", None, message_flag),
    "a flag for twins": ("twins of many", None, message_flag),
    "a flag for joined senders": ("many twins join", None, message_flag),
    "combines read by a peer": ("pipelines", "exact", read_by_peer("combine")),
    "a dispatch round": ("pipelines", "partial", ll_word("return_rounds")),
    **{f"a flag of {mode} rows": ("pipelines", mode, return_flag) for mode in MODES},
    "a flag between ranks": ("pipelines between ranks", "partial", return_flag),
}
"""Case, mode of combine, and the word that comes last."""


@pytest.mark.parametrize("what", AWAITED)
def test_a_launch_waits_for(what: str) -> None:
    """All has come but one word. Until it comes a launch stores nothing if peers have not read what it overwrites
    (NO_CONSUMED_WAIT, EARLY_LOOK). Else it sends all that it sends, since a peer may wait for that in turn
    (PIPED_HELD_SPAN), and does not end (PIPED_UNAWAITED)."""
    name, mode, find = AWAITED[what]
    case = (DISPATCHES | COMBINES)[name]
    many = case.cfg.max_tokens_per_rank == MANY
    turn = Turn(9, (MANY, MANY - 1, MANY - 40) if many else (37, 64, 17), "uniform", index=4)
    with staged(case) as stage:
        launch = prepared(stage, turn, mode, case.schedule)
        before = what.endswith("a peer")
        phase = ("combine" if mode else "dispatch") if before else ""
        check_waits(launch, find(launch, turn), what, first=phase, sends=not before)


def prepared(stage: Stage, turn: Turn, mode: CombineMode | None, schedule: Schedule) -> Launch:
    """A combine in that mode, or a dispatch."""
    return combine_fused(stage, turn, mode, schedule) if mode else dispatch_fused(stage, turn, schedule)
