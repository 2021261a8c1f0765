"""Fixtures of several files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cute_ep import connection
from cute_ep.launch_shape import CTAS_PER_SM

GPU, GPUS, SMS = "NVIDIA H200", 4, 132


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUS of SMS SMs each, on which a communicator is no more than its arguments."""
    for name, fake in {
        "enable_all_peers": lambda devices: None,
        "load_kernels": lambda *args: {},
        "unload_kernels": lambda kernels, device: None,
        "_make_arena": lambda cfg, rank, device: SimpleNamespace(address=0, free=None),
        "_max_ctas": lambda device, sms, ranks: CTAS_PER_SM * (sms or SMS) // ranks,
        "Communicator": lambda *args, **options: SimpleNamespace(**options, free=None),
    }.items():
        monkeypatch.setattr(connection, name, fake)
    monkeypatch.setattr(connection.torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(connection.torch.cuda, "device_count", lambda: GPUS)
