"""What the driver is given: parameters of a launch, contexts, ranges of a profiler, and the memory of an arena."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.arena import SENTINEL
from cute_ep.runtime import driver, launcher, parts
from tests import compiled_launches
from tests.fake_driver import OK, FakeDriver, cuda
from tests.fake_gpu import CFG, SHARED_EXPERT, SKIP_A2A


def entry_of(params: tuple = (), name: str = "kernel", smem_bytes: int = 0) -> Any:
    """A kernel of a library."""
    return SimpleNamespace(params=params, entry=name, smem_bytes=smem_bytes, read=bytes)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """One that torch takes for a GPU; a fake driver does the rest."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return torch.device("cuda", 3)


# ---- launches


Numbers = tuple[int, ...]
LaunchKernel = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(compiled_launches.Config), ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
)
WAYS = [
    "Python",
    pytest.param("compiled", marks=pytest.mark.skipif(launcher.taker() is None, reason="it was not compiled")),
]


class Recorded:
    """What launches tell the driver, by Python or by the compiled launcher.

    Attributes:
        fake: the driver.
        configs: (grid, threads, shared memory, stream, number of attributes).
        values: of the parameters.
        refuses: what the driver answers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str, widths: list[type]) -> None:
        self.configs: list[Numbers] = []
        self.values: list[list[int]] = []
        self.refuses, self._widths = cuda.CUresult.CUDA_SUCCESS, widths
        self.fake = FakeDriver(monkeypatch, self._by_python)
        self._compiled = LaunchKernel(self._by_launcher)
        if way == "compiled":
            at = ctypes.cast(self._compiled, ctypes.c_void_p).value
            monkeypatch.setattr(launcher, "driver_addresses", lambda: (at, 0))

    def _by_python(self, config: Any, function: Any, address: int, extra: int) -> tuple:
        stream = int(config.hStream)
        self._note(address, (config.gridDimX, config.blockDimX, config.sharedMemBytes, stream, config.numAttrs))
        return (self.refuses,)

    def _by_launcher(self, config: Any, function: int, address: int, extra: int | None) -> int:
        one = config.contents
        self._note(address, (one.grid[0], one.block[0], one.shared_bytes, one.stream, one.count))
        return int(self.refuses)

    def _note(self, address: int, config: Numbers) -> None:
        pointers = (ctypes.c_void_p * len(self._widths)).from_address(address)
        self.values.append([one.from_address(at).value for one, at in zip(self._widths, pointers, strict=True)])
        self.configs.append(config)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_a_launch_are_given_or_bound_or_0(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Each in its width and place; a copy of a kernel changes nothing in it."""
    params = (("out.at", "i64"), ("group.arena", "i64"), ("group.rank", "i32"), ("input.x", "i64"), ("input.n", "i32"))
    found = Recorded(monkeypatch, way, [ctypes.c_int64 if kind == "i64" else ctypes.c_int32 for _, kind in params])
    entry = entry_of(params, smem_bytes=48)
    kernel = driver.Kernel(entry, ("input", "out"))
    assert found.fake.allowed == [48], "shared memory that a launch may ask for"
    kernel.launch(1, (1 << 50, 7), 1001)
    kernel.bind("group", (1 << 40, -1))
    kernel.bind("other", (9,))
    bound = kernel.copy()
    bound.bind("out", (5,))
    kernel.launch(2, (0, -2, 1 << 33), 1002, early=True)
    bound.launch(3, ((3, (8,)),), 1003)
    kernel.launch(4, (2, 9, 0), 1004)
    driver.Kernel(entry).launch(5, [1, 2, 3, (), (4, 5)], 1005)
    kernel.launch(6, (), 1006, early=True, pairs=True)
    kernel.launch(8, (), 1008, pairs=True)
    attributes = {2: 1, 6: 2, 8: 1}
    grids = (1, 2, 3, 4, 5, 6, 8)
    assert found.configs == [(grid, 512, 48, 1000 + grid, attributes.get(grid, 0)) for grid in grids]
    assert ("cuLaunchKernelEx" in found.fake.calls) == (way == "Python")
    assert found.values == [
        [0, 0, 0, 1 << 50, 7],
        [1 << 33, 1 << 40, -1, 0, -2],
        [5, 1 << 40, -1, 3, 8],
        [0, 1 << 40, -1, 2, 9],
        [1, 2, 3, 4, 5],
        *[[0, 1 << 40, -1, 2, 9]] * 2,
    ]


