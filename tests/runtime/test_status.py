"""What ends a communicator, what it says then, and which errors of its input it survives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.routing import BEYOND, INPUT_ERRORS, Phase
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.status import MISSING
from tests.fake_gpu import CFG, SKIP_A2A, Launches, MakeRank, RecordingKernel, expert_rows, inputs, report

# ---- timeouts


ROUTED = "MESSAGE of rank 1: it has sent the routing of dispatch round 9, but not slice"


def test_a_timeout_is_raised_by_every_later_call(rank: Communicator, launches: Launches) -> None:
    report(rank, Phase.MESSAGE, 3, 9, 8, peer=1)
    assert rank.failed
    for call in (rank.synchronize, rank.allocate, lambda: rank.dispatch(*inputs())):
        with pytest.raises(EPTimeout, match=rf"{ROUTED} 3 of its token 0 \(there it last sent round 8\)") as caught:
            call()
        assert (caught.value.phase, caught.value.rank, caught.value.missing) == ("MESSAGE", 0, (1,))
    assert launches.kernels == []


@pytest.mark.parametrize(
    ("phase", "token", "index", "said"),
    [
        (
            Phase.DISPATCH_CONSUMED,
            0,
            0,
            "launched no dispatch since it received round 9 (the last: 8), so round 11",
        ),
        (Phase.ROUTE_TABLE, 0, 5, "it has sent nothing of dispatch round 9: it did not call it, its launch"),
        (
            Phase.ROUTE_ENTRY,
            0,
            13,
            "counts of dispatch round 9, but not the routing of its topk_ids.flatten()[13];",
        ),
        (
            Phase.MESSAGE,
            7,
            29,
            "sent the routing of dispatch round 9, but not slice 1 of its token 7 (there it last sent round 8)",
        ),
        (Phase.MESSAGE_WORDS, 1, 63, "the routing of dispatch round 9, but not all words of slice 31 of its token 1"),
        (
            Phase.COMBINE_CONSUMED,
            0,
            0,
            "launched no combine since it received round 9 (the last: 8), so round 11",
        ),
        (Phase.RETURN_ROUND, 0, 0, "it has not begun combine round 9: it did not call it, its launch"),
        (
            Phase.RETURN,
            32767,
            65535,
            "combine round 9: slice 1 of this rank's token 32767 is missing (there it last returned round 8)",
        ),
        (Phase.RETURN_WORDS, 0, 3, "combine round 9: words of slice 3 of this rank's token 0 are missing"),
        (Phase.FRAME_READ, 0, 0, "it has not read this rank's frame of dispatch round 9, so no other can be sent"),
        (
            Phase.FRAME,
            0,
            2,
            "its frame of dispatch round 9 has not come whole (what came last as piece 2 is of round 8)",
        ),
        (Phase.SUMS_READ, 0, 0, "it has not read this rank's sums of combine round 9, so no others can be sent"),
        (Phase.SUMS, 0, 2, "its sums of combine round 9 have not come whole (what came last as piece 2 is of round 8)"),
        (Phase.FRAME_SIZE, 0, 5, "its frame of dispatch round 5 has 8 rows, and here 9: give dispatch the same"),
    ],
    ids=lambda value: value.name if isinstance(value, Phase) else "",
)
def test_a_timeout_names_the_rank_and_what_it_has_not_done(
    rank: Communicator, phase: Phase, token: int, index: int, said: str
) -> None:
    """By the kind of wait. The token's slice follows from the source's: all tokens have 2^k slices."""
    report(rank, phase, index, 9, 8, peer=1, token=token)
    with pytest.raises(
        EPTimeout, match=rf"for rank\(s\) \[1\]\n  {phase.name} of rank 1: .*{re.escape(said)}"
    ) as caught:
        rank.synchronize()
    assert caught.value.phase == phase.name and len(caught.value.details) == 1


def test_every_wait_has_its_words() -> None:
    others = {Phase.NONE, Phase.GRID, Phase.ORDER, Phase.PAIR, *INPUT_ERRORS}
    assert set(MISSING) == set(Phase) - others


def test_the_page_on_timeouts_has_every_phase_once() -> None:
    """But those of other errors: EPError says what was out of order, EPInputError what is wrong with the input."""
    page = (Path(__file__).parents[2] / "docs" / "timeouts.md").read_text()
    table = page.partition("| phase | ")[2].partition("\n\n")[0].splitlines()[2:]
    found = [name for row in table for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    others = {Phase.NONE, Phase.ORDER, Phase.PAIR, *INPUT_ERRORS}
    assert sorted(found) == sorted(phase.name for phase in set(Phase) - others)


def test_a_timeout_has_the_flags_that_are_behind(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `flags` finds them; without them where they cannot be read."""
    report(rank, Phase.ROUTE_TABLE, 0, 1, 0, peer=1)
    with pytest.raises(EPTimeout) as caught:
        rank.synchronize()
    assert caught.value.flags == rank.flags()
    assert {(flag.name, flag.peer) for flag in rank.flags().behind} >= {("table", 0), ("table", 1)}

    def broken(nbytes: int, stream: object) -> bytes:
        raise EPError("CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(rank.arena, "read", broken)
    with pytest.raises(EPTimeout) as caught:
        rank.synchronize()
    assert caught.value.flags is None


def test_a_timeout_of_the_ranks_own_launch_counts_ctas(rank: Communicator) -> None:
    report(rank, Phase.GRID, 0, 264, 200)
    with pytest.raises(EPTimeout, match="GRID: 200 of 264 receiving CTAs came together"):
        rank.synchronize()


def test_a_timeout_with_skip_a2a_names_the_rank_itself(make_rank: MakeRank) -> None:
    rank = make_rank(SKIP_A2A, 1)
    report(rank, Phase.GRID, 0, 4, 3)
    with pytest.raises(EPTimeout, match=r"rank 1 gave up waiting in phase GRID for rank\(s\) \[1\]") as error:
        rank.synchronize()
    assert (error.value.rank, error.value.missing) == (1, (1,))


@pytest.mark.parametrize(
    ("word", "name"),
    [(StateWord.DISPATCH_SEND_EPOCH, "dispatch"), (StateWord.COMBINE_SEND_EPOCH, "combine")],
    ids=["dispatch", "combine"],
)
def test_a_fused_launch_that_ran_out_of_order_is_no_timeout(rank: Communicator, word: StateWord, name: str) -> None:
    """Kernels report it in the rank's own record, and no rank is missing."""
    report(rank, Phase.ORDER, word, 4, 5)
    assert rank.failed
    for call in (rank.synchronize, lambda: rank.dispatch(*inputs())):
        with pytest.raises(EPError, match=f"a fused {name} ran when 5 rounds had been sent and 4 received") as error:
            call()
        assert not isinstance(error.value, EPTimeout)


def test_rows_of_another_dispatch_round_are_no_timeout(make_rank: MakeRank, launches: Launches) -> None:
    """Kernels report it in the records of the ranks that returned them; a wait that was then given up is not told."""
    rank = make_rank(replace(CFG, world_size=4), 2)
    report(rank, Phase.PAIR, 7, 11, 10, peer=1)
    report(rank, Phase.PAIR, 7, 11, 12, peer=3)
    report(rank, Phase.RETURN, 5, 7, 6, peer=0)
    assert rank.failed
    rule = (
        "rank 2: combine round 7 has the batch of dispatch round 11 here, but rank 1 rows of dispatch round 10, rank 3 "
        "rows of dispatch round 12: all ranks must combine the batches of the same dispatch rounds in the same order"
    )
    for call in (rank.synchronize, lambda: rank.dispatch(*inputs())):
        with launches.forbidden(), pytest.raises(EPError, match=rule) as error:
            call()
        assert not isinstance(error.value, EPTimeout)


# ---- input that kernels found wrong


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        pytest.param(
            [(Phase.EXPERT_ID, 3, 8, 2**32 - 2)],
            r"topk_ids.flatten\(\)\[3\] = -2: must be -1 or in \[0, 8\)",
            id="expert id",
        ),
        pytest.param(
            [(Phase.EXPERT_ID, 7, 8, BEYOND % (1 << 32))],
            r"topk_ids\.flatten\(\)\[7\] = -2147483648 or beyond 32 bits: must be -1 or in \[0, 8\)",
            id="expert id beyond 32 bits",
        ),
        pytest.param(
            [(Phase.ROW_CAPACITY, 0, 64, 70)],
            "rank 0: out holds 64 rows, but those that arrived take 70",
            id="too many rows",
        ),
        pytest.param(
            [(Phase.EXPERT_ID, 3, 8, 9), (Phase.ROW_CAPACITY, 0, 64, 70)],
            r"flatten\(\)\[3\] = 9: must be .*; out holds 64 rows",
            id="both",
        ),
    ],
)
def test_an_input_error_is_raised_once_and_stops_nothing(rank: Communicator, reports: list, message: str) -> None:
    for one in reports:
        report(rank, *one)
    rank.dispatch(*inputs())
    assert not rank.failed
    with pytest.raises(EPInputError, match=message):
        rank.synchronize()
    rank.synchronize()


