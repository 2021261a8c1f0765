"""A GPU without a GPU: what the host launches is recorded, tensors lie on the CPU.

The fixtures, which `tests/conftest.py` gives to all tests:

    make_rank         makes a rank of a group whose peers are absent
    rank              rank 0 of two in NVFP4
    launches          what ranks have launched, the first launch first: `launches.last("combine").arguments["sums.out"]`
    local_launches    the same of `quantize`, `fused_silu` and `copy_bytes`
    gpus              GPUS GPUs for `connect_local`, on which a communicator is no more than its arguments

Arguments have the names of the kernels' parameters: "out.tokens" is field `tokens` of record `out`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.config import EPConfig
from cute_ep.layouts.maps.launch import PIPED_THREADS, RING_BYTES, THREADS, WARPS, WIDE_THREADS
from cute_ep.layouts.maps.parameters import Fields, numbers, parameters_of
from cute_ep.layouts.maps.routing import Phase
from cute_ep.layouts.maps.variants import COMBINE_KERNELS, DISPATCH_KERNELS, NO_HOOKS, PIPED_KERNELS, Hooks, Variant
from cute_ep.runtime import communicator as communicator_module
from cute_ep.runtime import connection, driver, launcher, launching, local_ops, parts, status
from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.parts import RankParts, load_kernels
from cute_ep.tuning.builtin import built_in
from tests.compiled_launches import CONTEXT, CompiledLaunches
from tests.connecting import replace_names
from tests.plain_memory import PlainArena, PlainHostMemory

ARCH = "sm_90a"
MAX_CTAS = 64
"""CTAs that are resident together on the GPU of a rank that `make_rank` makes."""
STREAM = 7
"""Raw handle of the only stream."""
ARENA_STEP = 4096
"""Rank r's arena is at (r + 1) * ARENA_STEP."""

CFG = EPConfig(hidden=128, num_experts=8, top_k=2, max_tokens_per_rank=16, world_size=2, dispatch_format="nvfp4")
"""The deployment of every test that names no other one."""
SHARED_EXPERT = replace(CFG, fused_shared_expert=True)
SKIP_A2A = replace(CFG, skip_a2a=True)
HOOKS = Hooks("a:epilogue", "a:weights", "a:scale")


# ---- what was launched


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        arguments: parameters that the host has set, in this launch or by binding them before, by name.
        parameters: all that the kernel has; those that are not set are 0.
        early: whether it may start before the launch before it has ended.
        pairs: whether the CTAs come in clusters of 2.
    """

    variant: Variant
    grid: int
    arguments: dict[str, int]
    stream: int
    early: bool = False
    pairs: bool = False
    parameters: frozenset[str] = frozenset()

    @property
    def kernel(self) -> str:
        """Name of the kernel, without format and hooks: "dispatch", "combine_wait_exact"."""
        return self.variant.kernel

    @property
    def empty_records(self) -> set[str]:
        """Records of the kernel whose numbers are all 0."""
        records = {name.partition(".")[0] for name in self.parameters}
        return records - {name.partition(".")[0] for name, value in self.arguments.items() if value}

    def record(self, name: str) -> tuple[int, ...]:
        """The numbers of a record, in the order of the parameters."""
        inside = (parameter for parameter, _ in parameters_of(self.kernel) if parameter.startswith(f"{name}."))
        return tuple(self.arguments[parameter] for parameter in inside)

    def values(self, *names: str) -> tuple[int, ...]:
        """Arguments by name, all of which are set."""
        return tuple(self.arguments[name] for name in names)


class Launches:
    """All launches, the first one first. A prefix of a kernel's name stands for the kernels that begin with it.

    Attributes:
        compiled: those that the compiled launcher makes, among the others here.
    """

    def __init__(self) -> None:
        self._all: list[Launch] = []
        self.compiled = CompiledLaunches()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._all)

    def add(self, launch: Launch) -> None:
        self._all.append(launch)

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels in the order of their launches."""
        return [launch.kernel for launch in self]

    def of(self, prefix: str) -> list[Launch]:
        """The launches of some kernels."""
        return [launch for launch in self if launch.kernel.startswith(prefix)]

    def first(self, prefix: str = "") -> Launch:
        """The first launch, or the first one of some kernels."""
        return self.of(prefix)[0]

    def last(self, prefix: str = "") -> Launch:
        """The last launch, or the last one of some kernels."""
        return self.of(prefix)[-1]

    def only(self, prefix: str = "") -> Launch:
        """The launch, or the one of some kernels, of which there is no other."""
        (launch,) = self.of(prefix)
        return launch

    def values(self, name: str) -> list[int | None]:
        """An argument in all launches, None in those that do not set it."""
        return [launch.arguments.get(name) for launch in self]

    @contextmanager
    def forbidden(self) -> Iterator[None]:
        """Nothing is launched in this block."""
        before = len(self)
        yield
        assert self.kernels[before:] == [], "launched where nothing may be launched"


