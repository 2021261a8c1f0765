"""Rounds over an engine that brings parts in any order and late, and what that engine promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from random import Random

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.mail import Channel, Piece, RoundWord
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.runtime.rails.engine import Put
from tests.storm_rail import Storm, Threads, parts_of

from .emulated_nodes import SHAPES, config, connected, fused_round, on_all, two_halves

LANES = 3


@contextmanager
def in_a_storm(cfg: EPConfig, *, copies: bool, seed: int = 0) -> Iterator[tuple[list[NodesCommunicator], Storm]]:
    with connected(cfg) as made, closing(Storm(lambda _: Threads(LANES), LANES, seed=seed, copies=copies)) as storm:
        storm.prepare([one.mail for one in made])
        yield made, storm


@pytest.mark.parametrize("copies", [False, True], ids=["late reads", "late landings"])
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_rounds_have_the_bytes_of_the_reference(nodes: int, ranks: int, copies: bool) -> None:
    cfg = config(nodes, ranks, dispatch_format="nvfp4_row", timeout_s=20)
    with in_a_storm(cfg, copies=copies) as (made, _):
        for number in range(20):
            fused_round(cfg, made, number)
        for turn in range(6):
            two_halves(cfg, made, turn)
        on_all(made, lambda rank: made[rank].synchronize())


@pytest.mark.parametrize("copies", [False, True], ids=["late reads", "late landings"])
@pytest.mark.parametrize("channel", Channel)
def test_sources_may_be_written_when_a_put_returns(channel: Channel, copies: bool) -> None:
    """The bytes of two rounds come, to every peer's own place, and then their numbers in order."""
    cfg = config(3, 1)
    with in_a_storm(cfg, copies=copies) as (made, storm):
        mail, at = made[1].mail, made[1].mail.map
        begin, step, to, nbytes = at.payload.at(), 160, at.sums.at(), 150
        piece = Put(Piece.ROUTES, begin, step, to, 0, nbytes, source_turn=3 * step, to_turn=nbytes)
        rounds = mail.memory[at.rounds.at(channel, RoundWord.SENT) :][:8].view(torch.int64)
        for number in range(1, 40, 2):
            sent = {}
            for one in (number, number + 1):
                rounds.fill_(one)
                source = mail.memory[begin + one % 2 * 3 * step :][: 3 * step]
                source.copy_(torch.randint(256, source.shape, dtype=torch.uint8))
                sent[one] = source.clone()
                mail.engine.put(mail, channel, [piece])
                source.fill_(0xEE)
            storm.settle()
            for node in (0, 2):
                there = made[node].mail.memory
                for one, source in sent.items():
                    assert torch.equal(there[to + one % 2 * nbytes :][:nbytes], source[node * step :][:nbytes])
                assert int(there[at.arrived.at(channel, 1, Piece.ROUTES) :][:8].view(torch.int64)) == number + 1


def test_parts_are_the_whole_in_any_cut() -> None:
    random, seen = Random(1), set()
    for nbytes in (1, 2, 15, 16, 17, 32, 999, 4096):
        for _ in range(50):
            parts = parts_of(Put(Piece.SCALES, 64, 8192, 128, 0, nbytes), random)
            assert {(one.piece, one.step, one.to - one.source) for one in parts} == {(Piece.SCALES, 8192, 64)}
            ends = [64, *(one.source + one.nbytes for one in parts)]
            assert [one.source for one in parts] == ends[:-1] and ends[-1] == 64 + nbytes
            assert all(one.nbytes > 0 for one in parts)
            seen.add(len(parts))
    assert len(seen) > 2