def test_an_input_error_comes_again_when_kernels_report_it_again(rank: Communicator) -> None:
    for index in (3, 4):
        report(rank, Phase.EXPERT_ID, index, 8, 9)
        with pytest.raises(EPInputError, match=rf"flatten\(\)\[{index}\] = 9"):
            rank.synchronize()


def test_input_errors_are_taken_once_without_waiting(rank: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then `synchronize` has nothing to raise; a closed communicator knows of none."""

    def waits() -> None:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        patch.setattr(rank, "_work_stream", waits)
        assert rank.take_input_errors() == {}
        report(rank, Phase.EXPERT_ID, 3, 8, 2**32 - 2)
        report(rank, Phase.ROW_CAPACITY, 0, 64, 70)
        assert rank.take_input_errors() == {Phase.EXPERT_ID: (3, 8, -2), Phase.ROW_CAPACITY: (0, 64, 70)}
        assert rank.take_input_errors() == {}
    rank.synchronize()
    report(rank, Phase.EXPERT_ID, 3, 8, 9)
    rank.close()
    assert rank.take_input_errors() == {}


@pytest.mark.parametrize("number", [0, 1])
def test_an_input_error_with_skip_a2a_is_one_of_all_experts(make_rank: MakeRank, number: int) -> None:
    rank = make_rank(SKIP_A2A, number)
    report(rank, Phase.EXPERT_ID, 3, 8, 9)
    assert not rank.failed
    with pytest.raises(EPInputError, match=r"topk_ids.flatten\(\)\[3\] = 9: must be -1 or in \[0, 8\)"):
        rank.synchronize()


# ---- launches that fail or are interrupted


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_launch_ends_the_communicator(
    rank: Communicator, launches: Launches, monkeypatch: pytest.MonkeyPatch, when: str, error: type[BaseException]
) -> None:
    """Whether the round was sent is not known: no later call may send it again, or leave it out. A handler of signals
    may raise any exception."""
    real = RecordingKernel.launch

    def launch(self: RecordingKernel, *args: object, **options: object) -> None:
        if when == "after":
            real(self, *args, **options)
        raise error

    batch = rank.dispatch(*inputs())
    monkeypatch.setattr(RecordingKernel, "launch", launch)
    with pytest.raises(error):
        rank.dispatch_async(*inputs())
    monkeypatch.setattr(RecordingKernel, "launch", real)
    for call in (
        lambda: rank.dispatch(*inputs()),
        lambda: rank.dispatch_async(*inputs()),
        lambda: rank.combine(expert_rows(batch), batch),
        rank.allocate,
    ):
        rule = "rank 0: a call was interrupted while it was being launched"
        with launches.forbidden(), pytest.raises(EPError, match=rule):
            call()
    rank.close()


def test_a_launch_that_fails_leaves_the_communicator_as_it_was(
    rank: Communicator, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RecordingKernel.launch

    def launch(self: RecordingKernel, *args: object, **options: object) -> None:
        raise EPError("CUDA driver: CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr(RecordingKernel, "launch", launch)
    for call in (rank.dispatch, rank.dispatch_async):
        with pytest.raises(EPError, match="LAUNCH_FAILED"):
            call(*inputs())
    monkeypatch.setattr(RecordingKernel, "launch", real)
    rank.dispatch(*inputs())
    assert launches.kernels == ["dispatch"]


# ---- the end


def close(rank: Communicator) -> None:
    rank.close()


def let_it_time_out(rank: Communicator) -> None:
    report(rank, Phase.ROUTE_TABLE, 0, 1, 0)


def interrupt(rank: Communicator) -> None:
    rank._interrupted = True


@pytest.mark.parametrize(
    ("end", "failed", "shown", "rule"),
    [
        pytest.param(close, False, "closed", "is closed", id="closed"),
        pytest.param(let_it_time_out, True, "failed", "gave up waiting", id="timed out"),
        pytest.param(interrupt, True, "failed", "was interrupted", id="interrupted"),
    ],
)
def test_every_call_says_what_ended_the_communicator_however_wrong_its_arguments_are(
    rank: Communicator, end: Callable, failed: bool, shown: str, rule: str
) -> None:
    end(rank)
    assert rank.failed == failed and shown in repr(rank)
    for call in (
        lambda: rank.dispatch(None, None),
        lambda: rank.dispatch_async(None, None),
        rank.dispatch_wait,
        lambda: rank.combine(None, None),
        lambda: rank.combine_async(None, None),
        rank.combine_wait,
        rank.allocate,
    ):
        with pytest.raises(EPError, match=rule):
            call()


def test_close_may_be_repeated_and_no_call_comes_after_it(rank: Communicator) -> None:
    plan = rank.plan_dispatch(*inputs())
    rank.close()
    rank.close()
    for call in (
        plan.launch,
        lambda: rank.dispatch(*inputs()),
        lambda: rank.plan_dispatch(*inputs()),
        rank.allocate,
        rank.synchronize,
    ):
        with pytest.raises(EPError, match="rank 0: the communicator is closed"):
            call()


@pytest.mark.parametrize("failed", [False, True])
def test_status_of_a_closed_rank_is_what_it_was(rank: Communicator, failed: bool) -> None:
    """Its memory belongs to others by then."""
    if failed:
        report(rank, Phase.GRID, 0, 264, 200)
    rank.close()
    memory_of_others = rank._status.memory.gone
    memory_of_others[:] = [0 if failed else 1] * len(memory_of_others)
    assert rank.failed == failed
