"""The CUDA driver in plain numbers, bytes and names.

The types of cuda-python change from release to release, so no other file touches them. `python -m tests.bindings` holds
this one against the releases that users may have. Addresses, contexts and other handles are ints, a device is an
ordinal, a stream is a raw handle. Each function raises EPError with the driver's name for what went wrong; without a
driver cuda-python raises RuntimeError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from cute_ep.api.errors import EPError

HANDLE_BYTES = int(driver.CU_IPC_HANDLE_SIZE)
"""Of a handle of CUDA IPC, and of a fabric handle."""
SUCCESS = driver.CUresult.CUDA_SUCCESS


def check(result: tuple) -> Any:
    """Unwrap a driver call's (status, values...)."""
    status, *values = result
    if status != SUCCESS:
        raise EPError(f"CUDA driver: {status.name}")
    return values[0] if values else None


# ---- contexts


def current_context() -> int:
    """The calling thread's; 0: it has none."""
    return int(check(driver.cuCtxGetCurrent()))


def set_context(context: int) -> None:
    """Make it the calling thread's."""
    check(driver.cuCtxSetCurrent(context))


def primary_context(device: int) -> int:
    """That of a device, which keeps it until the process ends."""
    return int(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device)))))


def enable_peer_access(context: int) -> None:
    """Let kernels of the current context use plain allocations of another one; nothing where they may already."""
    result = driver.cuCtxEnablePeerAccess(context, 0)
    if result[0] != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        check(result)


# ---- kernels


def load(image: bytes) -> int:
    """A library from a cubin, or from PTX that ends with a 0, for all contexts."""
    return int(check(driver.cuLibraryLoadData(image, None, None, 0, None, None, 0)))


def unload(library: int) -> None:
    """Give a library back; none of its kernels may be running."""
    check(driver.cuLibraryUnload(library))


def function_of(library: int, name: str) -> int:
    """A kernel of a library in the current context."""
    return int(check(driver.cuKernelGetFunction(check(driver.cuLibraryGetKernel(library, name.encode())))))


def allow_shared_memory(function: int, nbytes: int) -> None:
    """Let launches of a function ask for so much dynamic shared memory."""
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, most, nbytes))


def launch_config(smem_bytes: int, cluster: int) -> driver.CUlaunchConfig:
    """A launch with so much dynamic shared memory. Its attributes are the cluster, where that has several CTAs, and
    then that the CTAs may start early."""
    together = driver.CUlaunchAttribute()
    together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    together.value.clusterDim.x = cluster
    together.value.clusterDim.y = together.value.clusterDim.z = 1
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimY = config.gridDimZ = 1
    config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = smem_bytes
    config.attrs = [together, early] if cluster > 1 else [early]
    return config


class Launcher:
    """Launches one function of a context with so much dynamic shared memory. One launch overwrites the arguments of the
    one before: threads take turns."""

    def __init__(self, function: int, context: int, smem_bytes: int) -> None:
        self._alone, self._in_pairs = (launch_config(smem_bytes, cluster) for cluster in (1, 2))
        self._context = context
        self._function = driver.CUfunction(function)  # a number would be made into one at each launch

    def launch(self, grid: int, threads: int, stream: int, parameters: int, early: bool, pairs: bool) -> None:
        """Launch `grid` CTAs of so many threads.

        Args:
            parameters: address of the addresses of the kernel's arguments, which the driver has read when this returns.
            early: the CTAs may start before the launch before has ended.
            pairs: in clusters of 2; the grid must be even.
        """
        config: driver.CUlaunchConfig = self._in_pairs if pairs else self._alone
        config.gridDimX, config.blockDimX, config.hStream, config.numAttrs = grid, threads, stream, pairs + early
        result = driver.cuLaunchKernelEx(config, self._function, parameters, 0)
        if result[0] != SUCCESS:
            if result[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # the thread's first CUDA call
                set_context(self._context)
                result = driver.cuLaunchKernelEx(config, self._function, parameters, 0)
            check(result)


def launch_thread(function: int, stream: int, values: Sequence[int], types: Sequence[type]) -> None:
    """Launch one thread. types: of the values, in ctypes."""
    check(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (tuple(values), tuple(types)), 0))


def hold_stream(stream: int, address: int, least: int) -> None:
    """Let a stream wait until the 32-bit word at an address is at least so much (as a cyclic counter)."""
    flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    check(driver.cuStreamWaitValue32(stream, address, least, int(flags)))


def create_stream() -> int:
    """Raw handle of a new stream of the current device, which does not wait for the default stream."""
    return int(check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))))


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let the calling thread allocate, copy and wait while this or another thread captures a graph, which that would
    otherwise end as invalid."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before))


# ---- memory


def allocate(nbytes: int) -> int | None:
    """Address of new memory of the current context; None: too little is free."""
    result = driver.cuMemAlloc(nbytes)
    return None if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else int(check(result))


def free(address: int) -> None:
    """Give back what `allocate` gave."""
    check(driver.cuMemFree(address))


def fill(address: int, byte: int, count: int) -> None:
    """Set `count` bytes."""
    check(driver.cuMemsetD8(address, byte, count))


