"""DeepEP's normal mode: one row per (token, rank), by source rank, then token, and unweighted sums over ranks.

These are rank-major rows. Tokens go where `is_token_in_rank` says. Where that is what `get_dispatch_layout` made of the
same top-k entries, dispatch is given these. Otherwise each rank has one expert more, which is in none of DeepEP's
numbers, and a token has an entry more for each rank that it goes to. Three communicators take part:

| communicator | a message is | when |
| --- | --- | --- |
| counts | one rank's numbers of tokens by rank and by expert | each dispatch without a handle, first |
| rows | a token, in bfloat16 or as given FP8, and its entries | each dispatch; its batch serves combine |
| words | 32-bit words | where top-k weights are combined |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import DispatchBuffers, Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.row_tensors import with_plain_strides
from cute_ep.integrations.connections import Connections, config_of, room_for
from cute_ep.integrations.counts import Counting
from cute_ep.layouts.maps.formats import FP8, VECTOR_BYTES
from cute_ep.layouts.maps.routing import RANK_MAJOR
from cute_ep.runtime.routes import RouteCounts, count_routes
from cute_ep.torch_internals import version_of

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
        route: where tokens go, and the batch that combine returns rows of.
    """

    route: Route


class Returned(NamedTuple):
    """A communicator, and a batch of it whose rows combine can return; it holds no rows itself."""

    communicator: EPCommunicator
    batch: Dispatched


@dataclass
class Route:
    """Where the tokens of one dispatch go.

    Attributes:
        routes: of the entries that dispatch is given.
        experts: how many experts these are out of.
        tokens: what no rank has more tokens than.
        rows: rows received, or that there is room for.
        of_rows: for sums of rows, once they were sent.
        of_words: for sums of top-k weights, once there was need; by the number of words of a row.
    """

    routes: RouteCounts
    experts: int
    tokens: int
    rows: int
    of_rows: Returned | None = None
    of_words: dict[int, Returned] | None = None


class GivenLayout(NamedTuple):
    """What `get_dispatch_layout` has returned, and the tensors that it is true of as long as they do not change. It is
    an attribute of `goes`, which it does not refer to: there would be garbage to collect.

    Attributes:
        counts, by_rank, by_expert, ids, last_ids: of `RouteCounts`.
        topk_idx: the entries.
        versions: of these, the counts, and `goes`.
    """

    counts: torch.Tensor
    by_rank: torch.Tensor
    by_expert: torch.Tensor
    ids: torch.Tensor
    last_ids: torch.Tensor
    topk_idx: torch.Tensor
    versions: tuple[int, int, int]

    @classmethod
    def of(cls, topk_idx: torch.Tensor, num_experts: int, ranks: int) -> RouteCounts:
        """Count; `known` finds it again by `goes`."""
        routes = count_routes(topk_idx, num_experts, ranks)
        counts, by_rank, by_expert, goes, ids, last_ids, _ = routes
        versions = _version(topk_idx), _version(counts), _version(goes)
        goes._cute_ep_layout = cls(counts, by_rank, by_expert, ids, last_ids, topk_idx, versions)
        return routes

    @staticmethod
    def known(
        goes: torch.Tensor, by_rank: torch.Tensor, by_expert: torch.Tensor, topk_idx: torch.Tensor | None
    ) -> RouteCounts | None:
        """The counts, if all these are of one layout, unchanged. Of inference tensors torch does not know that."""
        made: GivenLayout | None = getattr(goes, "_cute_ep_layout", None)
        if made is None or made.topk_idx is not topk_idx:
            return None
        if made.by_rank is not by_rank or made.by_expert is not by_expert:
            return None
        if made.versions != (_version(topk_idx), _version(made.counts), _version(goes)):
            return None
        return RouteCounts(made.counts, by_rank, by_expert, goes, made.ids, made.last_ids)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def routes_of(goes: torch.Tensor, topk_idx: torch.Tensor | None, num_experts: int) -> tuple[RouteCounts, int]:
    """Entries that bring each token where `goes` [T, R] says, and out of how many experts they are: the [T, K] ones
    that there are, but for those of other ranks, then one for each rank."""
    ranks, local = goes.shape[1], 1 if topk_idx is None else num_experts // goes.shape[1] + 1
    own = torch.arange(local - 1, local * ranks, local, dtype=torch.int32, device=goes.device)
    entries = torch.where(goes, own, -1)
    if topk_idx is not None:
        server = topk_idx.clamp(min=0, max=num_experts - 1) // (local - 1)
        gone = (topk_idx < 0) | ((topk_idx < num_experts) & ~goes.gather(1, server.long()))
        entries = torch.cat([torch.where(gone, -1, topk_idx + server).int(), entries], dim=1)
    return count_routes(entries, local * ranks, ranks), local * ranks


