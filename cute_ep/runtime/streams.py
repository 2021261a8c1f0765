"""Streams that nobody else has.

Torch hands out 32 streams of a device in turn, so the 33rd is the first again. Two ranks on one stream wait for each
other for ever: the kernel of one waits for the other's, which is queued behind it.
"""

from __future__ import annotations

from threading import Lock

import torch

from cute_ep.runtime.driver import on_device
from cute_ep.runtime.driver_calls import create_stream

_unused: dict[torch.device, list[torch.cuda.Stream]] = {}
_taking = Lock()


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of a device (with an index) that is not one of torch's, and the caller's alone until `give_back`."""
    with _taking:
        if unused := _unused.get(device):
            return unused.pop()
    with on_device(device):
        return torch.cuda.ExternalStream(create_stream(), device=device)


def stream_of(device: torch.device, handle: int) -> torch.cuda.Stream:
    """torch's object for a raw handle. 0 is the default stream; for that `ExternalStream` makes one of torch's 32."""
    return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)


def give_back(stream: torch.cuda.Stream) -> None:
    """Let the next caller take a stream, all of whose work has ended. It is never destroyed: torch's allocator records
    an event on it for each tensor that was used there, as late as the tensor is freed."""
    with _taking:
        _unused.setdefault(stream.device, []).append(stream)
