"""The pools of process groups that adapters have in common, configurations with room to spare, and what kernels have
found wrong with the contents of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_ep import EPCommunicator, EPConfig, EPInputError
from cute_ep.api.host import refuse_capture
from cute_ep.integrations.common.checks import Names, roomy_config
from cute_ep.layouts.maps.routing import BEYOND, Phase
from cute_ep.reference.routes import NO_EXPERT
from cute_ep.runtime.gpus import sms_beside_nccl
from cute_ep.runtime.group_pool import GroupPool, Pools

EARLY_BYTES = 128 << 20
"""Of `may_send_early`: rows of 4096 tokens of two ranks, hidden 7168, bfloat16, one a rank."""
OwnSizes = tuple[int, int, int, int]
"""hidden, experts of all ranks, top-k, tokens of a rank."""
SHARED = Pools()
pool_of, release = SHARED.of, SHARED.release


def close() -> None:
    """Close all communicators that adapters share in this process; collective over each group. Call it before
    `destroy_process_group`. A later forward pass connects again; a backward pass from before raises EPInputError."""
    SHARED.close()


def may_send_early(nbytes: int) -> bool:
    """Whether tokens are sent before the host knows how many rows come, into memory for all that may come, so many
    bytes of rows. What is returned then is a view, which keeps this memory. All ranks must ask alike."""
    return nbytes <= EARLY_BYTES


def room_of(rows: int) -> int:
    """Rows to make room for where so many come, less than a sixteenth more. So sizes come again, and the compiled
    launcher repeats what was launched for one."""
    step = 1 << max(0, rows.bit_length() - 5)
    return max(1, -(-rows // step) * step)


def config_for(pool: GroupPool, names: Names, own: OwnSizes, **options: Any) -> EPConfig:
    """That of `communicator_for`. EPInputError: an argument breaks its rule."""
    return roomy_config(names, (*own, pool.size), timeout_s=pool.timeout_s, **options)


def communicator_for(
    pool: GroupPool, names: Names, own: OwnSizes, sms: int | None = None, **options: Any
) -> EPCommunicator:
    """One of a `config_for` these, which waits for late ranks as long as the group does. EPConfigError, EPError: as of
    `GroupPool.get`; without a number of `sms` it leaves some to NCCL. `options`: other fields of EPConfig."""
    return pool.get(config_for(pool, names, own, **options), sms, sms_beside_nccl, names)


@dataclass(frozen=True)
class Words:
    """How an interface calls what may be wrong: expert ids, [T, K], and what says how many rows there is room for. All
    calls of an adapter look for it before they send anything (docs/adapters.md)."""

    ids: str
    room: str

    def entry(self, communicator: EPCommunicator, index: int, experts: int, seen: int) -> str:
        """An expert id out of range: entry `index` of all, of so many experts."""
        token, slot = divmod(index, communicator.cfg.top_k)
        value = f"{seen} or beyond 32 bits" if seen in (BEYOND, NO_EXPERT) else seen
        return f"{self.ids}[{token}, {slot}] = {value}: must be -1 or in [0, {experts})"

    def rows(self, communicator: EPCommunicator, index: int, room: int, seen: int) -> str:
        """More rows than there was room for; `index`: 0, or one more than the group whose block was full."""
        if not index:
            return f"{self.room}: left room for {room} rows, but {seen} came, and all are lost"
        if communicator.cfg.is_rank_major:
            return f"{self.room}: left room for {room} rows of a rank, but {seen} came from rank {index - 1}"
        why = f"whose block has room for {room}, as where tokens name an expert twice"
        return f"{self.ids}: brought {seen} rows to local expert {index - 1}, {why}"

    def raise_found(self, pool: GroupPool) -> None:
        """EPInputError of what is known by now to be wrong with earlier calls' input, once, without waiting."""
        for communicator in pool.communicators:
            if not (found := communicator.take_input_errors()):
                continue
            tell = {Phase.EXPERT_ID: self.entry, Phase.ROW_CAPACITY: self.rows}
            if texts := [tell[phase](communicator, *found[phase]) for phase in tell if phase in found]:
                again = "(found in an earlier call; this one has sent nothing, make it again)"
                raise EPInputError(f"rank {communicator.rank}: {'; '.join(texts)} {again}")

    def synchronize(self, pool: GroupPool) -> None:
        """Wait for this rank's work on all communicators, and raise what was found wrong: EPInputError as of
        `raise_found`, EPTimeout and EPError as of `EPCommunicator.synchronize`."""
        refuse_capture(pool.device, "synchronize")
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        self.raise_found(pool)
        for communicator in pool.communicators:
            communicator.synchronize()
