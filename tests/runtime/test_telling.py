"""How the host is told counts: it polls and waits for no stream; late ranks, failures, interrupts, two exchanges."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.layouts.maps.routing import Phase, count_words
from cute_ep.runtime import host_words
from cute_ep.runtime.counts import ENDS, Counting, ReceiveCounts, counting_config, memory_of_ends
from tests.emulated_counts import Stream, arrive
from tests.fake_gpu import Launches, MakeRank, report

RANKS, EXPERTS = 3, 6
WORDS = count_words(RANKS, EXPERTS)


@pytest.fixture
def counting(make_rank: MakeRank, telling: Stream) -> Counting:
    """Of rank 1."""
    return Counting(make_rank(counting_config(WORDS, RANKS, 5.0), rank=1))


def table(seed: int) -> torch.Tensor:
    return torch.randint(0, 100, (RANKS, WORDS), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def wanted(given: torch.Tensor) -> ReceiveCounts:
    entries = given[:, RANKS + 2 : RANKS + 4].sum(0).tolist()
    return ReceiveCounts(entries, int(given[:, RANKS + EXPERTS].max()), int(given[:, 1].sum()))


def test_the_host_is_told_and_waits_for_no_stream(counting: Counting, telling: Stream, launches: Launches) -> None:
    for seed in range(4):
        arrive(counting, given := table(seed))
        begun = counting.exchange(given[1], EXPERTS, ends=(ends := memory_of_ends(RANKS, "cpu")))
        assert begun.wait() == wanted(given)
        assert torch.equal(ends.tensor(ENDS), given[:, :RANKS].cumsum(0, dtype=torch.int32))
    assert len(launches) == 4 and not telling.waited and not telling.asked


def test_an_exchange_that_nobody_waits_for_tells_nothing(counting: Counting, telling: Stream) -> None:
    """So it may be captured; without `ends` nothing is launched behind it."""
    arrive(counting, given := table(1))
    telling.at_once = False
    counting.exchange(given[1], EXPERTS, told=False)
    counting.exchange(given[1], EXPERTS, ends=(ends := memory_of_ends(RANKS, "cpu")), told=False)
    (launch,) = telling.launches
    assert launch.told == 0
    telling.run()
    assert torch.equal(ends.tensor(ENDS), given[:, :RANKS].cumsum(0, dtype=torch.int32))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the second first"])
def test_two_exchanges_may_be_waited_for(counting: Counting, telling: Stream, order: tuple[int, int]) -> None:
    given, begun = [table(1), table(2)], []
    for one in given:
        arrive(counting, one)  # the stream reads the first before the second overwrites it
        begun.append(counting.exchange(one[1], EXPERTS))
    for which in order:
        assert begun[which].wait() == wanted(given[which])


def test_a_third_exchange_overwrites_the_first(counting: Counting, telling: Stream) -> None:
    begun = []
    for seed in range(3):
        arrive(counting, given := table(seed))
        begun.append(counting.exchange(given[1], EXPERTS))
    with pytest.raises(EPInputError, match="at most 2 may be on their way"):
        begun[0].wait()
    assert begun[2].wait() == wanted(given)


def test_a_late_rank_is_waited_for(counting: Counting, telling: Stream) -> None:
    telling.at_once, given = False, table(5)
    begun = counting.exchange(given[1], EXPERTS)

    def late() -> None:
        time.sleep(0.02)
        arrive(counting, given)
        telling.run()

    thread = threading.Thread(target=late)
    thread.start()
    assert begun.wait() == wanted(given)
    thread.join()


def test_a_rank_that_does_not_come_is_a_timeout(counting: Counting, telling: Stream) -> None:
    """The dispatch of counts gives up and retracts its rows; behind it the kernel tells nothing, for all its work."""
    arrive(counting, given := table(5))
    counting.out.num_rows.fill_(0)
    begun = counting.exchange(given[1], EXPERTS)
    report(counting.communicator, Phase.ROUTE_TABLE, 0, 1, 0, peer=2)
    with pytest.raises(EPTimeout, match="ROUTE_TABLE of rank 2") as failure:
        begun.wait()
    assert failure.value.missing == (2,)
    with pytest.raises(EPTimeout):
        counting.exchange(given[1], EXPERTS)


def test_an_exchange_that_tells_nothing_is_an_error(
    counting: Counting, telling: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a record, when the stream has done all its work."""
    monkeypatch.setattr(host_words, "ENDED_EVERY_S", 0.01)
    counting.out.num_rows.fill_(0)
    begun = counting.exchange(table(5)[1], EXPERTS)
    with pytest.raises(EPError, match="rank 1: an exchange of counts has ended without them"):
        begun.wait()
    assert telling.asked


def test_an_interrupted_wait_leaves_the_next_exchange_whole(
    counting: Counting, telling: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches are made, so this rank takes part; what comes late is taken for no other exchange's."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    telling.at_once, given = False, table(8)
    begun = counting.exchange(given[1], EXPERTS)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host_words, "give_way", interrupt)
        begun.wait()
    arrive(counting, given)
    telling.run()
    for seed in range(3):
        arrive(counting, given := table(seed))
        begun = counting.exchange(given[1], EXPERTS)
        telling.run()
        assert begun.wait() == wanted(given)


def test_no_graph_captures_an_exchange_that_is_waited_for(
    counting: Counting, telling: Stream, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting.communicator, "device", torch.device("cuda", 0))
    from cute_ep.runtime import counts

    monkeypatch.setattr(counts, "is_capturing", lambda device: True)
    with launches.forbidden(), pytest.raises(EPError, match="no CUDA graph can capture this call"):
        counting.exchange(table(1)[1], EXPERTS)
