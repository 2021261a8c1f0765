"""The rail over NVSHMEM, with emulated kernels, nodes on the CPU and a symmetric heap in this process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from cute_ep import reference
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.api.types import CombineMode
from cute_ep.layouts.maps.mail import Channel, Piece
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.nodes import NodesCommunicator
from cute_ep.runtime.rails.engine import Put
from cute_ep.runtime.rails.shmem import ShmemRail
from cute_ep.runtime.rails.shmem_library import Addition
from cute_ep.testing.compare import assert_bits
from tests.reference.ranks import at_once

from .emulated_nodes import SHAPES, TOKENS, batch_of, config, dispatched, fused_round, on_all, two_halves
from .emulated_shmem import Heap, over_shmem
from .test_nodes import send_again

FORMATS = {"bf16": {}, "fp8": {"dispatch_format": "fp8"}, "nvfp4_row": {"dispatch_format": "nvfp4_row"}}
MOST = TOKENS + 2
"""Rows of the longest frame."""


def fail(ep: NodesCommunicator) -> None:
    """As when another kernel of the rank has given up."""
    torch.frombuffer((ctypes.c_int64 * 1).from_address(ep.mail.parts.abort), dtype=torch.int64).fill_(1)


@pytest.mark.parametrize("changes", FORMATS)
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_rounds_are_those_of_the_reference(nodes: int, ranks: int, changes: str) -> None:
    """Frames of the greatest length, which dispatch reads where they land, and shorter ones, which it reads from
    copies."""
    cfg = config(nodes, ranks, **FORMATS[changes])
    with over_shmem(cfg) as made:
        for number in range(6):
            fused_round(cfg, made, number)
        for turn in range(3):
            two_halves(cfg, made, turn)
        on_all(made, lambda rank: made[rank].synchronize())


@pytest.mark.parametrize("changes", FORMATS)
def test_a_rank_sends_the_rows_that_it_has_and_as_many_pieces_always(changes: str) -> None:
    """Rows from T on do not travel; ids and weights do, of the whole frame."""
    cfg = config(2, 1, **FORMATS[changes])
    with over_shmem(cfg) as made:
        heap, at = made[0].mail.engine._library, made[0].mail.map
        word = made[1].mail.memory[at.arrived.at(Channel.FRAMES, 0) :][: 8 * len(Piece)].view(torch.int64)
        pieces = [1, 1, 1] if at.scale_bytes else [1, 0, 1]
        for number, tokens in enumerate((3, 0, TOKENS), 1):
            given = [torch.randn(tokens, cfg.hidden).bfloat16(), torch.zeros(tokens, cfg.top_k, dtype=torch.int32)]
            weights = torch.ones(tokens, cfg.top_k)
            del heap.asked[:]
            at_once(
                range(2), lambda rank, given=given, weights=weights: made[rank].dispatch(*given, weights, frame=TOKENS)
            )
            assert word.tolist() == [number * one for one in pieces]
            routes = made[0].mail.frame_puts(TOKENS, tokens)[-1].nbytes
            rows = [tokens * size for size in (at.payload_bytes, at.scale_bytes) if size]
            assert heap.asked == [(1, nbytes) for nbytes in (*rows, routes)]


@pytest.mark.parametrize("mode", ["exact", "unweighted"])
def test_modes_that_do_not_travel_are_refused_before_anything_is_sent(mode: CombineMode) -> None:
    cfg = config(2, 1)
    with over_shmem(cfg) as made:
        given, _ = batch_of(cfg, 1, None)
        batches = on_all(made, lambda rank: made[rank].dispatch(**vars(given[rank])))
        rows, before = torch.zeros(batches[0].tokens.shape[0], cfg.hidden).bfloat16(), made[0].mail.memory.clone()
        rule = (
            f"^mode = '{mode}': must be 'partial' over 2 nodes with transport = 'nvshmem': take transport = 'nccl' for "
            "the other modes$"
        )
        for call in (made[0].combine, made[0].combine_async, made[0].plan_combine):
            with pytest.raises(EPInputError, match=rule):
                call(rows, batches[0], mode=mode)
        assert torch.equal(before, made[0].mail.memory) and not made[0].failed


# ---- after a failure


def test_old_mail_of_a_rank_that_has_given_up_is_no_new_mail() -> None:
    """It comes again, behind a signal that is right: the header is of the round before."""
    cfg = config(2, 1, timeout_s=5)
    with over_shmem(cfg) as made:
        given, _want, batches, rows = dispatched(cfg, made)
        on_all(made, lambda rank: made[rank].combine(rows[rank], batches[rank]))
        fail(made[0])
        began = time.monotonic()
        at_once(range(2), lambda rank: send_again(made[rank], given[rank], MOST))
        with pytest.raises(
            EPTimeout, match=r"FRAME of rank 0: its frame of dispatch round 2 .*its last mail is of round 1"
        ) as caught:
            made[1].synchronize()
        assert caught.value.missing == (0,) and time.monotonic() - began < 4  # it did not wait for its timeout
        landed = made[1].mail.map.sums.at(0, 0)
        assert made[1].mail.memory[landed:][:4].view(torch.int32).item() == 1


@pytest.mark.parametrize("pitch", [None, lambda mail, frame: frame], ids=["as it is", "frames packed"])
def test_a_frame_of_another_length_changes_nothing_that_a_peer_reads(
    monkeypatch: pytest.MonkeyPatch, pitch: object
) -> None:
    """The host has queued a put that comes after a failure, while a peer still reads the round before. Where frames are
    one behind the other it lands on another node's rows."""
    cfg = config(2, 1, dispatch_format="fp8")
    if pitch is not None:
        monkeypatch.setattr(RankMail, "_pitch", pitch)
    with over_shmem(cfg) as made:
        given, _ = batch_of(cfg, 1, None)
        on_all(made, lambda rank: made[rank].dispatch_async(**vars(given[rank]), frame=MOST))
        at, before = made[0].mail.map, made[0].mail.memory.clone()
        fail(made[1])
        for region in (at.payload, at.scales):  # as where rank 1 has an older frame of rank 0
            made[1].mail.memory[region.at(0) :][: MOST * region.stride[1]].fill_(7)
        for frame in (TOKENS, TOKENS + 1):
            at_once((1,), lambda rank, frame=frame: send_again(made[rank], given[rank], frame))
        same = [
            torch.equal(before[region.at() :][: region.nbytes], made[0].mail.memory[region.at() :][: region.nbytes])
            for region in (at.payload, at.scales, at.routes)
        ]
        assert same == [pitch is None, pitch is None, True]