class RecordingKernel:
    """`driver.Kernel` that records its launches, with the numbers by their names."""

    def __init__(self, variant: Variant, launches: Launches, call: Sequence[str] = ()) -> None:
        self.variant, self.launches = variant, launches
        self.parameters = parameters_of(variant.kernel)
        self.slots = driver.slots(self.parameters, call)
        self.values: dict[str, int] = {}

    def bind(self, record: str, values: tuple) -> None:
        names = [name for name in self.slots if name.partition(".")[0] == record]
        if names:
            self.values |= zip(names, numbers(values), strict=True)

    def copy(self) -> RecordingKernel:
        other = copy.copy(self)
        other.values = dict(self.values)
        return other

    context = CONTEXT

    def place(self, parameter: str) -> int:
        return self.slots.index(parameter) if parameter in self.slots else -1

    def described(self, given: Sequence[int], threads: int) -> tuple[int, int, int, bytes, bytes]:
        values = self.values | dict(zip(self.slots, given, strict=False))

        def record(arguments: dict[str, int], *launched: Any) -> None:
            self.values |= arguments
            self._record(arguments, *launched)

        names = [name for name, _ in self.parameters]
        return self.launches.compiled.describe(names, self.slots, values, threads, record)

    def launch(
        self,
        grid: int,
        given: Fields,
        stream: int,
        *,
        early: bool = False,
        pairs: bool = False,
        threads: int = THREADS,
    ) -> None:
        fresh = dict(zip(self.slots, flat := numbers(given), strict=False))
        assert len(fresh) == len(flat), f"{self.variant.symbol} has no more than {len(self.slots)} parameters"
        self.values |= fresh
        self._record(dict(self.values), grid, threads, stream, early, pairs)

    def _record(
        self, arguments: dict[str, int], grid: int, threads: int, stream: int, early: bool, pairs: bool
    ) -> None:
        assert threads == 32 * arguments.get("grid.warps", WARPS), "the kernel is told how many warps a CTA has"
        compiled_for = {THREADS}
        if self.variant.kernel in (*COMBINE_KERNELS, *DISPATCH_KERNELS):
            compiled_for = {THREADS, WIDE_THREADS}
        elif self.variant.kernel in PIPED_KERNELS:
            compiled_for = {PIPED_THREADS}
        assert threads in compiled_for
        assert all(type(value) is int for value in arguments.values())
        for name, width in self.parameters:
            assert -(1 << 31) <= arguments.get(name, 0) < 1 << (63 if width == "i64" else 32), name
        self.launches.add(Launch(self.variant, grid, arguments, stream, early, pairs, frozenset(self.slots)))

    def unload(self) -> None:
        pass


# ---- what a rank is made of


class EveryVariant:
    """A library that has whatever is asked for, as `Library.find` names it."""

    def find(self, kernel: str, arch: str, fmt: str | None = None, hooks: Hooks = NO_HOOKS) -> SimpleNamespace:
        return SimpleNamespace(variant=Variant(kernel, arch, fmt, hooks.of_kernel(kernel)))


def arena_address(rank: int) -> int:
    """Where the arena of a rank is, as all ranks see it."""
    return ARENA_STEP * (1 + rank)


def report(
    rank: Communicator,
    phase: Phase,
    index: int,
    expected: int,
    seen: int,
    *,
    peer: int | None = None,
    token: int = 0,
) -> None:
    """Store what a kernel of `rank` would: the phase in which it gave up waiting for `peer` (itself, unless another one
    is given), or what is wrong with its input. Kernels know these places: a record of four words for each peer, then
    one for expert ids and one for rows that do not fit."""
    peers = [rank.rank] if rank.cfg.skip_a2a else list(range(rank.cfg.world_size))
    behind_peers = {Phase.EXPERT_ID: 0, Phase.ROW_CAPACITY: 1}
    if phase in behind_peers:
        record = len(peers) + behind_peers[phase]
    else:
        record = peers.index(rank.rank if peer is None else peer)
    rank._status.memory.words[4 * record : 4 * record + 4] = [token << 8 | phase, index, expected, seen]


MakeRank = Callable[..., Communicator]


@pytest.fixture
def launches() -> Iterator[Launches]:
    """What ranks of `make_rank` have launched."""
    found = Launches()
    yield found
    assert not found.compiled.errors


