"""DeepEP's normal mode: one row per (token, rank), by source rank, then token, and unweighted sums over ranks.

Here a rank is the expert: entry d of a token is rank d or masked. Rows by expert, source, token are then the rows that
DeepEP returns, so nothing is copied. Rank-major rows of the real experts would bring the entries too, but would go
where a token's experts are. DeepEP sends it where `is_token_in_rank` says, which the host cannot compare without
waiting. Three communicators take part:

| communicator | a message is | when |
| --- | --- | --- |
| counts | one rank's numbers of tokens by rank and by expert | each dispatch without a handle, first |
| rows | a token, in bfloat16 or as given FP8 | each dispatch; its batch serves combine |
| entries | a token's expert ids and weights, as 32-bit words | where top-k entries are given or combined |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.integrations.connections import Connections, config_of, room_for
from cute_ep.integrations.counts import count_entries
from cute_ep.integrations.rows import without_rows
from cute_ep.layouts.maps.formats import FP8, VECTOR_BYTES

WORDS = VECTOR_BYTES // 4
"""32-bit words that rows of words are a multiple of."""


class _Fields(NamedTuple):
    rank_prefix_matrix: torch.Tensor
    channel_prefix_matrix: None
    recv_channel_prefix_matrix: None
    recv_src_idx: torch.Tensor
    is_token_in_rank: torch.Tensor
    send_head: None


class Handle(_Fields):
    """What dispatch returns for later calls: DeepEP's six fields, of which three are None, and the route.

    Attributes:
        rank_prefix_matrix: [R, R] int32; rows that rank d has of sources 0 .. s are element [s, d].
        recv_src_idx: [rows] int32, token index on its source of each row received.
        is_token_in_rank: [T, R] bool, as given.
        route: where tokens go, and the batches that combine returns rows of.
    """

    route: Route


class Counts(NamedTuple):
    """What all ranks send in one dispatch.

    Attributes:
        table: [R, R + E + 1] int32 on the device: of each rank its tokens by rank, entries by expert, and tokens.
        communicator: whose dispatch brought it.
    """

    table: torch.Tensor
    communicator: EPCommunicator

    def prefix_matrix(self) -> torch.Tensor:
        """`Handle.rank_prefix_matrix`."""
        return self.table[:, : len(self.table)].cumsum(0).int()


class Returned(NamedTuple):
    """A communicator, and a batch of it whose rows combine can return; it holds no rows itself."""

    communicator: EPCommunicator
    batch: Dispatched


@dataclass
class Route:
    """Where the tokens of one dispatch go.

    Attributes:
        ranks: [T, C] int32, C >= R or the entries of a token: a rank that the token goes to, each one once, else -1.
        tokens: what no rank has more tokens than.
        rows: rows received, or that there is room for.
        of_rows: for sums of rows.
        of_entries: for sums of top-k weights, once there was need; by the number of words of a row.
    """

    ranks: torch.Tensor
    tokens: int
    rows: int
    of_rows: Returned
    of_entries: dict[int, Returned]


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([R] int32 tokens by rank, [E] int32 entries by expert, [T, R] bool whether a token goes to a rank)."""
    ids = topk_idx.long()
    tokens, device = ids.shape[0], ids.device
    server = torch.where(ids >= 0, ids // (num_experts // ranks), ranks)
    goes = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=device).scatter_(1, server, True)[:, :ranks]
    return goes.sum(0, dtype=torch.int32), count_entries(ids, num_experts).int(), goes.contiguous()


