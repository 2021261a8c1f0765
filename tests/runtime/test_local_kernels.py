"""In which library the kernels of one GPU are looked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cute_ep.runtime import local_kernels
from cute_ep.runtime.local_kernels import load_local_kernels, local_kernel


class FakeLibrary:
    """Has every kernel: an entry is (folder, kernel)."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder, self.entries = folder, dict[Any, Any]()

    def find(self, kernel: str, arch: str, fmt: str | None) -> tuple[str | None, str]:
        return self.folder, kernel


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replaced = {"Library": FakeLibrary, "_load": lambda device, entry: entry, "architecture": lambda device: "sm_90a"}
    for name, value in (replaced | {"_given": {}, "torch": SimpleNamespace(device=lambda *place: place)}).items():
        monkeypatch.setattr(local_kernels, name, value)
    local_kernel.cache_clear()
    yield
    local_kernel.cache_clear()


def test_kernels_are_those_of_the_last_connection_on_the_device_unless_a_folder_is_given() -> None:
    assert local_kernel(0, "swiglu", "bf16", None) == (None, "swiglu")
    for folder in ("first", "last"):
        load_local_kernels([0], FakeLibrary(folder))
        assert local_kernel(0, "swiglu", "bf16", None) == (folder, "swiglu")
    assert local_kernel(0, "swiglu", "bf16", "given") == ("given", "swiglu")
    assert local_kernel(1, "swiglu", "bf16", None) == (None, "swiglu")