@pytest.fixture
def make_rank(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> MakeRank:
    """make_rank(cfg=CFG, rank=0, hooks=NO_HOOKS, shared=False, pairs=False, few=False): a rank whose peers are absent,
    the only one on its GPU unless it is `shared`; `pairs` as of `RankParts`; `few`: with few SMs, one for each CTA."""
    pytest.importorskip("cutlass")
    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    cuda = SimpleNamespace(
        current_stream=lambda device: stream,
        current_device=lambda: None,
        synchronize=lambda device=None: None,
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
    )
    for name, fake in {
        "torch": SimpleNamespace(**{**vars(torch), "cuda": cuda}),
        "current_stream": lambda ordinal: cuda.current_stream(ordinal).cuda_stream,
        "take_stream": lambda device: stream,
        "give_back": lambda stream: None,
    }.items():
        for module in (communicator_module, launching):
            monkeypatch.setattr(module, name, fake, raising=False)
    for name, fake in {
        "on_device": lambda device: nullcontext(),
        "Kernel": lambda entry, call, ring_bytes, *, twins: RecordingKernel(entry.variant, launches, call),
        "architecture": lambda device: ARCH,
    }.items():
        monkeypatch.setattr(parts, name, fake)
    monkeypatch.setattr(status, "HostMemory", PlainHostMemory)
    monkeypatch.setattr(launcher, "driver_addresses", lambda: launches.compiled.addresses)

    def make(
        cfg: EPConfig = CFG,
        rank: int = 0,
        hooks: Hooks = NO_HOOKS,
        *,
        shared: bool = False,
        pairs: bool = False,
        few: bool = False,
    ) -> Communicator:
        device, peers = torch.device("cpu"), [rank] if cfg.skip_a2a else range(cfg.world_size)
        made = RankParts(
            cfg,
            rank,
            device,
            PlainArena(arena_address(rank)),
            load_kernels(cfg, device, EveryVariant(), hooks),
            hooks,
            MAX_CTAS,
            built_in(cfg, MAX_CTAS),
            shared,
            pairs,
            few,
            RING_BYTES if few else 0,
        )
        addresses = [arena_address(peer) for peer in peers]
        return Communicator(made, addresses, group=None, release=lambda communicator: communicator.free())

    return make


@pytest.fixture
def rank(make_rank: MakeRank) -> Communicator:
    """Rank 0 of two in NVFP4."""
    return make_rank()


def inputs(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x, topk_ids and router_weights of a rank of CFG."""
    ids = torch.randint(0, CFG.num_experts, (tokens, CFG.top_k), dtype=torch.int32)
    return torch.randn(tokens, CFG.hidden).bfloat16(), ids, torch.rand(tokens, CFG.top_k)


def expert_rows(batch: DispatchBuffers) -> torch.Tensor:
    """Zeros for all rows of a batch."""
    return torch.zeros(batch.src_info.shape[0], CFG.hidden, dtype=torch.bfloat16)


def address(tensor: torch.Tensor | None) -> int:
    """The argument that a tensor becomes."""
    return 0 if tensor is None else tensor.data_ptr()


# ---- local operations


@pytest.fixture
def local_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What the local operations have launched; the CPU stands for a GPU on which LOCAL_CTAS CTAs are resident."""
    found = Launches()

    def kernel(device: int, name: str, fmt: str, folder: str | None) -> RecordingKernel:
        return RecordingKernel(Variant(name, ARCH, fmt), found)

    monkeypatch.setattr(local_ops, "launch_on", lambda device, kernel, grid, given: kernel.launch(grid, given, 0))
    monkeypatch.setattr(local_ops, "local_kernel", kernel)
    monkeypatch.setattr(local_ops, "resident_ctas", lambda device: LOCAL_CTAS)
    monkeypatch.setattr(local_ops, "_on_gpu", lambda name, tensor: True)
    return found


LOCAL_CTAS = 8


# ---- a machine


GPU, GPUS, SMS = "NVIDIA H200", 4, 132


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUS of SMS SMs each, on which a communicator is no more than its arguments."""
    fakes = {
        "enable_all_peers": lambda devices: None,
        "load_kernels": lambda *args: {},
        "load_local_kernels": lambda devices, library: None,
        "unload_kernels": lambda kernels, device: None,
        "make_arena": lambda cfg, rank, device, take: SimpleNamespace(address=0, free=None),
        "resident_ctas": driver.resident_ctas.__wrapped__,
        "has_clusters": lambda device: True,
        "Communicator": lambda parts, peers, **options: SimpleNamespace(**vars(parts), **options, free=None),
    }
    replace_names(monkeypatch, fakes)
    properties = SimpleNamespace(multi_processor_count=SMS, shared_memory_per_block_optin=227 << 10)
    for name, fake in {
        "current_device": lambda: 0,
        "get_device_name": lambda device: GPU,
        "get_device_properties": lambda device: properties,
        "device_count": lambda: GPUS,
    }.items():
        monkeypatch.setattr(connection.torch.cuda, name, fake)