class NormalMode:
    """Normal mode over the communicators of a group. All runs on the current stream."""

    def __init__(self, connections: Connections, sms: Callable[[], int]) -> None:
        """`sms`: says how many SMs kernels may take, when a communicator is connected."""
        self._connections, self._sms = connections, sms
        self._rank, self._ranks, self._timeout_s = connections.rank, connections.size, EPConfig.timeout_s

    # ---- counts

    def exchange_counts(self, by_rank: torch.Tensor, by_expert: torch.Tensor, tokens: int) -> Counts:
        """What every rank sends: [R] int32 tokens by rank, [E] int32 entries by expert, and its number of tokens."""
        own = torch.full((1,), tokens, dtype=torch.int32, device=by_rank.device)
        words = padded(torch.cat([by_rank.int(), by_expert.int(), own])[None])
        communicator = self._connect(words.shape[1] * 2, 1, self._ranks)
        everyone = torch.arange(self._ranks, dtype=torch.int32, device=by_rank.device)[None]
        batch = communicator.dispatch(words.view(torch.bfloat16), everyone, out=communicator.allocate(self._ranks))
        return Counts(batch.tokens.view(torch.int32)[:, : self._ranks + len(by_expert) + 1], communicator)

    def wait_for_counts(self, counts: Counts, alignment: int) -> tuple[int, int, list[int]]:
        """(rows that this rank gets, most tokens of a rank, entries of each local expert rounded up to `alignment`).
        Waits on the host for all ranks. EPTimeout: one does not come in time."""
        counts.communicator.synchronize()
        table, ranks = counts.table.cpu(), self._ranks
        local = (table.shape[1] - ranks - 1) // ranks
        entries = table[:, ranks + self._rank * local :][:, :local].sum(0).tolist()
        aligned = [-(-count // alignment) * alignment for count in entries]
        return int(table[:, self._rank].sum()), int(table[:, -1].max()), aligned

    # ---- rows

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        ranks: torch.Tensor,
        tokens: int,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Returned, torch.Tensor]:
        """Send tokens to ranks.

        Args:
            x, scales: [T, hidden] bfloat16 and None, or float8_e4m3fn and [T, factors] of 32 bits.
            ranks, tokens, rows: of the route.

        Returns:
            The rows, [rows, hidden]; their scale factors, [rows, factors]; the batch; [rows] int32 token indices.
        """
        hidden, scaled = x.shape[1], scales is not None
        wire = None if scales is None else as_wide(scales, hidden)
        communicator = self._connect(hidden, tokens, ranks.shape[1], scaled)
        out = communicator.allocate(max(rows, 1))
        batch = communicator.dispatch(x.contiguous(), _first_experts(communicator.cfg, ranks), scales=wire, out=out)
        factors = None
        if scales is not None and batch.scales is not None:
            factors = batch.scales[:rows].view(scales.dtype)[:, : scales.shape[1]].contiguous()
        sources = batch.src_info[:rows, 0].contiguous()
        return batch.tokens[:rows], factors, Returned(communicator, without_rows(batch)), sources

    def combine(self, rows: torch.Tensor, route: Route, biases: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] bfloat16: for each token the sum of its rows over ranks, and of the biases, in float32."""
        communicator, batch = route.of_rows
        if not biases:
            return communicator.combine(rows, batch)
        total = communicator.combine(rows, batch, dtype=torch.float32)
        for bias in biases:
            total += bias.float()
        return total.bfloat16()

    # ---- top-k entries

    def dispatch_entries(
        self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, route: Route
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([rows, K] int64 local experts, -1 for those of other ranks; [rows, K] float32 weights, 0 there)."""
        slots, local = topk_idx.shape[1], num_experts // self._ranks
        words = padded(torch.cat([topk_idx.int(), topk_weights.view(torch.int32)], dim=1))
        batch = self._send_words(words, route)
        got = batch.tokens[: route.rows].view(torch.int32)
        expert = got[:, :slots].long() - self._rank * local
        here = torch.arange(route.rows, device=got.device) < batch.num_rows
        inside = (expert >= 0) & (expert < local) & here[:, None]
        weights = got[:, slots : 2 * slots].contiguous().view(torch.float32)
        return torch.where(inside, expert, -1), torch.where(inside, weights, 0)

    def combine_weights(self, weights: torch.Tensor, route: Route) -> torch.Tensor:
        """[T, K] float32: sums of [rows, K] weights over ranks, in the order of the route."""
        slots = weights.shape[1]
        words = padded(torch.cat([weights, torch.zeros_like(weights)], dim=1).view(torch.int32))
        width = words.shape[1]
        if width not in route.of_entries:
            self._send_words(words.new_zeros((len(route.ranks), width)), route)
        communicator, batch = route.of_entries[width]
        home = communicator.combine(words.view(torch.bfloat16), batch, mode="unweighted")
        home = home.view(torch.float32)[:, :, :slots]
        total = home[:, 0]
        for column in range(1, home.shape[1]):
            total = total + home[:, column]
        return total

    def _send_words(self, words: torch.Tensor, route: Route) -> Dispatched:
        """Dispatch [T, words] int32 along a route, which keeps the batch for combine."""
        width = words.shape[1]
        communicator = self._connect(width * 2, route.tokens, route.ranks.shape[1])
        out = communicator.allocate(max(route.rows, 1))
        experts = _first_experts(communicator.cfg, route.ranks)
        batch = communicator.dispatch(words.view(torch.bfloat16), experts, out=out)
        route.of_entries[width] = Returned(communicator, without_rows(batch))
        return batch

    def _connect(self, hidden: int, tokens: int, columns: int, scaled: bool = False) -> EPCommunicator:
        """The communicator for rows of `hidden` elements, FP8 if `scaled`, `tokens` per rank, and `columns` of a
        route."""
        experts = self._ranks * -(-columns // self._ranks)  # enough for all columns; a rank's first one gets rows
        cfg = config_of(
            hidden,
            experts,
            columns,
            self._room(tokens),
            self._ranks,
            "fp8" if scaled else "bf16",
            self._timeout_s,
            scale_layout="linear" if scaled else None,
        )
        return self._connections.get(cfg, self._sms())

    def _room(self, tokens: int) -> int:
        """`max_tokens_per_rank` of a communicator for so many tokens."""
        return room_for(tokens)


def _first_experts(cfg: EPConfig, ranks: torch.Tensor) -> torch.Tensor:
    """Ids of the ranks' first experts."""
    experts = cfg.local_experts
    return ranks if experts == 1 else torch.where(ranks < 0, -1, ranks * experts)


def padded(words: torch.Tensor) -> torch.Tensor:
    """[n, words] int32 with zeros up to whole vectors."""
    return torch.nn.functional.pad(words, (0, -words.shape[1] % WORDS)).contiguous()


def as_wide(scales: torch.Tensor, hidden: int) -> torch.Tensor:
    """[T, hidden / 128] float32 that has the words of `scales` first."""
    words, columns = scales.contiguous().view(torch.float32), hidden // FP8.block
    if words.shape[1] > columns:
        raise EPInputError(f"x[1].shape[1] = {words.shape[1]}: must not exceed hidden / {FP8.block} = {columns}")
    if words.shape[1] == columns:
        return words
    wide = torch.zeros((words.shape[0], columns), dtype=torch.float32, device=words.device)
    wide[:, : words.shape[1]] = words
    return wide
