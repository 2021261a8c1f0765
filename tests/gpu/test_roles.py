"""Roles of the kernels alone: halves of dispatch and combine on one rank, whose peers the test plays.

Each test writes the memory of all ranks, launches one half on one of them, and compares every byte of every rank's
allocation, and of the outputs, with `role_model`. So it sees what a half stores, clears and leaves alone, whichever
half comes after it. Nothing that was not written by the launch or by the test is zero: memory is poisoned before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS
from cute_ep.layouts.maps.formats import FORMATS
from cute_ep.layouts.maps.scales import FEW_WORDS, SCATTERED_LAMPORT_WORDS, SCATTERED_WORDS

from .arena_images import FEW_TOKENS, Image
from .conftest import connected
from .role_halves import Half, Turn, combine_receive, combine_send, dispatch_receive, dispatch_send
from .role_model import message_parts
from .role_stage import SINGLE, Stage

ME = 1
"""The rank that launches; the others are played."""
RANKS, TOP_K, LOCAL_EXPERTS = 3, 4, 4
FEW, MANY = 64, 1061
"""Most tokens of a rank: of Lamport rows, and more, no multiple of a chunk."""
HIDDEN = {"bf16": 1400, "fp8": 1408, "fp8_pow2": 1408, "mxfp6_e2m3": 1472, "mxfp6_e3m2": 1472}
"""Of others 1440: no row is a multiple of a segment, nor are scale factors of vectors or, of most, of words."""
HELD_S = 0.05
"""How long a wait is watched that must not end."""


def config(fmt: str, most: int = FEW, ranks: int = RANKS, **changes: object) -> EPConfig:
    values: dict[str, object] = {"hidden": HIDDEN.get(fmt, 1440), "num_experts": LOCAL_EXPERTS * ranks, "top_k": TOP_K}
    values |= {"max_tokens_per_rank": most, "world_size": ranks, "dispatch_format": fmt, "timeout_s": 10}
    return EPConfig(**(values | changes))  # type: ignore[arg-type]


CONFIGS = {
    **{fmt: config(fmt) for fmt in FORMATS},
    **{f"{fmt}_many": config(fmt, MANY, hidden=640) for fmt in ("bf16", "fp8", "nvfp4")},
    "eight_ranks": config("bf16", ranks=8),
    "rank_major": config("nvfp4", row_order="rank_major"),
    "shared_expert": config("fp8", fused_shared_expert=True),
    "blocks": config("nvfp4", block_rows=896),
    "linear": config("mxfp8", scale_layout="linear", row_alignment=8),
}
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


def turns_of(cfg: EPConfig) -> list[Turn]:
    return [turn._replace(index=index) for index, turn in enumerate(TURNS[cfg.max_tokens_per_rank])]


@contextmanager
def staged(cfg: EPConfig, me: int = ME) -> Iterator[Stage]:
    with connected(cfg, ["cuda:0"] * cfg.world_size) as communicators:
        yield Stage(communicators, me)


def check_turns(name: str, prepare: Callable[[Stage, Turn], Half]) -> None:
    """All turns of a configuration, and in the end that each comparison notices one byte."""
    assert FEW_TOKENS == LAMPORT_TOKENS
    with staged(CONFIGS[name]) as stage:
        for turn in turns_of(stage.cfg):
            half = prepare(stage, turn)
            before = half.run(f"{name}, {turn}")
        stage.check_notices(half.images, before, seed=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_dispatch_sends(name: str) -> None:
    """Header, counts, entries, weights, messages and flags in every rank's arena."""
    check_turns(name, dispatch_send)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_dispatch_makes_of_what_was_sent(name: str) -> None:
    """Outputs, and the words that say of what was taken that it has not come."""
    check_turns(name, dispatch_receive)


@pytest.mark.parametrize("tokens", [LAMPORT_TOKENS, LAMPORT_TOKENS + 1])
def test_scale_factors_by_tiles(tokens: int) -> None:
    """So many scale factors that a second pass writes them: those of Lamport rows are set aside for it in the arena."""
    hidden, few = (2688, True) if tokens <= LAMPORT_TOKENS else (1344, False)
    cfg = EPConfig(hidden, 16, 8, tokens, 2, "nvfp4", timeout_s=10)
    words = cfg.format.scale_bytes(hidden) // 4 * cfg.top_k
    assert words > (SCATTERED_LAMPORT_WORDS if few else SCATTERED_WORDS) and words * 2 * tokens > FEW_WORDS
    with staged(cfg) as stage:
        half = dispatch_receive(stage, Turn(3, (tokens, tokens), "one_rank", index=2, alike=True), tiled=True)
        half.run("by tiles")
        aside = half.own.span(cfg.arena.staged_scales.at(), cfg.arena.staged_scales.nbytes)
        assert bool((aside != 0xA5).any()) == few


