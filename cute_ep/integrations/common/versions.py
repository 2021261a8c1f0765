"""Whether the library that an adapter adapts is installed, in a version that the adapter knows."""

from __future__ import annotations

import re
from importlib import import_module

Version = tuple[int, ...]


def _numbers(version: str) -> Version:
    """Those that a version starts with."""
    leading = re.match(r"\d+(\.\d+)+", version)
    return () if leading is None else tuple(map(int, leading[0].split(".")))


def has(name: str, oldest: Version) -> bool:
    """Whether an installed module's version is `oldest` or newer."""
    return _numbers(import_module(name).__version__) >= oldest


def require(name: str, oldest: Version, below: Version | None = None, *, package: str | None = None) -> None:
    """Import a library. ImportError, with the command that installs it: it is missing, or older than `oldest`, or not
    `below` a later version. `package`: what pip calls it, if not `name`."""
    least = ".".join(map(str, oldest))
    rule, wanted = f"{least} or newer", f"{package or name}>={least}"
    if below is not None:
        limit = ".".join(map(str, below))
        rule, wanted = f"at least {least} and below {limit}", f"{wanted},<{limit}"
    need = f"must be {rule}: pip install '{wanted}'"
    try:
        found = import_module(name).__version__
    except ModuleNotFoundError as missing:
        raise ImportError(f"{package or name} = not installed: {need}") from missing
    numbers = _numbers(found)
    if numbers < oldest or (below is not None and numbers >= below):
        raise ImportError(f"{package or name} = {found}: {need}")
