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
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.runtime import connection, meeting
from cute_ep.runtime.connection import _check_places, _Place
from cute_ep.runtime.meeting import Meeting
from cute_ep.tuning.builtin import built_in

RANKS = 3
CFG = EPConfig(hidden=128, num_experts=6, top_k=2, max_tokens_per_rank=16, world_size=RANKS)
PLAIN = SimpleNamespace(address=0, free=None)
PLACES = [_Place(CFG, "machine", f"GPU-{rank}") for rank in range(RANKS)]


def collective(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], object]) -> list[object]:
    """What call(rank) returns, or raises, on each rank; the test ends with an error where one of them is left waiting
    for another."""
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

    dist = SimpleNamespace(
        all_gather_object=all_gather_object,
        PrefixStore=torch.distributed.PrefixStore,
        get_rank=lambda group: mine.rank,
        get_world_size=lambda group: RANKS,
        is_initialized=lambda: True,
    )
    monkeypatch.setattr(connection, "dist", dist)
    monkeypatch.setattr(meeting, "dist", dist)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(meeting, "_get_default_store", lambda: store)
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, range(RANKS)))


def test_a_rank_that_does_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and the others have waited no longer than they said."""

    def meet(rank: int) -> None:
        here = Meeting(None)
        here.wait(30)
        if rank != 1:
            here.wait(0.2)

    got = collective(monkeypatch, meet)
    assert got[1] is None
    for rank in (0, 2):
        assert isinstance(got[rank], EPError) and " waited 0.2 s for rank(s) [1], and " in str(got[rank]), got


def test_a_rank_that_comes_late_goes_on_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others gave before they gave up is not taken for what they would have given next."""
    made: list[int] = []
    gone = threading.Event()

    def meet(rank: int) -> list[str]:
        here, words = Meeting(None), []
        if rank == 1:
            gone.wait(30)
        for step in (lambda: here.gather(("theirs", None), 0.2), lambda: here.on_all_ranks(lambda: made.append(rank))):
            try:
                step()
            except EPError as error:
                words.append(str(error))
                gone.set()
        return words

    for rank, words in enumerate(collective(monkeypatch, meet)):
        assert len(words) == 2 and all("waited 0.2 s for rank(s) [1]" in text for text in words), (rank, words)


def test_an_interrupt_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    undone: list[int] = []

    def make(rank: int) -> int:
        if rank == 1:
            raise KeyboardInterrupt
        return rank

    def meet(rank: int) -> object:
        try:
            return Meeting(None).on_all_ranks(lambda: make(rank), undo=undone.append)
        except KeyboardInterrupt:
            return "interrupted"

    got = collective(monkeypatch, meet)
    assert got[1] == "interrupted" and sorted(undone) == [0, 2]
    assert [str(got[rank]) for rank in (0, 2)] == ["rank 1 could not connect: KeyboardInterrupt: "] * 2


def test_every_rank_hears_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    got = collective(monkeypatch, lambda rank: Meeting(None).on_all_ranks(lambda: 10 * rank, lambda made: made + 1))
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
        lambda rank: Meeting(None).on_all_ranks(
            lambda: step("make", rank), lambda made: step("share", made), undone.append
        ),
    )
    assert isinstance(got[1], MemoryError)
    for rank in (0, 2):
        assert isinstance(got[rank], EPError)
        assert str(got[rank]) == "rank 1 could not connect: MemoryError: 2 GiB"
    assert sorted(undone) == ([0, 2] if at == "make" else [0, 1, 2])


@pytest.mark.parametrize(
    ("devices", "rule"),
    [
        (["gpu0", "gpu1"], "must be a list of names"),
        ([None, None], "must be a list of names"),
        (["cpu"], "devices = 1 entries: must be world_size = 2"),
        (["cuda:0", "cpu"], "must be all CUDA or all cpu"),
        (["cuda:0", "cuda:99"], "cuda:99 is not here, the machine has 4 CUDA GPUs"),
    ],
)
def test_devices_that_no_group_can_have(gpus: None, devices: list, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), devices)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_gpus_where_torch_finds_none(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EPConfigError, match=r"torch finds no CUDA GPU here; .* give \[\"cpu\"\] \* 2"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), [device] * 2)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"sms": 0}, "sms = 0: must be a positive integer"),
        ({"sms": 2.5}, "sms = 2.5: must be a positive integer"),
        ({"sms": True}, "sms = True: must be a positive integer"),
        ({"library": "nowhere"}, "library = 'nowhere': must be a folder"),
        ({"tuning": "fast"}, "tuning = str: must be a Tuning"),
    ],
)
def test_options_that_no_device_takes(gpus: None, device: str, options: dict, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), [device] * 2, **options)


def test_the_reference_backend_takes_good_options(tmp_path: Path) -> None:
    cfg = EPConfig(128, 8, 2, 16, 2)
    ranks = connection.connect_local(cfg, ["cpu"] * 2, sms=8, library=tmp_path, tuning=built_in(cfg, 16))
    assert [rank.rank for rank in ranks] == [0, 1]


