"""What processes of one group tell each other when they connect; threads stand for them."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_ep import connection
from cute_ep.config import EPConfig
from cute_ep.connection import _check_places, _on_all_ranks, _Place
from cute_ep.errors import EPConfigError, EPError

RANKS = 3
CFG = EPConfig(hidden=128, num_experts=6, top_k=2, max_tokens_per_rank=16, world_size=RANKS)
PLACES = [_Place(CFG, "machine", f"GPU-{rank}") for rank in range(RANKS)]


def collective(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], object]) -> list[object]:
    """What call(rank) returns, or raises, on each rank."""
    barrier, mine, given = threading.Barrier(RANKS, timeout=30), threading.local(), [None] * RANKS

    def all_gather_object(gathered: list, one: object, group: None) -> None:
        given[mine.rank] = one
        barrier.wait()
        gathered[:] = given
        barrier.wait()

    def work(rank: int) -> object:
        mine.rank = rank
        try:
            return call(rank)
        except Exception as error:
            return error

    dist = SimpleNamespace(all_gather_object=all_gather_object, get_world_size=lambda group: RANKS)
    monkeypatch.setattr(connection, "dist", dist)
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, range(RANKS)))


def test_every_rank_hears_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    got = collective(monkeypatch, lambda rank: _on_all_ranks(None, lambda: 10 * rank, lambda made: made + 1))
    assert got == [(10 * rank, [1, 11, 21]) for rank in range(RANKS)]


@pytest.mark.parametrize("at", ["make", "share"])
def test_what_fails_on_one_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    undone = []

    def step(name: str, rank: int) -> int:
        if name == at and rank == 1:
            raise MemoryError("2 GiB")
        return rank

    got = collective(
        monkeypatch,
        lambda rank: _on_all_ranks(None, lambda: step("make", rank), lambda made: step("share", made), undone.append),
    )
    assert isinstance(got[1], MemoryError)
    for rank in (0, 2):
        assert isinstance(got[rank], EPError)
        assert str(got[rank]) == "rank 1 could not connect: MemoryError: 2 GiB"
    assert sorted(undone) == ([0, 2] if at == "make" else [0, 1, 2])


@pytest.mark.parametrize(
    ("devices", "rule"),
    [
        (["gpu0", "gpu1"], "must be names of devices"),
        ([None, None], "must be names of devices"),
        (["cpu"], "devices = 1 entries: must be world_size = 2"),
        (["cuda:0", "cpu"], "must be all CUDA or all cpu"),
        (["cuda:0", "cuda:99"], "cuda:99 is not here, the machine has 4 CUDA GPUs"),
    ],
)
def test_devices_that_no_group_can_have(gpus: None, devices: list, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), devices)


@pytest.mark.parametrize("last", ["arena", "rank"])
def test_what_was_made_is_freed_when_connecting_fails(gpus: None, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Ranks before arenas, the last first."""
    freed = []

    def make(what: str, rank: int) -> SimpleNamespace:
        if what == last and rank == 2:
            raise EPError("CUDA driver: CUDA_ERROR_OUT_OF_MEMORY")
        return SimpleNamespace(address=4096 * rank, free=lambda: freed.append(f"{what} {rank}"))

    monkeypatch.setattr(connection, "_make_arena", lambda cfg, rank, device: make("arena", rank))
    monkeypatch.setattr(connection, "Communicator", lambda cfg, rank, *args, **options: make("rank", rank))
    with pytest.raises(EPError, match="OUT_OF_MEMORY"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{rank}" for rank in range(4)])
    arenas = [f"arena {rank}" for rank in (3, 2, 1, 0)]
    assert freed == (arenas[2:] if last == "arena" else ["rank 1", "rank 0", *arenas])


def test_places_that_go_together() -> None:
    for rank in range(RANKS):
        _check_places(rank, PLACES)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"cfg": replace(CFG, top_k=1)}, r"rank 2 was configured with .*top_k=1.*, rank 0 with .*top_k=2"),
        ({"machine": "other"}, "rank 2 and rank 0 are on different machines"),
        ({"gpu": "GPU-1"}, "rank 1 and rank 2 are both on GPU GPU-1: each must call torch.cuda.set_device"),
    ],
)
def test_places_that_do_not(changed: dict, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        _check_places(0, [*PLACES[:2], replace(PLACES[2], **changed)])


def test_the_identity_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    identity = connection._machine()
    assert identity and identity == connection._machine()
    monkeypatch.setattr(connection, "BOOT_ID", tmp_path / "hidden")
    assert connection._machine() == platform.node()
