"""Compiled code on CPUs for tests of its calls: torch's inductor arranges them, and no C++ compiler runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from torch import Tensor
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile


def empty_kernel(_: AsyncCompile, types: Sequence[str], source: str) -> object:
    """A kernel that writes zeros, and takes what a C++ kernel of these types of arguments takes."""
    written = [number for number, one in enumerate(types) if one.endswith("*") and not one.startswith("const ")]
    assert written, source

    def kernel(*arguments: Tensor | int) -> None:
        for number in written:
            arguments[number].zero_()  # type: ignore[union-attr]

    return kernel


@contextmanager
def no_arithmetic() -> Iterator[None]:
    """What inductor generates for CPUs writes zeros meanwhile."""
    with config.patch({"cpp.simdlen": 1}), mock.patch.object(AsyncCompile, "cpp_pybinding", empty_kernel):
        yield
