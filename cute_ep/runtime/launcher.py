"""The compiled launcher, `launcher.c`, if this installation and this torch have what it takes.

It is C for Python's stable ABI, one file without a dependency. With an empty driver a dispatch of 7 arguments takes it
0.9 us, a combine of 9 takes 1.3 us. apache-tvm-ffi, which reads tensors by the same functions of torch, takes 0.5 us
for a call with 3 tensors and 1.4 us for one with 12, before any check, and would be one more package to keep in step
with torch (one thread of a CPU, 2026-11-26).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeAlias

import torch

from cute_ep.api.errors import EPError
from cute_ep.layouts.maps.parameters import Fields
from cute_ep.torch_internals import exchange_api

MODULE = "cute_ep.runtime._launcher"
"""What `launcher.c` is compiled to."""


class Calls(Protocol):
    """`Calls` of `launcher.c`, which describes its methods."""

    def launch(self, stream: int, early: bool, *tensors_and_keys: object) -> Any:
        """Launch what was added for these, or None."""

    def add(self, *launch: object) -> bool:
        """Keep a launch."""


Start: TypeAlias = Callable[[int, int, int, bool, bool, Fields], int]
"""`start` of `launcher.c`'s `Function`."""
Take: TypeAlias = Callable[[int, int, int], "list[int] | None"]
"""`take` of `launcher.c`."""


@cache
def missing() -> str | None:
    """Why calls are launched by Python alone, in words; None: they need not be."""
    try:
        import_module(MODULE)
    except ImportError as error:
        return f"it was not compiled, or not for this Python ({error})"
    if exchange_api() is None:
        return f"torch {torch.__version__} has no DLPack exchange API, as 2.11 has"
    try:
        _calls((0, 0, 0), (0, 0, 1), 1, 0, 1)
    except (TypeError, ValueError) as error:
        return f"torch {torch.__version__}: {error}"
    return None


def _calls(
    driver: tuple[int, int, int], reports: tuple[int, int, int], *numbers: int, addresses: int = 0, opened: int = 0
) -> Calls:
    of_torch = exchange_api(), torch.Tensor, torch.is_grad_enabled
    return import_module(MODULE).Calls(*of_torch, driver, reports, *numbers, addresses, opened)


def driver_addresses() -> tuple[int, int]:
    """Addresses of cuLaunchKernelEx and cuCtxGetCurrent. EPError: there is no CUDA driver, or one without these."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        calls = library.cuLaunchKernelEx, library.cuCtxGetCurrent
    except (OSError, AttributeError) as error:
        raise EPError(f"CUDA driver: {error}") from None
    launch, current = (ctypes.cast(one, ctypes.c_void_p) for one in calls)
    return launch.value or 0, current.value or 0


def make_calls(
    context: int,
    reports: tuple[int, int, int],
    tensors: int,
    written: int,
    keys: int,
    addresses: int = 0,
    opened: int = 0,
) -> Calls:
    """Launches of one operation of one rank, none at first.

    Args:
        context: of the rank's kernels.
        reports: (address, words, step) of host memory: while every step-th word is 0 no call need be refused.
        tensors, keys: how many a call has.
        written: bits of the tensors that the kernel writes.
        addresses: bits of those that may be addresses instead, of memory that need not be checked.
        opened: bits of those in whose first extent calls of a kind may differ.

    Raises:
        EPError: the launcher is `missing`, or there is no CUDA driver.
    """
    why = missing()
    if why is not None:
        raise EPError(f"compiled launcher: {why}")
    return _calls((*driver_addresses(), context), reports, tensors, written, keys, addresses=addresses, opened=opened)


def starter(function: int, shared_bytes: int, values: ctypes.Array, order: bytes) -> Start | None:
    """What launches a kernel, as `Kernel.described` describes it, whose numbers are `values`. None: Python must."""
    if missing() is not None:
        return None
    try:
        launch, _ = driver_addresses()
    except EPError:
        return None
    made = import_module(MODULE).Function(launch, function, shared_bytes, values, order)
    start: Start = made.start
    return start


def taker() -> Take | None:
    """What takes numbers that kernels have told the host. None: Python must."""
    return None if missing() is not None else import_module(MODULE).take
