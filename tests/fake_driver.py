"""A CUDA driver without a GPU, which takes and returns cuda-python's own types as the real one does, so that these are
not hidden from tests without a GPU. `tests.runtime.stub_driver` is one behind cuda-python."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cute_ep.api.errors import EPError
from cute_ep.runtime import driver_calls, launcher

cuda: Any = driver_calls.driver
OK = (cuda.CUresult.CUDA_SUCCESS,)
STEP = 1 << 40
"""Between the addresses at which mappings of other processes' memory are told to be."""
GRANULARITY = 2 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FIXED = 0x10
NO_HANDLES = cuda.CUresult.CUDA_ERROR_NOT_PERMITTED
FABRIC = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
DESCRIPTOR = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class FakeDriver:
    """Device memory is this process's, any bytes at first. A thread's current context is `first_context` until it sets
    another one. Launches call `launch(config, function, address of the addresses of the arguments, extra)`.

    Attributes:
        memory: by address, allocations of devices and of the host.
        mapped: by the address of a mapping, that of the allocation.
        handles: of memory that can be mapped: a file of its content, and whether it was imported.
        reserved: bytes at addresses to map memory at.
        refused: handle types that memory cannot be created with.
        loaded: libraries.
        allowed: what functions may have of shared memory.
        calls: names of all calls, the first one first.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, launch: Callable[..., tuple] = lambda *_: OK, first_context: int = 5
    ) -> None:
        self.launch, self.first_context = launch, first_context
        self.memory: dict[int, ctypes.Array] = {}
        self.mapped: dict[int, int] = {}
        self.refused: set[Any] = set()
        self.loaded: set[int] = set()
        self.allowed: list[int] = []
        self.calls: list[str] = []
        self._handles: dict[bytes, int] = {}
        self.handles: dict[int, tuple[int, bool]] = {}
        self.reserved: dict[int, int] = {}
        self._accessible: set[int] = set()
        self._owners: dict[int, int] = {}  # by file: where its owner has mapped it
        self._thread = threading.local()
        self._numbers = itertools.count(1)
        monkeypatch.setattr(launcher, "driver_addresses", self._addresses)
        for name in [name for name in dir(self) if name.startswith("cu")]:
            monkeypatch.setattr(cuda, name, self._noted(name))

    def _addresses(self) -> tuple[int, int]:
        """The compiled launcher finds no driver, unless tests give it one."""
        raise EPError("CUDA driver: there is none")

    def _noted(self, name: str) -> Callable[..., tuple]:
        def call(*arguments: Any) -> tuple:
            self.calls.append(name)
            return getattr(self, name)(*arguments)

        return call

    @property
    def context(self) -> int:
        """The calling thread's."""
        return getattr(self._thread, "context", self.first_context)

    def bytes_at(self, address: int) -> ctypes.Array:
        """An allocation."""
        return self.memory[self.mapped.get(address, address)]

    def _new(self, nbytes: int) -> int:
        made = ctypes.create_string_buffer(b"\xa5" * nbytes, nbytes)
        self.memory[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    # contexts

    def cuCtxGetCurrent(self) -> tuple:
        return (*OK, cuda.CUcontext(self.context))

    def cuCtxSetCurrent(self, context: Any) -> tuple:
        self._thread.context = int(cuda.CUcontext(context))
        return OK

    def cuDeviceGet(self, ordinal: int) -> tuple:
        return (*OK, cuda.CUdevice(ordinal + 10))

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple:
        return (*OK, cuda.CUcontext(100 + int(device)))

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> tuple:
        return OK

    # kernels

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> tuple:
        number = next(self._numbers)
        self.loaded.add(number)
        return (*OK, cuda.CUlibrary(number))

    def cuLibraryUnload(self, library: Any) -> tuple:
        self.loaded.remove(int(cuda.CUlibrary(library)))
        return OK

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> tuple:
        return (*OK, cuda.CUkernel(int(cuda.CUlibrary(library))))

    def cuKernelGetFunction(self, kernel: Any) -> tuple:
        return (*OK, cuda.CUfunction(int(kernel)))

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple:
        assert attribute == cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.allowed.append(value)
        return OK

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple:
        assert isinstance(config, cuda.CUlaunchConfig) and isinstance(function, cuda.CUfunction)
        return self.launch(config, function, parameters, extra)

    # memory

    def cuMemAlloc(self, nbytes: int) -> tuple:
        return (*OK, cuda.CUdeviceptr(self._new(nbytes)))

    def cuMemFree(self, address: Any) -> tuple:
        del self.memory[int(cuda.CUdeviceptr(address))]
        return OK

    def cuMemsetD8(self, address: Any, byte: int, count: int) -> tuple:
        ctypes.memset(int(cuda.CUdeviceptr(address)), byte, count)
        return OK

    def cuMemcpyHtoD(self, address: Any, content: bytes, count: int) -> tuple:
        ctypes.memmove(int(cuda.CUdeviceptr(address)), content, count)
        return OK

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple:
        return (*OK, self._new(nbytes))

    def cuMemFreeHost(self, address: int) -> tuple:
        del self.memory[address]
        return OK

    # memory of other processes

    def cuIpcGetMemHandle(self, address: Any) -> tuple:
        handle, at = cuda.CUipcMemHandle(), int(cuda.CUdeviceptr(address))
        content = bytes((at + 7 * place) % 256 for place in range(56)) + at.to_bytes(8, "little")
        ctypes.memmove(handle.getPtr(), content, len(content))
        self._handles[content] = at
        return (*OK, handle)

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple:
        assert isinstance(handle, cuda.CUipcMemHandle)
        owner = self._handles.get(ctypes.string_at(handle.getPtr(), 64))
        if owner is None:
            return cuda.CUresult.CUDA_ERROR_INVALID_VALUE, cuda.CUdeviceptr()
        address = STEP * next(self._numbers)
        self.mapped[address] = owner
        return (*OK, cuda.CUdeviceptr(address))

    def cuIpcCloseMemHandle(self, address: Any) -> tuple:
        del self.mapped[int(cuda.CUdeviceptr(address))]
        return OK

    # memory that is mapped: a file of this machine, so that processes do share it; a handle is a descriptor of it

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple:
        return (*OK, GRANULARITY)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple:
        assert isinstance(properties, cuda.CUmemAllocationProp) and nbytes % GRANULARITY == flags == 0
        if properties.requestedHandleTypes in self.refused:
            return NO_HANDLES, cuda.CUmemGenericAllocationHandle()
        file = os.memfd_create("memory")
        os.write(file, b"\xa5" * nbytes)
        return (*OK, self._handle(file, imported=False))

    def _handle(self, file: int, *, imported: bool) -> Any:
        number = next(self._numbers)
        self.handles[number] = file, imported
        return cuda.CUmemGenericAllocationHandle(number)

    def cuMemRelease(self, memory: Any) -> tuple:
        file, _ = self.handles.pop(_number(memory))
        os.close(file)
        return OK

    def cuMemExportToShareableHandle(self, memory: Any, kind: Any, flags: int) -> tuple:
        file, _ = self.handles[_number(memory)]
        if kind == DESCRIPTOR:
            return (*OK, os.dup(file))
        handle = cuda.CUmemFabricHandle()
        content = f"/proc/{os.getpid()}/fd/{file}".encode()
        ctypes.memmove(handle.getPtr(), content, len(content))
        return (*OK, handle)

    def cuMemImportFromShareableHandle(self, handle: int, kind: Any) -> tuple:
        file = os.dup(handle) if kind == DESCRIPTOR else os.open(ctypes.string_at(handle), os.O_RDWR)
        return (*OK, self._handle(file, imported=True))

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple:
        found = self._mmap(None, nbytes)
        self.reserved[found] = nbytes
        return (*OK, cuda.CUdeviceptr(found))

    def _mmap(self, address: int | None, nbytes: int, file: int = -1) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file < 0 else mmap.MAP_SHARED
        access = mmap.PROT_READ if file < 0 else mmap.PROT_READ | mmap.PROT_WRITE
        found = LIBC.mmap(address, nbytes, access, flags | (FIXED if address else 0), file, 0)
        assert found != 2**64 - 1, os.strerror(ctypes.get_errno())
        return found

    def cuMemMap(self, address: int, nbytes: int, offset: int, memory: Any, flags: int) -> tuple:
        file, imported = self.handles[_number(memory)]
        assert self.reserved[address] == nbytes == os.fstat(file).st_size and offset == flags == 0
        self._mmap(address, nbytes, file)
        number = os.fstat(file).st_ino
        if imported:
            self.mapped[address] = self._owners.get(number, 0)
        else:
            self._owners[number] = address
            self.memory[address] = (ctypes.c_char * nbytes).from_address(address)
        return OK

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> tuple:
        ((one,), READ_WRITE) = access, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        assert one.flags == READ_WRITE and self.reserved[address] == nbytes
        self._accessible.add(address)
        return OK

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple:
        """Fails where others have the memory mapped still."""
        assert address in self._accessible, "the device had no access"
        self._accessible.remove(address)
        if address in self.memory:
            assert address not in self.mapped.values(), "freed while a peer has it mapped"
            del self.memory[address]
        else:
            del self.mapped[address]
        self._mmap(address, nbytes)
        return OK

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple:
        assert self.reserved.pop(address) == nbytes and address not in self.memory | self.mapped
        LIBC.munmap(address, nbytes)
        return OK


def _number(memory: Any) -> int:
    return int(cuda.CUmemGenericAllocationHandle(memory))
