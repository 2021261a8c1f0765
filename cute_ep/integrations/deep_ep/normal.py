"""DeepEP's normal mode: one row per (token, rank), by source rank, then token, and unweighted sums over ranks. Tokens
go where `is_token_in_rank` says. Where that is what `get_dispatch_layout` made of the same top-k entries, dispatch is
given these. Otherwise each rank has one expert more, which is in none of DeepEP's numbers, and a token has an entry
more for each rank that it goes to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_ep import DispatchBuffers, Dispatched, EPCommunicator, EPConfig
from cute_ep.api.row_tensors import with_plain_strides
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.pools import may_send_early
from cute_ep.integrations.deep_ep import calls
from cute_ep.integrations.deep_ep.layout import whole_vectors
from cute_ep.integrations.deep_ep.route import BY_RANK, Returned, Route
from cute_ep.layouts.maps.formats import FP8
from cute_ep.layouts.maps.routing import MAX_TOP_K
from cute_ep.runtime.counts import Counting, with_ends
from cute_ep.runtime.group_pool import GroupPool
from cute_ep.runtime.pool import Opening

NAMES: checks.Names = {
    **calls.NAMES,
    "num_experts": "num_tokens_per_expert.shape[0]",
    "max_tokens_per_rank": "x.shape[0], of the rank with the most tokens,",
}
FORMATS: dict[bool, dict[str, Any]] = {
    False: {"dispatch_format": "bf16", "scale_layout": None},
    True: {"dispatch_format": "mxfp8", "scale_layout": "linear"},
}
"""Of rows without and with scale factors: the format with as many bytes of these whose rows need no padding."""
Bias: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
"""Up to two tensors to add to sums."""
Sent = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Tokens, [T, hidden] bfloat16 and None, or float8_e4m3fn and [T, factors] of 32 bits; [T, entries] float32 weights."""
CONFIGS_KEPT = 1024
"""Configurations that a mode keeps, for the same sizes to come again."""


class Room(NamedTuple):
    """What dispatches of a kind are sent early with: into memory that `carve` makes, of which tokens have `nbytes`,
    with ENDS beside it."""

    communicator: EPCommunicator
    nbytes: int
    carve: Callable[[], DispatchBuffers]


class Early(NamedTuple):
    """What a dispatch was received into that was sent before it was known how many rows come, and its communicator."""

    communicator: EPCommunicator
    buffers: DispatchBuffers


