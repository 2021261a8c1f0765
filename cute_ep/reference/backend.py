"""The communicator interface on the CPU, computed by `cute_ep.reference`.

With all ranks in one process (`connect_reference`) their calls are made one after the other, so no call waits. A call
returns buffers at once; they are filled when the last rank has made its call of the same round, as a GPU's are once its
stream has been synchronised. Until then `num_rows` and `row_offsets` are UNKNOWN, so that no row is taken for a valid
one, and sums are NaN. A rank combines rows that the host has seen, so all ranks dispatch before any of them combines.
With one process per rank (`processes`) receiving halves wait until their results are in place.

Rounds are matched by call order: a rank's n-th dispatch belongs to every other rank's n-th dispatch, and likewise for
combine; with `skip_a2a` every rank has rounds of its own. What a call sends is copied during the call, so it may be
overwritten afterwards, as on a stream; `topk_ids` and router weights are read by combine again.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch

from cute_ep import reference
from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.calls import DispatchInput, SumOptions
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError, EPTimeout, raise_input_error
from cute_ep.api.flags import Flag, Flags
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.provenance import Origin
from cute_ep.api.rounds import PendingCombine, PendingDispatch, Plan
from cute_ep.api.tensors import check_apart
from cute_ep.api.types import CombineMode
from cute_ep.api.validate import check_buffers, check_input
from cute_ep.api.validate_combine import check_batch, check_mode, check_rows, check_sum
from cute_ep.layouts.maps.routing import BEYOND, Phase
from cute_ep.reference.dispatch import Source
from cute_ep.reference.results import (
    OwnDispatched,
    OwnPending,
    ReadAgain,
    add_up,
    check_frames,
    check_row_count,
    combine_send,
    copied,
    fill,
    make_source,
    read_scale,
    withhold,
    withhold_sums,
)
from cute_ep.reference.rounds import Collective, Exchange, Receiver

DEVICE = "cpu"
AHEAD = 64
"""Rounds of one process that a rank may be ahead of a peer; its next call fails, as on a GPU after `timeout_s`."""


def connect_reference(cfg: EPConfig) -> list[ReferenceCommunicator]:
    """The communicators of all ranks of `cfg`, joined to each other."""
    everyone = range(cfg.world_size)
    joint = Exchange(everyone)
    exchanges = [Exchange([rank]) if cfg.skip_a2a else joint for rank in everyone]
    return [ReferenceCommunicator(cfg, rank, own, group=joint) for rank, own in enumerate(exchanges)]


class ReferenceCommunicator(EPCommunicator):
    """One rank of the reference backend (see `connect_reference`). All tensors are on the CPU.

    After an EPTimeout every method but `close` raises it again. With all ranks in one process a call raises it when
    AHEAD rounds wait for a peer, or one waits for a peer that has closed. A combine is refused while a peer has not
    made its dispatch, and where its mode or its dispatch is another than a peer's of the same round. So is a dispatch
    whose `input_scale` is a tensor with a value out of range: it is read during the call.
    """

    def __init__(self, cfg: EPConfig, rank: int, exchange: Exchange, *, group: object) -> None:
        self.cfg, self.rank, self.device = cfg, rank, torch.device("cpu")
        self._exchange, self.group, self.origin = exchange, group, Origin(cfg, rank, self.device)
        self._dispatches, self._combines = exchange.dispatch.order[rank], exchange.combine.order[rank]
        self._failure: EPTimeout | None = None
        self._wrong_input: dict[Phase, tuple[int, int, int]] = {}  # the latest that `synchronize` has not raised
        self._closed = False

    def _check_usable(self) -> None:
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")
        self._raise_failure()
        for collective in (self._exchange.dispatch, self._exchange.combine):
            collective.raise_error(self.rank)

    def _raise_failure(self) -> None:
        """The EPTimeout of this rank, if it has one: a new instance each time, without the frames of earlier calls."""
        if self._failure is not None:
            failure = copy(self._failure)
            failure.flags = self.flags()
            raise failure

    @property
    def shares_device(self) -> bool:
        return len(self._exchange.dispatch.order) > 1

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def flags(self) -> Flags:
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")
        completed: dict[str, int] = {}
        behind: list[Flag] = []
        for many, collective in (("dispatches", self._exchange.dispatch), ("combines", self._exchange.combine)):
            completed[f"{many} sent"] = collective.order[self.rank].sent
            completed[f"{many} received"] = collective.completed(self.rank)
            behind += collective.behind(self.rank)
        return Flags(self.rank, completed, tuple(behind))

    def close(self) -> None:
        """End this rank's part; waits for nobody, and may be called again."""
        if not self._closed:
            self._closed = True
            self._exchange.close(self.rank)

    def synchronize(self) -> None:
        """Check that the results of all calls so far are in their buffers.

        Raises:
            EPTimeout: at once, when a peer has not made its call of a round that this rank waits for.
            EPInputError: an expert id outside [-1, num_experts), or more rows than the output buffers hold; once.
        """
        self._check_usable()
        for collective in (self._exchange.dispatch, self._exchange.combine):
            self._failure = self._failure or collective.overdue(self.rank)
        self._raise_failure()
        raise_input_error(self.rank, self.take_input_errors(), self._looked())

    def take_input_errors(self) -> dict[Phase, tuple[int, int, int]]:
        wrong, self._wrong_input = self._wrong_input, {}
        return {} if self._closed else wrong

    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        self._check_usable()
        return DispatchBuffers.allocate(self.cfg, DEVICE, capacity)

    def _dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Dispatched:
        return self._plan_dispatch(given, out).launch()

    def _plan_dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Plan[Dispatched]:
        self._check_usable()
        self._dispatches.check_fused()
        if out is not None:
            check_buffers(self.cfg, out, DEVICE)
        check_input(self.origin, given)
        read_scale(given.input_scale)
        self._check_apart(out, **given._asdict())

        def launch() -> Dispatched:
            self._check_usable()
            self._dispatches.check_fused()
            return self._receive_dispatch(self._send_dispatch(given), out)

        return Plan(launch)

    def _send_dispatch(self, given: DispatchInput) -> OwnPending:
        """Join the next dispatch with copies of what is given, as it is now."""
        check_frames(self.cfg, given.frame, self._exchange.dispatch.joined(self.rank))
        source = make_source(self.cfg, given)
        if found := reference.find_wrong_id(self.cfg, source.topk_ids):
            index, value = found
            seen = value if -(2**31) <= value < 2**31 else BEYOND
            self._wrong_input[Phase.EXPERT_ID] = index, self.cfg.num_experts, seen
        pending = OwnPending(given.topk_ids, given.router_weights, 0, (), given.frame)
        pending.read_again = ReadAgain(copied(given.topk_ids), copied(given.router_weights))
        self._look(given)
        self._join(self._exchange.dispatch, pending, source)
        return pending

    def _receive_dispatch(self, pending: PendingDispatch, out: DispatchBuffers | None) -> Dispatched:
        if out is None:
            out = self.allocate()
        check_buffers(self.cfg, out, DEVICE)
        self._check_apart(out, topk_ids=pending.topk_ids, router_weights=pending.router_weights)
        out.memory.generation.number += 1  # what it held is gone
        dispatched = OwnDispatched.received(
            out, self.origin, pending, number=self._dispatches.received + 1, read_again=pending.read_again
        )

        def receive(sources: Mapping[int, Source]) -> None:
            if full := fill(self.cfg, self.rank, sources, dispatched):
                self._wrong_input[Phase.ROW_CAPACITY] = full

        if not self._receive(self._exchange.dispatch, receive):
            withhold(out)
        return dispatched

    def _combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> torch.Tensor:
        return self._plan_combine(rows, dispatched, mode, options).launch()

    def _plan_combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> Plan[torch.Tensor]:
        self._check_usable()
        self._combines.check_fused()
        self._check_return(rows, dispatched, mode)
        self._check_sum(rows, dispatched, mode, options)

        def launch() -> torch.Tensor:
            self._check_usable()
            self._combines.check_fused()
            return self._receive_combine(self._send_combine(rows, dispatched, mode), options)

        return Plan(launch)

    def _check_return(self, rows: torch.Tensor, dispatched: Dispatched, mode: str) -> None:
        """EPInputError unless a combine can return these rows of this batch."""
        check_batch(self.origin, dispatched)
        check_mode(self.cfg, mode, dispatched)
        if isinstance(dispatched, OwnDispatched):
            dispatched.read_again.check_ids(dispatched)
        number = dispatched.number if isinstance(dispatched, OwnDispatched) else 0
        if not self._exchange.dispatch.is_filled(self.rank, number):
            missing = list(self._exchange.dispatch.missing(number))
            raise EPInputError(
                f"dispatched = round {number}: rank(s) {missing} must dispatch before rank {self.rank} combines"
            )
        check_rows(self.cfg, rows, DEVICE)
        check_row_count(rows, dispatched)

    def _send_combine(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode) -> PendingCombine:
        """Join the next combine with copies of rows and batch as they are now, unless a peer has joined it with another
        mode or dispatch."""
        self._check_return(rows, dispatched, mode)
        given = combine_send(self.cfg, rows, dispatched, mode)
        given.check_agreement(self._exchange.combine.joined(self.rank))
        pending = PendingCombine(dispatched, mode, rows)
        self._join(self._exchange.combine, pending, given)
        return pending

    def _receive_combine(self, pending: PendingCombine, options: SumOptions) -> torch.Tensor:
        rows, out = pending.rows, options.out
        weights, shape, dtype = self._check_sum(rows, pending.dispatched, pending.mode, options)
        result = torch.empty(shape, dtype=dtype, device=DEVICE) if out is None else out
        if not self._receive(self._exchange.combine, lambda given: add_up(self.cfg, self.rank, given, weights, result)):
            withhold_sums(result)
        return result

    def _check_sum(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: str, options: SumOptions
    ) -> tuple[torch.Tensor | None, tuple[int, ...], torch.dtype]:
        """As for any backend, with the weights as they are now."""
        weights, shape, dtype = check_sum(self.origin, rows, dispatched, mode, options)
        ids, row_map = dispatched.topk_ids, dispatched.row_map
        check_apart("out", options.out, topk_ids=ids, router_weights=weights, row_map=row_map)
        if isinstance(dispatched, OwnDispatched):
            dispatched.read_again.check_ids(dispatched)
            if mode == "partial":  # the experts' ranks multiply by the weights that travelled
                return dispatched.read_again.router_weights, shape, dtype
            dispatched.read_again.check_weights(dispatched, weights)
        return copied(weights), shape, dtype

    def _join(self, collective: Collective, pending: object, arguments: Any) -> None:
        """Send in the next round, unless too many wait for a peer."""
        self._failure = collective.overdue(self.rank, AHEAD)
        self._raise_failure()
        try:
            collective.send(self.rank, pending, arguments)
        except EPTimeout as failure:
            failure.flags = self.flags()
            self._failure = copy(failure)
            raise

    def _check_apart(self, out: DispatchBuffers | None, **read: Any) -> None:
        """EPInputError where `out` shares memory with a tensor among what a call reads."""
        for name, tensor in () if out is None else tensors_of(out).items():
            check_apart(f"out.{name}", tensor, **read)

    def _receive(self, collective: Collective, receiver: Receiver) -> bool:
        """Receive the oldest round; whether its results are in place."""
        try:
            done = collective.receive(self.rank, receiver)
        except EPTimeout as failure:
            failure.flags = self.flags()
            self._failure = copy(failure)
            raise
        collective.raise_error(self.rank)
        return done
