"""Whether the library that an adapter adapts is installed, in a version that the adapter was checked with."""

from __future__ import annotations

import re
from importlib import import_module


def require(name: str, oldest: tuple[int, int], below: tuple[int, int] | None = None, package: str = "") -> None:
    """Import a library. ImportError, with the command that installs it, if it is missing or of another version.

    Args:
        name: of the module, which has `__version__`.
        oldest: version that is enough.
        below: first version that is not taken; None: all newer ones are.
        package: what pip calls it, if not as the module.
    """
    package = package or name
    version, limit = ".".join(map(str, oldest)), "" if below is None else ".".join(map(str, below))
    rule = f"{version} or newer" + (f", below {limit}" if limit else "")
    need = f"must be {rule}: pip install '{package}>={version}{',<' + limit if limit else ''}'"
    try:
        found = import_module(name).__version__
    except ModuleNotFoundError as missing:
        raise ImportError(f"{package} = not installed: {need}") from missing
    numbers = re.match(r"(\d+)\.(\d+)", found)
    own = None if numbers is None else (int(numbers[1]), int(numbers[2]))
    if own is None or own < oldest or (below is not None and own >= below):
        raise ImportError(f"{package} = {found}: {need}")
