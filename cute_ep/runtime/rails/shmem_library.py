"""NVSHMEM in plain numbers and bytes: the host functions that a rail needs, of the library that the process has loaded
or that PyTorch brings.

By ctypes and not by nvshmem4py, which brings cuda-core and NumPy. There is no device code, so no versions that must
match: the C interface of these functions is the same in 3.3.9, 3.4.5 and 3.8.0.
"""

from __future__ import annotations

import ctypes
import os
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from cute_ep.api.errors import EPConfigError, EPError

SONAME = "libnvshmem_host.so.3"
WHEEL_FOLDER = Path("nvidia", "nvshmem", "lib")
"""Where the packages nvidia-nvshmem-cu12 and -cu13 have it, in a folder of sys.path."""
OLDEST = (3, 3, 9)
"""That of torch 2.8, the first that brings one."""
UNIQUE_ID_BYTES = 128
BY_UNIQUE_ID = 1 << 3
"""NVSHMEMX_INIT_WITH_UNIQUEID."""
SIGNAL_ADD = 10
ERRORS = {
    1: "INVALID_VALUE",
    2: "OUT_OF_MEMORY",
    3: "NOT_SUPPORTED",
    4: "SYMMETRY",
    5: "GPU_NOT_SELECTED",
    6: "COLLECTIVE_LAUNCH_FAILED",
    7: "INTERNAL",
}
"""Of nvshmemx_status, after NVSHMEMX_ERROR_."""
SAYS_MORE = "NVSHMEM_DEBUG=WARN has NVSHMEM say why"


class Begun(IntEnum):
    """How far NVSHMEM is in a process: those of nvshmemx_init_status that differ here. Higher numbers than WITH_GPU
    say that PEs share a GPU."""

    NOT = 0
    WITHOUT_GPU = 1
    WITH_GPU = 2


class UniqueId(ctypes.Structure):
    """What PEs find each other by."""

    _fields_ = [("version", ctypes.c_int), ("internal", ctypes.c_char * (UNIQUE_ID_BYTES - 4))]


class UniqueIdArgs(ctypes.Structure):
    """Of an `InitArgs`."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("id", ctypes.POINTER(UniqueId)),
        ("rank", ctypes.c_int),
        ("ranks", ctypes.c_int),
    ]


class InitArgs(ctypes.Structure):
    """Of an `InitAttributes`. `cuda_device_id`: padding before 3.5."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("by_id", UniqueIdArgs),
        ("cuda_device_id", ctypes.c_int),
        ("padding", ctypes.c_char * 92),
    ]


