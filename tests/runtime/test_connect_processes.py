"""`connect`, one process per rank: which processes go together, and what they give back when one of them fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.runtime import connection, gpus
from cute_ep.runtime.parts import RankParts
from cute_ep.runtime.places import Place, check_places, equal_runs
from tests.fake_driver import FakeDriver, cuda

from .as_threads import RANKS, collective

CFG = EPConfig(hidden=128, num_experts=6, top_k=2, max_tokens_per_rank=16, world_size=RANKS)
PLACES = [Place(CFG, "machine", f"GPU-{rank}") for rank in range(RANKS)]
NO_GPU = {"gpu": None}


class Machine(FakeDriver):
    """What `connect` takes from a machine and gives back: kernels and communicators by rank, here, and a driver's
    memory; `broken` names (what, rank) that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *broken: tuple[str, int]) -> None:
        super().__init__(monkeypatch)
        self.made: set[tuple] = set()
        self.broken = set(broken)
        self.mappings = Counter[int]()
        fakes = {
            "check_gpu": lambda name, device: None,
            "find_tuning": lambda *args: None,
            "load_kernels": lambda cfg, device, library, hooks: self.take("kernels"),
            "unload_kernels": lambda kernels, device: self.made.remove(kernels),
            "Communicator": lambda parts, peers, release, **options: self.communicator(parts, peers, release),
            "Library": lambda folder: None,
            "load_local_kernels": lambda devices, library: None,
            "_max_ctas": lambda device, sms, ranks: 8,
            "resident_ctas": lambda device: 8,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(connection, name, fake)
        monkeypatch.setattr(Place, "of", lambda cfg, device: replace(PLACES[dist_rank()], **({} if device else NO_GPU)))
        for name, fake in {
            "current_device": lambda: 0,
            "device": lambda device: nullcontext(),
            "device_count": lambda: int(("gpu", dist_rank()) not in self.broken),
            "get_device_name": str,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(connection.torch.cuda, name, fake)

    @property
    def held(self) -> tuple[int, int, int]:
        """Kernels and communicators, allocations, mappings."""
        return len(self.made), len(self.memory), len(self.mapped)

    def take(self, what: str) -> tuple:
        if (what, dist_rank()) in self.broken:
            raise EPError(f"no {what}")
        one = (what, dist_rank())
        self.made.add(one)
        return one

    def cuMemAlloc(self, nbytes: int) -> tuple:
        if ("arena", dist_rank()) in self.broken:
            return cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, cuda.CUdeviceptr()
        return super().cuMemAlloc(nbytes)

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple:
        rank = dist_rank()
        self.mappings[rank] += 1
        if ("mapping", rank) in self.broken and self.mappings[rank] == 2:
            return cuda.CUresult.CUDA_ERROR_MAP_FAILED, cuda.CUdeviceptr()
        return super().cuIpcOpenMemHandle(handle, flags)

    def communicator(self, parts: RankParts, peers: list[int], release: Callable) -> SimpleNamespace:
        one = self.take("rank")
        made = SimpleNamespace(failed=False, parts=parts, peers=peers, free=lambda: self.made.remove(one))
        made.close = lambda: release(made)
        return made

    def synchronize(self, device: object) -> None:
        if ("synchronize", dist_rank()) in self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


NOTHING = (0, 0, 0)


def dist_rank() -> int:
    """The rank that this thread stands for."""
    return connection.dist.get_rank(None)


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
    monkeypatch: pytest.MonkeyPatch, what: str, why: str
) -> None:
    machine = Machine(monkeypatch, (what, 1))
    got = collective(monkeypatch, lambda rank: connection.connect(CFG))
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
        return connection.connect(CFG)

    collective(monkeypatch, connect)
    assert loads == [True] * len(loads) and len(loads) >= RANKS


def test_every_rank_maps_what_the_others_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their handles; each knows its own arena by its address."""
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: connection.connect(CFG))
    begins = [CFG.arena.begin(rank) for rank in range(RANKS)]
    arenas = [one.parts.arena.address - begin for one, begin in zip(ranks, begins, strict=True)]
    assert sorted(arenas) == sorted(machine.memory)
    for rank, one in enumerate(ranks):
        places = [address - begin for address, begin in zip(one.peers, begins, strict=True)]
        assert [machine.mapped.get(place, place) for place in places] == arenas
        assert [place in machine.mapped for place in places] == [peer != rank for peer in range(RANKS)]


def test_ranks_that_close_give_back_all_that_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: connection.connect(CFG))
    assert machine.held == (2 * RANKS, RANKS, RANKS * (RANKS - 1))
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS and machine.held == NOTHING


def test_ranks_whose_waits_timed_out_give_it_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: connection.connect(CFG))
    for one in ranks[1:]:
        one.failed = True
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS and machine.held == NOTHING


def test_when_a_device_has_failed_all_ranks_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rank of that device has the error."""
    machine = Machine(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: connection.connect(CFG))
    machine.broken = {("synchronize", 2)}
    held = machine.held
    got = collective(monkeypatch, lambda rank: ranks[rank].close())
    assert got[:2] == [None, None] and "illegal memory access" in str(got[2]) and machine.held == held


# ---- processes that do not go together


def test_a_process_without_a_group_is_told_how_to_make_one() -> None:
    rule = r"group = None: must be initialised, call torch.distributed.init_process_group first \(without GPUs: "
    with pytest.raises(EPConfigError, match=rule + r'connect_local\(cfg, \["cpu"\] \* 3\)\)'):
        connection.connect(CFG)


def test_a_rank_with_another_number_of_ranks_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    got = collective(monkeypatch, lambda rank: connection.connect(replace(CFG, world_size=2) if rank == 2 else CFG))
    assert str(got[2]) == "world_size = 2: the process group has 3 ranks"
    assert [str(one) for one in got[:2]] == [f"rank 2 could not connect: EPConfigError: {got[2]}"] * 2


def test_all_ranks_have_a_gpu_or_none_has(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, ("gpu", 1))
    got = collective(monkeypatch, lambda rank: connection.connect(CFG))
    for rank, other in enumerate((0, 0, 2)):
        assert isinstance(got[rank], EPConfigError)
        assert str(got[rank]) == f"rank 1 has no CUDA GPU, but rank {other} has: must be all ranks or none"


def test_ranks_of_one_configuration_and_machine_on_gpus_of_their_own_go_together() -> None:
    for rank in range(RANKS):
        check_places(rank, PLACES)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        (
            {"cfg": replace(CFG, top_k=1)},
            r"^top_k = 2 on rank\(s\) \[0, 1\], 1 on rank\(s\) \[2\]: must be the same on all ranks$",
        ),
        ({"machine": "other"}, r"^rank 2 and rank 0 are on different machines: must be on one$"),
        ({"gpu": "GPU-1"}, "rank 1 and rank 2 are both on GPU GPU-1: each must call torch.cuda.set_device"),
    ],
    ids=["another configuration", "another machine", "the same GPU"],
)
def test_other_places_are_refused(changed: dict, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        check_places(0, [*PLACES[:2], replace(PLACES[2], **changed)])


def test_the_ranks_of_a_node_are_on_one_machine() -> None:
    """Two nodes may be on one, or on one each; on the CPU all are on one."""
    cfg = EPConfig(128, 8, 2, 16, 4, ranks_per_node=2)
    several = [Place(cfg, f"machine {rank // 2}", f"GPU-{rank}") for rank in range(4)]
    for one in (several, [replace(place, machine="machine 0") for place in several]):
        for rank in range(4):
            check_places(rank, one)
    mixed = [*several[:3], replace(several[3], machine="other")]
    check_places(0, mixed)
    with pytest.raises(
        EPConfigError, match=r"^rank 3 and rank 2 are on different machines: must be on one, as .* node 1$"
    ):
        check_places(2, mixed)
    with pytest.raises(
        EPConfigError, match=r"^rank 2 and rank 0 are on different machines: must be on one on the CPU$"
    ):
        check_places(0, [replace(place, gpu=None) for place in several])


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
    monkeypatch.setattr(connection.NcclLibrary, "loaded", lambda: None)
    monkeypatch.setattr(connection, "sms_over_nodes", lambda device, sms: 8)
    monkeypatch.setattr(connection, "join_rail", lambda cfg, node, library, meeting: Rail(machine, cfg))
    monkeypatch.setattr(connection, "NodesCommunicator", lambda node, mail, status, release: Joined(node, release))
    return machine


class Joined(SimpleNamespace):
    """A communicator over nodes."""

    def __init__(self, node: SimpleNamespace, release: Callable) -> None:
        super().__init__(node=node, close=lambda: release(self))


def test_ranks_of_a_node_map_each_other_only_and_give_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = nodes_of(monkeypatch)
    ranks: list[Any] = collective(monkeypatch, lambda rank: connection.connect(NODES))
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
        connection, "join_rail", lambda cfg, node, library, meeting: left.append(Rail(machine, cfg)) or left[-1]
    )
    ranks: list[Any] = collective(monkeypatch, lambda rank: connection.connect(NODES))
    machine.broken = {("synchronize", 2)}
    got = collective(monkeypatch, lambda rank: ranks[rank].close())
    assert got[:2] == [None, None] and "illegal memory access" in str(got[2])
    assert [one.left for one in left] == [[True]] * RANKS and machine.held == (2 * RANKS, RANKS, 0)


