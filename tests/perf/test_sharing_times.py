"""What `perf.sharing_times` says of its measurements."""

from __future__ import annotations

from cute_ep.runtime.symmetric import Kind
from perf.sharing_times import line


def test_kinds_are_compared_turn_by_turn() -> None:
    """A slow turn of both does not count."""
    found = {Kind.DESCRIPTOR: [10.1, 30.3, 10.2], Kind.IPC: [10.0, 30.0, 10.0]}
    assert line(128, found) == (
        "128 tokens: file descriptors 10.20 (10.10 to 30.30), 1.0100 of CUDA IPC; CUDA IPC 10.00 (10.00 to 30.00)"
    )