class NormalMode:
    """Normal mode over the communicators of a group. All runs on the current stream."""

    def __init__(self, connections: Connections, sms: Callable[[], int]) -> None:
        """`sms`: says how many SMs kernels may take, when a communicator is connected."""
        self._connections, self._sms = connections, sms
        self._rank, self._ranks, self._timeout_s = connections.rank, connections.size, EPConfig.timeout_s

    def counting(self, words: int) -> Counting:
        """`Connections.counting` for this mode."""
        return self._connections.counting(words, sms=self._sms(), timeout_s=self._timeout_s)

    # ---- rows

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor | None,
        route: Route,
        *,
        exact: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Dispatched]:
        """Send tokens along a route, which keeps the batch for combine if it has none.

        Args:
            x, scales: [T, hidden] bfloat16 and None, or float8_e4m3fn and [T, factors] of 32 bits.
            weights: [T, entries] float32 that travel along.
            exact: whether a token has each of the rows; else weights behind the last are made 0.

        Returns:
            The rows, [rows, hidden]; their scale factors, [rows, factors]; the batch.
        """
        hidden, scaled = x.shape[1], scales is not None
        wire = None if scales is None else as_wide(scales, hidden).view(torch.uint8)
        communicator = self._connect(hidden, route.tokens, route.experts, route.routes.ids.shape[1], scaled)
        out = buffers_for(communicator, route.rows)
        if weights is not None and not exact:
            out.row_weights.zero_()
        batch = communicator.dispatch(x.contiguous(), route.routes.ids, weights, scales=wire, out=out)
        factors = None
        if scales is not None and batch.scales is not None:
            factors = batch.scales[: route.rows].contiguous().view(scales.dtype)[:, : scales.shape[1]].contiguous()
        if route.of_rows is None:
            route.of_rows = Returned(communicator, batch.without_rows())
        return first_rows(batch.tokens, route.rows), factors, batch

    def combine(self, rows: torch.Tensor, route: Route, biases: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] bfloat16: for each token the sum of its rows over ranks, and of the biases, in float32."""
        assert route.of_rows is not None
        communicator, batch = route.of_rows
        if not biases:
            return communicator.combine(rows, batch, mode="partial")
        total = communicator.combine(rows, batch, mode="partial", dtype=torch.float32)
        for bias in biases:
            total += bias.float()
        return total.bfloat16()

    # ---- top-k entries

    @staticmethod
    def entries(batch: Dispatched, rows: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """([rows, slots] int64 local experts, -1 where there are none; float32 weights, 0 there)."""
        assert batch.row_expert_ids is not None
        local, weights = first_rows(batch.row_expert_ids, rows), first_rows(batch.row_weights, rows)
        if slots != weights.size(1):
            local, weights = local[:, :slots], weights[:, :slots].contiguous()
        return local.long(), weights

    def combine_weights(self, weights: torch.Tensor, route: Route) -> torch.Tensor:
        """[T, K] float32: sums of [rows, K] weights over ranks, in their order."""
        slots = weights.shape[1]
        words = padded(weights)
        width, goes = words.shape[1], route.routes.goes
        of_words = route.of_words = route.of_words or {}
        if width not in of_words:
            communicator = self._connect(width * 2, route.tokens, self._ranks, self._ranks)
            nothing = torch.zeros((len(goes), width * 2), dtype=torch.bfloat16, device=weights.device)
            ranks = torch.where(goes, torch.arange(self._ranks, dtype=torch.int32, device=goes.device), -1)
            batch = communicator.dispatch(nothing, ranks, out=buffers_for(communicator, route.rows))
            of_words[width] = Returned(communicator, batch.without_rows().derived(topk_ids=ranks))
        communicator, batch = of_words[width]
        home = communicator.combine(words.view(torch.bfloat16), batch, mode="unweighted")
        home = home.view(torch.float32)[:, :, :slots]
        total = home[:, 0]
        for column in range(1, home.shape[1]):
            total = total + home[:, column]
        return total

    def _connect(self, hidden: int, tokens: int, experts: int, top_k: int, scaled: bool = False) -> EPCommunicator:
        """The communicator for rank-major rows of `hidden` elements, FP8 if `scaled`, `tokens` per rank."""
        cfg = config_of(
            hidden,
            experts,
            top_k,
            self._room(tokens),
            self._ranks,
            "mxfp8" if scaled else "bf16",  # the format with as many bytes of scale factors whose rows need no padding
            self._timeout_s,
            scale_layout="linear" if scaled else None,
            row_alignment=1,
            row_order=RANK_MAJOR,
        )
        return self._connections.get(cfg, self._sms())

    def _room(self, tokens: int) -> int:
        """`max_tokens_per_rank` of a communicator for so many tokens."""
        return room_for(tokens)


def prefix_matrix(table: torch.Tensor) -> torch.Tensor:
    """`Handle.rank_prefix_matrix` of `Counting.table`."""
    return table.narrow(1, 0, table.size(0)).cumsum(0, dtype=torch.int32)


def joined(by_rank: torch.Tensor, by_expert: torch.Tensor, tokens: int) -> torch.Tensor:
    """`RouteCounts.counts` from its parts, [R] and [E] of any integer type."""
    own = torch.full((1,), tokens, dtype=torch.int32, device=by_rank.device)
    return padded(torch.cat([by_rank.int(), by_expert.int(), own])[None])[0]


def buffers_for(communicator: EPCommunicator, rows: int) -> DispatchBuffers:
    """New memory for so many rows, and at least one."""
    return DispatchBuffers.carve(communicator.cfg, communicator.device, max(rows, 1))


def first_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of a tensor that may have no others."""
    return tensor if tensor.size(0) == rows else tensor.narrow(0, 0, rows)


def padded(words: torch.Tensor) -> torch.Tensor:
    """[n, words] of 32 bits with zeros up to whole vectors."""
    return torch.nn.functional.pad(words, (0, -words.shape[1] % WORDS)).contiguous()


def as_wide(scales: torch.Tensor, hidden: int) -> torch.Tensor:
    """[T, hidden / 128] float32 that has the words of `scales` first."""
    words, columns = with_plain_strides(scales.contiguous()).view(torch.float32), hidden // FP8.block
    if words.shape[1] > columns:
        raise EPInputError(f"x[1].shape[1] = {words.shape[1]}: must not exceed hidden / {FP8.block} = {columns}")
    if words.shape[1] == columns:
        return words
    wide = torch.zeros((words.shape[0], columns), dtype=torch.float32, device=words.device)
    wide[:, : words.shape[1]] = words
    return wide
