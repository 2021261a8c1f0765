"""Records that a kernel stores while the host polls: late ones, two on their way, in any order, and none."""

from __future__ import annotations

import threading
import time

import pytest

from cute_ep.api.errors import EPInputError
from cute_ep.runtime import host_words
from cute_ep.runtime.host_words import EPOCH_MASK, POLLS_PER_CHECK, SPIN_S, HostWords
from tests.emulated_counts import store
from tests.plain_memory import PlainHostMemory

ROOM = 6


def never() -> bool:
    return False


@pytest.fixture(params=["compiled", "Python"])
def words(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> HostWords:
    if request.param == "Python":
        monkeypatch.setattr(host_words, "taker", lambda: None)
    elif host_words.taker() is None:
        pytest.skip("the launcher was not compiled")
    monkeypatch.setattr(host_words, "HostMemory", PlainHostMemory)
    return HostWords(ROOM)


def stored(values: list[int], address: int, epoch: int) -> list[tuple[int, int]]:
    return [(address + 8 * place, epoch << 32 | value) for place, value in enumerate(values)]


def test_a_record_is_taken_when_all_its_words_have_come(words: HostWords) -> None:
    """In every order of two words of three, the last one first and last."""
    for last in range(3):
        number, address, epoch = words.begin()
        given = stored([7, 2**32 - 1, number], address, epoch)
        store(given[:last] + given[last + 1 :])
        assert words.take(number, 3) is None
        store([given[last]])
        assert words.take(number, 3) == [7, 2**32 - 1, number]


def test_two_records_may_be_on_their_way_and_come_in_any_order(words: HostWords) -> None:
    first, second = words.begin(), words.begin()
    store(stored([4, 5], *second[1:]))
    assert words.take(first[0], 2) is None
    assert words.take(second[0], 2) == [4, 5]
    store(stored([1, 2, 3], *first[1:]))
    assert words.take(first[0], 3) == [1, 2, 3] and words.take(second[0], 2) == [4, 5]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_record_whose_place_was_taken_is_refused(words: HostWords, changed: int) -> None:
    """Also where only some words of the later one have come: none of its numbers passes for the earlier one's."""
    number, address, epoch = words.begin()
    store(stored([1, 2, 3], address, epoch))
    words.begin()
    _, address, epoch = words.begin()
    store(stored([9, 9, 9], address, epoch)[changed : changed + 1])
    with pytest.raises(EPInputError, match=f"record {number} of the host: must be waited for before"):
        words.take(number, 3)


def test_epochs_may_wrap(words: HostWords) -> None:
    words._numbers = iter(range(EPOCH_MASK - 3, EPOCH_MASK + 5))
    for turn in range(7):
        number, address, epoch = words.begin()
        assert turn < 2 or words.take(number, 2) is None
        store(stored([number % 1000, 1], address, epoch))
        assert words.take(number, 2) == [number % 1000, 1]


def test_a_late_record_is_waited_for_and_other_threads_run(words: HostWords) -> None:
    number, address, epoch = words.begin()
    ran = threading.Event()

    def late() -> None:
        time.sleep(3 * SPIN_S)
        ran.set()
        store(stored([1, 2], address, epoch))

    thread = threading.Thread(target=late)
    thread.start()
    assert words.wait(number, 2, never, never) == [1, 2] and ran.is_set()
    thread.join()


def test_a_wait_ends_when_kernels_have_failed(words: HostWords) -> None:
    asked = []
    number, _, _ = words.begin()
    assert words.wait(number, 2, lambda: asked.append(1) is None, never) is None
    assert len(asked) == 1


def test_a_record_that_came_before_a_failure_counts(words: HostWords) -> None:
    """The failure is of a later launch, which the next call tells."""
    number, address, epoch = words.begin()

    def failed() -> bool:
        store(stored([3, 4], address, epoch))
        return True

    assert words.wait(number, 2, failed, never) == [3, 4]


def test_a_wait_ends_when_the_stream_has(words: HostWords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_words, "ENDED_EVERY_S", 0.01)
    number, _, _ = words.begin()
    assert words.wait(number, 2, never, lambda: True) is None


def test_an_error_of_the_device_ends_a_wait(words: HostWords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_words, "ENDED_EVERY_S", 0.01)

    def ended() -> bool:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        words.wait(words.begin()[0], 2, never, ended)


def test_a_record_that_is_there_costs_no_question(words: HostWords) -> None:
    number, address, epoch = words.begin()
    store(stored([1] * 2, address, epoch))
    polled = 0

    def failed() -> bool:
        nonlocal polled
        polled += 1
        return False

    assert words.wait(number, 2, failed, never) == [1, 1] and polled == 0 < POLLS_PER_CHECK


def test_freed_records_do_not_come(words: HostWords) -> None:
    number, address, epoch = words.begin()
    store(stored([1, 2], address, epoch))
    words.free()
    assert words.take(number, 2) is None
