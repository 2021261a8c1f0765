"""The driver that the compiled launcher calls, without a GPU: launches of `tests.fake_gpu.RecordingKernel` are recorded
as those by Python are."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fake_gpu import Launches

CONTEXT = 5
SHARED_BYTES = 48
SUCCESS, INVALID_VALUE = 0, 1
CLUSTER, EARLY = 4, 6
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


@contextmanager
def compiled(launches: Launches, count: int = 1) -> Iterator[None]:
    """So many launches are made in this block, all of them by the compiled launcher."""
    before = len(launches), launches.compiled.count
    yield
    assert (len(launches) - before[0], launches.compiled.count - before[1]) == (count, count)


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


Record = Callable[[dict[str, int], int, int, int, bool, bool], None]
"""Takes arguments by name, grid, stream, and whether the launch is early and in pairs."""


class CompiledLaunches:
    """Functions that kernels tell the launcher of, and what it does with them.

    Attributes:
        addresses: of cuLaunchKernelEx and cuCtxGetCurrent.
        context: the current one.
        status: what launches return.
        count: how many were made.
        errors: what was wrong with them.
    """

    def __init__(self) -> None:
        self.context, self.status, self.count = CONTEXT, SUCCESS, 0
        self.errors: list[BaseException] = []
        self._functions: list[tuple[Sequence[str], set[str], Record]] = []
        launch = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
        )
        current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_size_t))
        self._callbacks: tuple[Any, Any] = launch(self._launch), current(self._current)
        first, second = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._callbacks)
        self.addresses = first, second

    def describe(
        self, names: Sequence[str], slots: Sequence[str], values: Mapping[str, int], threads: int, record: Record
    ) -> tuple[int, int, int, bytes, bytes]:
        """`Kernel.described` of a new function, whose launches are recorded with the parameters that have a value.

        Args:
            names, slots: its parameters in the order of the kernel, and of the host.
            values: by name, of some of them.
            threads: of a CTA.
        """
        self._functions.append((names, set(values), record))
        numbers = struct.pack(f"{len(slots)}q", *(values.get(name, 0) for name in slots))
        order = struct.pack(f"{len(names)}H", *map(slots.index, names))
        return len(self._functions), threads, SHARED_BYTES, numbers, order

    def _current(self, context: Any) -> int:
        context[0] = self.context
        return SUCCESS

    def _launch(self, config: Any, function: int, parameters: int, extra: int | None) -> int:
        self.count += 1
        if self.status == SUCCESS:
            try:
                self._read(config.contents, function, parameters, extra)
            except BaseException as error:  # which ctypes would print
                self.errors.append(error)
        return self.status

    def _read(self, given: Config, function: int, parameters: int, extra: int | None) -> None:
        names, known, record = self._functions[function - 1]
        pointers = (ctypes.c_void_p * len(names)).from_address(parameters)
        values = {name: ctypes.c_int64.from_address(at).value for name, at in zip(names, pointers, strict=True)}
        assert not any(values[name] for name in values.keys() - known) and extra is None
        block = tuple(given.grid[1:]), tuple(given.block[1:]), given.shared_bytes
        assert block == ((1, 1), (1, 1), SHARED_BYTES)
        flags = {one.id: tuple(one.value[:3]) for one in given.attributes[: given.count]}
        early, pairs = EARLY in flags, CLUSTER in flags
        assert flags == ({CLUSTER: (2, 1, 1)} if pairs else {}) | ({EARLY: (1, 0, 0)} if early else {})
        arguments = {name: value for name, value in values.items() if name in known}
        record(arguments, given.grid[0], given.block[0], given.stream, early, pairs)