def test_who_does_not_come_is_named_by_all_who_wait() -> None:
    cfg = config(3, 1, timeout_s=0.5)
    with over_shmem(cfg) as made:
        given, _ = batch_of(cfg, 2, None)

        def work(rank: int) -> tuple[int, ...]:
            made[rank].dispatch_async(**vars(given[rank]))
            try:
                made[rank].synchronize()
            except EPTimeout as error:
                return error.missing
            return ()

        began = time.monotonic()
        assert at_once((0, 1), work) == [(2,), (2,)] and time.monotonic() - began < 3 * cfg.timeout_s


def test_a_rail_that_was_left_takes_no_call() -> None:
    cfg = config(2, 1)
    with over_shmem(cfg) as made:
        given, _ = batch_of(cfg, 2, None)
        made[0].mail.engine.give_up()
        with pytest.raises(EPError, match=r"^rank 0: NVSHMEM between nodes has ended; close, and connect again$"):
            made[0].dispatch(**vars(given[0]))
        assert made[0].failed


# ---- landings


def test_sums_land_where_none_are_that_were_not_received() -> None:
    """So those of a graph of one combine land in one place in each replay, and of two outstanding ones in two."""
    cfg = config(2, 1)
    with over_shmem(cfg) as made:
        _given, _want, batches, rows = dispatched(cfg, made)
        seen: list[list[int]] = [[], []]

        def work(rank: int) -> None:
            ep, batch = made[rank], batches[rank]

            def send() -> object:
                pending = ep.combine_async(rows[rank], batch)
                seen[rank].append(pending.landing)  # type: ignore[attr-defined]
                return pending

            for _ in range(3):
                ep.combine(rows[rank], batch)
            first, _ = send(), send()
            ep.combine_wait(first)
            send()
            ep.combine_wait()
            send()
            ep.combine_wait()
            ep.combine_wait()

        on_all(made, work)
        assert seen == [[0, 1, 0, 1]] * 2
        sent = [made[0].mail.words(landing)[made[0].mail.map.rounds.at(Channel.SUMS) // 8] for landing in range(2)]
        assert sent == [5, 2]
        flags = made[0].flags()
        assert flags.completed["sums sent"] == flags.completed["sums received"] == 7


@pytest.mark.parametrize("apart", [True, False], ids=["as it is", "counted together"])
def test_sums_wait_for_who_has_not_read_the_ones_before_in_their_place(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """A fast rank combines again before its peer has read the first sums. Counted together, a round may come while the
    one before is read: that suits landings by turns only."""
    if not apart:
        monkeypatch.setattr(RankMail, "count_landings_apart", lambda mail: None)
    cfg = config(2, 1)
    with over_shmem(cfg) as made:
        _given, want, batches, rows = dispatched(cfg, made)
        at = made[0].mail.map
        header = made[0].mail.memory[at.sums.at(0, 1) :][:4].view(torch.int32)
        back = [made[rank].combine_async(rows[rank], batches[rank]) for rank in range(2)]
        made[1].combine_wait(back[1])
        second = threading.Thread(target=made[1].combine_async, args=(rows[1], batches[1]), daemon=True)
        second.start()
        second.join(0.3)
        assert second.is_alive() == apart and int(header) == (1 if apart else 2)
        if apart:
            assert_bits(made[0].combine_wait(back[0]), reference.combine(cfg, rows, want)[0], "sums")
            second.join()
            assert int(header) == 2 and not made[1].failed


def test_flags_tell_of_the_second_landing_where_it_is_waited_for() -> None:
    cfg = config(2, 1, timeout_s=0.5)
    with over_shmem(cfg) as made:
        _given, _want, batches, rows = dispatched(cfg, made)
        assert {flag.index[0] for flag in made[0].flags().behind if flag.name == "arrived"} == {0, 1}
        back = [made[0].combine_async(rows[0], batches[0]) for _ in range(2)]
        flags = made[0].flags()
        assert flags.completed["sums sent"] == 2 and flags.completed["sums received"] == 0
        late = [flag.index for flag in flags.behind if flag.name == "arrived"]
        assert late == [(0, 1, 0), (1, 1, int(Piece.ROUTES)), (2, 1, int(Piece.ROUTES))]
        made[0].combine_wait(back[0])
        with pytest.raises(
            EPTimeout, match=r"SUMS of rank 1: its sums of round 1 of one of the two landings of sums have"
        ):
            made[0].synchronize()


def test_what_was_not_read_is_told_by_its_landing() -> None:
    """Pack's second round of a landing waits until the first was read, which the kernel counts as round 0."""
    cfg = config(2, 1, timeout_s=1)
    with over_shmem(cfg) as made:
        _given, _want, batches, rows = dispatched(cfg, made)
        made[0].combine_async(rows[0], batches[0])
        flags = [flag for flag in made[0].flags().behind if flag.name == "free" and flag.operation == "combine"]
        assert [(flag.index[0], flag.seen, flag.needed) for flag in flags] == [(1, 0, 1)]
        status = made[0]._status
        status.report(1, Phase.SUMS_READ, 0, 0, -1 & 0xFFFFFFFF)
        with pytest.raises(EPTimeout, match=r"it has not read this rank's sums of round 1 of one of the two landings"):
            made[0].synchronize()


# ---- what the engine promises


class SignalFirst(Heap):
    """A library that signals before the bytes are there."""

    def put(self, to: int, source: int, nbytes: int, signal: Addition, stream: int) -> None:
        content = ctypes.string_at(source, nbytes)
        self.signal(signal, stream)
        time.sleep(0.05)
        ctypes.memmove(self.at(to, signal.pe, nbytes), content, nbytes)


class FreeEarly(ShmemRail):
    """A rail that says that mail was read when its own is on the way."""

    def put(self, mail: RankMail, channel: Channel, pieces: Sequence[Put]) -> None:
        super().put(mail, channel, pieces)
        super().free(mail, channel, 0)

    def free(self, mail: RankMail, channel: Channel, landing: int) -> None:
        pass


def test_a_library_that_signals_before_its_bytes_is_found() -> None:
    cfg = config(2, 1, timeout_s=1)
    with over_shmem(cfg, SignalFirst) as made, pytest.raises((AssertionError, EPError)):
        for number in range(3):
            fused_round(cfg, made, number)
        on_all(made, lambda rank: made[rank].synchronize())


@pytest.mark.parametrize("rail", [ShmemRail, FreeEarly], ids=["as it is", "free early"])
def test_a_frame_stays_until_it_was_read(rail: type[ShmemRail]) -> None:
    """Rank 0 is a round ahead of rank 1, which takes its time to read."""
    cfg = config(2, 1, timeout_s=5)
    with over_shmem(cfg, rail=rail) as made:
        given = [batch_of(cfg, number, None)[0] for number in (3, 1)]
        landed = made[1].mail.memory[made[1].mail.map.payload.at(0) :].view(torch.bfloat16)
        first, same = given[0][0].x.flatten(), list[bool]()

        def work(rank: int) -> None:
            for number in range(2):
                send_again(made[rank], given[number][rank], MOST)
                if (rank, number) == (1, 0):
                    time.sleep(0.3)
                    same.append(torch.equal(landed[: first.numel()], first))
                made[rank].mail.free(Channel.FRAMES)

        at_once(range(2), work)
        assert same == [rail is ShmemRail] and (rail is FreeEarly or not made[0].failed | made[1].failed)
