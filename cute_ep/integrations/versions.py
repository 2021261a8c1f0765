"""Whether the library that an adapter adapts is installed, and new enough."""

from __future__ import annotations

import re
from importlib import import_module


def require(name: str, oldest: tuple[int, int]) -> None:
    """Import a library. ImportError, with the command that installs it, if it is missing or older than `oldest`."""
    version = ".".join(map(str, oldest))
    need = f"must be {version} or newer: pip install '{name}>={version}'"
    try:
        found = import_module(name).__version__
    except ModuleNotFoundError as missing:
        raise ImportError(f"{name} = not installed: {need}") from missing
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < oldest:
        raise ImportError(f"{name} = {found}: {need}")
