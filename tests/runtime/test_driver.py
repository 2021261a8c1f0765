"""What the driver is given: parameters of a launch, contexts, ranges of a profiler, and the memory of an arena."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig, memory_bytes
from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.arena import SENTINEL
from cute_ep.runtime import driver, parts
from tests.fake_gpu import CFG, SHARED_EXPERT, SKIP_A2A, replace_driver

SUCCESS = driver.driver.CUresult.CUDA_SUCCESS
ARENA_AT = 4096


# ---- launches


def test_parameters_of_a_launch_are_given_or_bound_or_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its width and place; a copy of a kernel changes nothing in it."""
    params = (("out.at", "i64"), ("group.arena", "i64"), ("group.rank", "i32"), ("input.x", "i64"), ("input.n", "i32"))
    launched, configs = [], []

    def launch(config: driver.driver.CUlaunchConfig, function: int, address: int, extra: int) -> tuple[int]:
        pointers = (ctypes.c_void_p * len(params)).from_address(address)
        widths = [ctypes.c_int64 if kind == "i64" else ctypes.c_int32 for _, kind in params]
        launched.append([width.from_address(at).value for width, at in zip(widths, pointers, strict=True)])
        configs.append((config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream), config.numAttrs))
        return (SUCCESS,)

    allowed = replace_driver(monkeypatch, launch)
    entry = SimpleNamespace(params=params, entry="kernel", smem_bytes=48, read=bytes)
    kernel = driver.Kernel(entry, ("input", "out"))
    assert allowed == [48], "shared memory that a launch may ask for"
    kernel.launch(1, (1 << 50, 7), 1001)
    kernel.bind("group", (1 << 40, -1))
    kernel.bind("other", (9,))
    bound = kernel.copy()
    bound.bind("out", (5,))
    kernel.launch(2, (0, -2, 1 << 33), 1002, early=True)
    bound.launch(3, (3, 8), 1003)
    kernel.launch(4, (2, 9, 0), 1004)
    driver.Kernel(entry).launch(5, (1, 2, 3, 4, 5), 1005)
    assert configs == [(grid, 512, 48, 1000 + grid, int(grid == 2)) for grid in (1, 2, 3, 4, 5)]
    assert launched == [
        [0, 0, 0, 1 << 50, 7],
        [1 << 33, 1 << 40, -1, 0, -2],
        [5, 1 << 40, -1, 3, 8],
        [0, 1 << 40, -1, 2, 9],
        [1, 2, 3, 4, 5],
    ]


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
    replace_driver(monkeypatch, lambda *_: (SUCCESS,))
    params = (("group.arena", "i64"), ("group.rank", "i32"))
    kernel = driver.Kernel(SimpleNamespace(params=params, entry="kernel", smem_bytes=0, read=bytes))
    with pytest.raises(ValueError):
        kernel.bind("group", (1,))


def test_a_thread_without_a_context_takes_that_of_the_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    current, launched_in = [0], []

    def launch(*_: object) -> tuple:
        launched_in.append(current[0])
        return (SUCCESS if current[0] == 5 else driver.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,)

    def enter(context: int) -> tuple:
        current[0] = context
        return (SUCCESS,)

    replace_driver(monkeypatch, launch)
    monkeypatch.setattr(driver.driver, "cuCtxGetCurrent", lambda: (SUCCESS, 5))
    monkeypatch.setattr(driver.driver, "cuCtxSetCurrent", enter)
    kernel = driver.Kernel(SimpleNamespace(params=(), entry="kernel", smem_bytes=0, read=bytes))
    kernel.launch(1, (), 7)
    kernel.launch(1, (), 7)
    assert launched_in == [0, 5, 5]


def test_a_launch_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_driver(monkeypatch, lambda *_: (driver.driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,))
    kernel = driver.Kernel(SimpleNamespace(params=(), entry="kernel", smem_bytes=0, read=bytes))
    with pytest.raises(EPError, match="CUDA_ERROR_LAUNCH_FAILED"):
        kernel.launch(1, (), 7)


