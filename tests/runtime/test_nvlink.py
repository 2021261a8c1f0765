"""The NVLink domain of a GPU, by forged answers of NVML."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.runtime.nvlink import COMPLETED, Fabric, FabricInfo, ask_nvml, clique_of

ZEROS, CLUSTER = bytes(16), bytes(range(16))


@pytest.mark.parametrize(
    ("told", "clique"),
    [
        (Fabric(COMPLETED, 0, CLUSTER, 7), "000102030405060708090a0b0c0d0e0f.7"),
        (Fabric(COMPLETED, 0, ZEROS, 7), None),
        (Fabric(COMPLETED, 999, CLUSTER, 7), None),
        *[(Fabric(state, 0, CLUSTER, 7), None) for state in range(COMPLETED)],
        (None, None),
    ],
    ids=["in a domain", "a cluster of zeros", "failed", "not supported", "not started", "in progress", "no answer"],
)
def test_the_clique_of_a_gpu(monkeypatch: pytest.MonkeyPatch, told: Fabric | None, clique: str | None) -> None:
    """Two machines that are a domain each have clusters of zeros: neither has a clique."""
    asked: list[str] = []
    properties = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert clique_of(torch.device("cuda", 1), lambda uuid: asked.append(uuid) or told) == clique
    assert asked == ["1234"]


class Nvml:
    """The library, which answers `fabric`, or an error; `open` counts inits."""

    def __init__(self, fabric: Fabric, **results: int) -> None:
        self.fabric, self.results, self.open = fabric, results, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return self.results.get("init", 0)

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, gpu: Any) -> int:
        assert name == b"GPU-1234"
        gpu._obj.value = 77
        return self.results.get("handle", 0)

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: Any, info: Any) -> int:
        assert gpu.value == 77 and info._obj.version == 36 | 2 << 24
        place = ctypes.addressof(info._obj)
        state, status, cluster, clique = self.fabric
        content = cluster + status.to_bytes(4, "little") + clique.to_bytes(4, "little") + bytes([state])
        ctypes.memmove(place + 4, content, len(content))
        return self.results.get("info", 0)


def test_nvml_is_asked_for_the_fabric_of_a_gpu() -> None:
    """As its header has the record, of 36 bytes; the library is given back."""
    told = Fabric(COMPLETED, 5, CLUSTER, 1 << 31)
    nvml = Nvml(told)
    assert ask_nvml("1234", lambda: nvml) == ask_nvml("GPU-1234", lambda: nvml) == told and nvml.open == 0
    assert ctypes.sizeof(FabricInfo) == 36


@pytest.mark.parametrize("failed", ["init", "handle", "info"])
def test_nvml_that_fails_tells_nothing(failed: str) -> None:
    """As of a part of a GPU, whose name it does not know."""
    nvml = Nvml(Fabric(COMPLETED, 0, CLUSTER, 0), **{failed: 3})
    assert ask_nvml("1234", lambda: nvml) is None and nvml.open == (failed == "init")


def test_without_nvml_or_with_an_old_one_nothing_is_told() -> None:
    def missing() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert ask_nvml("1234", missing) is None
    assert ask_nvml("1234", lambda: SimpleNamespace(nvmlInit_v2=None, nvmlShutdown=None)) is None
