"""Launches by Python where there is the compiled launcher, to compare the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from cute_ep.runtime.communicator import Communicator
from cute_ep.runtime.driver import Kernel


@contextmanager
def by_python(rank: Communicator) -> Iterator[None]:
    """Calls of a rank in this block are launched by Python, and so are all kernels of this process."""
    kept, rank._repeats = rank._repeats, None
    try:
        with patch.object(Kernel, "launch", Kernel.launch_by_python):
            yield
    finally:
        rank._repeats = kept
