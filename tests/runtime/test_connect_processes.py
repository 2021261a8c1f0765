"""`connect`, one process per rank: which processes go together, and what they give back when one of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cute_ep.api import host
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.runtime import gpus, process_connection, trial
from cute_ep.runtime.places import Place
from cute_ep.runtime.rails import transport
from cute_ep.runtime.symmetric import Kind

from .as_threads import RANKS, collective
from .fake_machine import CFG, NOTHING, Machine, dist_rank


@pytest.fixture(params=Kind, ids=lambda kind: kind.name.lower())
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """The only one that is tried."""
    monkeypatch.setattr(trial, "ON_ONE_MACHINE", (request.param,))
    return request.param


# ---- memory


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("kernels", "no kernels"),
        ("arena", "CUDA driver: CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("mapping", "CUDA driver: CUDA_ERROR_MAP_FAILED"),
        ("rank", "no rank"),
    ],
)
def test_all_ranks_give_back_what_they_made_when_one_cannot_connect(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, what: str, why: str
) -> None:
    machine = Machine(monkeypatch, (what, 1))
    got = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    assert str(got[1]) == why and all(isinstance(one, EPError) for one in got)
    assert str(got[0]) == f"rank 1 could not connect: EPError: {why}" and machine.held == NOTHING


def test_nothing_is_loaded_before_all_ranks_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load waits for the kernels that run, and holds up launches of the process: so all that these wait for must have
    been launched, as all has that comes before `connect`."""
    machine = Machine(monkeypatch)
    came, loads = set[int](), list[bool]()
    take = machine.take
    monkeypatch.setattr(machine, "take", lambda what: loads.append(len(came) == RANKS) or take(what))

    def connect(rank: int) -> Any:
        time.sleep(0.1 * rank)
        came.add(rank)
        return process_connection.connect(CFG)

    collective(monkeypatch, connect)
    assert loads == [True] * len(loads) and len(loads) >= RANKS


