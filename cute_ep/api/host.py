"""Numbers on their way from a GPU to the host.

A copy to pageable memory (`tolist`, `cpu`) holds up the other threads and streams of the process while it waits for its
own stream: there no kernel starts and no event ends (driver 580, 2026-11-25). Where ranks share a process, one of those
may be what it waits for. A copy to page-locked memory, behind which the host waits for an event, holds up nobody.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_ep.api.errors import EPError


def host_memory(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Uninitialised, page-locked."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures what is queued for a device: for a GPU, on the current stream of the current one. A
    GPU that has failed captures nothing."""
    try:
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def refuse_capture(device: torch.device, call: str) -> None:
    """EPError for what waits for a device, while a CUDA graph is captured: most waits would end the capture as
    invalid."""
    if is_capturing(device):
        raise EPError(f"{call}: waits for the GPU, which no CUDA graph captures; do it before or after the capture")


@torch.compiler.disable
def host_list(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()`, which waits for the current stream of the tensor's device. EPError: during a capture."""
    if tensor.device.type == "cpu":
        return tensor.tolist()
    refuse_capture(tensor.device, "numbers that the host reads")
    found = host_memory(tensor.shape, tensor.dtype)
    stream = torch.cuda.current_stream(tensor.device)
    with torch.cuda.stream(stream):
        found.copy_(tensor.detach(), non_blocking=True)
    stream.synchronize()
    return found.tolist()
