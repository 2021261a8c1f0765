"""The rules that the table of `cute_ep/runtime/pool.py` has. tests/runtime/meeting_worker.py has what needs
processes, tests/integrations/test_growing.py what DeepEP's buffers make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api import host
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.reference.backend import connect_reference
from cute_ep.runtime import group_pool, local_pool, process_connection
from cute_ep.runtime.gpus import sms_beside_nccl
from cute_ep.runtime.group_pool import GroupPool, Pools, timeout_of
from cute_ep.runtime.local_pool import LocalPool
from cute_ep.runtime.pool import Pool, serves

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
BASE = EPConfig(128, 8, 2, 64, 2)
BLOCKS = EPConfig(128, 8, 2, 64, 2, block_rows=128)


@pytest.mark.parametrize(
    ("own", "cfg", "does"),
    [
        (BASE, BASE, True),
        (BASE, replace(BASE, max_tokens_per_rank=8), True),
        (BASE, replace(BASE, max_tokens_per_rank=65), False),
        (BASE, replace(BASE, hidden=64), False),
        (BASE, replace(BASE, dispatch_format="fp8"), False),
        (BLOCKS, replace(BLOCKS, max_tokens_per_rank=8, block_rows=16), True),
        (BLOCKS, replace(BLOCKS, block_rows=256), False),
        (BASE, BLOCKS, False),
        (BLOCKS, BASE, False),
    ],
    ids=[
        "same",
        "fewer tokens",
        "more tokens",
        "hidden",
        "format",
        "smaller blocks",
        "larger blocks",
        "blocks",
        "none",
    ],
)
def test_a_communicator_serves_what_needs_no_more_room(own: EPConfig, cfg: EPConfig, does: bool) -> None:
    assert serves(own, cfg) == does


ONE = EPConfig(64, 2, 1, 64, 1)


class Group:
    """A process group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.fixture
def opened(monkeypatch: Patch) -> list[tuple[EPConfig, dict[str, Any]]]:
    """(configuration, options) of all that was opened in group pools."""
    calls = []

    def connect(check: Callable[[], None], cfg: EPConfig, group: Any, **options: Any) -> Any:
        check()
        calls.append((cfg, options))
        return connect_reference(cfg)[0]

    monkeypatch.setattr(process_connection, "connect_checked", connect)
    monkeypatch.setattr(group_pool, "gather", lambda group, one: [one])
    return calls


def pools(*, grows: bool = False) -> list[Pool]:
    group: Any = Group()
    return [GroupPool(group, grows=grows), LocalPool([CPU], grows=grows)]


KINDS = pytest.mark.parametrize("kind", [0, 1], ids=["of a group", "of a process"])


# ---- who shares one, and what `sms` means


@pytest.mark.parametrize(
    ("own", "asked", "exact", "found"),
    [
        ((ONE, None), (ONE, None), False, True),
        ((ONE, None), (replace(ONE, max_tokens_per_rank=8), None), False, True),
        ((ONE, None), (replace(ONE, max_tokens_per_rank=8), None), True, False),
        ((ONE, None), (ONE, None), True, True),
        ((ONE, None), (replace(ONE, max_tokens_per_rank=65), None), False, False),
        ((ONE, None), (ONE, 8), False, False),
        ((ONE, 8), (ONE, None), False, True),
        ((ONE, 8), (ONE, 8), False, True),
        ((ONE, 8), (ONE, 8), True, True),
        ((ONE, 8), (ONE, 16), False, False),
        ((ONE, 16), (ONE, 8), True, False),
    ],
)
@KINDS
def test_who_finds_what_was_opened(kind: int, own: tuple, asked: tuple, exact: bool, found: bool, opened: list) -> None:
    pool = pools()[kind]
    made = pool.open(*own)
    layer_on = CPU if exact else None
    assert pool.find(*asked, layer_on=layer_on) == (made if found else None)
    assert pool.find(*asked, layer_on=torch.device("meta")) is None
    made.first.close()
    assert pool.find(*asked, layer_on=layer_on) is None, "it was closed"


@KINDS
def test_of_several_the_roomiest_is_found(kind: int, opened: list) -> None:
    pool = pools()[kind]
    made = [pool.open(replace(ONE, max_tokens_per_rank=tokens)) for tokens in (8, 64, 32)]
    assert pool.find(replace(ONE, max_tokens_per_rank=4)) == made[1]
    pool.close([made[1].first])
    assert pool.find(replace(ONE, max_tokens_per_rank=4)) == made[2]
    assert pool.communicators == [made[0].first, made[2].first]


