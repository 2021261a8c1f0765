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
    """Import a library, whose version must be in a range.

    Args:
        name: of the module.
        oldest: the first version that will do.
        below: the first later one that will not; None: all newer ones will.
        package: what pip calls it; None: `name`.

    Raises:
        ImportError: it is missing or of another version. The message has the command that installs it.
    """
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