COMBINED = ("bf16", "nvfp4_many", "eight_ranks")


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("name", COMBINED)
def test_what_a_combine_sends(name: str, mode: str) -> None:
    """Rows or sums in the slots of every rank's tokens, flags, and the dispatch round that they belong to."""
    check_turns(name, lambda stage, turn: combine_send(stage, turn, mode))


@pytest.mark.parametrize("mode", ["exact", "partial", "unweighted"])
@pytest.mark.parametrize("name", COMBINED)
def test_what_a_combine_makes_of_what_comes_home(name: str, mode: str) -> None:
    """Sums, or the rows themselves, and the words that say of what was taken that it has not come."""
    check_turns(name, lambda stage, turn: combine_receive(stage, turn, mode))


# ---- one byte, and one word, that matter


def first_token(half: Half, source: int, *, blank: bool) -> tuple[int, int]:
    """(token, slice) of a source that goes to the launching rank: with a word of ones in that slice, or with none."""
    sent, cfg = half.sent[source], half.stage.cfg
    found = sent.blank(cfg)
    if not blank:
        found = ~found.any(dim=1, keepdim=True)
    goes = sent.goes_to(cfg, source, half.stage.me)
    token, index = (found & goes[:, None]).nonzero()[0].tolist()
    return token, index


def first_row(half: Half, turn: Turn) -> tuple[int, int, int]:
    """(offset, token, slot) of a Lamport row without words of ones that comes home."""
    slots = half.own.slots(turn.number, turn.tokens_of(ME), flagged=False, partial=False)
    token, slot = (slots.view(torch.int32) != -1).all(dim=2).nonzero()[0].tolist()
    return half.own.arena.lamport_returns.at(turn.number & 1, token, slot), token, slot


def test_one_byte_of_a_message_is_noticed() -> None:
    """The comparison of a dispatch's outputs, where a played peer has written one byte otherwise."""
    with staged(CONFIGS["nvfp4"]) as stage:
        for field in ("payload", "scales"):
            half = dispatch_receive(stage, turns_of(stage.cfg)[1])
            token, _ = first_token(half, 0, blank=False)
            message, _ = half.own.messages(2, 0, half.sent[0].tokens)
            message[token, message_parts(half.sent[0].rows)[field][0]] ^= 0x10
            with pytest.raises(AssertionError, match=f"rank {ME} {'tokens' if field == 'payload' else 'scales'}"):
                half.run(field)


def test_one_byte_of_a_returned_row_is_noticed() -> None:
    """The same of a combine's output."""
    with staged(CONFIGS["bf16"]) as stage:
        turn = turns_of(stage.cfg)[3]
        half = combine_receive(stage, turn, "unweighted")
        offset, token, slot = first_row(half, turn)
        half.own.span(offset, 1)[0] ^= 0x10
        with pytest.raises(AssertionError, match=rf"combine unweighted\[{token}, {slot}, 0\]: is "):
            half.run("one byte")


class Held(NamedTuple):
    """A word that comes last.

    Attributes:
        offset: in the launching rank's arena.
        absent: the bytes that say that it has not come.
    """

    offset: int
    absent: torch.Tensor


def older(image: Image, offset: int, by: int) -> Held:
    """A flag that holds less, or with `by` in its upper half an LL word of a round before."""
    word = image.words(offset, 1).clone()
    return Held(offset, (word - by).view(torch.uint8))


def ll_word(region: str, *place: int) -> Callable[[Half, Turn], Held]:
    """An LL word of source 0 and the round's parity."""

    def find(half: Half, turn: Turn) -> Held:
        at = getattr(half.own.arena, region).at(turn.number & 1, 0, *place)
        return older(half.own, at, 2 << 32)

    return find