class NormalMode:
    """Normal mode over the communicators of a group, on the current stream."""

    names: checks.Names = NAMES
    _over_nodes = True
    _made: Callable[..., EPConfig] = staticmethod(checks.roomy_config)

    def __init__(
        self, pool: GroupPool, opening: Opening, words: calls.LayoutWords, timeout_s: float = EPConfig.timeout_s
    ) -> None:
        self._pool, self._opening, self._words, self._timeout_s = pool, opening, words, timeout_s
        self._configs: dict[tuple[object, ...], EPConfig] = {}
        self._countings: dict[int, Counting] = {}

    @cached_property
    def ranks_per_node(self) -> int | None:
        """For `EPConfig`; the first time it is collective."""
        return self._pool.ranks_per_node if self._over_nodes else None

    @property
    def nodes(self) -> int:
        """How many there are; as `ranks_per_node`."""
        return self._pool.size // (self.ranks_per_node or self._pool.size)

    def counting(self, words: int) -> Counting:
        """What exchanges so many words of counts."""
        found = self._countings.get(words)
        if found is None or found.communicator.closed:
            asked: dict[str, Any] = {"opening": self._opening, "timeout_s": self._timeout_s}
            found = self._countings[words] = self._pool.counting(words, **asked, ranks_per_node=self.ranks_per_node)
        return found

    def config(
        self,
        hidden: int,
        route: Route,
        entries: torch.Tensor | None = None,
        *,
        scaled: bool = False,
        tokens: int | None = None,
    ) -> EPConfig:
        """Of rows of `hidden` elements, FP8 if `scaled`, along a route; with `entries` and `tokens` of a rank of others
        than its own, entries by rank. EPInputError: a size breaks its rule."""
        ids, order = (route.routes.ids, route.order) if entries is None else (entries, BY_RANK)
        most = route.tokens if tokens is None else tokens
        sizes = hidden, route.experts, ids.shape[1], most, self._pool.size
        key = *sizes, scaled, *order.values()
        found = self._configs.get(key)
        if found is None:
            if len(self._configs) >= CONFIGS_KEPT:
                self._configs.clear()
            options = {"timeout_s": self._timeout_s, "ranks_per_node": self.ranks_per_node}
            found = self._configs[key] = self._made(self.names, sizes, **options, **order, **FORMATS[scaled])
        return found

    def place(self, route: Route, counting: Counting) -> None:
        """Find where a batch over nodes has the rows of a route, whose counts were exchanged last."""
        per_node, ranks, rank = self.ranks_per_node, self._pool.size, self._pool.rank
        if per_node is None:
            return
        counts = counting.by_rank()[:, rank].long()
        ends, by_rail = counts.cumsum(0), counts.view(-1, per_node).t()
        begins = (by_rail.flatten().cumsum(0).view_as(by_rail) - by_rail).t().flatten()
        row = torch.arange(route.rows, device=counts.device)
        source = torch.searchsorted(ends, row, right=True).clamp(max=ranks - 1)
        route.places = torch.where(row < ends[-1], row - (ends - counts)[source] + begins[source], row)

    def bring_home(
        self, x: torch.Tensor, route: Route, bias: Bias, weights: torch.Tensor | None, shape: tuple[int | None, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`sums` of the rows of a route, and `sums_of_weights`, if these are given, of this shape, for each row. What
        these return. EPInputError unless rows are as many, in bfloat16, weights float32, and biases up to two of the
        output's shape, or the route's communicator was closed."""
        hold, device = route.sent.hold, self._pool.device
        calls.check_open(hold)
        hidden, given = hold.communicator.cfg.hidden, dict[str, torch.Tensor]()
        checks.given("x", x, shape=(shape[0], hidden), dtype=torch.bfloat16, device=device)
        if bias is not None:
            many = isinstance(bias, tuple)
            given = {f"bias[{place}]": one for place, one in enumerate(bias)} if many else {"bias": bias}
        checks.require(len(given) <= 2, "len(bias) = {}: must be at most 2", len(given))
        for name, one in given.items():
            home = route.routes.ids.shape[0], hidden
            checks.given(name, one, shape=home, dtype=torch.bfloat16, device=device)
        if weights is not None:
            checks.given("topk_weights", weights, shape=shape, dtype=torch.float32, device=device)
            if weights.dim() > 1:
                checks.integer("topk_weights.shape[1]", weights.shape[1], 1, MAX_TOP_K)
        out = self.sums(checks.as_rows(x), route, list(given.values()))
        return out, None if weights is None else self.sums_of_weights(weights, route)

    def dispatch(
        self, sent: Sent, route: Route, rows: int, *, exact: bool = True, early: Early | None = None
    ) -> tuple[DispatchBuffers, torch.Tensor | None]:
        """Send tokens along a route; the route keeps the batch for combine if it has none. Unless each of the `rows`
        has a token (`exact`), weights behind the last are made 0. What was sent `early` is sent again if a rank had no
        room for its tokens. Returns what was received into, and [rows, factors] scale factors, by source rank."""
        x, scales, _ = sent
        if early is None or early.communicator.cfg.max_tokens_per_rank < route.tokens:
            if early is not None:
                route.of_rows = None  # whose communicator may give way
            communicator = self._connect(self.config(x.shape[1], route, scaled=scales is not None))
            out = buffers_for(communicator, rows, route)
            batch = self._send(communicator, sent, route.routes.ids, route, out, exact=exact)
            early = Early(communicator, out)
            if route.of_rows is None or route.of_rows.hold.communicator.closed:
                route.of_rows = Returned(self._pool.hold(communicator), batch)
        buffers = early.buffers
        factors = None
        if scales is not None:
            (factors,) = route.by_source(buffers, ("scales",), rows)
            factors = factors.contiguous().view(scales.dtype)
            factors = factors[:, : scales.shape[1]].contiguous()
        return buffers, factors

    def room(self, sent: Sent, route: Route) -> Room | None:
        """What tokens are sent with along a route before it is known how many come: room for as many as may. None, on
        all ranks alike: there is no communicator yet, that memory is too much, or the route is over nodes, where a
        dispatch is told the most tokens of a rank."""
        x, scales, _ = sent
        if self.ranks_per_node is not None:
            return None
        ids = route.routes.ids
        kind = (
            x.shape[1],
            scales is None,
            route.experts,
            ids.shape[1],
            self._agreed_tokens(route),
            route.zeroes,
            *route.order.values(),
        )
        room: Room | None = self._pool.kept.get(kind)
        if room is None and (room := self._find_room(x, scales, route)) is not None:
            self._pool.keep(kind, room)
        return None if room is None or not may_send_early(room.nbytes) else room

    def send_early(self, sent: Sent, route: Route, room: Room, out: DispatchBuffers) -> Early:
        """Send tokens along a route into what `room` has made. A rank with too many tokens sends none."""
        communicator, ids = room.communicator, route.routes.ids
        if sent[0].shape[0] > communicator.cfg.max_tokens_per_rank:
            x, scales, _ = sent
            sent, ids = (x[:0], None if scales is None else scales[:0], None), ids[:0]
        batch = self._send(communicator, sent, ids, route, out)
        route.of_rows = Returned(self._pool.hold(communicator), batch)
        return Early(communicator, out)

    def _find_room(self, x: torch.Tensor, scales: torch.Tensor | None, route: Route) -> Room | None:
        """For `room`."""
        cfg = self.config(x.shape[1], route, scaled=scales is not None, tokens=self._agreed_tokens(route))
        communicator = self._pool.known(cfg)
        if communicator is None:
            return None
        rows = route.most_rows(self._pool.size * communicator.cfg.max_tokens_per_rank)
        made_for, beside = route.made_for(communicator.cfg), with_ends(self._pool.size)
        carve = DispatchBuffers.carver(made_for, communicator.device, rows, beside)
        return Room(communicator, rows * x.shape[1] * x.itemsize, carve)

    def _agreed_tokens(self, route: Route) -> int:
        """Of `config`, for what finds the same communicator on all ranks before they know each other's tokens."""
        return 1

    def _send(
        self,
        communicator: EPCommunicator,
        sent: Sent,
        ids: torch.Tensor,
        route: Route,
        out: DispatchBuffers,
        *,
        exact: bool = True,
    ) -> Dispatched:
        """A dispatch of tokens with these entries along a route, into new memory: the batch, without its rows."""
        x, scales, weights = sent
        wire = None
        if scales is not None:
            wire = with_plain_strides(scales.contiguous()).view(torch.float32)
            if more := x.shape[1] // FP8.block - scales.shape[1]:
                wire = torch.nn.functional.pad(wire, (0, more))
            wire = wire.view(torch.uint8)
        (self._words.own.add if route.own else self._words.own.discard)(communicator)
        if weights is not None and not exact:
            out.row_weights.zero_()
        frame = None if self.ranks_per_node is None else route.frame
        return communicator.dispatch(checks.as_rows(x), ids, weights, scales=wire, out=out, frame=frame).without_rows()

    def sums(self, rows: torch.Tensor, route: Route, biases: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] bfloat16: for each token the sum of its rows over ranks, and of the biases, in float32."""
        communicator, batch = self._home(route.sent)
        rows = route.by_batch(rows)
        if not biases:
            return communicator.combine(rows, batch, mode="partial")
        total = communicator.combine(rows, batch, mode="partial", dtype=torch.float32)
        for bias in biases:
            total += bias.float()
        return total.bfloat16()

    def sums_of_weights(self, weights: torch.Tensor, route: Route) -> torch.Tensor:
        """[T, K] float32: sums of [rows, K] weights over ranks, in their order."""
        words, of_words = whole_vectors(weights), route.of_words
        width, last_ids = words.shape[1], route.routes.last_ids
        if width not in of_words or of_words[width].hold.communicator.closed:
            # an entry of each rank that a token goes to, ascending behind those that there are not
            ids = last_ids.sort(1).values[:, -self._pool.size :].contiguous()
            communicator = self._connect(self.config(width * 2, route, ids))
            nothing = torch.zeros((len(ids), width * 2), dtype=torch.bfloat16, device=weights.device)
            out = buffers_for(communicator, route.rows)
            batch = communicator.dispatch(nothing, ids, out=out, frame=route.frame)
            kept = batch.without_rows().derived(topk_ids=ids)
            of_words[width] = Returned(self._pool.hold(communicator), kept)
        communicator, batch = self._home(of_words[width])
        home = communicator.combine(route.by_batch(words).view(torch.bfloat16), batch, mode="unweighted")
        home = home.view(torch.float32)[:, :, : weights.shape[1]]
        total = home[:, 0]
        for column in range(1, home.shape[1]):
            total = total + home[:, column]
        return total

    def _connect(self, cfg: EPConfig) -> EPCommunicator:
        """The communicator for rows that are sent next."""
        communicator = self._pool.get(cfg, None, self._opening, self.names)
        self._pool.note_capture(communicator)
        return communicator

    def _home(self, returned: Returned) -> tuple[EPCommunicator, Dispatched]:
        """What rows go home by."""
        self._pool.note_capture(returned.hold.communicator)
        return returned.hold.communicator, returned.batch


def rows_and_entries(
    buffers: DispatchBuffers, route: Route, slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([rows, hidden]; [rows, slots] int64 local experts, -1 where there are none; float32 weights, 0 there)."""
    rows, local, weights = route.by_source(buffers, ("tokens", "row_expert_ids", "row_weights"), route.rows)
    if slots != weights.size(1):
        local, weights = local[:, :slots].contiguous(), weights[:, :slots].contiguous()
    return rows, local.long(), weights


def buffers_for(communicator: EPCommunicator, rows: int, route: Route | None = None) -> DispatchBuffers:
    """New memory for so many rows, and at least one, of dispatches along a route."""
    cfg = communicator.cfg if route is None else route.made_for(communicator.cfg)
    return DispatchBuffers.carve(cfg, communicator.device, max(rows, 1))
