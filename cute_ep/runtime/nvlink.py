"""Which NVLink domain a GPU is in, as NVML tells."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
COMPLETED = 3
"""State of a GPU that the fabric has taken in."""
CLUSTER_BYTES = 16
VERSION = 2


class Fabric(NamedTuple):
    """What NVML tells of a GPU: how far it has come with the fabric, and whose part it is there."""

    state: int
    status: int
    cluster: bytes
    clique: int


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * CLUSTER_BYTES),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def load_nvml() -> Any:
    """The library. OSError: there is none."""
    return ctypes.CDLL(LIBRARY)


def ask_nvml(uuid: str, load: Callable[[], Any] = load_nvml) -> Fabric | None:
    """What NVML tells of a GPU; None: nothing, as without NVML, of a part of a GPU, and with older drivers."""
    try:
        nvml = load()
        ask, begin, end = nvml.nvmlDeviceGetGpuFabricInfoV, nvml.nvmlInit_v2, nvml.nvmlShutdown
    except (OSError, AttributeError):
        return None
    if begin() != SUCCESS:
        return None
    try:
        gpu, info = ctypes.c_void_p(), FabricInfo(version=ctypes.sizeof(FabricInfo) | VERSION << 24)
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(gpu)) != SUCCESS:
            return None
        if ask(gpu, ctypes.byref(info)) != SUCCESS:
            return None
        return Fabric(info.state, info.status, bytes(info.cluster), info.clique)
    finally:
        end()


def clique_of(device: torch.device, ask: Callable[[str], Fabric | None] = ask_nvml) -> str | None:
    """The clique of NVLink of a GPU, which may have GPUs of other machines; None: its machine is all that is known.

    A GPU that the fabric has not taken in has none, nor has one whose cluster has no name, zeros, as on machines that
    are a domain each: they would all look like one.
    """
    found = ask(str(torch.cuda.get_device_properties(device).uuid))
    if found is None or (found.state, found.status) != (COMPLETED, SUCCESS) or not any(found.cluster):
        return None
    return f"{found.cluster.hex()}.{found.clique}"
