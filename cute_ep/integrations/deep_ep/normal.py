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

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cute_ep import DispatchBuffers, Dispatched, EPCommunicator, EPConfig
from cute_ep.api.row_tensors import with_plain_strides
from cute_ep.integrations.common.checks import Names, Sizes, as_rows, roomy_config
from cute_ep.integrations.deep_ep import calls
from cute_ep.integrations.deep_ep.calls import WORDS
from cute_ep.integrations.deep_ep.layout import LayoutWords
from cute_ep.layouts.maps.formats import FP8, VECTOR_BYTES
from cute_ep.layouts.maps.routing import RANK_MAJOR
from cute_ep.runtime.counts import Counting
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.runtime.pool import Hold, Opening
from cute_ep.runtime.routes import RouteCounts

VECTOR_WORDS = VECTOR_BYTES // 4
"""32-bit words that rows of words are a multiple of."""
NAMES: Names = {
    "hidden": "x.shape[1]",
    "num_experts": "num_tokens_per_expert.shape[0]",
    "top_k": "topk_idx.shape[1]",
    "max_tokens_per_rank": "x.shape[0], of the rank with the most tokens,",
    "world_size": "group.size()",
}
FORMATS: dict[bool, dict[str, Any]] = {
    False: {"dispatch_format": "bf16", "scale_layout": None},
    True: {"dispatch_format": "mxfp8", "scale_layout": "linear"},
}
"""Of rows without and with scale factors: the format that has as many bytes of these, and whose rows need no
padding."""


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


class Layout(NamedTuple):
    """Sizes of a dispatch that its handle keeps; as the arguments of `ElasticBuffer.dispatch`."""

    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    do_expand: bool


class Returned(NamedTuple):
    """A communicator, and a batch of it whose rows combine can return; it holds no rows itself. `hold`: keeps the
    communicator open."""

    communicator: EPCommunicator
    batch: Dispatched
    hold: Hold


@dataclass
class Route:
    """Where the tokens of one dispatch go.

    Attributes:
        routes: of the entries that dispatch is given.
        experts: how many experts these are out of.
        tokens: what no rank has more tokens than.
        rows: rows received, or that there is room for.
        own: whether a token has an entry of each rank behind those that it was given.
        layout: of an `ElasticBuffer`.
        cfg: of the rows that are sent next.
        of_rows: for sums of rows, once they were sent.
        of_words: for sums of top-k weights, once there was need; by the number of words of a row.
    """

    routes: RouteCounts
    experts: int
    tokens: int
    rows: int
    own: bool = False
    layout: Layout | None = None
    cfg: EPConfig | None = None
    of_rows: Returned | None = None
    of_words: dict[int, Returned] = field(default_factory=dict)


