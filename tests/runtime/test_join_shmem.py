"""How ranks with a process each come together over NVSHMEM and part, with a library of Python and threads as ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.layouts.maps.mail import PARITIES, Channel
from cute_ep.runtime import join_shmem, process_connection
from cute_ep.runtime.mail import MailParts
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.rails import shmem, transport
from cute_ep.runtime.rails.shmem_library import Addition, Begun

from .as_threads import RANKS, collective
from .emulated_mail import at
from .test_connect_processes import CFG, NODES, Rail, nodes_of

CONFIG = EPConfig(hidden=128, num_experts=6, top_k=2, max_tokens_per_rank=4, world_size=RANKS, ranks_per_node=1)


class Pe:
    """The library of one process; `broken` names a method that fails."""

    def __init__(self, rank: int, begun: Begun, broken: str = "") -> None:
        self.rank, self.state, self.broken = rank, begun, broken
        self.calls: list[tuple] = []
        self.memory = torch.empty(0)

    def begun(self) -> Begun:
        return self.state

    def place(self) -> tuple[int, int]:
        return self.rank, RANKS

    def unique_id(self) -> bytes:
        return b"id of rank %d" % self.rank

    def begin(self, *given: object) -> None:
        self.called("begin", *given)

    def join(self) -> None:
        self.called("join")

    def allocate(self, nbytes: int) -> int:
        self.called("allocate")
        self.memory = torch.full((nbytes,), 9, dtype=torch.uint8)
        return self.memory.data_ptr()

    def free(self, address: int) -> None:
        assert address == self.memory.data_ptr()
        self.called("free")

    def leave(self) -> None:
        self.called("leave")

    def put(self, to: int, source: int, nbytes: int, signal: Addition, stream: int) -> None:
        self.called("put", nbytes, signal.amount, signal.pe)

    def signal(self, addition: Addition, stream: int) -> None:
        self.called("signal", addition.amount, addition.pe)

    def called(self, name: str, *given: object) -> None:
        if name == self.broken:
            raise EPError(f"no {name}")
        self.calls.append((name, *given))

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls if name not in ("put", "signal")]


class Machine:
    """Ranks' libraries, kernels that are given back, and ordinary memory for a GPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begun: Begun = Begun.NOT, broken: tuple[str, int] = ("", 0)):
        self.pes = [Pe(rank, begun, broken[0] if rank == broken[1] else "") for rank in range(RANKS)]
        self.patch, self.held = monkeypatch, set[int]()
        self.mine = threading.local()
        device = SimpleNamespace(index=0)
        node = SimpleNamespace(device=device)

        def kernels(cfg: EPConfig, device: object, library: object, undo: Any) -> dict:
            rank = self.mine.rank
            self.held.add(rank)
            undo.callback(self.held.discard, rank)
            return {}

        def parts(cfg: EPConfig, node: object, status: Any, kernels: dict, memory: tuple[int, int]) -> MailParts:
            pe = self.pes[status.rank]
            assert memory == (pe.memory.data_ptr(), pe.memory.numel())
            return MailParts(cfg, status.rank, pe.memory, kernels, 0, 0, 4)

        def status(cfg: EPConfig, rank: int, undo: Any, *, landings_apart: bool) -> Any:
            assert landings_apart
            return SimpleNamespace(rank=rank, peers=tuple(range(cfg.world_size)))

        def fill(address: int, byte: int, count: int) -> None:
            at(address, torch.uint8, count).fill_(byte)

        patches: dict[Any, dict[str, Any]] = {
            join_shmem: {"mail_kernels": kernels, "mail_parts": parts, "rail_status": status},
            join_shmem.ShmemLibrary: {"load": lambda: self.pes[self.mine.rank]},
            shmem: {"on_device": lambda device: nullcontext(), "allocate": lambda nbytes: 0, "START_S": 5.0},
            shmem.driver_calls: {"free": lambda address: None, "fill": fill},
            shmem.torch.cuda: {"synchronize": lambda device: None, "Event": Event},
        }
        for place, fakes in patches.items():
            for name, fake in fakes.items():
                monkeypatch.setattr(place, name, fake)
        self.node = node

    def join(self, rank: int) -> Any:
        self.mine.rank = rank
        with Meeting(None) as meeting:
            return join_shmem.join_shmem(CONFIG, self.node, None, meeting)  # type: ignore[arg-type]

    def on_all(self, call: Callable[[int], object]) -> list[Any]:
        return collective(self.patch, call)