def test_connect_warns_where_mail_takes_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes_of(monkeypatch)
    monkeypatch.setattr(connection, "slow_network", lambda: "TCP sockets")
    monkeypatch.setattr(Place, "of", lambda cfg, device: Place(cfg, f"machine {dist_rank()}", f"GPU-{dist_rank()}"))
    ranks: list[Any] = collective(monkeypatch, lambda rank: connection.connect(NODES))
    assert sorted(caplog.messages) == [f"rank {rank}: TCP sockets" for rank in range(RANKS)]
    assert collective(monkeypatch, lambda rank: ranks[rank].close()) == [None] * RANKS


def test_options_that_nodes_do_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch)
    hooks = connection.Hooks("a:epilogue")
    for error in collective(monkeypatch, lambda rank: connection.connect(NODES, hooks=hooks)):
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

    monkeypatch.setattr(connection, "join_rail", join_rail)
    got = collective(monkeypatch, lambda rank: connection.connect(NODES))
    assert isinstance(got[1], ZeroDivisionError) and machine.held == NOTHING
    assert str(got[0]) == "rank 1 could not connect: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("machines", "found"),
    [("aaaa", 4), ("aabb", 2), ("abc", 1), ("a", 1)],
)
def test_machines_with_as_many_ranks_each_are_nodes(machines: str, found: int) -> None:
    assert equal_runs(machines) == found


@pytest.mark.parametrize(
    ("machines", "rule"),
    [
        ("aab", r"^ranks \[0, 1\] are on one machine and ranks \[2\] on another: must be as many on each$"),
        ("abab", r"^ranks \[0\], \[1\], \[2\], \[3\] are on machines in turns: the ranks of a machine must follow"),
    ],
)
def test_other_machines_make_no_nodes(machines: str, rule: str) -> None:
    with pytest.raises(EPConfigError, match=rule):
        equal_runs(machines)
