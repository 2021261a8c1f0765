"""Other things in place of what `connect` and `connect_local` take from the machine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cute_ep.runtime import connection, parts, process_connection


def replace_names(monkeypatch: pytest.MonkeyPatch, fakes: Mapping[str, object]) -> None:
    """Each name in every module of these that has it; AttributeError where none has."""
    for name, fake in fakes.items():
        modules = [one for one in (connection, process_connection, parts) if hasattr(one, name)]
        if not modules:
            raise AttributeError(name)
        for module in modules:
            monkeypatch.setattr(module, name, fake)