@pytest.mark.parametrize(
    ("devices", "sms", "ctas"),
    [
        ([0, 1, 2, 3], None, [264] * 4),
        ([0, 1, 2, 3], 132, [264] * 4),
        ([0, 1, 2, 3], 16, [16] * 4),
        ([0, 1, 2, 3], 131, [131] * 4),
        ([0, 0, 0, 0], None, [31] * 4),
        ([0, 0, 0, 0], 16, [16] * 4),
        ([0, 0, 0, 0], 132, [31] * 4),
        ([0, 1, 0, 0], None, [41, 264, 41, 41]),
    ],
)
def test_ranks_that_share_a_gpu_leave_sms_free(gpus: None, devices: list, sms: int | None, ctas: list) -> None:
    """GPUs of 132 SMs, which hold two CTAs each: all of a GPU to one rank, else at most one CTA on an SM, 8 without."""
    ranks = connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{index}" for index in devices], sms=sms)
    assert [rank.max_ctas for rank in ranks] == ctas
    assert [rank.shared_device for rank in ranks] == [devices.count(index) > 1 for index in devices]


def test_cuda_is_the_current_device(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.torch.cuda, "current_device", lambda: 2)
    made: list[str] = []
    monkeypatch.setattr(connection, "_make_arena", lambda cfg, rank, device: made.append(str(device)) or PLAIN)
    connection.connect_local(EPConfig(128, 8, 2, 16, 2), ["cuda", "cuda:1"])
    assert made == ["cuda:2", "cuda:1"]