def fill_words(address: int, word: int, count: int) -> None:
    """Set `count` 32-bit words."""
    check(driver.cuMemsetD32(address, word, count))


def write(address: int, content: bytes) -> None:
    """Copy bytes to a device."""
    check(driver.cuMemcpyHtoD(address, content, len(content)))


def copy(to: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy by the copy engine."""
    check(driver.cuMemcpyAsync(to, source, nbytes, stream))


def allocate_host(nbytes: int) -> int:
    """Address of page-locked host memory that all devices see there."""
    flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
    return int(check(driver.cuMemHostAlloc(nbytes, int(flags))))


def free_host(address: int) -> None:
    """Give back what `allocate_host` gave."""
    check(driver.cuMemFreeHost(address))


# ---- memory that is mapped, which other processes import (cuMemCreate)


def memory_properties(device: int, fabric: bool) -> driver.CUmemAllocationProp:
    """Memory of a device that goes to other processes by fabric handle, else by file descriptor."""
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.requestedHandleTypes = handle_type(fabric)
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = int(check(driver.cuDeviceGet(device)))
    return made


def handle_type(fabric: bool) -> driver.CUmemAllocationHandleType:
    """That of fabric handles, else of file descriptors."""
    if fabric:
        return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def granularity(device: int, fabric: bool) -> int:
    """Bytes of which sizes of such memory, and the addresses that it is mapped at, are multiples."""
    option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(check(driver.cuMemGetAllocationGranularity(memory_properties(device, fabric), option)))


def create_memory(device: int, nbytes: int, fabric: bool) -> int | None:
    """Memory without an address; None: too little is free."""
    result = driver.cuMemCreate(nbytes, memory_properties(device, fabric), 0)
    return None if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else int(check(result))


def release_memory(memory: int) -> None:
    """Give up what `create_memory` gave or was imported; it ends with its last mapping."""
    check(driver.cuMemRelease(memory))


def export_descriptor(memory: int) -> int:
    """A new file descriptor of memory, to be closed by the caller."""
    return int(check(driver.cuMemExportToShareableHandle(memory, handle_type(fabric=False), 0)))


def import_descriptor(descriptor: int) -> int:
    """Memory of another process on this machine; the descriptor stays the caller's."""
    return int(check(driver.cuMemImportFromShareableHandle(descriptor, handle_type(fabric=False))))


def export_fabric(memory: int) -> bytes:
    """HANDLE_BYTES that name memory to processes of the NVLink domain."""
    handle: driver.CUmemFabricHandle = check(driver.cuMemExportToShareableHandle(memory, handle_type(fabric=True), 0))
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def import_fabric(content: bytes) -> int:
    """Memory of another process, from `export_fabric`."""
    check_length(content)
    handle = driver.CUmemFabricHandle()
    ctypes.memmove(handle.getPtr(), content, HANDLE_BYTES)
    return int(check(driver.cuMemImportFromShareableHandle(handle.getPtr(), handle_type(fabric=True))))


def reserve_addresses(nbytes: int) -> int:
    """The first of so many addresses, a multiple of the granularity, at which nothing is mapped."""
    return int(check(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))


def free_addresses(address: int, nbytes: int) -> None:
    """Give back what was reserved; nothing may be mapped there."""
    check(driver.cuMemAddressFree(address, nbytes))


def map_memory(address: int, nbytes: int, memory: int) -> None:
    """Map memory from its start on. No device may use it there before `allow_access`."""
    check(driver.cuMemMap(address, nbytes, 0, memory, 0))


def allow_access(address: int, nbytes: int, device: int) -> None:
    """Let a device, the memory's own or a peer, read and write what is mapped."""
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(check(driver.cuDeviceGet(device)))
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(driver.cuMemSetAccess(address, nbytes, [access], 1))


def unmap_memory(address: int, nbytes: int) -> None:
    """Undo `map_memory`; no kernel may be using it."""
    check(driver.cuMemUnmap(address, nbytes))


# ---- memory of other processes (CUDA IPC)


def ipc_handle(address: int) -> bytes:
    """HANDLE_BYTES that name an allocation to other processes on this machine."""
    return handle_bytes(check(driver.cuIpcGetMemHandle(address)))


def open_ipc_handle(handle: bytes) -> int:
    """Map another process's allocation into the current context; returns its address here."""
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(check(driver.cuIpcOpenMemHandle(handle_of(handle), int(flags))))


def close_ipc_handle(address: int) -> None:
    """Unmap what `open_ipc_handle` mapped."""
    check(driver.cuIpcCloseMemHandle(address))


def handle_bytes(handle: driver.CUipcMemHandle) -> bytes:
    """What the driver has written: its address is the one thing about a handle that all releases agree on."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_of(content: bytes) -> driver.CUipcMemHandle:
    """The handle of `handle_bytes`."""
    check_length(content)
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), content, HANDLE_BYTES)
    return handle


def check_length(content: bytes) -> None:
    """EPError unless these are the bytes of a handle."""
    if len(content) != HANDLE_BYTES:
        raise EPError(f"handle of {len(content)} bytes: must be {HANDLE_BYTES}")
