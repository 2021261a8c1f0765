"""Fixtures for all tests; `tests.fake_gpu` and `tests.emulated_counts` say what each of them is."""

from __future__ import annotations

import gc
import os
import platform
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: threads of several workers on a core wait for each other
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ["OMP_NUM_THREADS"] = str(max(1, share))

from tests.emulated_counts import telling
from tests.fake_gpu import gpus, launches, local_launches, make_rank, rank

__all__ = ["gpus", "launches", "local_launches", "make_rank", "rank", "telling"]

settings.register_profile("cute_ep", deadline=None)  # machines that run tests are busy
settings.load_profile("cute_ep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda-bindings", metavar="VERSION", help="the cuda-bindings that must be found (tests.bindings)")
    parser.addoption(
        "--failures", metavar="FILE", type=Path, help="a file that gets each failure as soon as it is known"
    )


class FailuresFile:
    """Appends each failure to a file, so that a run which is cut off leaves them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.path.open("a") as file:
                file.write(f"==== {report.nodeid} ({report.when}, {report.duration:.1f} s)\n{report.longreprtext}\n")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--failures")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresFile(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have Python's collector leave out the million objects of modules and tests, which each of its full passes visits
    for half a second, and run less often. What tests make is collected as ever."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what has been tested: the first of each package on the path."""
    from cute_ep.bench.machine import driver_version, nccl_version, packages

    found = {"Python": platform.python_version(), **packages(), "NCCL": nccl_version(), "driver": driver_version()}
    terminalreporter.write_line(", ".join(f"{name} {version}" for name, version in found.items() if version))
