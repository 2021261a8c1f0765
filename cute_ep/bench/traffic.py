"""Bytes that one dispatch and one combine must move, computed from the routing. No device is involved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPInputError
from cute_ep.layouts.maps.arena import COMBINE_ITEMSIZE, message_bytes
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.scales import WORD_BYTES, scale_words

LAUNCHES = ("dispatch", "combine_exact", "combine_partial")
"""Launches whose bytes `traffic` counts."""


@dataclass(frozen=True)
class RoutingCounts:
    """How often ranks talk to each other in one batch. Matrices are [R, R] int64 on the CPU, indexed [source, owner];
    with `skip_a2a` they are diagonal.

    Attributes:
        entries: (token, slot) pairs of `source` whose expert `owner` has.
        pairs: tokens of `source` with at least one expert on `owner`: rows that a partial combine sends home.
        messages: tokens that dispatch sends: `pairs`, and on the diagonal those that the shared expert alone takes.
        shared: per rank the tokens that its shared expert takes.
        tokens: per source rank its tokens.
        rows: per rank the rows of its dispatch output, those of the shared expert and padding included; with blocks
            those of all blocks.
        scale_rows: per rank the same for its scale factors, which may be padded further.
    """

    entries: torch.Tensor
    pairs: torch.Tensor
    messages: torch.Tensor
    shared: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    scale_rows: tuple[int, ...]

    def rows_received(self, rank: int) -> int:
        """Rows of `rank`'s dispatch output."""
        return self.rows[rank]


def count_routing(cfg: EPConfig, topk_ids: Sequence[torch.Tensor]) -> RoutingCounts:
    """Counts of one batch; `topk_ids` has one [T_r, top_k] int32 tensor a rank, -1 masks an entry."""
    ranks, local = cfg.world_size, cfg.local_experts
    entries, pairs, messages = torch.zeros(3, ranks, ranks, dtype=torch.int64)
    per_expert = torch.zeros(cfg.num_experts, dtype=torch.int64)
    shared = []
    for source, ids in enumerate(topk_ids):
        expert = ids.cpu().long()
        owner = torch.where(expert >= 0, expert // local, ranks)
        if cfg.skip_a2a:
            owner[owner != source] = ranks
        hits = torch.nn.functional.one_hot(owner, ranks + 1)[..., :ranks].sum(dim=1)
        takes = hits > 0
        entries[source], pairs[source] = hits.sum(dim=0), takes.sum(dim=0)
        first, count = cfg.shared_slice(ids.shape[0], source)
        takes[first : first + count, source] = True
        messages[source] = takes.sum(dim=0)
        shared.append(count)
        per_expert += torch.bincount(expert[owner < ranks], minlength=cfg.num_experts)

    per_group = pairs.T if cfg.is_rank_major else per_expert.view(ranks, local)

    def rows(alignment: int) -> tuple[int, ...]:
        """Per rank its rows, each group's rounded up to a multiple."""
        if cfg.block_rows is not None:
            return (cfg.groups * alignment,) * ranks
        routed = align_up(per_group, alignment).sum(dim=1).tolist()
        return tuple(align_up(count, alignment) + own for count, own in zip(shared, routed, strict=True))

    tokens = tuple(ids.shape[0] for ids in topk_ids)
    return RoutingCounts(
        entries, pairs, messages, tuple(shared), tokens, rows(cfg.alignment), rows(cfg.scale_alignment)
    )


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
    """Bytes of one operation, out of LAUNCHES.

    Memory counts each row where it is read and where it is written: dispatch reads x, writes and reads every message at
    its receiver, and writes the output rows and scale factors, padding included but for that of blocks, and but for
    tokens without `zero_padding`, which it leaves alone; combine reads the expert rows, writes and reads what returns
    to its source and writes the sums. Where dispatch encodes nothing, a rank's own tokens are no messages
    (`kernels/dispatch/given_rows.py`). In combine rows of the own rank's tokens, and of the shared expert, are read
    where they are, as pipelines do (`kernels/combine/pipeline.py`): other kernels write and read these, too. Routing
    tables (8 bytes a slot to each rank, 16 with router weights) are left out.

    Raises:
        EPInputError: there is no such operation.
    """
    if operation not in LAUNCHES:
        raise EPInputError(f"operation = {operation!r}: must be one of {', '.join(LAUNCHES)}")
    fmt, token = cfg.format, cfg.hidden * COMBINE_ITEMSIZE
    message = message_bytes(fmt, cfg.hidden)
    row = fmt.payload_bytes(cfg.hidden) + fmt.row_scale_bytes
    scales = scale_words(fmt.scale_bytes(cfg.hidden)) * WORD_BYTES
    shared = torch.tensor(counts.shared)
    made = (counts.pairs if cfg.is_rank_major else counts.entries).sum(dim=0) + shared
    if operation == "dispatch":
        moved, logical = counts.messages * message, int((counts.entries.sum(dim=0) + shared).sum()) * message
        rows, scale_rows = torch.tensor(counts.rows), torch.tensor(counts.scale_rows)
        payload = (rows if cfg.zero_padding else made) * fmt.payload_bytes(cfg.hidden)
        written = payload + rows * fmt.row_scale_bytes + scale_rows * scales
        if cfg.block_rows is not None:
            written = made * (row + scales)
        remote = moved - torch.diag(moved.diag())
        at_rank = 2 * (remote if fmt.scale is None else moved).sum(dim=0) + written
    else:
        returned = counts.entries if operation == "combine_exact" else counts.pairs
        moved, logical = returned.T * token, int(counts.entries.sum()) * token
        remote = moved - torch.diag(moved.diag())
        at_rank = 2 * remote.sum(dim=0) + made * token
    memory = (int(at_rank[rank]) + count * token for rank, count in enumerate(counts.tokens))
    return Traffic(remote, logical, tuple(memory))


def per_expert_receive_bytes(cfg: EPConfig) -> int:
    """Receive buffer that one rank needs when messages have slots [local expert, source, token]: E * Tmax of them."""
    return cfg.num_experts * cfg.max_tokens_per_rank * message_bytes(cfg.format, cfg.hidden)