class InitAttributes(ctypes.Structure):
    """How NVSHMEM begins: nvshmemx_init_attr_v1."""

    _fields_ = [("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("args", InitArgs)]


class Function(NamedTuple):
    """Types of a function's arguments and of its result."""

    arguments: list[Any]
    result: Any = None


INT, LONG, SIZE, AT = ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
NUMBER = ctypes.POINTER(INT)
FUNCTIONS = {
    "nvshmemx_vendor_get_version_info": Function([NUMBER, NUMBER, NUMBER]),
    "nvshmemx_init_status": Function([], INT),
    "nvshmemx_get_uniqueid": Function([ctypes.POINTER(UniqueId)], INT),
    "nvshmemx_set_attr_uniqueid_args": Function(
        [INT, INT, ctypes.POINTER(UniqueId), ctypes.POINTER(InitAttributes)], INT
    ),
    "nvshmemx_hostlib_init_attr": Function([ctypes.c_uint, ctypes.POINTER(InitAttributes)], INT),
    "nvshmemx_hostlib_finalize": Function([]),
    "nvshmem_my_pe": Function([], INT),
    "nvshmem_n_pes": Function([], INT),
    "nvshmem_malloc": Function([SIZE], AT),
    "nvshmem_free": Function([AT]),
    "nvshmemx_putmem_signal_on_stream": Function([AT, AT, SIZE, AT, LONG, INT, INT, AT]),
    "nvshmemx_signal_op_on_stream": Function([AT, LONG, INT, INT, AT]),
}


class Addition(NamedTuple):
    """`amount` is added to a word of a PE. Words, and where puts go, are addresses of this PE's symmetric memory."""

    word: int
    amount: int
    pe: int


class ShmemLibrary:
    """The functions of a libnvshmem_host. Addresses and streams are plain numbers; PEs are the processes that began
    together, and each works on its own device, which is the current one.

    A process has NVSHMEM once, and so one of these. NVSHMEM ends the process where it meets what it does not expect.

    Attributes:
        version: (major, minor, patch).
        path: where the library was found; its name alone: the process had loaded it.
    """

    def __init__(self, library: Any, path: str = SONAME) -> None:
        self.path = path
        self._users, self._counting = 0, Lock()  # since one of them began it
        try:
            self._functions = {name: getattr(library, name) for name in FUNCTIONS}
        except AttributeError as error:
            raise EPConfigError(f"{SONAME}: {error}; must be NVSHMEM {version_text(OLDEST)} or newer") from None
        for name, function in self._functions.items():
            function.argtypes, function.restype = FUNCTIONS[name]
        found = [INT() for _ in range(3)]
        self._functions["nvshmemx_vendor_get_version_info"](*(ctypes.byref(one) for one in found))
        self.version = found[0].value, found[1].value, found[2].value
        if self.version < OLDEST:
            raise EPConfigError(
                f"{SONAME}: is NVSHMEM {version_text(self.version)}, must be {version_text(OLDEST)} or newer"
            )

    @classmethod
    @cache
    def load(cls) -> ShmemLibrary:
        """The library that this process has loaded, else the one of PyTorch. EPConfigError: there is none, or an old
        one."""
        there = [path for folder in sys.path if (path := Path(folder or ".") / WHEEL_FOLDER / SONAME).exists()]
        tried = []
        for name, mode in ((SONAME, os.RTLD_NOLOAD), *((str(path), 0) for path in there)):
            try:
                return cls(ctypes.CDLL(name, mode=mode | os.RTLD_NOW), name)
            except OSError as error:
                tried.append(f"{name}: {error}" if mode == 0 else f"{name}: this process has not loaded it")
        if not there:
            tried.append(f"{WHEEL_FOLDER / SONAME}: in no folder of sys.path")
        raise EPConfigError(
            f"transport = 'nvshmem': NVSHMEM is not here ({'; '.join(tried)}): install nvidia-nvshmem-cu13, or -cu12 "
            "for CUDA 12, or take transport = 'nccl'"
        )

    def begun(self) -> Begun:
        """How far NVSHMEM is in this process."""
        return Begun(min(self._functions["nvshmemx_init_status"](), Begun.WITH_GPU))

    def place(self) -> tuple[int, int]:
        """This process's PE, and how many there are, once it has begun."""
        return self._functions["nvshmem_my_pe"](), self._functions["nvshmem_n_pes"]()

    def unique_id(self) -> bytes:
        """What all PEs must have to begin together, made by PE 0."""
        made = UniqueId()
        self._call("nvshmemx_get_uniqueid", ctypes.byref(made))
        return bytes(memoryview(made))

    def begin(self, unique_id: bytes, pe: int, pes: int, device: int) -> None:
        """Become a PE on the current device, whose ordinal is `device`; waits for all PEs. EPError: NVSHMEM cannot."""
        one, attributes = UniqueId.from_buffer_copy(unique_id), InitAttributes()
        for part in (attributes, attributes.args, attributes.args.by_id):
            part.version = (1 << 16) + ctypes.sizeof(part)
        attributes.args.cuda_device_id = device  # 0 where it counts and nobody sets it
        given = ctypes.byref(attributes)
        self._call("nvshmemx_set_attr_uniqueid_args", pe, pes, ctypes.byref(one), given)
        self._call("nvshmemx_hostlib_init_attr", BY_UNIQUE_ID, given)
        if self.begun() != Begun.WITH_GPU:  # it says 0 although it has failed
            raise EPError(f"nvshmemx_hostlib_init_attr: PE {pe} has not begun on cuda:{device}; {SAYS_MORE}")
        self._users = 1

    def join(self) -> None:
        """Use what has begun. It ends with its last user if one of them began it."""
        with self._counting:
            self._users += self._users > 0

    def leave(self) -> None:
        """Use it no more; waits for all PEs where it ends with that."""
        with self._counting:
            ends = self._users == 1
            self._users -= self._users > 0
        if ends:
            self._functions["nvshmemx_hostlib_finalize"]()

    def allocate(self, nbytes: int) -> int:
        """Address of new symmetric memory, in multiples of 512; all PEs allocate as much, and wait for each other.
        EPError: there is not enough."""
        address = self._functions["nvshmem_malloc"](nbytes)
        if not address:
            size = f"{-(-nbytes // 2**20)} MiB"
            raise EPError(
                f"nvshmem_malloc: no {size} of symmetric memory: set NVSHMEM_SYMMETRIC_SIZE to more than that (1 GiB "
                "unless it is set; where the heap grows, NVSHMEM_MAX_MEMORY_PER_GPU limits it) before NVSHMEM begins, "
                f"or take fewer max_tokens_per_rank; {SAYS_MORE}"
            )
        return int(address)

    def free(self, address: int) -> None:
        """Give back what `allocate` gave, on all PEs, which wait for each other."""
        self._functions["nvshmem_free"](address)

    def put(self, to: int, source: int, nbytes: int, signal: Addition, stream: int) -> None:
        """Queue bytes to `to` of the signal's PE, and behind them the signal. What comes behind on the stream may write
        to the source."""
        if nbytes:
            word, amount, pe = signal
            name = "nvshmemx_putmem_signal_on_stream"
            self._functions[name](to, source, nbytes, word, amount, SIGNAL_ADD, pe, stream)
        else:
            self.signal(signal, stream)

    def signal(self, addition: Addition, stream: int) -> None:
        """Queue an addition."""
        word, amount, pe = addition
        self._functions["nvshmemx_signal_op_on_stream"](word, amount, SIGNAL_ADD, pe, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise EPError(f"{name}: status {code}, {ERRORS.get(code, 'unknown')}; {SAYS_MORE}")


def version_text(version: tuple[int, int, int]) -> str:
    """3.4.5 for (3, 4, 5)."""
    return ".".join(map(str, version))
