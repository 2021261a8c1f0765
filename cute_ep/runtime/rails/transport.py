"""Which library carries mail between the nodes of GPUs, by the name that `connect` is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPConfigError
from cute_ep.runtime.rails.nccl_library import NcclLibrary
from cute_ep.runtime.rails.shmem_library import ShmemLibrary

NCCL, NVSHMEM = "nccl", "nvshmem"
LIBRARIES: dict[str, Callable[[], object]] = {NCCL: lambda: NcclLibrary.loaded(), NVSHMEM: lambda: ShmemLibrary.load()}


def chosen_transport(cfg: EPConfig, given: str | None) -> str:
    """What carries mail where `connect` is given this; EPConfigError unless it is a transport, and has nodes."""
    if not (given is None or (isinstance(given, str) and given in LIBRARIES)):
        raise EPConfigError(f"transport = {given!r}: must be None or one of {', '.join(map(repr, LIBRARIES))}")
    if given is not None and cfg.nodes == 1:
        raise EPConfigError(f"transport = {given!r}: must be None on one node (several have EPConfig.ranks_per_node)")
    return given or NCCL


def check_transport(transport: str) -> None:
    """EPConfigError unless its library is here, and new enough."""
    LIBRARIES[transport]()


def check_same_transport(by_rank: Sequence[str]) -> None:
    """EPConfigError unless all ranks have chosen one."""
    other = next((rank for rank, one in enumerate(by_rank) if one != by_rank[0]), None)
    if other is not None:
        raise EPConfigError(
            f"transport = {by_rank[0]!r} on rank 0, {by_rank[other]!r} on rank {other}: must be the same on all ranks"
        )
