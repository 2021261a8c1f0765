"""Roles of the kernels alone: halves of dispatch and combine on one rank, whose peers the test plays.

Each test writes the memory of all ranks, launches one half on one of them, and compares every byte of every rank's
allocation, and of the outputs, with `role_model`. So it sees what a half stores, clears and leaves alone, whichever
half comes after it. Nothing that was not written by the launch or by the test is zero: memory is poisoned before.

| file | what it has |
| --- | --- |
| `arena_images`, `role_model` | a rank's allocation, byte for byte; what each role reads and writes there |
| `role_stage`, `role_launch` | the rank and the memory of its peers; a launch, with all memory before and after it |
| `role_given` | what a launch is given, what peers have sent, what outputs must be |
| `role_halves`, `role_fused` | launches of halves, and fused ones (`test_fused_roles`) |
| `role_cases`, `role_schedules`, `role_runs` | configurations, tokens, routes; shapes of launches; cases on a GPU |
| `role_waits` | words that come last, for which launches wait |
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.testing.verify import POISON

from .role_cases import MANY, ME, TILED, Case, config, tiled_config, turns_of
from .role_halves import combine_receive, combine_send, dispatch_receive, dispatch_send
from .role_launch import Launch, Turn
from .role_model import message_parts
from .role_runs import check_turns, staged
from .role_stage import Stage
from .role_waits import (
    Find,
    check_waits,
    first_row,
    first_token,
    ll_word,
    message_flag,
    message_word,
    read_by_peer,
    return_flag,
    returned_word,
)

CONFIGS = {
    **{fmt: config(fmt) for fmt in FORMATS},
    **{f"{fmt}_many": config(fmt, MANY, hidden=640) for fmt in ("bf16", "fp8", "nvfp4")},
    "eight_ranks": config("bf16", ranks=8),
    "rank_major": config("nvfp4", row_order="rank_major"),
    "shared_expert": config("fp8", fused_shared_expert=True),
    "blocks": config("nvfp4", block_rows=896),
    "linear": config("mxfp8", scale_layout="linear", row_alignment=8),
}


def check_halves(name: str, prepare: Callable[[Stage, Turn], Launch]) -> None:
    """All turns of a configuration."""
    check_turns(name, Case(CONFIGS[name]), turns_of(CONFIGS[name]), prepare)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_dispatch_sends(name: str) -> None:
    """Header, counts, entries, weights, messages and flags in every rank's arena."""
    check_halves(name, dispatch_send)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_dispatch_makes_of_what_was_sent(name: str) -> None:
    """Outputs, and the words that say of what was taken that it has not come."""
    check_halves(name, dispatch_receive)


@pytest.mark.parametrize("tokens", [LAMPORT_TOKENS, LAMPORT_TOKENS + 1])
def test_scale_factors_by_tiles(tokens: int) -> None:
    """So many scale factors that a second pass writes them: those of Lamport rows are set aside for it in the arena."""
    with staged(Case(tiled_config(tokens))) as stage:
        half = dispatch_receive(stage, TILED._replace(tokens=(tokens, tokens)), tiled=True)
        half.run("by tiles")
        aside = half.own.span(stage.cfg.arena.staged_scales.at(), stage.cfg.arena.staged_scales.nbytes)
        assert bool((aside != POISON).any()) == (tokens <= LAMPORT_TOKENS)


COMBINED = ("bf16", "nvfp4_many", "eight_ranks")


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("name", COMBINED)
def test_what_a_combine_sends(name: str, mode: CombineMode) -> None:
    """Rows or sums in the slots of every rank's tokens, flags, and the dispatch round that they belong to."""
    check_halves(name, lambda stage, turn: combine_send(stage, turn, mode))


@pytest.mark.parametrize("mode", ["exact", "partial", "unweighted"])
@pytest.mark.parametrize("name", COMBINED)
def test_what_a_combine_makes_of_what_comes_home(name: str, mode: CombineMode) -> None:
    """Sums, or the rows themselves, and the words that say of what was taken that it has not come."""
    check_halves(name, lambda stage, turn: combine_receive(stage, turn, mode))


# ---- one byte, and one word, that matter


def test_one_byte_of_a_message_is_noticed() -> None:
    """The comparison of a dispatch's outputs, where a played peer has written one byte otherwise."""
    with staged(Case(CONFIGS["nvfp4"])) as stage:
        for field in ("payload", "scales"):
            half = dispatch_receive(stage, turns_of(stage.cfg)[1])
            token, _ = first_token(half, 0, blank=False)
            message, _ = half.own.messages(2, 0, half.sent[0].tokens)
            message[token, message_parts(half.sent[0].rows)[field][0]] ^= 0x10
            with pytest.raises(AssertionError, match=f"rank {ME} {'tokens' if field == 'payload' else 'scales'}"):
                half.run(field)


def test_one_byte_of_a_returned_row_is_noticed() -> None:
    """The same of a combine's output."""
    with staged(Case(CONFIGS["bf16"])) as stage:
        turn = turns_of(stage.cfg)[3]
        half = combine_receive(stage, turn, "unweighted")
        offset, token, slot = first_row(half, turn)
        half.own.span(offset, 1)[0] ^= 0x10
        with pytest.raises(AssertionError, match=rf"combine unweighted\[{token}, {slot}, 0\]: is "):
            half.run("one byte")


def receive(stage: Stage, turn: Turn) -> Launch:
    return combine_receive(stage, turn, "unweighted")


def send(stage: Stage, turn: Turn) -> Launch:
    return combine_send(stage, turn, "exact")


AWAITED: dict[str, tuple[str, Callable[[Stage, Turn], Launch], Find]] = {
    "consumed by a peer": ("bf16", dispatch_send, read_by_peer("dispatch")),
    "header": ("bf16", dispatch_receive, ll_word("table", 1)),
    "count": ("bf16", dispatch_receive, ll_word("table", 4)),
    "entry": ("bf16", dispatch_receive, ll_word("entries", 7, 2)),
    "weight": ("bf16", dispatch_receive, ll_word("weights", 7, 2)),
    "payload": ("nvfp4_row", dispatch_receive, message_word("payload")),
    "scale factors": ("nvfp4_row", dispatch_receive, message_word("scales")),
    "row scale": ("nvfp4_row", dispatch_receive, message_word("row_scales")),
    "flag of a slice": ("nvfp4_row", dispatch_receive, message_flag),
    "flag of a chunk": ("bf16_many", dispatch_receive, message_flag),
    "returns consumed by a peer": ("bf16", send, read_by_peer("combine")),
    "dispatch round": ("bf16", receive, ll_word("return_rounds")),
    "returned row": ("bf16", receive, returned_word),
    "flag of a returned chunk": ("bf16_many", receive, return_flag),
}
"""Configuration, half, and the word that comes last."""


@pytest.mark.parametrize("what", AWAITED)
def test_a_half_waits_for(what: str) -> None:
    """All has come but one word: the half does not end before it comes. A sending one stores nothing before."""
    name, prepare, find = AWAITED[what]
    with staged(Case(CONFIGS[name])) as stage:
        turn = Turn(9, (MANY, MANY, 5) if name.endswith("_many") else (37, 64, 17), "uniform", index=3)
        half = prepare(stage, turn)
        phase = ("dispatch" if prepare is dispatch_send else "combine") if what.endswith("a peer") else ""
        check_waits(half, find(half, turn), what, first=phase)