def test_kernels_of_one_gpu_are_loaded_before_a_rank_is_made(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once on each GPU, however many ranks share it."""
    done: list[object] = []
    monkeypatch.setattr(connection, "load_local_kernels", lambda devices, library: done.append(list(devices)))
    monkeypatch.setattr(connection, "Communicator", lambda *args, **options: done.append("rank") or PLAIN)
    connection.connect_local(EPConfig(128, 8, 2, 16, 4), ["cuda:1", "cuda:0", "cuda:1", "cuda:1"])
    assert done == [[1, 0], *["rank"] * 4]


def test_a_rank_has_a_cta_at_least(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "resident_ctas", lambda device: 3)
    ranks = connection.connect_local(EPConfig(128, 8, 2, 16, 4), ["cuda:0"] * 4)
    assert [rank.max_ctas for rank in ranks] == [1] * 4


def test_sms_that_a_gpu_does_not_have(gpus: None) -> None:
    with pytest.raises(EPConfigError, match=r"sms = 133: must be in \[1, 132\], the SMs of cuda:0"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 2), ["cuda:0"] * 2, sms=133)


@pytest.mark.parametrize("failed", [None, 0, 2])
def test_memory_goes_with_the_last_rank(gpus: None, monkeypatch: pytest.MonkeyPatch, failed: int | None) -> None:
    """Once no device works any more; none goes where a wait of some rank, be it closed long ago, has timed out."""
    done: list[str] = []

    def make(what: str, rank: int, **more: object) -> SimpleNamespace:
        return SimpleNamespace(address=4096 * rank, free=lambda: done.append(f"{what} {rank}"), **more)

    def rank(cfg: EPConfig, rank: int, *args: object, release: Callable, **options: object) -> SimpleNamespace:
        return make("rank", rank, failed=rank == failed, release=release)

    monkeypatch.setattr(connection, "_make_arena", lambda cfg, rank, device: make("arena", rank))
    monkeypatch.setattr(connection, "Communicator", rank)
    monkeypatch.setattr(connection, "unload_kernels", lambda kernels, device: done.append(f"kernels {device.index}"))
    monkeypatch.setattr(connection.torch.cuda, "synchronize", lambda device: done.append(f"wait {device.index}"))
    ranks = connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{index}" for index in range(4)])
    for index in (1, 3, 0):
        ranks[index].release(ranks[index])
    assert not done
    ranks[2].release(ranks[2])
    freed = [f"{what} {rank}" for what in ("rank", "arena", "kernels") for rank in (3, 2, 1, 0)]
    assert done == [*(f"wait {index}" for index in range(4)), *(freed if failed is None else [])]


@pytest.mark.parametrize("last", ["arena", "rank"])
def test_what_was_made_is_freed_when_connecting_fails(gpus: None, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Ranks before arenas before kernels, the last first."""
    freed = []

    def make(what: str, rank: int) -> SimpleNamespace:
        if what == last and rank == 2:
            raise EPError("CUDA driver: CUDA_ERROR_OUT_OF_MEMORY")
        return SimpleNamespace(address=4096 * rank, free=lambda: freed.append(f"{what} {rank}"))

    monkeypatch.setattr(connection, "_make_arena", lambda cfg, rank, device: make("arena", rank))
    monkeypatch.setattr(connection, "Communicator", lambda cfg, rank, *args, **options: make("rank", rank))
    monkeypatch.setattr(connection, "unload_kernels", lambda kernels, device: freed.append(f"kernels {device.index}"))
    with pytest.raises(EPError, match="OUT_OF_MEMORY"):
        connection.connect_local(EPConfig(128, 8, 2, 16, 4), [f"cuda:{rank}" for rank in range(4)])
    arenas, kernels = ([f"{what} {rank}" for rank in (3, 2, 1, 0)] for what in ("arena", "kernels"))
    assert freed == [*(arenas[2:] if last == "arena" else ["rank 1", "rank 0", *arenas]), *kernels]


class Machine:
    """What `connect` takes from a machine and gives back, by rank; `broken` names (what, rank) that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *broken: tuple[str, int]) -> None:
        self.held: set[tuple] = set()
        self.broken = set(broken)
        fakes = {
            "check_gpu": lambda name, device: None,
            "find_tuning": lambda *args: None,
            "load_kernels": lambda cfg, device, library, hooks: self.take("kernels"),
            "unload_kernels": lambda kernels, device: self.give_back(kernels),
            "_make_arena": lambda cfg, rank, device: self.arena(),
            "open_handle": lambda device, handle: self.mapped(handle),
            "close_handle": lambda device, address: self.give_back(("mapping", dist_rank(), address)),
            "Communicator": lambda *args, release, **options: self.communicator(release),
            "Library": lambda folder: None,
            "load_local_kernels": lambda devices, library: None,
            "_max_ctas": lambda device, sms, ranks: 8,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(connection, name, fake)
        monkeypatch.setattr(connection._Place, "of", lambda cfg, device: PLACES[dist_rank()])
        for name, fake in {
            "current_device": lambda: 0,
            "device_count": lambda: int(("gpu", dist_rank()) not in self.broken),
            "get_device_name": str,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(connection.torch.cuda, name, fake)

    def take(self, what: str, *more: object) -> tuple:
        if (what, dist_rank()) in self.broken:
            raise EPError(f"no {what}")
        one = (what, dist_rank(), *more)
        self.held.add(one)
        return one

    def give_back(self, one: tuple) -> None:
        self.held.remove(one)

    def arena(self) -> SimpleNamespace:
        one = self.take("arena")
        return SimpleNamespace(address=0, handle=lambda: dist_rank(), free=lambda: self.give_back(one))

    def mapped(self, handle: int) -> int:
        if ("mapping", dist_rank()) in self.broken and self.held & {
            ("mapping", dist_rank(), peer) for peer in range(9)
        }:
            raise EPError("no second mapping")
        self.held.add(("mapping", dist_rank(), handle))
        return handle

    def communicator(self, release: Callable) -> SimpleNamespace:
        one = self.take("rank")
        made = SimpleNamespace(failed=False, free=lambda: self.give_back(one))
        made.close = lambda: release(made)
        return made

    def synchronize(self, device: object) -> None:
        if ("synchronize", dist_rank()) in self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def dist_rank() -> int:
    """The rank that this thread stands for."""
    return connection.dist.get_rank(None)


@pytest.mark.parametrize("what", ["kernels", "arena", "mapping", "rank"])
def test_what_processes_made_is_given_back_when_connecting_fails(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    machine = Machine(monkeypatch, (what, 1))
    got = collective(monkeypatch, lambda rank: connection.connect(CFG))
    assert "no " in str(got[1]) and all(isinstance(one, EPError) for one in got)
    assert str(got[0]).startswith("rank 1 could not connect") and not machine.held


def test_processes_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    ranks = collective(monkeypatch, lambda rank: connection.connect(CFG))
    assert len(machine.held) == RANKS * (3 + RANKS - 1)
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS and not machine.held


def test_a_rank_whose_device_failed_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keep their memory, and only it has the error."""
    machine = Machine(monkeypatch, ("synchronize", 2))
    ranks = collective(monkeypatch, lambda rank: connection.connect(CFG))
    held = set(machine.held)
    got = collective(monkeypatch, lambda rank: ranks[rank].close())
    assert got[:2] == [None, None] and "illegal memory access" in str(got[2]) and machine.held == held


def test_a_rank_with_another_number_of_ranks_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    got = collective(monkeypatch, lambda rank: connection.connect(replace(CFG, world_size=2) if rank == 2 else CFG))
    assert str(got[2]) == "world_size = 2: the process group has 3 ranks"
    assert [str(one) for one in got[:2]] == [f"rank 2 could not connect: EPConfigError: {got[2]}"] * 2


def test_a_process_without_a_group() -> None:
    rule = r"group = None: must be initialised, call torch.distributed.init_process_group first \(without GPUs: "
    with pytest.raises(EPConfigError, match=rule + r'connect_local\(cfg, \["cpu"\] \* 3\)\)'):
        connection.connect(CFG)


def test_a_rank_without_a_gpu_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, ("gpu", 1))
    monkeypatch.setattr(connection, "_machine", lambda: "machine")
    got = collective(monkeypatch, lambda rank: connection.connect(CFG))
    for rank, other in enumerate((0, 0, 2)):
        assert isinstance(got[rank], EPConfigError)
        assert str(got[rank]) == f"rank 1 has no CUDA GPU, but rank {other} has: must be all ranks or none"


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
