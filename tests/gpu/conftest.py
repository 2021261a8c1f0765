"""GPU fixtures: which devices play which rank, and the library of kernels under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cute_ep.communicator import Communicator
from cute_ep.config import EPConfig
from cute_ep.connection import connect_local

LIBRARY = Path(__file__).parents[2] / "build" / "library"
VIRTUAL_RANKS = 8


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
    """Communicators of all ranks, closed at the end."""
    communicators = connect_local(cfg, devices, library=LIBRARY, **options)
    try:
        yield communicators
    finally:
        for communicator in communicators:
            communicator.close()