def test_launches_are_ranges_of_a_profiler_while_one_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded, and the lock is free, before and afterwards."""
    replace_driver(monkeypatch, lambda *_: (SUCCESS,))
    kernel = driver.Kernel(SimpleNamespace(params=(), entry="cute_ep_dispatch_bf16_0", smem_bytes=0, read=bytes))
    monkeypatch.setattr(driver, "record_function", None)
    kernel.launch(1, (), 7)
    monkeypatch.undo()
    replace_driver(monkeypatch, lambda *_: (SUCCESS,))
    with torch.profiler.profile() as profile:
        kernel.launch(1, (), 7)
        kernel.launch(1, (), 7)
    kernel.launch(1, (), 7)
    assert [(event.key, event.count) for event in profile.key_averages()] == [("cute_ep.dispatch_bf16", 2)]


# ---- contexts


@pytest.mark.parametrize("current", [0, 7], ids=["none", "one"])
def test_a_thread_has_a_context_on_a_device(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """Its own where it has one, else the primary one of the device."""
    contexts = [current]
    cuda = SimpleNamespace(device=lambda _: nullcontext(), current_device=lambda: 3)
    monkeypatch.setattr(driver, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(driver.driver, "cuCtxGetCurrent", lambda: (SUCCESS, contexts[-1]))
    monkeypatch.setattr(driver.driver, "cuDeviceGet", lambda ordinal: (SUCCESS, ordinal + 10))
    monkeypatch.setattr(driver.driver, "cuDevicePrimaryCtxRetain", lambda device: (SUCCESS, device + 100))
    monkeypatch.setattr(driver.driver, "cuCtxSetCurrent", lambda context: (contexts.append(context), (SUCCESS,))[1])
    with driver.on_device(3) as context:
        assert contexts[-1] == context == (current or 113)
    assert len(contexts) == (1 if current else 2)


# ---- memory


def test_memory_that_torch_holds_unused_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    free, cached = [100 * 2**20], [50 * 2**20]

    def allocate(nbytes: int) -> tuple[int, int | None]:
        if nbytes > free[0]:
            return driver.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        free[0] -= nbytes
        return SUCCESS, ARENA_AT

    def empty_cache() -> None:
        free[0], cached[0] = free[0] + cached[0], 0

    cuda = SimpleNamespace(empty_cache=empty_cache, mem_get_info=lambda: (free[0], 200 * 2**20))
    monkeypatch.setattr(driver, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(driver.driver, "cuMemAlloc", allocate)
    assert driver.allocate(90 * 2**20) == ARENA_AT and cached[0]
    assert driver.allocate(60 * 2**20) == ARENA_AT and not cached[0]
    with pytest.raises(EPError, match=r"symmetric memory of 1 MiB: the GPU has 0 of 200 MiB free; .*tokens_per_rank"):
        driver.allocate(2**19)


@pytest.mark.parametrize("cfg", [CFG, SHARED_EXPERT, SKIP_A2A], ids=["plain", "shared expert", "skip_a2a"])
@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_new_arena_every_lamport_word_is_the_sentinel_and_all_else_0(
    monkeypatch: pytest.MonkeyPatch, cfg: EPConfig, rank: int
) -> None:
    """Wherever the arena begins in its allocation."""
    memory = bytearray()

    def fill(address: int, byte: int, count: int) -> tuple[int]:
        memory[address - ARENA_AT : address - ARENA_AT + count] = bytes([byte]) * count
        return (SUCCESS,)

    def allocate(nbytes: int) -> tuple[int, int]:
        memory[:] = b"\xa5" * nbytes
        return SUCCESS, ARENA_AT

    monkeypatch.setattr(driver, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(driver, "torch", SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda _: None)))
    monkeypatch.setattr(driver.driver, "cuMemAlloc", allocate)
    monkeypatch.setattr(driver.driver, "cuMemsetD8", fill)
    arena = parts.make_arena(cfg, rank, torch.device("cuda", 0))
    assert arena.nbytes == len(memory) == memory_bytes(cfg)
    begin = arena.address - ARENA_AT
    assert begin == (0 if cfg.skip_a2a else cfg.arena.begin(rank))
    assert not any(memory[:begin]) and not any(memory[begin + cfg.arena.nbytes :])
    words = torch.frombuffer(memory[begin : begin + cfg.arena.nbytes], dtype=torch.uint32)
    blank = torch.zeros(len(words), dtype=torch.bool)
    for name in ("lamport_returns", "lamport_messages"):
        region = cfg.arena.regions[name]
        assert region.offset % 4 == region.nbytes % 4 == 0
        blank[region.offset // 4 : (region.offset + region.nbytes) // 4] = True
    assert torch.equal(words == SENTINEL, blank) and torch.equal(words == 0, ~blank)