def test_every_rank_maps_what_the_others_allocated(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """By their handles; each knows its own arena by its address."""
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    begins = [CFG.arena.begin(rank) for rank in range(RANKS)]
    arenas = [one.parts.arena.address - begin for one, begin in zip(ranks, begins, strict=True)]
    assert sorted(arenas) == sorted(machine.memory)
    for rank, one in enumerate(ranks):
        places = [address - begin for address, begin in zip(one.peers, begins, strict=True)]
        assert [machine.mapped.get(place, place) for place in places] == arenas
        assert [place in machine.mapped for place in places] == [peer != rank for peer in range(RANKS)]


def test_ranks_that_close_give_back_all_that_they_held(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    assert machine.held == (2 * RANKS, RANKS, RANKS * (RANKS - 1))
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS and machine.held == NOTHING


def test_ranks_whose_waits_timed_out_give_it_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    for one in ranks[1:]:
        one.failed = True
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS and machine.held == NOTHING


def test_when_a_device_has_failed_all_ranks_keep_their_memory(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Only the rank of that device has the error."""
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    machine.broken = {("synchronize", 2)}
    held = machine.held
    got = collective(monkeypatch, lambda rank: ranks[rank].close())
    assert got[:2] == [None, None] and "illegal memory access" in str(got[2]) and machine.held == held


# ---- processes that do not go together


def test_a_process_without_a_group_is_told_how_to_make_one() -> None:
    rule = r"group = None: must be initialised, call torch.distributed.init_process_group first \(without GPUs: "
    with pytest.raises(EPConfigError, match=rule + r'connect_local\(cfg, \["cpu"\] \* 3\)\)'):
        process_connection.connect(CFG)


def test_a_rank_with_another_number_of_ranks_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    got = collective(
        monkeypatch, lambda rank: process_connection.connect(replace(CFG, world_size=2) if rank == 2 else CFG)
    )
    assert str(got[2]) == "world_size = 2: the process group has 3 ranks"
    assert [str(one) for one in got[:2]] == [f"rank 2 could not connect: EPConfigError: {got[2]}"] * 2


def test_no_rank_connects_while_one_captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, capturing = Machine(monkeypatch), {2}
    monkeypatch.setattr(host, "is_capturing", lambda device: dist_rank() in capturing)
    got = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    assert str(got[2]).startswith("connect: waits for the GPU, which no CUDA graph captures")
    assert [str(one) for one in got[:2]] == [f"rank 2 could not connect: EPError: {got[2]}"] * 2
    assert machine.held == NOTHING
    capturing.clear()
    assert not any(
        isinstance(one, Exception) for one in collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    )


def test_all_ranks_have_a_gpu_or_none_has(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, ("gpu", 1))
    got = collective(monkeypatch, lambda rank: process_connection.connect(CFG))
    for rank, other in enumerate((0, 0, 2)):
        assert isinstance(got[rank], EPConfigError)
        assert str(got[rank]) == f"rank 1 has no CUDA GPU, but rank {other} has: must be all ranks or none"


# ---- several nodes

NODES = replace(CFG, ranks_per_node=1)


class Rail:
    """What `join_rail` returns, and how it was left."""

    def __init__(self, machine: Machine, cfg: EPConfig) -> None:
        self.one, self.left = machine.take("rail"), list[bool]()
        parts = SimpleNamespace(rank=dist_rank())
        self.machine, self.mail, self.status = machine, SimpleNamespace(cfg=cfg, parts=parts), None

    def leave(self, patience: float, *, abort: bool) -> None:
        self.left.append(abort)
        self.machine.made.remove(self.one)


def nodes_of(monkeypatch: pytest.MonkeyPatch, *broken: tuple[str, int]) -> Machine:
    machine = Machine(monkeypatch, *broken)
    monkeypatch.setattr(transport.NcclLibrary, "loaded", lambda: None)
    monkeypatch.setattr(process_connection, "sms_over_nodes", lambda device, sms: 8)
    monkeypatch.setattr(process_connection, "join_rail", lambda cfg, node, library, meeting: Rail(machine, cfg))
    monkeypatch.setattr(
        process_connection, "NodesCommunicator", lambda node, mail, status, release: Joined(node, release)
    )
    return machine


class Joined(SimpleNamespace):
    """A communicator over nodes."""

    def __init__(self, node: SimpleNamespace, release: Callable) -> None:
        super().__init__(node=node, close=lambda: release(self))


def test_ranks_of_a_node_map_each_other_only_and_give_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = nodes_of(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(NODES))
    assert machine.held == (3 * RANKS, RANKS, 0)
    for rank, one in enumerate(ranks):
        parts = one.node.parts
        assert parts.cfg.world_size == 1 and parts.rank == 0 and parts.first_rank == rank
        assert one.node.peers == [parts.arena.address]
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS and machine.held == NOTHING


def test_a_device_that_has_failed_leaves_its_rail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays, and what NCCL has under way is aborted on all ranks."""
    machine = nodes_of(monkeypatch)
    left: list[Rail] = []
    monkeypatch.setattr(
        process_connection, "join_rail", lambda cfg, node, library, meeting: left.append(Rail(machine, cfg)) or left[-1]
    )
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(NODES))
    machine.broken = {("synchronize", 2)}
    got = collective(monkeypatch, lambda rank: ranks[rank].close())
    assert got[:2] == [None, None] and "illegal memory access" in str(got[2])
    assert [one.left for one in left] == [[True]] * RANKS and machine.held == (2 * RANKS, RANKS, 0)


def test_connect_warns_where_mail_takes_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes_of(monkeypatch)
    monkeypatch.setattr(process_connection, "slow_network", lambda: "TCP sockets")
    monkeypatch.setattr(Place, "of", lambda cfg, device: Place(cfg, f"machine {dist_rank()}", f"GPU-{dist_rank()}"))
    ranks: list[Any] = collective(monkeypatch, lambda rank: process_connection.connect(NODES))
    assert sorted(caplog.messages) == [f"rank {rank}: TCP sockets" for rank in range(RANKS)]
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS


def test_options_that_nodes_do_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch)
    hooks = process_connection.Hooks("a:epilogue")
    for error in collective(monkeypatch, lambda rank: process_connection.connect(NODES, hooks=hooks)):
        assert "must be Hooks() over 3 nodes" in str(error)
    have = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(gpus.torch.cuda, "get_device_properties", lambda device: have)
    assert [gpus.sms_over_nodes("cuda:0", sms) for sms in (None, 24, 124)] == [124, 24, 124]
    with pytest.raises(EPConfigError, match=r"^sms = 125: must be at most 124 over nodes, which leaves 8 of 132 SMs"):
        gpus.sms_over_nodes("cuda:0", 125)
    with pytest.raises(EPConfigError, match=r"^sms = 133: must be in \[1, 132\]"):
        gpus.sms_over_nodes("cuda:0", 133)


def test_all_give_back_what_they_made_when_a_rail_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = nodes_of(monkeypatch)

    def join_rail(cfg: EPConfig, node: object, library: object, meeting: Any) -> None:
        meeting.on_all_ranks(lambda: 1 / (dist_rank() - 1), doing="connect the nodes by NCCL")

    monkeypatch.setattr(process_connection, "join_rail", join_rail)
    got = collective(monkeypatch, lambda rank: process_connection.connect(NODES))
    assert isinstance(got[1], ZeroDivisionError) and machine.held == NOTHING
    assert str(got[0]) == "rank 1 could not connect: ZeroDivisionError: division by zero"
