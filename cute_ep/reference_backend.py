"""The communicator interface on the CPU, computed by `cute_ep.reference`: all ranks live in one process.

The calls of the ranks are made one after the other, so no call waits. A call returns buffers at once; they
are filled when the last rank has made its call of the same round, as a GPU's are once its stream has been
synchronised. Rounds are matched by call order: a rank's n-th dispatch belongs to every other rank's n-th
dispatch, and likewise for combine; with `skip_a2a` every rank has rounds of its own. A rank combines rows that the host
has seen, so all ranks dispatch before any of them combines. What a call sends is copied during the call, so it may be
overwritten afterwards, as on a stream; `topk_ids` and router weights are read by combine again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_ep import reference
from cute_ep.config import EPConfig
from cute_ep.dispatched import DispatchBuffers, Dispatched, QuantizedRows, tensors_of
from cute_ep.errors import EPError, EPInputError, EPTimeout
from cute_ep.interface import EPCommunicator
from cute_ep.layouts.routing import LOST_ROW, Phase
from cute_ep.layouts.scales import TRANSPOSED
from cute_ep.rounds import Plan, Rounds
from cute_ep.status import raise_input_error
from cute_ep.validate import (
    check_buffers,
    check_epilogue_data,
    check_input_scale,
    check_mode,
    check_output,
    check_rows,
    check_tokens,
    combine_weights,
)

DEVICE = "cpu"

ANNOUNCED = ("row_offsets", "row_counts", "scales_offsets", "num_rows")
OF_ROWS = ("tokens", "scales", "row_scales", "src_info")
"""Tensors of `DispatchBuffers` that say which rows there are, and that hold them."""


@dataclass(eq=False)
class _Round:
    """One collective call of all its ranks: arguments as they arrive, receivers until they have been called."""

    index: int
    arguments: dict[int, Any] = field(default_factory=dict)
    receivers: dict[int, Callable[[_Round], None]] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Pending:
    """What an asynchronous call returns and the wait of the same rank takes, once."""

    rank: int
    round: _Round
    mode: str | None = None
    topk_ids: torch.Tensor | None = None
    router_weights: torch.Tensor | None = None
    dispatched: Dispatched | None = None


@dataclass(frozen=True, eq=False)
class _OwnDispatched(Dispatched):
    """A `Dispatched` that knows whether its buffers have been filled."""

    origin: Pending


@dataclass(frozen=True, eq=False)
class _Returned:
    """What one rank gives back in a combine: its rows and batch as they were, the mode, the round of its dispatch."""

    rows: torch.Tensor
    batch: Dispatched
    mode: str
    dispatch: int


class _Collective:
    """The rounds of dispatch or of combine, shared by the ranks that exchange messages."""

    def __init__(self, name: str, phase: Phase, ranks: Sequence[int]) -> None:
        self.name, self.phase, self.ranks = name, phase, ranks
        self.rounds: list[_Round] = []
        self.order = {rank: Rounds(name) for rank in ranks}

    def next_round(self, rank: int) -> _Round:
        """The round that the next `send` of `rank` joins."""
        index = self.order[rank].sent
        if index == len(self.rounds):
            self.rounds.append(_Round(index))
        return self.rounds[index]

    def owns(self, one: _Round) -> bool:
        return one.index < len(self.rounds) and self.rounds[one.index] is one

    def send(self, rank: int, arguments: Any) -> _Round:
        joined = self.next_round(rank)
        self.order[rank].sent += 1
        joined.arguments[rank] = arguments
        self._progress(joined)
        return joined

    def check_receive(self, rank: int, pending: Pending) -> None:
        own = isinstance(pending, Pending) and pending.rank == rank and self.owns(pending.round)
        self.order[rank].check_own(own, pending, rank)
        self.order[rank].check_wait(pending.round.index + 1)

    def receive(self, pending: Pending, receiver: Callable[[_Round], None]) -> None:
        self.order[pending.rank].received += 1
        pending.round.receivers[pending.rank] = receiver
        self._progress(pending.round)

    def _progress(self, current: _Round) -> None:
        if len(current.arguments) < len(self.ranks):
            return
        for rank in current.receivers.keys() - current.filled:
            current.receivers[rank](current)
            current.filled.add(rank)
        if len(current.filled) == len(self.ranks):  # nobody needs these any more
            current.arguments, current.receivers = {}, {}

    def unfilled(self, rank: int) -> _Round | None:
        """The oldest round that `rank` waits for in vain, if any."""
        waited = self.rounds[: self.order[rank].received]
        return next((one for one in waited if rank not in one.filled), None)

    def missing(self, current: _Round) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if self.order[rank].sent <= current.index)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


class _Exchange:
    def __init__(self, ranks: Sequence[int]) -> None:
        self.dispatch = _Collective("dispatch", Phase.ROUTE, ranks)
        self.combine = _Collective("combine", Phase.RETURN, ranks)


def connect_reference(cfg: EPConfig) -> list[ReferenceCommunicator]:
    """The communicators of all ranks of `cfg`, joined to each other."""
    everyone = range(cfg.world_size)
    joint = _Exchange(everyone)
    return [ReferenceCommunicator(cfg, rank, _Exchange([rank]) if cfg.skip_a2a else joint) for rank in everyone]


class ReferenceCommunicator(EPCommunicator):
    """One rank of the reference backend (see `connect_reference`). All tensors are on the CPU.

    Any method but `close` raises EPError after `close`, and after an EPTimeout that again.

    Attributes:
        cfg: the deployment.
        rank: this rank, 0 <= rank < cfg.world_size.
    """

    def __init__(self, cfg: EPConfig, rank: int, exchange: _Exchange) -> None:
        self.cfg, self.rank, self.device = cfg, rank, torch.device("cpu")
        self._exchange = exchange
        self._failure: EPTimeout | None = None
        self._wrong_input: dict[Phase, tuple[int, int, int]] = {}  # the latest that `synchronize` has not raised
        self._closed = False

    def _check_usable(self) -> None:
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")
        if self._failure is not None:
            raise self._failure

    @property
    def failed(self) -> bool:
        """Whether `synchronize` has raised EPTimeout."""
        return self._failure is not None

    def __enter__(self) -> ReferenceCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End this rank's part; may be called again."""
        self._closed = True

    def synchronize(self) -> None:
        """Check that the results of all calls so far are in their buffers.

        Raises:
            EPTimeout: at once, when a peer has not made its call of a round that this rank waits for.
            EPInputError: an expert id outside [-1, num_experts), or more rows than the output buffers hold; once.
        """
        self._check_usable()
        for collective in (self._exchange.dispatch, self._exchange.combine):
            current = collective.unfilled(self.rank)
            if current is not None:
                missing, calls = collective.missing(current), f"{current.index + 1} {collective.name} calls"
                details = tuple(f"rank {peer}: expected {calls}, saw {collective.order[peer].sent}" for peer in missing)
                self._failure = EPTimeout(collective.phase.name, self.rank, missing, details)
                raise self._failure
        wrong, self._wrong_input = self._wrong_input, {}
        raise_input_error(self.rank, wrong)

    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        """Uninitialised buffers for `capacity` rows, default `cfg.max_rows`. EPInputError: it is no number of rows."""
        self._check_usable()
        return DispatchBuffers.allocate(self.cfg, DEVICE, capacity)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        out: DispatchBuffers | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
    ) -> Dispatched:
        """`dispatch_async` and `dispatch_wait` in one call; same arguments, result and errors."""
        return self.plan_dispatch(
            x, topk_ids, router_weights, input_scale, out, scales=scales, row_scales=row_scales
        ).launch()

    def plan_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        out: DispatchBuffers | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
    ) -> Plan[Dispatched]:
        """All of `dispatch` but joining the round; arguments and errors are the same."""
        self._check_usable()
        order = self._exchange.dispatch.order[self.rank]
        order.check_fused()
        if out is not None:
            check_buffers(self.cfg, out, DEVICE)
        source = self._encode(x, topk_ids, router_weights, input_scale, scales, row_scales)

        def launch() -> Dispatched:
            self._check_usable()
            order.check_fused()
            return self.dispatch_wait(self._send(source, topk_ids, router_weights), out)

        return Plan(launch)

    def dispatch_async(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
    ) -> Pending:
        """Send this rank's tokens.

        Args:
            x: [T, hidden] bfloat16, T <= max_tokens_per_rank; with `scales` the payload of `QuantizedRows`.
            topk_ids: [T, top_k] int32, -1 (masked) or a global expert id. Others are masked, and `synchronize` says so.
            router_weights: [T, top_k] float32 or None; partial combine needs them here, on every rank.
            input_scale: global scale of this rank's tokens (formats that have one), a number or a float32
                tensor of one element; None: 1.0. Must be None with `scales`.
            scales, row_scales: as in `QuantizedRows`, of tokens that are quantised already and travel as they are.

        Raises:
            EPInputError: an argument breaks its rule. The round has not been joined then.
        """
        self._check_usable()
        self._exchange.dispatch.order[self.rank].check_send()
        source = self._encode(x, topk_ids, router_weights, input_scale, scales, row_scales)
        return self._send(source, topk_ids, router_weights)

    def _encode(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None,
        input_scale: float | torch.Tensor | None,
        scales: torch.Tensor | None,
        row_scales: torch.Tensor | None,
    ) -> Any:
        """What this rank sends, made of copies."""
        check_tokens(self.cfg, x, topk_ids, router_weights, DEVICE, scales, row_scales)
        if isinstance(input_scale, torch.Tensor):
            check_input_scale(self.cfg.format, input_scale)
            input_scale = input_scale.item()
        copies = [_copy(one) for one in (x, topk_ids, router_weights, scales, row_scales)]
        x_now, ids_now, weights_now, scales_now, row_scales_now = copies
        ready = None if scales is None else QuantizedRows(x_now, scales_now, row_scales_now)
        return reference.encode_source(self.cfg, x_now, ids_now, input_scale, weights_now, ready)

    def _send(self, source: Any, topk_ids: torch.Tensor, router_weights: torch.Tensor | None) -> Pending:
        """Join the next dispatch."""
        if found := reference.find_wrong_id(self.cfg, source.topk_ids):
            index, value = found
            self._wrong_input[Phase.EXPERT_ID] = index, self.cfg.num_experts, value
        joined = self._exchange.dispatch.send(self.rank, source)
        return Pending(self.rank, joined, topk_ids=topk_ids, router_weights=router_weights)

    def dispatch_wait(self, pending: Pending, out: DispatchBuffers | None = None) -> Dispatched:
        """Receive the rows of this rank's experts into `out` (default: `allocate()`).

        Returns:
            A `Dispatched` over the buffers. Rows and scale blocks beyond those in use keep what they held. `weights`
            is 0 where this rank has no row or the source gave none. More rows than `out` holds are lost: none is
            written or announced, combine returns NaN for each of them, and `synchronize` says so.

        Raises:
            EPInputError: `pending` is not this rank's oldest unreceived dispatch, or `out` does not fit.
        """
        self._check_usable()
        self._exchange.dispatch.check_receive(self.rank, pending)
        if out is None:
            out = self.allocate()
        check_buffers(self.cfg, out, DEVICE)
        buffers = tensors_of(out)
        given = {"rank": self.rank, "topk_ids": pending.topk_ids, "router_weights": pending.router_weights}
        dispatched = _OwnDispatched(**buffers, **given, return_pieces=0, origin=pending)
        self._exchange.dispatch.receive(pending, lambda current: self._fill(current, buffers))
        return dispatched

    def _fill(self, current: _Round, buffers: dict[str, torch.Tensor | None]) -> None:
        result = reference.receive(self.cfg, self.rank, current.arguments)
        rows, capacity = result.num_rows.item(), buffers["tokens"].shape[0]
        if rows > capacity:
            self._wrong_input[Phase.ROW_CAPACITY] = 0, capacity, rows
            result.row_map[result.row_map >= 0] = LOST_ROW
            for name in ANNOUNCED:
                if buffers[name] is not None:
                    getattr(result, name).zero_()
            buffers = {name: buffer for name, buffer in buffers.items() if name not in OF_ROWS}
        for name, buffer in buffers.items():
            value = getattr(result, name)
            if name == "weights" and value is None:
                buffer.zero_()
            elif name == "scales" and self.cfg.scales_as == TRANSPOSED:
                buffer[:, :rows] = value
            elif buffer is not None:
                buffer[: value.shape[0]] = value

    def combine(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None = None,
        mode: str = "exact",
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`combine_async` and `combine_wait` in one call; same arguments, result and errors."""
        return self.plan_combine(
            rows, dispatched, router_weights, mode, out, dtype=dtype, epilogue_data=epilogue_data
        ).launch()

    def plan_combine(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None = None,
        mode: str = "exact",
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> Plan[torch.Tensor]:
        """All of `combine` but joining the round; arguments and errors are the same."""
        self._check_usable()
        order = self._exchange.combine.order[self.rank]
        order.check_fused()
        given = self._prepare_return(rows, dispatched, mode)
        combine_weights(self.cfg, mode, router_weights, dispatched)
        check_epilogue_data(mode, None, epilogue_data, DEVICE)
        check_output(self.cfg, mode, dispatched.topk_ids.shape[0], dtype, out, DEVICE)

        def launch() -> torch.Tensor:
            self._check_usable()
            order.check_fused()
            return self.combine_wait(self._return(given, dispatched), router_weights, out, dtype=dtype)

        return Plan(launch)

    def combine_async(self, rows: torch.Tensor, dispatched: Dispatched, mode: str = "exact") -> Pending:
        """Send the expert outputs back to the ranks that the tokens came from.

        Args:
            rows: [>= num_rows, hidden] bfloat16, in the row order of `dispatched`.
            dispatched: what this rank's dispatch returned; must have been filled, since `rows` come from it.
            mode: one of COMBINE_MODES (see `cute_ep.reference.combine`), the same on all ranks.

        Raises:
            EPInputError: an argument breaks its rule, `dispatched` has not been filled because a peer has not made its
                call, weights are missing in partial mode, the mode does not go with the configuration, or a peer's
                combine of this round has another mode or dispatch. The round has not been joined then.
        """
        self._check_usable()
        self._exchange.combine.order[self.rank].check_send()
        given = self._prepare_return(rows, dispatched, mode)
        if mode != "exact":
            combine_weights(self.cfg, mode, None, dispatched)
        return self._return(given, dispatched)

    def _prepare_return(self, rows: torch.Tensor, dispatched: Dispatched, mode: str) -> _Returned:
        """What this rank gives back, made of copies."""
        check_mode(mode)
        self._check_dispatched(dispatched)
        origin = dispatched.origin.round
        if self.rank not in origin.filled:
            missing = list(self._exchange.dispatch.missing(origin))
            raise EPInputError(
                f"dispatched = round {origin.index}: rank(s) {missing} must dispatch before rank {self.rank} combines"
            )
        check_rows(self.cfg, rows, dispatched)
        need = dispatched.num_rows.item()
        if rows.shape[0] < need:
            raise EPInputError(f"rows.shape[0] = {rows.shape[0]}: must be at least num_rows = {need}")
        # if rows were lost `need` is 0: every entry's is NaN, and of the shared expert's those that did not fit
        _, shared = self.cfg.shared_slice(dispatched.topk_ids.shape[0], self.rank)
        held = rows[: min(max(need, shared), dispatched.tokens.shape[0])]
        more = max(shared - held.shape[0], 0) + 1
        lost = reference.round_to(torch.full((more, self.cfg.hidden), torch.nan), torch.bfloat16)
        # what combine reads of `dispatched`, as it is now: its buffers may be used again
        row_map = dispatched.row_map.clamp(max=held.shape[0])
        now = replace(dispatched, row_map=row_map, topk_ids=dispatched.topk_ids.clone())
        return _Returned(torch.cat([held, lost]), now, mode, origin.index)

    def _return(self, given: _Returned, dispatched: Dispatched) -> Pending:
        """Join the next combine, unless a peer has joined it with another mode or dispatch."""
        for peer, other in self._exchange.combine.next_round(self.rank).arguments.items():
            if (other.mode, other.dispatch) != (given.mode, given.dispatch):
                raise EPInputError(
                    f"mode = {given.mode!r} of dispatch round {given.dispatch}: must match rank {peer}'s combine, "
                    f"{other.mode!r} of round {other.dispatch}"
                )
        joined = self._exchange.combine.send(self.rank, given)
        return Pending(self.rank, joined, mode=given.mode, dispatched=dispatched)

    def combine_wait(
        self,
        pending: Pending,
        router_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add up what came back.

        Args:
            pending: what `combine_async` returned.
            router_weights: [T, top_k] float32; None: those given to dispatch. Must be None in the other modes than
                exact.
            out: [T, hidden], unweighted [T, top_k, hidden], bfloat16, float16 or float32, overwritten; None: a new
                tensor.
            dtype: element type of the new tensor.
            epilogue_data: must be None, as there are no hooks.

        Returns:
            `out`.

        Raises:
            EPInputError: an argument breaks its rule, or no weights were given anywhere.
        """
        self._check_usable()
        self._exchange.combine.check_receive(self.rank, pending)
        dispatched = pending.dispatched
        weights = _copy(combine_weights(self.cfg, pending.mode, router_weights, dispatched))
        check_epilogue_data(pending.mode, None, epilogue_data, DEVICE)
        shape, dtype = check_output(self.cfg, pending.mode, dispatched.topk_ids.shape[0], dtype, out, DEVICE)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=DEVICE)

        def reduce(current: _Round) -> None:
            rows = {rank: given.rows for rank, given in current.arguments.items()}
            batches = {rank: given.batch for rank, given in current.arguments.items()}
            if pending.mode == "unweighted":
                made = reference.unweighted_source(self.cfg, self.rank, rows, batches, out.dtype)
            else:
                made = reference.combine_source(self.cfg, self.rank, rows, batches, weights, pending.mode, out.dtype)
            out.copy_(made)

        self._exchange.combine.receive(pending, reduce)
        return out

    def _check_dispatched(self, dispatched: Dispatched) -> None:
        own = isinstance(dispatched, _OwnDispatched) and dispatched.origin.rank == self.rank
        if not (own and self._exchange.dispatch.owns(dispatched.origin.round)):
            kind = type(dispatched).__name__
            raise EPInputError(f"dispatched = {kind}: must be what a dispatch of rank {self.rank} returned")
