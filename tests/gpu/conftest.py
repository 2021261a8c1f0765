"""GPU fixtures: which devices play which rank, and the library of kernels under test.

Workers of pytest-xdist (`make test-gpu`) run tests with virtual ranks side by side, several on a GPU in time slices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.runtime import connection
from cute_ep.runtime.communicator import Communicator

LIBRARY = Path(__file__).parents[2] / "build" / "library"
VIRTUAL_RANKS = 8


def use_library_by_default() -> None:
    """Have the library under test found where no folder is named, here and in processes that tests start."""
    cache = LIBRARY.parent / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (cache / "cute_ep").symlink_to(LIBRARY, target_is_directory=True)
    os.environ["XDG_CACHE_HOME"] = str(cache)


def take_share(worker: int) -> None:
    """Leave to this process, which has not used a GPU yet, one of the GPUs in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)]


if LIBRARY.exists():
    use_library_by_default()
if "PYTEST_XDIST_WORKER" in os.environ:
    take_share(int(os.environ["PYTEST_XDIST_WORKER"][len("gw") :]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


def device_sets() -> dict[str, list[str]]:
    """Test id -> devices of the ranks: virtual ranks on one GPU, and all GPUs of the machine when it has several."""
    sets = {f"virtual{VIRTUAL_RANKS}": ["cuda:0"] * VIRTUAL_RANKS}
    if torch.cuda.device_count() > 1:
        sets[f"gpus{torch.cuda.device_count()}"] = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return sets


@pytest.fixture(params=list(device_sets().values()), ids=list(device_sets()))
def devices(request: pytest.FixtureRequest) -> list[str]:
    """Devices of the ranks."""
    return request.param


@contextmanager
def connected(cfg: EPConfig, devices: list[str], **options: object) -> Iterator[list[Communicator]]:
    """Communicators of all ranks with the library under test, closed at the end."""
    with connection.connected(cfg, devices, library=LIBRARY, **options) as communicators:
        yield communicators


@pytest.fixture(autouse=True)
def leave_memory_to_others() -> Iterator[None]:
    """Give back what torch holds unused: other workers' tests are on the same GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
