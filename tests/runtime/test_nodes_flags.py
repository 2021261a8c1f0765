"""What a rank over nodes says that it waits for: words of its mail, and flags of its node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_ep import reference
from cute_ep.api.errors import EPTimeout
from cute_ep.api.flags import MEANINGS, Flag, Flags, slowest
from cute_ep.layouts.maps.mail import Channel, Piece, RoundWord
from cute_ep.runtime.flags import over_nodes
from tests.reference.ranks import at_once

from .emulated_nodes import batch_of, config, connected, fused_round

FRAMES, SUMS = int(Channel.FRAMES), int(Channel.SUMS)
RANK, SENT = 2, 5
"""Of 3 nodes of 2 ranks: rank 0 of node 1, whose rail has the ranks 0 and 4."""
CFG = config(3, 2, dispatch_format="fp8")
NODE = Flags(0, {"dispatches sent": 4}, ())


class Words:
    """A rank's words when SENT mails of each channel were sent and as many received, and the next ones have come."""

    def __init__(self, cfg=CFG) -> None:
        self.cfg, self.words = cfg, [0] * (cfg.mail.payload.at() // 8)
        for channel in Channel:
            self.put(cfg.mail.rounds, SENT, channel, RoundWord.SENT)
            self.put(cfg.mail.rounds, SENT, channel, RoundWord.RECEIVED)
            for node in (0, 2):
                self.put(cfg.mail.free, SENT if channel == Channel.FRAMES else SENT - 1, channel, node)
                for piece in Piece:
                    self.put(cfg.mail.arrived, SENT + 1, channel, node, piece)

    def put(self, region, value: int, *index: int) -> None:
        self.words[region.at(*index) // 8] = value

    def behind(self) -> tuple[Flag, ...]:
        found = over_nodes(self.cfg, RANK, NODE, self.words)
        mailed = dict.fromkeys(("frames sent", "frames received", "sums sent", "sums received"), SENT)
        assert (found.rank, found.completed) == (RANK, NODE.completed | mailed)
        return found.behind


def test_nothing_is_behind_where_all_has_come() -> None:
    """Of sums, which land in turn in two places, the round before the last need not have been read."""
    assert Words().behind() == ()


@pytest.mark.parametrize(("channel", "operation"), [(FRAMES, "dispatch"), (SUMS, "combine")])
def test_mail_that_was_not_read_is_named_with_its_rank(channel: int, operation: str) -> None:
    one, needed = Words(), SENT if channel == FRAMES else SENT - 1
    one.put(one.cfg.mail.free, needed - 1, channel, 2)
    assert one.behind() == (Flag("free", (channel, 2), 1, operation, SENT + 1, 4, needed - 1, needed),)


def test_pieces_that_have_not_come_are_named_with_their_rank() -> None:
    """Neighbours of which the same round came last, together."""
    one = Words()
    for piece, seen in ((Piece.PAYLOAD, SENT), (Piece.SCALES, SENT), (Piece.ROUTES, SENT - 1)):
        one.put(one.cfg.mail.arrived, seen, FRAMES, 0, piece)
    one.put(one.cfg.mail.arrived, SENT, FRAMES, 2, Piece.SCALES)
    one.put(one.cfg.mail.arrived, SENT, SUMS, 2, Piece.ROUTES)
    assert one.behind() == (
        Flag("arrived", (FRAMES, 0, 0), 2, "dispatch", SENT + 1, 0, SENT, SENT + 1),
        Flag("arrived", (FRAMES, 0, 2), 1, "dispatch", SENT + 1, 0, SENT - 1, SENT + 1),
        Flag("arrived", (FRAMES, 2, 1), 1, "dispatch", SENT + 1, 4, SENT, SENT + 1),
        Flag("arrived", (SUMS, 2, 2), 1, "combine", SENT + 1, 4, SENT, SENT + 1),
    )
    assert str(one.behind()[0]) == (
        f"dispatch round 6 needs rank 0: arrived[0][0][0] and 1 more: round 5, must be 6: {MEANINGS['arrived']}"
    )


def test_pieces_that_mail_does_not_have_are_not_waited_for() -> None:
    one = Words(replace(CFG, dispatch_format="bf16"))
    one.put(one.cfg.mail.arrived, 0, FRAMES, 0, Piece.SCALES)
    one.put(one.cfg.mail.arrived, 0, SUMS, 0, Piece.SCALES)
    one.put(one.cfg.mail.arrived, 0, SUMS, 0, Piece.PAYLOAD)
    assert one.behind() == ()


@pytest.mark.parametrize("node", [0, 1, 2])
def test_ranks_of_the_node_are_counted_over_all_nodes(node: int) -> None:
    flag = Flag("table", (1, 0, 0), 1, "dispatch", 5, 0, 4, 5)
    given = Flags(1, {}, (flag, replace(flag, peer=1)))
    found = over_nodes(CFG, 2 * node + 1, given, [0] * len(Words().words))
    assert [one.peer for one in found.behind if one.name == "table"] == [2 * node, 2 * node + 1]
    assert f"needs rank {2 * node}: table" in str(found) and "needs this rank: table" in str(found)


def test_a_timeout_tells_of_the_mail_that_has_not_come(tmp_path: Path) -> None:
    """After a round: its rank of the rail has sent no other frame, and the rank itself one that was not read."""
    cfg = config(2, 2, timeout_s=1)
    with connected(cfg) as made:
        fused_round(cfg, made, 0)
        given, _ = batch_of(cfg, 1, None)
        frame = cfg.frame_rows(None)
        rows = reference.quantize(given[1].x, "bf16")
        made[1].mail.send_frame(rows, given[1].topk_ids, given[1].router_weights, frame)
        with pytest.raises(EPTimeout, match="FRAME of rank 3") as caught:
            made[1].synchronize()
        flags = caught.value.flags
        assert flags is not None and flags == made[1].flags() and flags.rank == 1
        assert flags.completed["frames sent"] == 2 and flags.completed["frames received"] == 1
        expected = [("free", (FRAMES, 1), 3, 1), ("arrived", (FRAMES, 1, 0), 3, 1), ("arrived", (SUMS, 1, 2), 3, 1)]
        assert [(one.name, one.index, one.peer, one.seen) for one in flags.behind] == expected
        assert str(flags).splitlines()[0] == (
            "rank 1 has completed 1 dispatches sent, 1 dispatches received, 1 combines sent, 1 combines received, "
            "2 frames sent, 1 frames received, 1 sums sent, 1 sums received"
        )
        assert "dispatch round 3 needs rank 3: free[0][1]: round 1, must be 2: it has not read" in str(flags)
        assert "dispatch round 2 needs rank 3: arrived[0][1][0] and 1 more: round 1, must be 2: this piece" in str(
            flags
        )
        flags.write(tmp_path / "flags.json")
        assert Flags.read(tmp_path / "flags.json") == flags
        assert slowest([flags]).startswith("look first at rank 3, for which rank(s) [1] wait")


def test_a_timeout_of_the_node_tells_of_the_mail() -> None:
    """Ranks 0 and 2 of a rail meet; ranks 1 and 3, of the other, do not come, and each node misses one."""
    cfg = config(2, 2, timeout_s=1.5)
    with connected(cfg) as made:
        given, _ = batch_of(cfg, 1, None)
        at_once((0, 2), lambda rank: made[rank].dispatch(**vars(given[rank])))
        with pytest.raises(EPTimeout) as caught:
            made[2].synchronize()
        flags = caught.value.flags
        assert flags is not None and flags.rank == 2 and flags.completed["frames received"] == 1
        assert {(one.name, one.peer) for one in flags.behind} >= {("calls", 3), ("arrived", 0)}
