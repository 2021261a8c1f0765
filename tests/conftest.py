"""Fixtures for all tests; `tests.fake_gpu` says what each of them is."""

from __future__ import annotations

import os
import platform

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: threads of several workers on a core wait for each other
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ["OMP_NUM_THREADS"] = str(max(1, share))

from tests.fake_gpu import gpus, launches, local_launches, make_rank, rank

__all__ = ["gpus", "launches", "local_launches", "make_rank", "rank"]

settings.register_profile("cute_ep", deadline=None)  # machines that run tests are busy
settings.load_profile("cute_ep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda-bindings", metavar="VERSION", help="the cuda-bindings that must be found (tests.bindings)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what has been tested: the first of each package on the path."""
    from cute_ep.bench.machine import driver_version, nccl_version, packages

    found = {"Python": platform.python_version(), **packages(), "NCCL": nccl_version(), "driver": driver_version()}
    terminalreporter.write_line(", ".join(f"{name} {version}" for name, version in found.items() if version))