def message_word(field: str) -> Callable[[Half, Turn], Held]:
    """The first word of a field of a Lamport message from rank 0."""

    def find(half: Half, turn: Turn) -> Held:
        token, _ = first_token(half, 0, blank=False)
        begin, _ = message_parts(half.sent[0].rows)[field]
        offset = half.own.arena.lamport_messages.at(turn.number & 1, 0, token) + begin
        return Held(offset, torch.full((4,), 0xFF, dtype=torch.uint8))

    return find


def message_flag(half: Half, turn: Turn) -> Held:
    """The flag of a Lamport slice with a word of ones, or of the chunk of the first token, from rank 0."""
    tokens, index = half.sent[0].tokens, 0
    if tokens <= FEW_TOKENS:
        token, part = first_token(half, 0, blank=True)
        index = (token << half.sent[0].log2) + part
    return older(half.own, half.own.arena.message_ready.at(0, index), 2)


def consumed(phase: str) -> Callable[[Half, Turn], Held]:
    """What rank 2 has read, which lets it be overwritten."""
    return lambda half, turn: older(half.own, getattr(half.own.arena, f"{phase}_consumed").at(2), 1)


def returned_word(half: Half, turn: Turn) -> Held:
    """The first word of a row without words of ones that comes home."""
    return Held(first_row(half, turn)[0], torch.full((4,), 0xFF, dtype=torch.uint8))


def return_flag(half: Half, turn: Turn) -> Held:
    """The flag of the first chunk from rank 0."""
    return older(half.own, half.own.arena.return_ready.at(0, 0), 2)


def receive(stage: Stage, turn: Turn) -> Half:
    return combine_receive(stage, turn, "unweighted")


def send(stage: Stage, turn: Turn) -> Half:
    return combine_send(stage, turn, "exact")


AWAITED: dict[str, tuple[str, Callable[[Stage, Turn], Half], Callable[[Half, Turn], Held]]] = {
    "consumed by a peer": ("bf16", dispatch_send, consumed("dispatch")),
    "header": ("bf16", dispatch_receive, ll_word("table", 1)),
    "count": ("bf16", dispatch_receive, ll_word("table", 4)),
    "entry": ("bf16", dispatch_receive, ll_word("entries", 7, 2)),
    "weight": ("bf16", dispatch_receive, ll_word("weights", 7, 2)),
    "payload": ("nvfp4_row", dispatch_receive, message_word("payload")),
    "scale factors": ("nvfp4_row", dispatch_receive, message_word("scales")),
    "row scale": ("nvfp4_row", dispatch_receive, message_word("row_scales")),
    "flag of a slice": ("nvfp4_row", dispatch_receive, message_flag),
    "flag of a chunk": ("bf16_many", dispatch_receive, message_flag),
    "returns consumed by a peer": ("bf16", send, consumed("combine")),
    "dispatch round": ("bf16", receive, ll_word("return_rounds")),
    "returned row": ("bf16", receive, returned_word),
    "flag of a returned chunk": ("bf16_many", receive, return_flag),
}
"""Configuration, half, and the word that comes last."""


@pytest.mark.parametrize("what", AWAITED)
def test_a_half_waits_for(what: str) -> None:
    """All has come but one word: the half does not end before it comes. A sending one stores nothing before."""
    name, prepare, find = AWAITED[what]
    with staged(CONFIGS[name]) as stage:
        turn = Turn(9, (MANY, MANY, 5) if name.endswith("_many") else (37, 64, 17), "uniform", index=3)
        half = prepare(stage, turn)
        held = find(half, turn)
        place = half.own.span(held.offset, len(held.absent))
        content = place.clone()
        place.copy_(held.absent)
        stage.write(half.images)
        half.start()
        time.sleep(HELD_S)
        assert stage.is_running, "it has ended without that word"
        if what.endswith("a peer"):
            meanwhile = [image.copy() for image in half.images]
            region = half.own.arena.dispatch_consumed if prepare is dispatch_send else half.own.arena.combine_consumed
            for image in meanwhile:
                image.leave_open(region.at(ME), 8)  # its own rounds, which it tells first
            tickets = half.own.arena.combine_tickets
            meanwhile[ME].leave_open(tickets.at(), tickets.nbytes)
            stage.compare(meanwhile, f"while it waits for {what}")
        place.copy_(content)
        stage.poke(half.own.begin + held.offset, content)
        half.finish()
        stage.check(half.images, f"once {what} had come")
        half.check()
