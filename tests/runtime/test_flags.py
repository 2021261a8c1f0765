"""Which flags of an arena are behind, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.api.flags import ALTERNATING, MEANINGS, Flag, Flags, slowest
from cute_ep.layouts.maps.arena import LAMPORT_TOKENS, HeaderWord, StateWord, chunk_of, pack_messages
from cute_ep.layouts.maps.record import Region
from cute_ep.layouts.maps.routing import MASKED_ENTRY, pack_entry
from cute_ep.runtime.flags import find_behind, flag_bytes

MANY = LAMPORT_TOKENS + 6
CFG = EPConfig(512, 8, 2, MANY, 2, "bf16")
RANK, PEER = 0, 1
ROUND = 5
"""Of both operations, the one that has not ended."""
SLICES_LOG2 = 1


class Arena:
    """The flags of rank RANK after ROUND - 1 complete rounds: all that ROUND needs has come from both ranks."""

    def __init__(self, cfg: EPConfig, tokens: int) -> None:
        self.cfg, self.tokens = cfg, tokens
        self.words = torch.zeros(flag_bytes(cfg.arena) // 8, dtype=torch.int64)
        arena, parity = cfg.arena, ROUND & 1
        for word in (
            StateWord.DISPATCH_SEND_EPOCH,
            StateWord.DISPATCH_RECV_EPOCH,
            StateWord.COMBINE_SEND_EPOCH,
            StateWord.COMBINE_RECV_EPOCH,
        ):
            self.of(arena.state)[word] = ROUND - 1
        for region in (arena.dispatch_consumed, arena.combine_consumed):
            self.of(region)[:] = ROUND - 2
        self.of(arena.return_rounds)[parity] = self.ll(7)
        header = {
            HeaderWord.TOKENS: tokens,
            HeaderWord.MESSAGES: pack_messages(SLICES_LOG2, 0),
            HeaderWord.ROUND: ROUND,
        }
        self.of(arena.table)[parity] = self.ll(0)
        for word, value in header.items():
            self.of(arena.table)[parity, :, word] = self.ll(value)
        entries = self.of(arena.entries)[parity, :, :tokens]
        entries[:, 0::2] = self.ll(pack_entry(RANK * cfg.local_experts + 1, 3))  # even tokens go to this rank
        entries[:, 1::2] = self.ll(pack_entry(PEER * cfg.local_experts, 3))
        entries[:, :, 1] = self.ll(MASKED_ENTRY)
        self.of(arena.message_ready)[:] = ROUND - 1
        even = torch.arange(0, tokens, 2)
        self.of(arena.message_ready)[:, chunk_of(even << SLICES_LOG2)] = ROUND

    def of(self, region: Region) -> torch.Tensor:
        return torch.as_strided(self.words, region.shape, region.stride, region.offset // 8)

    @staticmethod
    def ll(value: int, number: int = ROUND) -> int:
        """An LL word."""
        return number << 32 | value & 0xFFFFFFFF

    def behind(self) -> tuple[Flag, ...]:
        found = find_behind(self.cfg, RANK, self.words.numpy().tobytes())
        assert found.completed == dict.fromkeys(found.completed, ROUND - 1) and len(found.completed) == 4
        return found.behind


def late_consumed(operation: str) -> Callable[[Arena], None]:
    def edit(one: Arena) -> None:
        one.of(getattr(one.cfg.arena, f"{operation}_consumed"))[PEER] = ROUND - 3

    return edit


def late_table(one: Arena) -> None:
    one.of(one.cfg.arena.table)[ROUND & 1, PEER, 2:] = Arena.ll(9, ROUND - 2)


def late_entries(one: Arena) -> None:
    one.of(one.cfg.arena.entries)[ROUND & 1, PEER, one.tokens - 3 : one.tokens - 1] = Arena.ll(9, ROUND - 2)


def late_messages(one: Arena) -> None:
    one.of(one.cfg.arena.message_ready)[PEER, 5:7] = ROUND - 1


def late_rounds(one: Arena) -> None:
    one.of(one.cfg.arena.return_rounds)[ROUND & 1, PEER] = Arena.ll(9, ROUND - 2)


PARITY = ROUND & 1
LATE = {
    "dispatch_consumed": (late_consumed("dispatch"), (PEER,), 1, ROUND - 3, ROUND - 2),
    "combine_consumed": (late_consumed("combine"), (PEER,), 1, ROUND - 3, ROUND - 2),
    "table": (late_table, (PARITY, PEER, 2), 6, ROUND - 2, ROUND),
    "entries": (late_entries, (PARITY, PEER, MANY - 3, 0), 4, ROUND - 2, ROUND),
    "message_ready": (late_messages, (PEER, 5), 2, ROUND - 1, ROUND),
    "return_rounds": (late_rounds, (PARITY, PEER), 1, ROUND - 2, ROUND),
}


def test_nothing_is_behind_where_all_has_come() -> None:
    assert Arena(CFG, MANY).behind() == ()
    assert Arena(CFG, 0).behind() == ()
    assert "nothing is behind" in str(find_behind(CFG, RANK, Arena(CFG, 3).words.numpy().tobytes()))


@pytest.mark.parametrize("name", LATE)
def test_a_flag_that_is_behind_is_named_with_its_rank(name: str) -> None:
    edit, index, count, seen, needed = LATE[name]
    one = Arena(CFG, MANY)
    edit(one)
    operation = "combine" if name in ("combine_consumed", "return_rounds") else "dispatch"
    (flag,) = one.behind()
    assert flag == Flag(name, index, count, operation, ROUND, PEER, seen, needed)
    more = f" and {count - 1} more" if count > 1 else ""
    place = name + "".join(f"[{one}]" for one in index)
    assert str(flag) == (
        f"{operation} round {ROUND} needs rank {PEER}: {place}{more}: "
        f"{'of every other round the last is' if name in ALTERNATING else 'round'} {seen}, must be {needed}: "
        f"{MEANINGS[name]}"
    )


def test_rows_of_few_tokens_have_no_flags() -> None:
    """They are their own."""
    one = Arena(CFG, LAMPORT_TOKENS)
    one.of(CFG.arena.message_ready)[:] = 0
    assert one.behind() == ()


def test_no_message_is_missed_that_a_rank_may_not_send_itself() -> None:
    """A fused launch that encodes nothing receives its own tokens where they are, so flags of its own stay old."""
    one = Arena(CFG, MANY)
    one.of(CFG.arena.message_ready)[RANK] = 0
    assert one.behind() == ()
    late_messages(one)
    assert [flag.peer for flag in one.behind()] == [PEER]


def test_rank_major_counts_are_one_a_source() -> None:
    cfg = replace(CFG, row_order="rank_major")
    one = Arena(cfg, MANY)
    one.of(cfg.arena.table)[PARITY, :, len(HeaderWord) + 1 :] = 0
    assert one.behind() == ()
    one.of(cfg.arena.table)[PARITY, PEER, len(HeaderWord)] = 0
    assert [(flag.name, flag.index, flag.seen) for flag in one.behind()] == [("table", (PARITY, PEER, 4), 0)]


def test_a_rank_that_exchanges_with_itself_names_itself() -> None:
    cfg = EPConfig(512, 8, 2, 16, 2, "bf16", skip_a2a=True)
    found = find_behind(cfg, PEER, bytes(flag_bytes(cfg.arena)))
    assert {(flag.name, flag.peer) for flag in found.behind} == {("table", PEER)}


def test_files_of_flags_are_read_as_they_were_written(tmp_path: Path) -> None:
    one = Arena(CFG, MANY)
    late_entries(one)
    flags = find_behind(CFG, RANK, one.words.numpy().tobytes())
    flags.write(tmp_path / "flags.json")
    assert Flags.read(tmp_path / "flags.json") == flags
    for content in ("", "{}", "[1]", '{"rank": 0, "completed": {}, "behind": [{"name": "table"}]}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(EPInputError, match=r"other\.json: must be a file of Flags.write"):
            Flags.read(tmp_path / "other.json")
    with pytest.raises(EPInputError, match=r"gone\.json: must be a file"):
        Flags.read(tmp_path / "gone.json")


def test_the_slowest_rank_is_named() -> None:
    """Also one whose file is not there, as of a process that has died."""
    behind = (Flag("table", (1, 2, 0), 1, "dispatch", 5, 2, 4, 5),)
    ranks = [Flags(0, {"dispatches sent": 4}, behind), Flags(1, {"dispatches sent": 4}, behind)]
    assert slowest(ranks) == "look first at rank 2, for which rank(s) [0, 1] wait: there are no flags of it here"
    ranks.append(Flags(2, {"dispatches sent": 3}, ()))
    assert slowest(ranks) == "look first at rank(s) [2]: they have completed the fewest rounds"
    assert slowest(ranks[:2] + [Flags(2, {"dispatches sent": 4}, ())]) == "all ranks have completed as many rounds"
