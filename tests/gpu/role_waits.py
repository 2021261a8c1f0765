"""Words that come last: where they are, and that a launch waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .arena_images import FEW_TOKENS, Image
from .role_launch import Launch, Turn
from .role_model import STATE, STATE_WORDS, consumed, message_parts
from .role_stage import Stage

HELD_S = 0.05
"""How long a wait is watched that must not end."""
SENT_S = 4.0
"""How long a launch has, on a GPU that it shares, for what it does before it waits: less than a timeout."""


class Held(NamedTuple):
    """A word that comes last.

    Attributes:
        offset: in the launching rank's arena.
        absent: the bytes that say that it has not come.
    """

    offset: int
    absent: torch.Tensor


Find = Callable[[Launch, Turn], Held]


def a_peer(launch: Launch) -> int:
    """A rank that is played: 0, or if that is the launching one, 1."""
    return int(launch.stage.me == 0)


def first_token(launch: Launch, source: int, *, blank: bool) -> tuple[int, int]:
    """(token, slice) of a source that goes to the launching rank: with a word of ones in that slice, or with none."""
    sent, cfg = launch.sent[source], launch.stage.cfg
    found = sent.blank(cfg)
    if not blank:
        found = ~found.any(dim=1, keepdim=True)
    goes = sent.goes_to(cfg, source, launch.stage.me)
    token, index = (found & goes[:, None]).nonzero()[0].tolist()
    return token, index


def first_row(launch: Launch, turn: Turn) -> tuple[int, int, int]:
    """(offset, token, slot) of a Lamport row without words of ones that comes home."""
    slots = launch.own.slots(turn.number, turn.tokens_of(launch.stage.me), flagged=False, partial=False)
    token, slot = (slots.view(torch.int32) != -1).all(dim=2).nonzero()[0].tolist()
    return launch.own.arena.lamport_returns.at(turn.number & 1, token, slot), token, slot


def older(image: Image, offset: int, by: int) -> Held:
    """A flag that holds less, or with `by` in its upper half an LL word of a round before."""
    word = image.words(offset, 1).clone()
    return Held(offset, (word - by).view(torch.uint8))


def ll_word(region: str, *place: int) -> Find:
    """An LL word of `a_peer` and the round's parity."""

    def find(launch: Launch, turn: Turn) -> Held:
        at = getattr(launch.own.arena, region).at(turn.number & 1, a_peer(launch), *place)
        return older(launch.own, at, 2 << 32)

    return find


def message_word(field: str) -> Find:
    """The first word of a field of a Lamport message from `a_peer`."""

    def find(launch: Launch, turn: Turn) -> Held:
        source = a_peer(launch)
        token, _ = first_token(launch, source, blank=False)
        begin, _ = message_parts(launch.sent[source].rows)[field]
        offset = launch.own.arena.lamport_messages.at(turn.number & 1, source, token) + begin
        return Held(offset, torch.full((4,), 0xFF, dtype=torch.uint8))

    return find


def message_flag(launch: Launch, turn: Turn) -> Held:
    """The flag of a Lamport slice with a word of ones, or of the chunk of the first token, from `a_peer`."""
    source, index = a_peer(launch), 0
    if launch.sent[source].tokens <= FEW_TOKENS:
        token, part = first_token(launch, source, blank=True)
        index = (token << launch.sent[source].log2) + part
    return older(launch.own, launch.own.arena.message_ready.at(source, index), 2)


def read_by_peer(phase: str) -> Find:
    """What the next rank has read, which lets it be overwritten."""

    def find(launch: Launch, turn: Turn) -> Held:
        peer = (launch.stage.me + 1) % len(launch.images)
        return older(launch.own, consumed(launch.own, phase).at(peer), 1)

    return find


def returned_word(launch: Launch, turn: Turn) -> Held:
    """The first word of a row without words of ones that comes home."""
    return Held(first_row(launch, turn)[0], torch.full((4,), 0xFF, dtype=torch.uint8))


def return_flag(launch: Launch, turn: Turn) -> Held:
    """The flag of the first chunk from `a_peer`."""
    return older(launch.own, launch.own.arena.return_ready.at(a_peer(launch), 0), 2)


def check_waits(launch: Launch, held: Held, what: str, *, first: str = "", sends: bool = False) -> None:
    """That a launch does not end before that word has come, and is right then.

    Args:
        what: the word's name.
        first: the phase of a launch that may store nothing before, but must tell which rounds it had received.
        sends: whether all that it sends must be there before.
    """
    stage, own = launch.stage, launch.own
    place = own.span(held.offset, len(held.absent))
    content = place.clone()
    place.copy_(held.absent)
    stage.write(launch.images)
    meanwhile = [image.copy() for image in launch.images] if first else []
    for image in meanwhile:
        received = own.words(own.arena.state.at(), STATE_WORDS)[STATE[first][1]]
        image.signal(consumed(image, first).at(stage.me), int(received))
        if image.rank == stage.me:
            image.leave_open(image.arena.combine_tickets.at(), image.arena.combine_tickets.nbytes)
    launch.start()
    time.sleep(HELD_S)
    assert stage.is_running, "it has ended without that word"
    _compare_soon(stage, meanwhile, f"while it waits for {what}")
    place.copy_(content)
    launch.finish()
    if sends:
        _compare_soon(stage, [image for image in launch.images if image is not own], f"while it waits for {what}")
        assert stage.is_running, "it has ended without that word"
    stage.poke(own.begin + held.offset, content)
    stage.check(launch.images, f"once {what} had come")
    launch.check()


def _compare_soon(stage: Stage, images: Sequence[Image], when: str) -> None:
    """`Stage.compare`, again while there is time and some byte differs."""
    until = time.monotonic() + SENT_S
    while True:
        try:
            return stage.compare(images, when)
        except AssertionError:
            if time.monotonic() > until:
                raise
