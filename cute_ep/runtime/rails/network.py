"""Whether NCCL has a fast network between machines. No call of NCCL tells, so this looks where NCCL does."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path

from cute_ep.api.config import EPConfig
from cute_ep.runtime.places import Place

LOG = logging.getLogger(__name__)
DEFAULT_PLUGIN = "default"
"""NCCL takes libnccl-net.so if there is one."""
DEVICES = Path("/sys/class/infiniband")
"""Where Linux has the devices of InfiniBand, RoCE and EFA."""


def slow_network(environment: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> str | None:
    """What to tell a user of several nodes whose NCCL has nothing faster than TCP sockets, and why; None where it has a
    device with an active port, or a plugin, of which nothing is known here."""
    net, plugin = environment.get("NCCL_NET", ""), environment.get("NCCL_NET_PLUGIN", DEFAULT_PLUGIN)
    if net.lower() == "socket":
        why = f"NCCL_NET={net}"
    elif net.lower() not in ("", "ib") or plugin.lower() not in ("", "none", DEFAULT_PLUGIN):
        return None
    elif (disabled := environment.get("NCCL_IB_DISABLE", "0")) not in ("", "0"):
        why = f"NCCL_IB_DISABLE={disabled}"
    elif any("ACTIVE" in _text(state) for state in devices.glob("*/ports/*/state")):
        return None
    elif plugin == DEFAULT_PLUGIN and find_library("nccl-net"):
        return None
    else:
        why = f"no port in {devices} is active"
    return f"NCCL probably carries mail between nodes over TCP sockets ({why}); NCCL_DEBUG=INFO tells"


def warn_of_slow_mail(cfg: EPConfig, rank: int, places: Sequence[Place], slow: str | None) -> None:
    """Log `slow`, what `slow_network` found, on the first rank of a node whose mail leaves its machine.

    Args:
        places: of all ranks.
    """
    rail = places[rank % cfg.peers :: cfg.peers]
    if slow and rank % cfg.peers == 0 and any(place.machine != places[rank].machine for place in rail):
        LOG.warning("rank %d: %s", rank, slow)


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
