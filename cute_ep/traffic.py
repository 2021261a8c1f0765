"""Bytes that one dispatch and one combine must move, computed from the routing. No device is involved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_ep.config import EPConfig
from cute_ep.layouts.arena import COMBINE_ITEMSIZE, message_bytes

OPERATIONS = ("dispatch", "combine_exact", "combine_partial")


@dataclass(frozen=True)
class RoutingCounts:
    """How often ranks talk to each other in one batch. All are [R, R] int64 on the CPU, indexed [source, owner].

    Attributes:
        entries: (token, slot) pairs of `source` whose expert `owner` has: rows of the owner's output.
        pairs: tokens of `source` with at least one expert on `owner`: messages that dispatch sends.
        tokens: per source rank its tokens.
    """

    entries: torch.Tensor
    pairs: torch.Tensor
    tokens: tuple[int, ...]

    def rows_received(self, rank: int) -> int:
        """Rows of `rank`'s dispatch output."""
        return int(self.entries[:, rank].sum())


def count_routing(cfg: EPConfig, topk_ids: Sequence[torch.Tensor]) -> RoutingCounts:
    """Counts of one batch; `topk_ids` has one [T_r, top_k] int32 tensor a rank, -1 masks an entry."""
    ranks = cfg.world_size
    entries, pairs = torch.zeros(2, ranks, ranks, dtype=torch.int64)
    for source, ids in enumerate(topk_ids):
        owner = torch.where(ids >= 0, ids // cfg.local_experts, ranks).cpu()
        hits = torch.nn.functional.one_hot(owner.long(), ranks + 1)[..., :ranks].sum(dim=1)
        entries[source] = hits.sum(dim=0)
        pairs[source] = (hits > 0).sum(dim=0)
    return RoutingCounts(entries, pairs, tuple(ids.shape[0] for ids in topk_ids))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one operation on one batch.

    Attributes:
        remote: [R, R] int64, bytes that rank [row] stores for rank [column]; the diagonal is 0.
        logical: what a scheme that moves one message per (token, expert) would send, local rows included.
        memory: per rank the least bytes of device memory that are read and written on its behalf.
    """

    remote: torch.Tensor
    logical: int
    memory: tuple[int, ...]

    @property
    def remote_bytes(self) -> int:
        """Bytes that leave any rank for another one."""
        return int(self.remote.sum())

    def busiest_link(self, devices: Sequence[str]) -> int:
        """Most bytes that the ranks of one device together send to, or receive from, other ranks."""
        groups = {name: [rank for rank, other in enumerate(devices) if other == name] for name in devices}
        sent = (int(self.remote[group].sum()) for group in groups.values())
        received = (int(self.remote[:, group].sum()) for group in groups.values())
        return max(*sent, *received)

    def busiest_memory(self, devices: Sequence[str]) -> int:
        """Most bytes that the memory of one device must read and write."""
        totals = dict.fromkeys(devices, 0)
        for name, nbytes in zip(devices, self.memory, strict=True):
            totals[name] += nbytes
        return max(totals.values())


def traffic(cfg: EPConfig, counts: RoutingCounts, operation: str) -> Traffic:
    """Bytes of one operation out of OPERATIONS.

    Memory counts each row where it is read and where it is written: dispatch reads x, writes and reads every
    message at its receiver and writes the output rows; combine reads the expert rows, writes and reads what
    returns to its source and writes the sums. Routing tables (4 bytes a slot) are left out.
    """
    message = message_bytes(cfg.format, cfg.hidden)
    row = cfg.format.payload_bytes(cfg.hidden) + cfg.format.scale_bytes(cfg.hidden)
    token = cfg.hidden * COMBINE_ITEMSIZE
    made = counts.entries.sum(dim=0)
    if operation == "dispatch":
        moved, logical = counts.pairs * message, int(counts.entries.sum()) * message
        at_owner = 2 * moved.sum(dim=0) + made * row
        memory = [int(at_owner[rank]) + count * token for rank, count in enumerate(counts.tokens)]
    else:
        returned = counts.entries if operation == "combine_exact" else counts.pairs
        moved, logical = returned.T * token, int(counts.entries.sum()) * token
        at_source = 2 * moved.sum(dim=0) + made * token
        memory = [int(at_source[rank]) + count * token for rank, count in enumerate(counts.tokens)]
    remote = moved - torch.diag(moved.diag())
    return Traffic(remote, logical, tuple(memory))


def add_traffic(first: Traffic, second: Traffic) -> Traffic:
    """Bytes of two operations, one after the other."""
    memory = tuple(a + b for a, b in zip(first.memory, second.memory, strict=True))
    return Traffic(first.remote + second.remote, first.logical + second.logical, memory)


def per_expert_receive_bytes(cfg: EPConfig) -> int:
    """Receive buffer that one rank needs when messages have slots [local expert, source, token]: E * Tmax of them."""
    return cfg.num_experts * cfg.max_tokens_per_rank * message_bytes(cfg.format, cfg.hidden)
