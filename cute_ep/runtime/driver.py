"""What the runtime needs of the CUDA driver: modules, launches, symmetric memory."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from functools import cache
from itertools import product
from typing import Protocol

import torch
from torch.autograd.profiler import record_function

from cute_ep.aot.library import LibraryEntry
from cute_ep.api.errors import EPConfigError, EPError
from cute_ep.layouts.maps.launch import CTAS_PER_SM, THREADS, WIDE_THREADS
from cute_ep.layouts.maps.parameters import Fields, numbers
from cute_ep.runtime import driver_calls, launcher
from cute_ep.torch_internals import current_stream, profiler_enabled


def architecture(device: torch.device) -> str:
    """Compilation target of a device, "sm_90a" for an H200."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


@contextmanager
def on_device(device: torch.device | int) -> Iterator[int]:
    """Make a device the current one and its context the thread's, for driver calls. `torch.cuda.device` leaves a thread
    without a context that has used none, as in a process whose first use of a GPU this is."""
    with torch.cuda.device(device):
        context = driver_calls.current_context()
        if not context:
            context = driver_calls.primary_context(torch.cuda.current_device())
            driver_calls.set_context(context)
        yield context


def has_clusters(device: torch.device) -> bool:
    """Whether a device can launch CTAs in clusters."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def resident_ctas(device: int) -> int:
    """CTAs of our kernels that fit a whole GPU, an ordinal, together."""
    return torch.cuda.get_device_properties(device).multi_processor_count * CTAS_PER_SM


def slots(params: Sequence[tuple[str, str]], call: Sequence[str] = ()) -> list[str]:
    """The names of a kernel's parameters in the order in which a launch gives them: those of the records that change
    from launch to launch, in the order of `call`, then the others."""
    place = {record: number for number, record in enumerate(call)}
    return sorted((name for name, _ in params), key=lambda name: place.get(name.partition(".")[0], len(place)))


@cache
def _packer(count: int) -> Callable[..., None]:
    return struct.Struct(f"{count}q").pack_into


class Kernel:
    """A loaded kernel of one device, that of `on_device`, with the numbers of its parameters, 0 at first. While a
    profiler of torch is on, its launches are ranges, named as "cute_ep.dispatch_bf16".

    One launch overwrites the numbers of the one before (the driver has copied them); threads take turns.

    Attributes:
        context: in which it is loaded.
    """

    def __init__(
        self, entry: LibraryEntry, call: Sequence[str] = (), ring_bytes: int = 0, *, twins: bool = False
    ) -> None:
        """call: the records that change from launch to launch, in the order of `launch`; none: all numbers do.
        ring_bytes: of shared memory beyond what the entry says. twins: wide CTAs have twice what it says."""
        self._library = driver_calls.load(entry.read())
        self._function = driver_calls.function_of(self._library, entry.entry)
        self._smem_bytes = entry.smem_bytes + ring_bytes
        self._wide_bytes = self._smem_bytes + (entry.smem_bytes if twins else 0)
        driver_calls.allow_shared_memory(self._function, self._wide_bytes)
        self.context = driver_calls.current_context()
        sizes = {self._smem_bytes, self._wide_bytes}
        self._launchers = {one: driver_calls.Launcher(self._function, self.context, one) for one in sizes}
        self._range = f"cute_ep.{entry.entry.removeprefix('cute_ep_').removesuffix('_0')}"
        self._names = [name for name, _ in entry.params]
        self._slots = slots(entry.params, call)
        self._hold([0] * len(self._slots))
        self._lock = threading.Lock()

    def _hold(self, values: Sequence[int]) -> None:
        self._values = (ctypes.c_int64 * len(values))(*values)  # a kernel reads as many bytes of one as it wants
        first = ctypes.addressof(self._values)
        at = {name: first + 8 * slot for slot, name in enumerate(self._slots)}
        self._pointers = (ctypes.c_void_p * len(values))(*(at[name] for name in self._names))
        self._pointers_at = ctypes.addressof(self._pointers)
        self._starts: dict[int, launcher.Start | None] = {}  # by threads, when they are needed

    def _bytes_of(self, threads: int) -> int:
        """Shared memory of a CTA of so many threads."""
        return self._wide_bytes if threads == WIDE_THREADS else self._smem_bytes

    def _order(self) -> bytes:
        """Of each parameter which of the numbers it is, as uint16."""
        place = {name: slot for slot, name in enumerate(self._slots)}
        return struct.pack(f"{len(self._names)}H", *(place[name] for name in self._names))

    def bind(self, record: str, values: tuple) -> None:
        """Set the numbers of one record for all launches to come that do not give them; nothing where the kernel has no
        such record."""
        inside = [slot for slot, name in enumerate(self._slots) if name.partition(".")[0] == record]
        if inside:
            for slot, value in zip(inside, numbers(values), strict=True):
                self._values[slot] = value

    def copy(self) -> Kernel:
        """This kernel, of the same module and so not to be unloaded, with numbers of its own, as they are now."""
        other = shallow_copy(self)
        other._hold(list(self._values))
        return other

    def place(self, parameter: str) -> int:
        """Which of the numbers a parameter is; -1: the kernel has no such one."""
        return self._slots.index(parameter) if parameter in self._slots else -1

    def described(self, given: Sequence[int], threads: int) -> tuple[int, int, int, bytes, bytes]:
        """The kernel as `launcher.c` launches it with these numbers: function, threads of a CTA, bytes of dynamic
        shared memory, all numbers as int64, and of each parameter which of them it is as uint16."""
        values = [*given, *self._values[len(given) :]]
        return self._function, threads, self._bytes_of(threads), struct.pack(f"{len(values)}q", *values), self._order()

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
        """Launch `grid` CTAs on a stream (a raw handle) of the current device.

        Args:
            given: the numbers of the first records of `call`, or records of them; those that are not given are as they
                were bound or last given, at first 0.
            early: the CTAs may start before the launch before has ended, if that allows it, and wait for its end
                (programmatic dependent launch).
            pairs: in clusters of 2, so `grid` must be even and the device of compute capability 9 or newer.
            threads: of a CTA, for which the kernel is compiled.
        """
        if threads not in self._starts:
            nbytes = self._bytes_of(threads)
            self._starts[threads] = launcher.starter(self._function, nbytes, self._values, self._order())
        start = self._starts[threads]
        if start is None or profiler_enabled() or start(grid, threads, stream, early, pairs, given):
            # which says why the driver refuses
            self.launch_by_python(grid, given, stream, early=early, pairs=pairs, threads=threads)

    def launch_by_python(
        self,
        grid: int,
        given: Fields,
        stream: int,
        *,
        early: bool = False,
        pairs: bool = False,
        threads: int = THREADS,
    ) -> None:
        """`launch` without the compiled launcher."""
        flat = numbers(given)
        with self._in_range() if profiler_enabled() else self._lock:
            _packer(len(flat))(self._values, 0, *flat)
            launch = self._launchers[self._bytes_of(threads)].launch
            launch(grid, threads, stream, self._pointers_at, early, pairs)

    @contextmanager
    def _in_range(self) -> Iterator[None]:
        """The lock, in a range of the profiler that is on: an NVTX range under `torch.autograd.profiler.emit_nvtx`."""
        with record_function(self._range), self._lock:
            yield

    def unload(self) -> None:
        """Release the module; no launch may be running."""
        driver_calls.unload(self._library)


def allocate(nbytes: int, ask: Callable[[int], int | None] = driver_calls.allocate) -> int:
    """New memory of the current device: its address, or what else `ask` answers for so many bytes. Where that is None,
    since too little is free, PyTorch first gives back what its caching allocator holds unused, which waits for the
    device.

    Raises:
        EPError: there is not enough.
    """
    made = ask(nbytes)
    if made is None:
        torch.cuda.empty_cache()
        made = ask(nbytes)
    if made is None:
        free, total = (size // 2**20 for size in torch.cuda.mem_get_info())
        raise EPError(
            f"symmetric memory of {-(-nbytes // 2**20)} MiB: the GPU has {free} of {total} MiB free; fewer "
            "max_tokens_per_rank need less (cute_ep.memory_bytes)"
        )
    return made


def launch_on(device: int, kernel: Kernel, grid: int, given: Fields, stream: int | None = None) -> None:
    """`Kernel.launch` on a stream of a device, an ordinal, by default on the current one. torch takes microseconds to
    make a device current that is."""
    where = current_stream(device) if stream is None else stream
    if torch.cuda.current_device() == device:
        kernel.launch(grid, given, where)
        return
    with torch.cuda.device(device):
        kernel.launch(grid, given, where)


class Allocation(Protocol):
    """Device memory, used and freed on its device."""

    address: int

    def free(self) -> None:
        """Give it back; no kernel may be using it."""


class PlainAllocation:
    """Memory of the current device that the driver places, `address`."""

    def __init__(self, nbytes: int) -> None:
        self.address = allocate(nbytes)

    def free(self) -> None:
        driver_calls.free(self.address)


class DeviceMemory:
    """An allocation of a device, which `take` makes of a number of bytes, for what begins `begin` bytes into it, at
    `address`: zeros, and ones in the (offset from there, bytes) of `ones`."""

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        ones: Sequence[tuple[int, int]] = (),
        *,
        begin: int = 0,
        take: Callable[[int], Allocation] = PlainAllocation,
    ) -> None:
        self.device, self.nbytes = device, nbytes
        with on_device(device):
            self.allocation = take(nbytes)
            self.address = self.allocation.address + begin
            try:
                driver_calls.fill(self.allocation.address, 0, nbytes)
                for offset, count in ones:
                    driver_calls.fill(self.address + offset, 0xFF, count)
                torch.cuda.synchronize(device)
            except BaseException:
                self.free()
                raise

    def store(self, offset: int, words: Sequence[int]) -> None:
        """Write 64-bit words `offset` bytes from `address`; done when the device is synchronised."""
        content = struct.pack(f"{len(words)}Q", *words)
        with on_device(self.device):
            driver_calls.write(self.address + offset, content)

    def read(self, nbytes: int, stream: torch.cuda.Stream) -> bytes:
        """The first bytes from `address`, a multiple of 4, as they are now: waits for nothing but `stream`. May be
        called while a graph is captured, as by a call that raises an EPTimeout."""
        with driver_calls.relaxed_capture():
            host = HostMemory(nbytes // 4)
            try:
                with on_device(self.device):
                    driver_calls.copy(host.address, self.address, nbytes, stream.cuda_stream)
                stream.synchronize()
                return bytes(host.words)
            finally:
                host.free()

    def free(self) -> None:
        """Release the memory; no peer may still be writing to it."""
        with on_device(self.device):
            self.allocation.free()


class HostMemory:
    """Page-locked host memory that kernels of any device can store to, seen by Python as `words`."""

    def __init__(self, words: int) -> None:
        with on_device(torch.cuda.current_device()):
            self.address = driver_calls.allocate_host(4 * words)
        self.words = (ctypes.c_uint32 * words).from_address(self.address)
        ctypes.memset(self.address, 0, 4 * words)

    def free(self) -> None:
        """Release the memory; no kernel may still be running. `words` keep their last values."""
        self.words = type(self.words)(*self.words)
        with on_device(torch.cuda.current_device()):
            driver_calls.free_host(self.address)


def enable_all_peers(devices: Iterable[torch.device]) -> None:
    """`enable_peer_access` for every pair."""
    ordinals = [device.index for device in devices]
    for device, peer in product(ordinals, ordinals):
        enable_peer_access(device, peer)


@cache
def enable_peer_access(device: int, peer: int) -> None:
    """Let kernels of `device` use plain allocations of `peer` (both ordinals).

    Raises:
        EPConfigError: the two GPUs cannot reach each other's memory.
    """
    if device == peer:
        return
    if not torch.cuda.can_device_access_peer(device, peer):
        raise EPConfigError(
            f"devices: cuda:{device} cannot access the memory of cuda:{peer} (no NVLink or PCIe peer path)"
        )
    with on_device(peer) as context:
        pass
    with on_device(device):
        driver_calls.enable_peer_access(context)
