"""Fixtures of several files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cute_ep.runtime import connection, driver

GPU, GPUS, SMS = "NVIDIA H200", 4, 132


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUS of SMS SMs each, on which a communicator is no more than its arguments."""
    for name, fake in {
        "enable_all_peers": lambda devices: None,
        "load_kernels": lambda *args: {},
        "load_local_kernels": lambda devices, library: None,
        "unload_kernels": lambda kernels, device: None,
        "_make_arena": lambda cfg, rank, device: SimpleNamespace(address=0, free=None),
        "resident_ctas": driver.resident_ctas.__wrapped__,
        "Communicator": lambda *args, **options: SimpleNamespace(**options, free=None),
    }.items():
        monkeypatch.setattr(connection, name, fake)
    properties = SimpleNamespace(multi_processor_count=SMS)
    for name, fake in {
        "current_device": lambda: 0,
        "get_device_name": lambda device: GPU,
        "get_device_properties": lambda device: properties,
        "device_count": lambda: GPUS,
    }.items():
        monkeypatch.setattr(connection.torch.cuda, name, fake)
