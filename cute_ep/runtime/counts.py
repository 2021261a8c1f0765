"""How many rows come to each rank: what a caller that allocates exactly that many must ask the others first."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.host import host_memory
from cute_ep.api.interface import EPCommunicator
from cute_ep.layouts.maps.record import align_up
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_TOP_K, RANK_MAJOR


@lru_cache(maxsize=256, typed=True)
def counting_config(words: int, ranks: int, timeout_s: float, ranks_per_node: int | None = None) -> EPConfig:
    """Of a communicator for one message a rank, which all ranks get: `words` 32-bit words, sent as bfloat16, which
    moves unchanged. A token has few entries, so a message is as many tokens as all ranks need, each to the ranks of a
    few nodes. Each rank has an expert for each of these nodes, so that a node has one for each entry of a token."""
    per_node = ranks_per_node or ranks
    nodes = ranks // per_node
    reached = max(1, min(nodes, MAX_TOP_K // per_node, MAX_EXPERTS // ranks))
    sizes = 2 * words, ranks * reached, reached * per_node, -(-nodes // reached), ranks
    rows: dict[str, Any] = {"row_alignment": 1, "row_order": RANK_MAJOR}
    return EPConfig(*sizes, timeout_s=timeout_s, ranks_per_node=ranks_per_node, **rows)


class ReceiveCounts(NamedTuple):
    """What a rank receives from all ranks, itself included, and the most that one of them sends.

    Attributes:
        entries: of all ranks' tokens, for each local expert.
        tokens: most of a rank.
        arriving: tokens with an entry for this rank.
    """

    entries: list[int]
    tokens: int
    arriving: int

    def padded(self, alignment: int) -> list[int]:
        """Rows of each local expert, padded to a multiple of `alignment`."""
        return self.entries if alignment == 1 else [align_up(count, alignment) for count in self.entries]


class Counting:
    """What all exchanges of counts on a communicator have in common. Each overwrites what the one before has brought,
    in inference mode or not.

    Attributes:
        everyone: [tokens, top_k] int32 ids, one of each rank in all, then -1.
        out: memory for R rows, those of a rail one after the other.
        table: these as [R, words] int32: `RouteCounts.counts`, in the order of `rows`.
        rows: which row each rank has.
    """

    @torch.inference_mode(False)
    def __init__(self, communicator: EPCommunicator) -> None:
        self.communicator, cfg = communicator, communicator.cfg
        ranks, shape = cfg.world_size, (cfg.max_tokens_per_rank, cfg.top_k)
        self.everyone = torch.full(shape, -1, dtype=torch.int32, device=communicator.device)
        first = torch.arange(0, cfg.num_experts, cfg.local_experts, dtype=torch.int32, device=communicator.device)
        self.everyone.view(-1)[:ranks] = first
        self.rows = [rank % cfg.peers * cfg.nodes + cfg.node(rank) for rank in range(ranks)]
        self._order = torch.tensor(self.rows, device=communicator.device)
        self.out = communicator.allocate(ranks)
        self.table = self.out.tokens.view(torch.int32)
        self._on_host = self.table  # on the CPU
        if communicator.device.type != "cpu":
            self._on_host = host_memory(self.table.shape)
        self._words = (ctypes.c_int32 * self._on_host.numel()).from_address(self._on_host.data_ptr())

    def exchange(self, counts: torch.Tensor) -> None:
        """Have every rank know this one's `RouteCounts.counts`, [words] int32. Collective; nothing waits on the
        host."""
        tokens = counts.view(torch.bfloat16).expand(len(self.everyone), -1)
        self.communicator.dispatch(tokens, self.everyone, out=self.out)

    def by_rank(self) -> torch.Tensor:
        """The table with a row for each rank, on the device."""
        return self.table if self.communicator.cfg.nodes == 1 else self.table.index_select(0, self._order)

    def wait(self, experts: int) -> ReceiveCounts:
        """Copy the table to the host, and wait for that and so for the current stream. `experts`: of all ranks.

        Raises:
            EPTimeout: a rank did not come in time.
        """
        if self._on_host is not self.table:
            self._on_host.copy_(self.table, non_blocking=True)
        self.communicator.synchronize()
        ranks, rank = self.communicator.cfg.world_size, self.communicator.rank
        local = experts // ranks
        entries, *others = self._columns(ranks + rank * local, local)
        for more in others:
            entries = list(map(add, entries, more))
        tokens = max(count for (count,) in self._columns(ranks + experts, 1))
        return ReceiveCounts(list(entries), tokens, sum(count for (count,) in self._columns(rank, 1)))

    def _columns(self, first: int, words: int) -> list[Sequence[int]]:
        """By rank, `words` words of the table from `first` on."""
        pitch = self.table.shape[1]
        return [self._words[first + row * pitch : first + row * pitch + words] for row in self.rows]
