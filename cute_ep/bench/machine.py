"""What this machine is: devices chosen on a command line, their names, links, driver; for people and for JSON files."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import cute_ep
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.routing import MAX_RANKS
from cute_ep.runtime.gpus import check_gpu, sm_budget
from cute_ep.runtime.rails.shmem_library import ShmemLibrary, version_text

VIRTUAL_RANKS = 4
"""Ranks that "auto" puts on a machine with one GPU, and that "cpu" stands for."""
NO_GPU = "there is no CUDA GPU on this machine; cute-ep verify and cute-ep demo also run on the CPU (--devices cpu)"


def parse_devices(text: str, num_experts: int | None = None, *, or_cpu: bool = False) -> list[str]:
    """One device name per rank, ["cuda:0", "cuda:1"], from a `--devices` argument (its help says which there are).

    Args:
        text: the argument.
        num_experts: "auto" takes the largest number of GPUs that divides it; None: all.
        or_cpu: "auto" is "cpu" on a machine without GPUs; False: an error.

    Raises:
        EPConfigError: the argument is malformed, names a GPU that is not here, or asks for too many ranks.
    """
    devices = _named_devices(text, num_experts, or_cpu)
    if len(devices) > MAX_RANKS:
        raise EPConfigError(f"devices = {text!r}: {len(devices)} ranks, must be at most {MAX_RANKS}")
    return devices


def _named_devices(text: str, num_experts: int | None, or_cpu: bool) -> list[str]:
    """`parse_devices` before ranks are counted."""
    gpus = torch.cuda.device_count()
    if text == "auto" and not gpus:
        if not or_cpu:
            raise EPConfigError(NO_GPU)
        text = "cpu"
    kind, _, number = text.partition(":")
    if kind in ("virtual", "cpu"):
        count = number or str(VIRTUAL_RANKS)
        if not count.isdecimal() or int(count) < 1:
            raise EPConfigError(f"devices = {text!r}: {kind}:N needs a positive number of ranks N")
        if kind == "virtual" and not gpus:
            raise EPConfigError(f"devices = {text!r}: {NO_GPU}")
        return ["cuda:0" if kind == "virtual" else "cpu"] * int(count)
    if text == "auto":
        if gpus == 1:
            return ["cuda:0"] * VIRTUAL_RANKS
        ranks = max(
            count for count in range(1, min(gpus, MAX_RANKS) + 1) if not num_experts or num_experts % count == 0
        )
        return [f"cuda:{index}" for index in range(ranks)]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        index = name.removeprefix("cuda:")
        if not name.startswith("cuda:") or not index.isdecimal():
            raise EPConfigError(f"devices = {text!r}: must be auto, cpu, virtual:N or cuda:I,cuda:J,...")
        check_gpu(f"devices = {text!r}", int(index))
    return names


def describe_devices(devices: Sequence[str], sms: int | None = None) -> str:
    """The devices in words, "4 ranks on 1 GPU (NVIDIA H200), 16 SMs per rank"; EPConfigError as `sm_budget`."""
    distinct = list(dict.fromkeys(devices))
    ranks = f"{len(devices)} rank{'s' * (len(devices) > 1)}"
    if distinct == ["cpu"]:
        why = "" if torch.cuda.device_count() else ", since this machine has no CUDA GPU"
        return f"{ranks} of the reference backend on the CPU{why}"
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(device) for device in distinct))
    budget = "" if sms is None else f", {min(sm_budget(device, sms) for device in distinct)} SMs per rank"
    return f"{ranks} on {len(distinct)} GPU{'s' * (len(distinct) > 1)} ({names}){budget}"


def machine_name(devices: Sequence[str]) -> str:
    """GPU and number of GPUs as a part of a file name, "h200x4"."""
    distinct = list(dict.fromkeys(devices))
    name = torch.cuda.get_device_name(distinct[0]).removeprefix("NVIDIA ").split()[0]
    return f"{name.lower()}x{len(distinct)}"


def driver_version() -> str | None:
    """Version of the NVIDIA driver, None where none can be asked."""
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def link_matrix() -> list[list[str]] | None:
    """[GPU][GPU] -> how they are connected in nvidia-smi's words ("NV18": 18 NVLinks); None where it cannot tell."""
    rows = []
    for line in (_output("nvidia-smi", "topo", "-m") or "").splitlines():
        cells = line.split()
        if cells and cells[0].startswith("GPU") and len(cells) > 1 and not cells[1].startswith("GPU"):
            rows.append(cells[1:])
    return [row[: len(rows)] for row in rows] or None


GPU_STATE = ("clocks.sm", "clocks.mem", "power.draw", "enforced.power.limit", "temperature.gpu")


def gpu_state() -> list[dict[str, str]]:
    """GPU_STATE of each GPU now, with the units that nvidia-smi gives; [] where it cannot be asked."""
    lines = (_output("nvidia-smi", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader") or "").splitlines()
    return [dict(zip(GPU_STATE, map(str.strip, line.split(",")), strict=False)) for line in lines]


def git_commit() -> str | None:
    """Commit of the checkout that cute_ep runs from ("-dirty" with local changes), None outside a checkout."""
    root = Path(cute_ep.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


PACKAGES = (
    "torch",
    "triton",
    "cuda-python",
    "cuda-bindings",
    "cuda-pathfinder",
    "nvidia-cutlass-dsl",
    "numpy",
    "rich",
    "transformers",
    "megatron-core",
    "torchtitan",
    "flashinfer-python",
    "sglang",
    "vllm",
)
"""What can have a part in a run, by the names of distributions."""


def packages() -> dict[str, str]:
    """The version of each of PACKAGES that is installed: of the first one on Python's path, which is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def nccl_version() -> str | None:
    """Of the NCCL in torch; None: it has none."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def nvshmem_found() -> tuple[str, str] | None:
    """Version and path of the NVSHMEM that `connect(transport="nvshmem")` takes, which is loaded here; None: there is
    none, or an old one."""
    try:
        library = ShmemLibrary.load()
    except EPConfigError:
        return None
    return version_text(library.version), library.path


def environment(devices: Sequence[str], command: str) -> dict:
    """Facts that belong beside every measured number: devices, versions, date, commit, command line."""
    gpus = [device for device in dict.fromkeys(devices) if device != "cpu"]
    return {
        "cute_ep": cute_ep.__version__,
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "devices": list(devices),
        "gpus": {device: torch.cuda.get_device_name(device) for device in gpus},
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "nccl": nccl_version(),
        "python": platform.python_version(),
        "packages": packages(),
    }


def _output(*command: str) -> str | None:
    """What a program prints, None when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