class NormalMode:
    """Normal mode over the communicators of a group, on the current stream. `words`: of what kernels found wrong."""

    names: Names = NAMES
    _made = staticmethod(roomy_config)

    def __init__(self, pool: GroupPool, opening: Opening) -> None:
        self._pool, self._opening = pool, opening
        self._rank, self._ranks, self._timeout_s = pool.rank, pool.size, EPConfig.timeout_s
        self.words = LayoutWords(WORDS.ids, WORDS.room)

    def counting(self, words: int) -> Counting:
        """`GroupPool.counting` for this mode."""
        return self._pool.counting(words, opening=self._opening, timeout_s=self._timeout_s)

    def config(self, hidden: int, route: Route, *, scaled: bool) -> EPConfig:
        """Of rows of `hidden` elements, FP8 if `scaled`, along a route. EPInputError: a size breaks its rule."""
        return self._rank_major((hidden, route.experts, route.routes.ids.shape[1], route.tokens, self._ranks), scaled)

    def _rank_major(self, sizes: Sizes, scaled: bool) -> EPConfig:
        options = {"timeout_s": self._timeout_s, **FORMATS[scaled]}
        return self._made(self.names, sizes, row_alignment=1, row_order=RANK_MAJOR, **options)

    def check_route(self, x: torch.Tensor, route: Route, *, scaled: bool) -> None:
        """Set `Route.cfg` for rows like these. EPInputError: they cannot be sent along the route."""
        route.cfg = self.config(x.shape[1], route, scaled=scaled)

    @staticmethod
    def check_returned(route: Route) -> tuple[int, int]:
        """The shape of rows that go home by a route. EPInputError: its communicator was closed."""
        assert route.of_rows is not None
        calls.check_open("handle", route.of_rows.hold)
        return route.rows, route.of_rows.communicator.cfg.hidden

    def dispatch(
        self,
        sent: tuple[torch.Tensor, torch.Tensor | None],
        weights: torch.Tensor | None,
        route: Route,
        rows: int,
        *,
        exact: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Dispatched]:
        """Send tokens along a route that was checked for them, which keeps the batch for combine if it has none.

        `sent` is [T, hidden] bfloat16 and None, or float8_e4m3fn and [T, factors] of 32 bits; [T, entries] float32
        weights travel along. Unless each of the `rows` has a token (`exact`), weights behind the last are made 0.
        Returns rows [rows, hidden], their scale factors [rows, factors], and the batch."""
        assert route.cfg is not None
        x, scales = sent
        wire = None if scales is None else as_wide(scales, x.shape[1]).view(torch.uint8)
        communicator = self._connect(route.cfg)
        (self.words.own.add if route.own else self.words.own.discard)(communicator)
        out = buffers_for(communicator, rows)
        if weights is not None and not exact:
            out.row_weights.zero_()
        batch = communicator.dispatch(as_rows(x), route.routes.ids, weights, scales=wire, out=out)
        factors = None
        if scales is not None and batch.scales is not None:
            factors = batch.scales[:rows].contiguous().view(scales.dtype)[:, : scales.shape[1]].contiguous()
        if route.of_rows is None or route.of_rows.communicator.closed:
            route.of_rows = self.returned(communicator, batch.without_rows())
        return first_rows(batch.tokens, rows), factors, batch

    def combine(self, rows: torch.Tensor, route: Route, biases: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] bfloat16: for each token the sum of its rows over ranks, and of the biases, in float32."""
        communicator, batch = self._home(route)
        if not biases:
            return communicator.combine(rows, batch, mode="partial")
        total = communicator.combine(rows, batch, mode="partial", dtype=torch.float32)
        for bias in biases:
            total += bias.float()
        return total.bfloat16()

    def _home(self, route: Route) -> tuple[EPCommunicator, Dispatched]:
        """What rows of a route go home by."""
        assert route.of_rows is not None
        communicator, batch, _ = route.of_rows
        self._pool.note_capture(communicator)
        return communicator, batch

    def returned(self, communicator: EPCommunicator, batch: Dispatched) -> Returned:
        """What a route keeps of a batch, without its rows, for calls to come."""
        return Returned(communicator, batch, self._pool.hold(communicator))

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
        width, goes, of_words = words.shape[1], route.routes.goes, route.of_words
        if width not in of_words or of_words[width].communicator.closed:
            communicator = self._connect(
                self._rank_major((width * 2, self._ranks, self._ranks, route.tokens, self._ranks), False)
            )
            nothing = torch.zeros((len(goes), width * 2), dtype=torch.bfloat16, device=weights.device)
            ranks = torch.where(goes, torch.arange(self._ranks, dtype=torch.int32, device=goes.device), -1)
            batch = communicator.dispatch(nothing, ranks, out=buffers_for(communicator, route.rows))
            of_words[width] = self.returned(communicator, batch.without_rows().derived(topk_ids=ranks))
        communicator, batch, _ = of_words[width]
        self._pool.note_capture(communicator)
        home = communicator.combine(words.view(torch.bfloat16), batch, mode="unweighted")
        home = home.view(torch.float32)[:, :, :slots]
        total = home[:, 0]
        for column in range(1, home.shape[1]):
            total = total + home[:, column]
        return total

    def _connect(self, cfg: EPConfig) -> EPCommunicator:
        """The communicator for rows that are sent next."""
        communicator = self._pool.get(cfg, None, self._opening, self.names)
        self._pool.note_capture(communicator)
        return communicator


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
    return torch.nn.functional.pad(words, (0, -words.shape[1] % VECTOR_WORDS)).contiguous()


def as_wide(scales: torch.Tensor, hidden: int) -> torch.Tensor:
    """[T, hidden / 128] float32 that has the words of `scales` first."""
    words, columns = with_plain_strides(scales.contiguous()).view(torch.float32), hidden // FP8.block
    if words.shape[1] == columns:
        return words
    wide = torch.zeros((words.shape[0], columns), dtype=torch.float32, device=words.device)
    wide[:, : words.shape[1]] = words
    return wide