class Event:
    """What is queued happens at once."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def test_ranks_begin_with_the_id_of_the_first_and_end_when_all_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    rails = machine.on_all(machine.join)
    for rank, (pe, rail) in enumerate(zip(machine.pes, rails, strict=True)):
        assert pe.calls[0] == ("begin", b"id of rank 0", rank, RANKS, 0)
        counts = {count for name, *given in pe.calls if name in ("put", "signal") for count in given[-2:-1]}
        assert counts == {0}  # the first exchange is no round
        assert {given[-1] for name, *given in pe.calls if name == "put"} == set(range(RANKS)) - {rank}
        mail = rail.mail
        assert mail.parts.second == CONFIG.mail.allocation
        for landing in range(2):
            words = mail.words(landing)
            begins = [CONFIG.mail.free.at(channel) // 8 for channel in (Channel.FRAMES, Channel.SUMS)]
            assert [words[one : one + RANKS] for one in begins] == [[0] * RANKS, [1 - PARITIES] * RANKS]
            assert sum(map(abs, words)) == RANKS
    assert machine.on_all(lambda rank: rails[rank].leave(5, abort=False)) == [None] * RANKS
    assert all(pe.names() == ["begin", "allocate", "free", "leave"] for pe in machine.pes) and not machine.held


def test_ranks_join_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, Begun.WITH_GPU)
    machine.on_all(machine.join)
    assert all(pe.names() == ["join", "allocate"] for pe in machine.pes)


def test_who_leaves_without_the_others_leaves_everything_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    rails = machine.on_all(machine.join)
    rails[0].leave(5, abort=True)
    assert machine.pes[0].names() == ["begin", "allocate"] and machine.held == set(range(RANKS))


def test_memory_that_cannot_be_given_back_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a rank has ended meanwhile, for whom the others wait."""
    machine = Machine(monkeypatch, broken=("free", 1))
    rails = machine.on_all(machine.join)
    machine.on_all(lambda rank: rails[rank].leave(5, abort=False))
    assert machine.held == {1} and machine.pes[1].names() == ["begin", "allocate"]


@pytest.mark.parametrize("what", ["begin", "allocate", "put"])
def test_a_rank_that_cannot_connect_is_named(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    machine = Machine(monkeypatch, broken=(what, 1))
    got = machine.on_all(machine.join)
    assert str(got[1]) == f"no {what}"
    assert str(got[0]) == str(got[2]) == f"rank 1 could not connect: EPError: no {what}" and not machine.held


def test_a_rank_without_enough_memory_is_named_before_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)

    def allocate(nbytes: int) -> int:
        assert nbytes > CONFIG.mail.allocation
        if machine.mine.rank == 2:
            raise EPError("the GPU has 1 of 2 MiB free")
        return 0

    monkeypatch.setattr(shmem, "allocate", allocate)
    got = machine.on_all(machine.join)
    assert str(got[0]) == "rank 2 could not connect: EPError: the GPU has 1 of 2 MiB free"
    assert not any(pe.names() for pe in machine.pes) and not machine.held


def test_processes_of_which_only_some_have_begun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.pes[2].state = Begun.WITH_GPU
    for error in machine.on_all(machine.join):
        assert isinstance(error, EPConfigError) and "rank 0 has not begun: must be PE 0 of 3" in str(error)
    assert not any(pe.names() for pe in machine.pes)


# ---- the argument of connect


@pytest.mark.parametrize("given", ["ucx", "NCCL", 3, ["nccl"], ""], ids=str)
@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_another_transport_is_refused(monkeypatch: pytest.MonkeyPatch, given: Any, where: str) -> None:
    nodes_of(monkeypatch, *[("gpu", rank) for rank in range(RANKS) if where == "cpu"])
    for error in collective(monkeypatch, lambda rank: process_connection.connect(NODES, transport=given)):
        assert isinstance(error, EPConfigError)
        assert str(error) == f"transport = {given!r}: must be None or one of 'nccl', 'nvshmem'"


def test_one_node_has_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch)
    for error in collective(monkeypatch, lambda rank: process_connection.connect(CFG, transport="nccl")):
        assert str(error).startswith("transport = 'nccl': must be None on one node")


def test_ranks_take_the_same_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch)
    monkeypatch.setattr(transport.ShmemLibrary, "load", lambda: None)
    given = (None, "nccl", "nvshmem")
    rule = "transport = 'nccl' on rank 0, 'nvshmem' on rank 2: must be the same on all ranks"
    for error in collective(monkeypatch, lambda rank: process_connection.connect(NODES, transport=given[rank])):
        assert str(error) == rule


def test_a_transport_has_its_own_library_and_rail(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of NCCL is not asked for."""
    machine = nodes_of(monkeypatch)
    joined, loaded = [], []
    monkeypatch.setattr(transport.NcclLibrary, "loaded", lambda: 1 / 0)
    monkeypatch.setattr(transport.ShmemLibrary, "load", lambda: loaded.append(1))
    monkeypatch.setattr(process_connection, "join_shmem", lambda cfg, *given: joined.append(cfg) or Rail(machine, cfg))
    collective(monkeypatch, lambda rank: process_connection.connect(NODES, transport="nvshmem"))
    assert joined == [NODES] * RANKS and len(loaded) == RANKS


def test_cpu_ranks_have_no_use_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, *[("gpu", rank) for rank in range(RANKS)])
    monkeypatch.setattr(process_connection, "connect_processes", lambda cfg, rank, on_all_ranks: rank)
    monkeypatch.setattr(transport.ShmemLibrary, "load", lambda: 1 / 0)
    got = collective(monkeypatch, lambda rank: process_connection.connect(NODES, transport="nvshmem"))
    assert got == list(range(RANKS))
