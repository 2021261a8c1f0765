"""What kernels have found wrong with the contents of tensors, and wrote to the host's memory. Every call of an adapter
looks there before it sends anything (docs/adapters.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_ep import EPCommunicator, EPInputError
from cute_ep.layouts.maps.routing import BEYOND, Phase
from cute_ep.reference.routes import NO_EXPERT
from cute_ep.runtime.group_pool import GroupPool


@dataclass(frozen=True)
class Words:
    """How an interface calls what may be wrong: expert ids, [T, K], and what says how many rows there is room for."""

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
        `raise_found`, EPTimeout as of `EPCommunicator.synchronize`."""
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        self.raise_found(pool)
        for communicator in pool.communicators:
            communicator.synchronize()
