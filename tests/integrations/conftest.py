"""Tests of adapters compute with one thread: their tensors are tiny, and threads would wait for each other.

A test that takes `no_wait` fails where the host waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_ep.runtime.communicator import Communicator
from tests.integrations.absent_peer import absent_group, waits

__all__ = ["absent_group", "waits"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*arguments: Any, **named: Any) -> None:
        raise AssertionError("the host waits for the device")

    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    monkeypatch.setattr(Communicator, "synchronize", waits)
