"""A process whose first SwiGLU comes while a rank waits for another one: `python -m tests.gpu.first_use`."""

from __future__ import annotations

import sys
import time

import torch

from cute_ep.api.config import EPConfig
from cute_ep.runtime.local_ops import fused_silu

from .conftest import LIBRARY, connected

TIMEOUT_S = 20
LONGEST_S = 5


def main() -> None:
    """AssertionError or EPTimeout when the SwiGLU, or its launch, has waited for the rank that waits."""
    devices = ["cuda:0"] * 2
    cfg = EPConfig(1024, 8, 2, 32, 2, "bf16", TIMEOUT_S)
    with connected(cfg, devices) as communicators:
        x = torch.randn(32, 1024, device="cuda").bfloat16()
        gate_up = torch.randn(32, 1024, device="cuda").bfloat16()
        ids = torch.arange(64, dtype=torch.int32, device="cuda").view(32, 2) % 8
        buffers, inner = [c.allocate() for c in communicators], torch.empty_like(gate_up[:, :512].contiguous())
        torch.cuda.synchronize()
        started = time.monotonic()
        communicators[0].dispatch(x, ids, out=buffers[0])
        with torch.cuda.stream(communicators[1].stream):
            fused_silu(gate_up, out=inner, library=str(LIBRARY))
        communicators[1].dispatch(x, ids, out=buffers[1])
        for communicator in communicators:
            communicator.synchronize()
        took = time.monotonic() - started
    assert took < LONGEST_S, f"{took:.1f} s: the launch has waited for rank 0"


if __name__ == "__main__":
    main()
    sys.stdout.write("first use ok\n")