@pytest.mark.parametrize(("asked", "nodes", "sms"), [(None, 1, 124), (None, 2, 116), (20, 1, 20), (20, 2, 20)])
def test_nccl_kernels_have_sms_unless_somebody_says_how_many(
    monkeypatch: Patch, asked: int | None, nodes: int, sms: int
) -> None:
    """`tests/gpu/nccl_worker.py` shows what happens without. Over nodes our own exchanges take as many as others'."""
    said: list[int | None] = []
    hopper = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(group_pool, "timeout_of", lambda group: 30.0)
    monkeypatch.setattr(
        process_connection,
        "connect_checked",
        lambda check, cfg, group, sms: said.append(sms) or connect_reference(cfg)[0],
    )
    group: Any = Group()
    cfg = ONE if nodes == 1 else EPConfig(64, 2, 1, 64, 2, ranks_per_node=1)
    GroupPool(group).get(cfg, asked, sms_beside_nccl)
    assert said == [sms] and sms_beside_nccl(CPU) is None


# ---- a rank that cannot open, a round that failed


@KINDS
def test_what_cannot_be_opened_leaves_nothing_and_what_was_open_stays(kind: int, opened: list) -> None:
    pool = pools()[kind]
    before = pool.open(replace(ONE, max_tokens_per_rank=8))

    def refuse() -> None:
        raise EPConfigError("not here")

    for _ in range(2):
        with pytest.raises(EPConfigError, match="not here"):
            pool.open(ONE, check=refuse)
        assert pool.find(ONE) is None and pool.communicators == [before.first] and not before.first.closed
    assert pool.open(ONE).first.cfg == ONE