@pytest.mark.parametrize("way", WAYS)
def test_twins_of_a_wide_cta_have_shared_memory_each(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Whatever was launched before, and by a copy, too; without twins a wide CTA has as much as others."""
    found = Recorded(monkeypatch, way, [ctypes.c_int64])
    entry = entry_of((("at", "i64"),), smem_bytes=48)
    for kernel, wide in ((driver.Kernel(entry, twins=True), 96), (driver.Kernel(entry, (), 8), 56)):
        for threads in (512, 1024, 512):
            for one in (kernel, kernel.copy()):
                one.launch(1, (5,), 7, threads=threads)
        assert kernel.described((5,), 1024)[2] == wide
    assert found.fake.allowed == [96, 56]
    assert [config[2] for config in found.configs] == [48, 48, 96, 96, 48, 48] + [56] * 6


@pytest.mark.parametrize("way", WAYS)
def test_a_launch_that_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Of Python, in the driver's words, whoever was refused first; with the numbers of this launch."""
    found = Recorded(monkeypatch, way, [ctypes.c_int64])
    kernel = driver.Kernel(entry_of((("at", "i64"),)))
    found.refuses = cuda.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(EPError, match="CUDA driver: CUDA_ERROR_LAUNCH_FAILED"):
        kernel.launch(1, ((5,),), 7)
    assert found.values == [[5]] * (2 if way == "compiled" else 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", [(1, 2), (1 << 63,), ("1",)], ids=["too many", "too wide", "no number"])
def test_what_is_no_number_of_a_kernel_is_not_launched(monkeypatch: pytest.MonkeyPatch, way: str, given: tuple) -> None:
    found = Recorded(monkeypatch, way, [ctypes.c_int64])
    kernel = driver.Kernel(entry_of((("at", "i64"),)))
    with pytest.raises((struct.error, OverflowError, TypeError, ValueError)):
        kernel.launch(1, given, 7)
    assert not found.values


def test_a_kernel_is_described_to_the_compiled_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it is bound to, and with the numbers that a launch gives; those come first."""
    params = (("out.at", "i64"), ("group.rank", "i32"), ("input.x", "i64"), ("input.n", "i32"))
    FakeDriver(monkeypatch)
    kernel = driver.Kernel(entry_of(params, smem_bytes=48), ("input", "out"))
    kernel.bind("group", (-1,))
    kernel.launch(1, (5, 6, 7), 1001)
    function, threads, shared_bytes, numbers, order = kernel.described((1 << 50, 8), 1024)
    assert (threads, shared_bytes, kernel.context) == (1024, 48, 5) and function
    assert struct.unpack("4q", numbers) == (1 << 50, 8, 7, -1) and struct.unpack("4H", order) == (2, 3, 0, 1)
    assert [kernel.place(name) for name in ("input.x", "out.at", "out.rows")] == [0, 2, -1]


def test_another_device_is_current_for_a_launch_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current, launched = [0], []

    @contextmanager
    def device(ordinal: int) -> Iterator[None]:
        before, current[0] = current[0], ordinal
        yield
        current[0] = before

    monkeypatch.setattr(driver, "torch", SimpleNamespace(cuda=SimpleNamespace(
        device=device, current_device=lambda: current[0]
    )))  # fmt: skip
    monkeypatch.setattr(driver, "current_stream", lambda ordinal: 1000 + ordinal)
    kernel: Any = SimpleNamespace(launch=lambda *given: launched.append((current[0], *given)))
    for ordinal in (0, 1):
        driver.launch_on(ordinal, kernel, 5, (7,))
    assert launched == [(0, 5, (7,), 1000), (1, 5, (7,), 1001)] and current == [0]


def test_a_record_is_bound_whole_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch)
    kernel = driver.Kernel(entry_of((("group.arena", "i64"), ("group.rank", "i32"))))
    with pytest.raises(ValueError):
        kernel.bind("group", (1,))


def test_a_thread_without_a_context_takes_that_of_the_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_in = []

    def launch(*_: object) -> tuple:
        launched_in.append(fake.context)
        return OK if fake.context == 5 else (cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT,)

    fake = FakeDriver(monkeypatch, launch)
    kernel = driver.Kernel(entry_of())

    def work() -> None:
        cuda.cuCtxSetCurrent(0)
        kernel.launch(1, (), 7)
        kernel.launch(1, (), 7)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert launched_in == [0, 5, 5]


def test_a_kernel_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(monkeypatch)
    first, second = driver.Kernel(entry_of()), driver.Kernel(entry_of())
    assert len(fake.loaded) == 2
    first.unload()
    second.unload()
    assert not fake.loaded


def test_launches_are_ranges_of_a_profiler_while_one_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded, and the lock is free, before and afterwards."""
    FakeDriver(monkeypatch)
    kernel = driver.Kernel(entry_of(name="cute_ep_dispatch_bf16_0"))
    monkeypatch.setattr(driver, "record_function", None)
    kernel.launch(1, (), 7)
    monkeypatch.undo()
    FakeDriver(monkeypatch)
    with torch.profiler.profile() as profile:
        kernel.launch(1, (), 7)
        kernel.launch(1, (), 7)
    kernel.launch(1, (), 7)
    assert [(event.key, event.count) for event in profile.key_averages()] == [("cute_ep.dispatch_bf16", 2)]


# ---- contexts


@pytest.mark.parametrize("current", [0, 7], ids=["none", "one"])
def test_a_thread_has_a_context_on_a_device(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, current: int
) -> None:
    """Its own where it has one, else the primary one of the device."""
    fake = FakeDriver(monkeypatch, first_context=current)
    with driver.on_device(device) as context:
        assert fake.context == context == (current or 113)
    assert ("cuCtxSetCurrent" in fake.calls) == (current == 0)


# ---- memory


def test_memory_that_torch_holds_unused_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    free, cached = [100 * 2**20], [50 * 2**20]

    class FullDriver(FakeDriver):
        def cuMemAlloc(self, nbytes: int) -> tuple:
            if nbytes > free[0]:
                return cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, cuda.CUdeviceptr()
            free[0] -= nbytes
            return super().cuMemAlloc(16)

    def empty_cache() -> None:
        free[0], cached[0] = free[0] + cached[0], 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 200 * 2**20))
    fake = FullDriver(monkeypatch)
    assert driver.allocate(90 * 2**20) in fake.memory and cached[0]
    assert driver.allocate(60 * 2**20) in fake.memory and not cached[0]
    with pytest.raises(EPError, match=r"symmetric memory of 1 MiB: the GPU has 0 of 200 MiB free; .*tokens_per_rank"):
        driver.allocate(2**19)


