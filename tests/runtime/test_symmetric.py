"""How the ranks of a node share memory: what each kind gives, which one they take, and what is left open."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.runtime import driver, process_connection, symmetric, trial
from cute_ep.runtime.meeting import Meeting
from cute_ep.runtime.symmetric import SHARINGS, Kind, refusal
from tests.fake_driver import DESCRIPTOR, FABRIC, GRANULARITY, FakeDriver, cuda
from tests.processes import WITHOUT_GPU, run_ranks

from .as_threads import RANKS, collective
from .fake_machine import CFG, NOTHING, PLACES, Machine, dist_rank

DEVICE = torch.device("cuda", 3)
NOT_PERMITTED = "CUDA driver: CUDA_ERROR_NOT_PERMITTED"


def open_files() -> list[str]:
    """What the descriptors of this process are of."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link) for link in links if os.path.lexists(link))


# ---- one kind


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver of a device that torch takes for a GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return FakeDriver(monkeypatch)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_memory_is_seen_by_a_peer_and_then_given_back(fake: FakeDriver, kind: Kind) -> None:
    """Zeros but for what was stored; its size is rounded up, its handle and descriptors are closed."""
    before = open_files()
    with closing(SHARINGS[kind](DEVICE, 0)) as own, closing(SHARINGS[kind](DEVICE, 1)) as peer:
        told = [own.begin(), peer.begin()]
        own.introduce({1: told[1]})
        memory = driver.DeviceMemory(DEVICE, 64, begin=8, take=own.take)
        memory.store(16, (1, 1 << 63))
        mapped = peer.open(0, own.offer(memory.allocation))
        content = fake.bytes_at(mapped).raw
        assert content[:64] == bytes(24) + b"\1" + bytes(7) + bytes(7) + b"\x80" + bytes(24)
        assert len(content) == (64 if kind is Kind.IPC else GRANULARITY)
        assert len(fake.handles) == (kind is not Kind.IPC) and len(fake.mapped) == 1
        peer.shut(mapped)
        memory.free()
    assert not (fake.mapped or fake.memory or fake.handles or fake.reserved) and open_files() == before


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_mapped_is_given_back(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real, made = getattr(fake, call), []
    failed = (cuda.CUresult.CUDA_ERROR_INVALID_DEVICE,)

    def fails(*arguments: Any) -> tuple:
        if call == "cuMemSetAccess":  # the fake driver wants it before memory is unmapped
            real(*arguments)
        made.append(call)
        return failed

    monkeypatch.setattr(fake, call, fails)
    with pytest.raises(EPError, match="CUDA_ERROR_INVALID_DEVICE"):
        symmetric.MappedAllocation(3, 64, fabric=False)
    assert made and not (fake.mapped or fake.memory or fake.handles or fake.reserved)


def test_memory_that_torch_holds_unused_is_given_back_first(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    create, room = fake.cuMemCreate, [0]

    def full(*arguments: Any) -> tuple:
        lacks = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, cuda.CUmemGenericAllocationHandle()
        return create(*arguments) if room[0] else lacks

    monkeypatch.setattr(fake, "cuMemCreate", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 200 * 2**20))
    with pytest.raises(EPError, match=r"symmetric memory of 2 MiB: the GPU has 0 of 200 MiB free; .*tokens_per_rank"):
        symmetric.MappedAllocation(3, 64, fabric=True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: room.append(room.pop() + 1))
    symmetric.MappedAllocation(3, 64, fabric=True).free()


def test_a_device_says_what_it_refuses(fake: FakeDriver) -> None:
    before = open_files()
    assert [refusal(kind, DEVICE) for kind in Kind] == [None] * 3
    fake.refused = {FABRIC}
    assert [refusal(kind, DEVICE) for kind in Kind] == [NOT_PERMITTED, None, None]
    assert not (fake.memory or fake.handles or fake.reserved) and open_files() == before


# ---- which kind


def taken(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What ranks have logged, in their order."""
    lines = [one.getMessage() for one in caplog.records if "shares memory" in one.getMessage()]
    return sorted(line.removeprefix("rank ") for line in lines)


def connect_and_close(monkeypatch: pytest.MonkeyPatch, cfg: EPConfig = CFG, times: int = 1) -> None:
    def work(rank: int) -> None:
        for _ in range(times):
            process_connection.connect(cfg).close()

    assert collective(monkeypatch, work) == [None] * RANKS


def test_ranks_of_a_machine_take_descriptors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(monkeypatch)
    with caplog.at_level(logging.INFO, "cute_ep"):
        connect_and_close(monkeypatch)
    assert taken(caplog) == [f"{rank} shares memory by file descriptors" for rank in range(RANKS)]
    assert "cuMemAlloc" not in machine.calls and machine.held == NOTHING


def refuse_on(machine: Machine, monkeypatch: pytest.MonkeyPatch, rank: int, call: str, refused: tuple) -> None:
    """Have a call of the driver refused on one rank."""
    real = getattr(machine, call)
    monkeypatch.setattr(machine, call, lambda *given: refused if dist_rank() == rank else real(*given))


NO_MEMORY = cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, cuda.CUmemGenericAllocationHandle()
"""What a driver without such memory, as under WSL, answers."""


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        ("cuMemCreate", NO_MEMORY),
        ("cuMemExportToShareableHandle", (NO_MEMORY[0], 0)),
        ("cuMemImportFromShareableHandle", NO_MEMORY),
        ("cuMemSetAccess", NO_MEMORY[:1]),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_all_take_ipc_where_one_rank_has_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, refused: tuple
) -> None:
    """And say why; what was tried is given back."""
    before, machine = open_files(), Machine(monkeypatch)
    if call == "cuMemSetAccess":
        monkeypatch.setattr(machine, "cuMemUnmap", lenient(machine))
    refuse_on(machine, monkeypatch, 1, call, refused)
    with caplog.at_level(logging.INFO, "cute_ep"):
        connect_and_close(monkeypatch)
    why = "file descriptors (rank 1: CUDA driver: CUDA_ERROR_NOT_SUPPORTED)"
    assert taken(caplog) == [f"{rank} shares memory by CUDA IPC; it cannot by {why}" for rank in range(RANKS)]
    assert machine.held == NOTHING and open_files() == before


def lenient(machine: Machine) -> Callable[..., tuple]:
    """`cuMemUnmap` of memory that no device was given access to."""
    unmap = machine.cuMemUnmap

    def work(address: int, nbytes: int) -> tuple:
        machine._accessible.add(address)
        return unmap(address, nbytes)

    return work


def test_all_take_ipc_where_ranks_are_in_other_network_namespaces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that is not reached looks like one that is closed."""

    def not_there(*given: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    before, machine = open_files(), Machine(monkeypatch)
    monkeypatch.setattr(symmetric, "leave", not_there)
    with caplog.at_level(logging.INFO, "cute_ep"):
        connect_and_close(monkeypatch)
    assert all("by CUDA IPC; it cannot by file descriptors (rank 0: no descriptor has" in one for one in taken(caplog))
    assert "are both in one network namespace?" in taken(caplog)[0]
    assert machine.held == NOTHING and open_files() == before


def test_an_old_binding_without_the_functions_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """cuda-python raises RuntimeError for what the driver does not have."""

    def missing(*given: object) -> tuple:
        raise RuntimeError('Function "cuMemGetAllocationGranularity" not found')

    machine = Machine(monkeypatch)
    monkeypatch.setattr(machine, "cuMemGetAllocationGranularity", missing)
    with caplog.at_level(logging.INFO, "cute_ep"):
        connect_and_close(monkeypatch)
    assert "by CUDA IPC" in taken(caplog)[0] and "not found" in taken(caplog)[0]


def test_ranks_that_share_no_memory_are_told_all_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.refused = {DESCRIPTOR}
    monkeypatch.setattr(machine, "cuIpcOpenMemHandle", lambda *given: (NO_MEMORY[0], cuda.CUdeviceptr()))
    got = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    ours = ", ".join(f"rank {rank}: {NOT_PERMITTED}" for rank in range(RANKS))
    theirs = ours.replace("PERMITTED", "SUPPORTED")
    rule = f"are on one machine, but cannot share memory by file descriptors ({ours}), CUDA IPC ({theirs})"
    assert all(isinstance(one, EPConfigError) and str(one) == f"ranks 0 to 2 {rule}" for one in got)
    assert machine.held == NOTHING


# ---- over machines


def over_machines(machine: Machine, cfg: EPConfig = CFG) -> None:
    """Put each rank on a machine of its own, all in one NVLink domain."""
    machine.places = [
        replace(place, cfg=cfg, machine=f"machine {rank}", clique="c") for rank, place in enumerate(PLACES)
    ]


def test_ranks_of_an_nvlink_domain_take_fabric_handles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch)
    over_machines(machine)
    machine.refused = {DESCRIPTOR}
    with caplog.at_level(logging.INFO, "cute_ep"):
        connect_and_close(monkeypatch)
    assert taken(caplog) == [f"{rank} shares memory by fabric handles" for rank in range(RANKS)]
    assert machine.held == NOTHING


def test_without_fabric_handles_ranks_of_several_machines_are_told_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, machine = open_files(), Machine(monkeypatch)
    over_machines(machine)
    imported = cuda.CUresult.CUDA_ERROR_NOT_PERMITTED, cuda.CUmemGenericAllocationHandle()
    refuse_on(machine, monkeypatch, 2, "cuMemImportFromShareableHandle", imported)
    got = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    for one in got:
        assert isinstance(one, EPConfigError)
        assert str(one) == (
            "ranks_per_node = 3: ranks 0 to 2 are on 3 machines, and cannot share memory by fabric handles (rank 2: "
            f"{NOT_PERMITTED}): must be the ranks of one machine, unless nvidia-imex runs on all of them and each "
            "process has an IMEX channel (/dev/nvidia-caps-imex-channels)"
        )
    assert machine.held == NOTHING and open_files() == before


@pytest.mark.parametrize("refuses", [None, "a fabric handle"])
def test_each_node_takes_what_works_on_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch, refuses: str | None) -> None:
    """The first is on one machine, without descriptors on one rank; the second on one; the third on two machines, where
    a failure is one of all ranks."""
    before, machine = open_files(), Machine(monkeypatch)
    create, wanted = machine.cuMemCreate, set[tuple[int, Any]]()

    def on_some(nbytes: int, properties: Any, flags: int) -> tuple:
        wanted.add((dist_rank(), properties.requestedHandleTypes))
        refused = dist_rank() == 1 or (refuses is not None and dist_rank() == 5)
        return NO_MEMORY if refused else create(nbytes, properties, flags)

    monkeypatch.setattr(machine, "cuMemCreate", on_some)
    machines = ["a", "a", "b", "b", "c", "d"]

    def work(rank: int) -> Kind | None:
        with Meeting(None) as meeting, closing(trial.choose(meeting, 2, machines, DEVICE)) as chosen:
            return chosen.kind

    got = collective(monkeypatch, work, ranks=6)
    if refuses:
        assert {str(one)[:59] for one in got} == {"ranks_per_node = 2: ranks 4 to 5 are on 2 machines, and can"}
    else:
        assert got == [Kind.IPC] * 2 + [Kind.DESCRIPTOR] * 2 + [Kind.FABRIC] * 2
    assert wanted == {(rank, FABRIC if rank > 3 else DESCRIPTOR) for rank in range(6)}
    assert machine.held == NOTHING and open_files() == before


def test_a_rank_alone_on_its_node_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    connected = collective(monkeypatch, lambda rank: process_connection.connect(replace(CFG, skip_a2a=True)))
    assert not {"cuMemCreate", "cuIpcGetMemHandle"} & set(machine.calls) and machine.held == (2 * RANKS, RANKS, 0)
    collective(monkeypatch, lambda rank: connected[rank].close())
    assert machine.held == NOTHING


# ---- what is left open


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_a_hundred_connects_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(trial, "ON_ONE_MACHINE", (kind,))
    before = open_files()
    connect_and_close(monkeypatch, times=99)
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    more = list((Counter(open_files()) - Counter(before)).elements())  # a handle is a descriptor here
    assert len(more) == (0 if kind is Kind.IPC else RANKS) and all(one.startswith("/memfd:memory") for one in more)
    collective(monkeypatch, lambda rank: ranks[rank].close())
    assert open_files() == before and machine.held == NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("program", ["shares", "killed in the trial", "killed before it maps arenas"])
def test_processes_share_memory_and_know_of_one_that_is_killed(program: str, tmp_path: Path) -> None:
    """They see each other's stores; who survives raises EPError and leaves no socket open."""
    killed = [RANKS - 1] if "killed" in program else []
    where = ("tests.runtime.sharing_worker", RANKS, tmp_path / "store", program)
    run_ranks(*where, environment=[WITHOUT_GPU] * RANKS, timeout=100, killed=killed)