def test_a_process_that_is_no_rank_of_the_group_has_no_pool(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    with pytest.raises(EPConfigError, match="must have this process, global rank 3, as one of its own"):
        GroupPool(torch.distributed.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


@KINDS
def test_what_has_failed_is_found_until_it_is_closed(kind: int, opened: list, monkeypatch: Patch) -> None:
    """It may have failed on this rank only."""
    pool = pools()[kind]
    made = pool.open(ONE)
    monkeypatch.setattr(type(made.first), "failed", property(lambda self: True))
    assert pool.find(ONE) == made
    pool.close()
    assert pool.find(ONE) is None


def test_errors_are_told_in_the_words_of_the_interface(monkeypatch: Patch) -> None:
    def differs(*arguments: Any, **options: Any) -> None:
        raise EPConfigError("rank 1: max_tokens_per_rank = 64, rank 0: max_tokens_per_rank = 128: must be equal")

    monkeypatch.setattr(process_connection, "connect_checked", differs)
    group: Any = Group()
    names = {"max_tokens_per_rank": "num_max_dispatch_tokens_per_rank"}
    rule = (
        "rank 1: num_max_dispatch_tokens_per_rank = 64, rank 0: num_max_dispatch_tokens_per_rank = 128: must be equal"
    )
    with pytest.raises(EPConfigError, match=rule):
        GroupPool(group).get(BASE, names=names)


# ---- graphs, and what gives way


@KINDS
def test_a_capture_opens_nothing(kind: int, opened: list, monkeypatch: Patch) -> None:
    pool = pools(grows=True)[kind]
    before = pool.open(replace(ONE, max_tokens_per_rank=8))
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "capturing", lambda self: True)
        with pytest.raises(EPError, match="make it before capturing a CUDA graph"):
            pool.open(ONE)
        assert pool.find(before.first.cfg) == before and not before.first.closed
    pool.open(ONE)


@pytest.mark.parametrize("need", ["nothing", "hold", "ended", "lost", "captured", "captured, then held"])
@pytest.mark.parametrize("grows", [False, True])
@KINDS
def test_what_gives_way_to_what_has_more_room(
    kind: int, grows: bool, need: str, opened: list, monkeypatch: Patch
) -> None:
    pool = pools(grows=grows)[kind]
    small = pool.open(replace(ONE, max_tokens_per_rank=8)).first
    if "captured" in need:
        with monkeypatch.context() as patch:
            patch.setattr(Pool, "capturing", lambda self: True)
            assert pool.note_capture(small)
    hold = pool.hold(small) if need not in ("nothing", "captured") else None
    if need == "ended" and hold is not None:
        hold.end()
    if need == "lost":
        hold = None
    assert not pool.note_capture(small)
    other = pool.open(replace(ONE, hidden=128)).first
    pool.open(ONE)
    needed = not grows or need in ("hold", "captured", "captured, then held")
    assert small.closed == (not needed) and not other.closed
    if hold is not None:
        hold.end()
    pool.open(replace(ONE, max_tokens_per_rank=128))  # what is kept is looked at again
    assert small.closed == (grows and "captured" not in need) and not other.closed
    pool.close()
    assert small.closed and other.closed


@pytest.mark.parametrize("theirs", [False, True])
def test_no_rank_closes_what_another_one_needs(theirs: bool, opened: list, monkeypatch: Patch) -> None:
    monkeypatch.setattr(group_pool, "gather", lambda group, one: [one, dict.fromkeys(one, theirs)])
    group: Any = Group()
    pool = GroupPool(group, grows=True)
    small = pool.get(replace(ONE, max_tokens_per_rank=8))
    large = pool.get(ONE)
    assert small.closed != theirs and pool.get(replace(ONE, max_tokens_per_rank=8)) is large


# ---- closing


def test_nothing_closes_during_a_capture(opened: list, monkeypatch: Patch) -> None:
    """Nor is anything forgotten, so it closes after the capture."""
    own, user, group = Pools(), object(), Group()
    given: Any = group
    other: Any = Group()
    shared, lost = own.of(given, user), LocalPool([CPU])
    first, second, third = shared.get(ONE), lost.open(ONE).first, own.of(other).get(ONE)
    del lost
    with monkeypatch.context() as patch:
        patch.setattr(host, "is_capturing", lambda device: True)
        patch.setattr(local_pool, "is_capturing", lambda device: True)
        for close in (shared.close, own.close, lambda: own.release(given, user)):
            with pytest.raises(EPError, match=r"^close: waits for the GPU, which no CUDA graph captures; do it before"):
                close()
        LocalPool([CPU]).sweep()
        own.of(Group(), user).close()  # type: ignore[arg-type]
        assert not any(one.closed for one in (first, second, third)) and shared.find(ONE) is not None
        assert own.of(given) is shared and own.of(other).find(ONE) is not None
    own.close()
    LocalPool([CPU]).sweep()
    assert first.closed and second.closed and third.closed


def test_users_that_release_a_pool_close_it_with_the_last_one(opened: list) -> None:
    """One that has not, such as FlashInfer's objects, may call again after `close`."""
    own, user, group = Pools(), object(), Group()
    given: Any = group
    pool = own.of(given)
    assert own.of(given, user) is pool
    first = pool.get(ONE)
    own.close()
    assert first.closed and own.of(given, user) is pool
    second = pool.get(ONE)
    assert second is not first and not second.closed
    own.release(given, user)
    own.release(given, user)
    assert second.closed and not own


def test_another_group_has_another_pool(opened: list) -> None:
    own = Pools()
    first, second = (own.of(group) for group in (Group(), Group()))  # type: ignore[arg-type]
    first.get(ONE)
    assert second.find(ONE) is None and list(own) == [first, second]


def test_what_nobody_has_is_closed_by_the_next_sweep_of_any_pool() -> None:
    pool = LocalPool([CPU])
    communicator = pool.open(ONE).first
    del pool
    assert not communicator.closed
    LocalPool([CPU]).sweep()
    assert communicator.closed


def test_what_no_later_call_has_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool = LocalPool([CPU])
    one = pool.open(EPConfig(8, 2, 1, 4, 1)).first
    one.dispatch(torch.zeros(1, 8).bfloat16(), torch.full((1, 1), 2))
    pool.close()
    assert one.closed and "wrong input was found, and no later call has told" in caplog.text


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (SimpleNamespace(_timeout=timedelta(minutes=10)), 600.0),
        (SimpleNamespace(_timeout=timedelta(days=1)), 3600.0),
        (None, EPConfig.timeout_s),
    ],
    ids=["as long as the group", "at most an hour", "unknown"],
)
def test_ranks_wait_as_long_as_their_group(options: Any, seconds: float) -> None:
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    assert timeout_of(group) == seconds
    EPConfig(64, 8, 2, 64, 2, timeout_s=seconds)