def test_words_of_the_host_keep_their_values_when_they_are_given_back(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    fake = FakeDriver(monkeypatch)
    memory = driver.HostMemory(4)
    assert list(memory.words) == [0] * 4 and ctypes.addressof(memory.words) == memory.address in fake.memory
    memory.words[2] = 7
    memory.free()
    assert list(memory.words) == [0, 0, 7, 0] and not fake.memory


@pytest.mark.parametrize("cfg", [CFG, SHARED_EXPERT, SKIP_A2A], ids=["plain", "shared expert", "skip_a2a"])
@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_new_arena_every_lamport_word_is_the_sentinel_and_all_else_0(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, cfg: EPConfig, rank: int
) -> None:
    """Wherever the arena begins in its allocation."""
    fake = FakeDriver(monkeypatch)
    arena = parts.make_arena(cfg, rank, device)
    ((first, content),) = fake.memory.items()
    memory, begin = bytearray(content.raw), arena.address - first
    assert arena.nbytes == len(memory) == memory_bytes(cfg)
    assert begin == (0 if cfg.skip_a2a else cfg.arena.begin(rank))
    assert not any(memory[:begin]) and not any(memory[begin + cfg.arena.nbytes :])
    words = torch.frombuffer(memory[begin : begin + cfg.arena.nbytes], dtype=torch.uint32)
    blank = torch.zeros(len(words), dtype=torch.bool)
    for name in ("lamport_returns", "lamport_messages"):
        region = cfg.arena.regions[name]
        assert region.offset % 4 == region.nbytes % 4 == 0
        blank[region.offset // 4 : (region.offset + region.nbytes) // 4] = True
    assert torch.equal(words == SENTINEL, blank) and torch.equal(words == 0, ~blank)
