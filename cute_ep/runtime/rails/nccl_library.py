"""NCCL in plain numbers and bytes: the functions that a rail needs, of the library that torch has loaded.

By ctypes and not by nccl4py, which brings cuda-core and NumPy, and may load another libnccl than torch's. The C
interface of these functions is the same in all releases from OLDEST on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cute_ep.api.errors import EPConfigError, EPError

SONAME = "libnccl.so.2"
OLDEST = (2, 18, 0)
"""The first release that has all of `Config`; torch 2.7 brings 2.26."""
UNIQUE_ID_BYTES = 128
MAGIC = 0xCAFEBEEF
UNDEFINED = -(2**31)
"""Of a `Config`: what NCCL finds out itself."""
BYTES = 0
"""ncclInt8."""


class UniqueId(ctypes.Structure):
    """What the ranks of a communicator find each other by."""

    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """How a communicator works: the fields of ncclConfig_t that OLDEST has. Later releases fill up the others."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        UniqueId,
        ctypes.c_int,
        ctypes.POINTER(Config),
    ],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p],
    "ncclRecv": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p],
    "ncclCommAbort": [ctypes.c_void_p],
}
"""Name -> types of the arguments; all return an ncclResult_t."""


def code_of(version: tuple[int, int, int]) -> int:
    """A release as NCCL counts them from 2.9 on."""
    major, minor, patch = version
    return 10000 * major + 100 * minor + patch


class NcclLibrary:
    """The functions of a libnccl. Communicators are plain numbers, and each is used on its own device, which is the
    current one.

    Each method raises EPError with NCCL's words for what went wrong.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        try:
            self._functions = {name: getattr(library, name) for name in FUNCTIONS}
            self._error_string, self._last_error = library.ncclGetErrorString, library.ncclGetLastError
        except AttributeError as error:
            raise EPConfigError(f"{SONAME}: {error}; must be NCCL {version_text(code_of(OLDEST))} or newer") from None
        for name, function in self._functions.items():
            function.argtypes, function.restype = FUNCTIONS[name], ctypes.c_int
        self._error_string.argtypes, self._error_string.restype = [ctypes.c_int], ctypes.c_char_p
        self._last_error.argtypes, self._last_error.restype = [ctypes.c_void_p], ctypes.c_char_p
        found = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(found))
        self.version = found.value
        if self.version < code_of(OLDEST):
            raise EPConfigError(
                f"{SONAME}: is NCCL {version_text(self.version)}, must be {version_text(code_of(OLDEST))} or newer"
            )

    @classmethod
    def loaded(cls) -> NcclLibrary:
        """That of this process, which torch has loaded. EPConfigError: there is none, or an old one."""
        try:
            return cls(ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError as error:
            raise EPConfigError(
                f"several nodes need NCCL, but this PyTorch has not loaded {SONAME} ({error}): install one with CUDA "
                "that links it"
            ) from None

    def unique_id(self) -> bytes:
        """For one communicator, of which all ranks must have it."""
        made = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(memoryview(made))

    def connect(self, unique_id: bytes, rank: int, ranks: int, max_ctas: int) -> int:
        """A communicator on the current device, whose kernels have at most `max_ctas` CTAs and no clusters; waits for
        the other ranks."""
        config = Config(ctypes.sizeof(Config), MAGIC, code_of(OLDEST), 1, 1, UNDEFINED, max_ctas, None, UNDEFINED)
        made = ctypes.c_void_p()
        self._call(
            "ncclCommInitRankConfig",
            ctypes.byref(made),
            ranks,
            UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        assert made.value is not None
        return made.value

    @contextmanager
    def group(self) -> Iterator[None]:
        """Sends and receives of this block are one operation."""
        self._call("ncclGroupStart")
        try:
            yield
        finally:
            self._call("ncclGroupEnd")

    def send(self, address: int, nbytes: int, peer: int, communicator: int, stream: int) -> None:
        """Queue bytes to a rank of the communicator."""
        self._call("ncclSend", address, nbytes, BYTES, peer, communicator, stream)

    def receive(self, address: int, nbytes: int, peer: int, communicator: int, stream: int) -> None:
        """Queue as many bytes from a rank of the communicator."""
        self._call("ncclRecv", address, nbytes, BYTES, peer, communicator, stream)

    def abort(self, communicator: int) -> None:
        """End what is under way on the device, and then the communicator, alone; waits for graphs that hold it."""
        self._call("ncclCommAbort", communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            said, last = (text.decode(errors="replace") for text in (self._error_string(code), self._last_error(None)))
            raise EPError(f"{name}: {said}" + (f"; {last.strip()}" if last.strip() else ""))


def version_text(code: int) -> str:
    """2.28.9 for 22809."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
