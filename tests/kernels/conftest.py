"""Fixtures of tests of device code on the CPU."""

import pytest


@pytest.fixture
def host_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are traced have stand-ins for instructions that only a GPU has."""
    from . import host

    host.install(monkeypatch)
