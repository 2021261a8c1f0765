"""The pools of process groups that adapters have in common, and configurations with room to spare."""

from __future__ import annotations

from cute_ep import EPCommunicator, EPConfig
from cute_ep.integrations.common.checks import Names, roomy_config
from cute_ep.runtime.gpus import sms_beside_nccl
from cute_ep.runtime.group_pool import GroupPool, Pools

OwnSizes = tuple[int, int, int, int]
"""hidden, experts of all ranks, top-k, tokens of a rank."""
SHARED = Pools()
pool_of, release = SHARED.of, SHARED.release


def close() -> None:
    """Close all communicators that adapters share in this process; collective over each group. Call it before
    `destroy_process_group`. A later forward pass connects again; a backward pass from before raises EPInputError."""
    SHARED.close()


def config_for(pool: GroupPool, names: Names, own: OwnSizes, row_alignment: int | None = None) -> EPConfig:
    """That of `communicator_for`. EPInputError: an argument breaks its rule."""
    return roomy_config(names, (*own, pool.size), timeout_s=pool.timeout_s, row_alignment=row_alignment)


def communicator_for(
    pool: GroupPool, names: Names, own: OwnSizes, row_alignment: int | None = None, sms: int | None = None
) -> EPCommunicator:
    """One of a `config_for` these, which waits for late ranks as long as the group does. EPConfigError, EPError: as of
    `GroupPool.get`; without a number of `sms` it leaves some to NCCL."""
    return pool.get(config_for(pool, names, own, row_alignment), sms, sms_beside_nccl, names)
