"""The communicator over several nodes: an exchange along the rail around the calls of the own node's communicator.

A dispatch exchanges frames, and is then one ordinary dispatch of the node, to whose ranks the frames of a rail are one
rank's tokens. A combine is the node's partial combine, an exchange of its sums, and their sum (`docs/protocol.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch

from cute_ep.api.buffers import DispatchBuffers
from cute_ep.api.calls import DispatchInput, SumOptions
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.api.flags import Flags
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.provenance import Origin
from cute_ep.api.rounds import PendingCombine, PendingDispatch, Plan, Rounds
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.api.types import CombineMode, ScaledFormat
from cute_ep.api.validate import check_input
from cute_ep.api.validate_combine import OUTPUT_TYPES, check_batch, check_rows, check_sum
from cute_ep.layouts.maps.mail import SUM_SLOTS, Channel
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime.local_ops import quantize
from cute_ep.runtime.mail import RankMail
from cute_ep.runtime.status import Status


def node_config(cfg: EPConfig) -> EPConfig:
    """Of the communicator of one node, which is given the frames of a rail as one rank's tokens."""
    return replace(
        cfg,
        num_experts=cfg.num_experts // cfg.nodes,
        world_size=cfg.peers,
        max_tokens_per_rank=cfg.max_tokens_per_peer,
        ranks_per_node=None,
    )


@dataclass(frozen=True, eq=False, repr=False)
class NodesDispatched(Dispatched):
    """A batch over nodes. `of_node`: the same rows as the own node's communicator knows them."""

    of_node: Dispatched | None = None

    def _changed(self, changes: Mapping[str, Any]) -> Self:
        if "topk_ids" in changes:
            raise EPInputError("topk_ids = tensor: must be None over nodes, whose other ranks know those of dispatch")
        made = super()._changed(changes)
        assert self.of_node is not None
        return replace(made, of_node=replace(self.of_node, buffers=made.buffers))


class NodesPending(PendingDispatch):
    """A dispatch over nodes that was sent: `of_node` is the node's."""

    of_node: PendingDispatch


class SentSums(PendingCombine):
    """A combine over nodes that was sent: in which slot, and the own node's sums of all nodes."""

    slot: int
    sums: torch.Tensor


class NodesCommunicator(EPCommunicator):
    """One rank of several nodes on a GPU. Combine takes mode "partial".

    Args:
        node: the communicator of the own node, of `node_config(cfg)`.
        mail: the rank's mail.
        status: its records.
        group: as of `EPCommunicator`.
        release: called by `close`, once.
    """

    def __init__(
        self,
        cfg: EPConfig,
        rank: int,
        node: EPCommunicator,
        mail: RankMail,
        status: Status,
        *,
        group: object,
        release: Callable[[NodesCommunicator], None],
    ) -> None:
        self.cfg, self.rank, self.device, self.group = cfg, rank, node.device, group
        self.node, self.mail, self._status, self._release = node, mail, status, release
        self.origin, self.stream = Origin(cfg, rank, node.device), node.stream
        self._dispatches, self._combines = Rounds("dispatch"), Rounds("combine")
        self._taken: list[int] = []  # slots of sums that were sent and not received

    @property
    def failed(self) -> bool:
        return self._status.failed or self.node.failed

    @property
    def shares_device(self) -> bool:
        return self.node.shares_device

    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        self._check_usable()
        return self.node.allocate(capacity)

    # ---- dispatch

    def _dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Dispatched:
        return self._plan_dispatch(given, out).launch()

    def _plan_dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Plan[Dispatched]:
        self._check_dispatch(given)

        def launch() -> Dispatched:
            self._check_dispatch(given)
            self._look(given)
            with self._work(*_tensors(given)):
                frames, weights, rows = self._exchange(given)
                scales, row_scales = rows.scales, rows.row_scales
                batch = self.node.dispatch(rows.payload, frames, weights, out=out, scales=scales, row_scales=row_scales)
                self.mail.free(Channel.FRAMES)
            self._dispatches.count_fused()
            sent = PendingDispatch(given.topk_ids, given.router_weights, batch.return_slices_log2, (), given.frame)
            return NodesDispatched.received(batch.buffers, self.origin, sent, of_node=batch)

        return Plan(launch)

    def _check_dispatch(self, given: DispatchInput) -> None:
        self._check_usable()
        self._dispatches.check_fused()
        check_input(self.origin, given)

    def _send_dispatch(self, given: DispatchInput) -> PendingDispatch:
        self._look(given)
        with self._work(*_tensors(given)):
            frames, weights, rows = self._exchange(given)
            sent = self.node.dispatch_async(
                rows.payload, frames, weights, scales=rows.scales, row_scales=rows.row_scales
            )
            self.mail.free(Channel.FRAMES)
        slices = sent.return_slices_log2
        pending = NodesPending(given.topk_ids, given.router_weights, slices, (frames, weights), given.frame)
        pending.of_node = sent
        self._dispatches.count_sent(pending)
        return pending

    def _receive_dispatch(self, pending: PendingDispatch, out: DispatchBuffers | None) -> Dispatched:
        assert isinstance(pending, NodesPending)
        with self._work():
            batch = self.node.dispatch_wait(pending.of_node, out)
        self._dispatches.count_received()
        return NodesDispatched.received(batch.buffers, self.origin, pending, of_node=batch)

    def _exchange(self, given: DispatchInput) -> tuple[torch.Tensor, torch.Tensor, QuantizedRows]:
        """Ids, weights and rows of all nodes' frames, once this rank's was sent."""
        if given.scales is not None or not self.cfg.format.scale:
            rows = QuantizedRows(given.x, given.scales, given.row_scales)
        else:
            scale = given.input_scale
            if not (scale is None or isinstance(scale, torch.Tensor)):
                scale = torch.full((1,), scale, dtype=torch.float32, device=self.device)
            rows = quantize(given.x.contiguous(), cast("ScaledFormat", self.cfg.dispatch_format), scale)
        frame = self._frame(given.frame)
        self.mail.send_frame(rows, given.topk_ids, given.router_weights, frame)
        frames = self.mail.frames(frame)
        return frames.topk_ids, frames.router_weights, frames.rows

    def _frame(self, given: int | None) -> int:
        return given or self.cfg.max_tokens_per_rank

    # ---- combine

    def _combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> torch.Tensor:
        return self._plan_combine(rows, dispatched, mode, options).launch()

    def _plan_combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> Plan[torch.Tensor]:
        self._check_combine(rows, dispatched, mode)
        self._check_sum(rows, dispatched, mode, options)

        def launch() -> torch.Tensor:
            self._check_combine(rows, dispatched, mode)
            with self._work(rows, options.out):
                result = self._add(self._send_sums(rows, dispatched, mode), options)
            self._combines.count_fused()
            return result

        return Plan(launch)

    def _check_combine(self, rows: torch.Tensor, dispatched: Dispatched, mode: str) -> None:
        self._check_usable()
        self._combines.check_fused()
        check_batch(self.origin, dispatched)
        self._check_mode(rows, dispatched, mode)

    def _check_mode(self, rows: torch.Tensor, dispatched: Dispatched, mode: str) -> None:
        if mode != "partial":
            raise EPInputError(f"mode = {mode!r}: must be 'partial' over {self.cfg.nodes} nodes")
        if not isinstance(dispatched, NodesDispatched):
            raise EPInputError(f"dispatched = {type(dispatched).__name__}: must be what this communicator returned")
        check_rows(self.cfg, rows, self.device)

    def _send_combine(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode) -> PendingCombine:
        self._check_mode(rows, dispatched, mode)
        with self._work(rows):
            pending = self._send_sums(rows, dispatched, mode)
        self._taken.append(pending.slot)
        self._combines.count_sent(pending)
        return pending

    def _receive_combine(self, pending: PendingCombine, options: SumOptions) -> torch.Tensor:
        assert isinstance(pending, SentSums)
        self._check_sum(pending.rows, pending.dispatched, pending.mode, options)
        with self._work(options.out):
            result = self._add(pending, options)
        self._taken.remove(pending.slot)
        self._combines.count_received()
        return result

    def _send_sums(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode) -> SentSums:
        """The node's combine, whose sums go to the other nodes' ranks. Of the slots, which all ranks choose alike, the
        first that no outstanding combine has."""
        assert isinstance(dispatched, NodesDispatched) and dispatched.of_node is not None
        pending = SentSums(dispatched, mode, rows)
        pending.slot = next(slot for slot in range(SUM_SLOTS) if slot not in self._taken)
        pending.sums = self.node.combine(rows, dispatched.of_node, mode=mode)
        tokens = dispatched.topk_ids.shape[0]
        self.mail.send_sums(pending.slot, pending.sums, tokens, self._frame(dispatched.frame))
        return pending

    def _add(self, pending: SentSums, options: SumOptions) -> torch.Tensor:
        """The sums of all nodes for this rank's tokens."""
        dispatched = pending.dispatched
        _, shape, dtype = check_sum(self.origin, pending.rows, dispatched, pending.mode, options)
        out = torch.empty(shape, dtype=dtype, device=self.device) if options.out is None else options.out
        frame = self._frame(dispatched.frame)
        own = pending.sums[self.cfg.node(self.rank) * frame :]
        self.mail.add_sums(pending.slot, own, out, OUTPUT_TYPES[dtype], frame)
        return out

    def _check_sum(self, rows: torch.Tensor, dispatched: Dispatched, mode: str, options: SumOptions) -> None:
        check_sum(self.origin, rows, dispatched, mode, options)

    # ---- the rest

    @contextmanager
    def _work(self, *tensors: torch.Tensor | None) -> Iterator[None]:
        """With the rank's device current, the stream of the node's calls, after what the caller's has been given: where
        ranks share a GPU the node's own, which then also uses the caller's tensors."""
        if not (self.shares_device and self.stream is not None):
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def _check_usable(self) -> None:
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")
        self._status.raise_failure()
        self.node._check_usable()

    def synchronize(self) -> None:
        """Wait for this rank's work and raise what its kernels reported, of the mail first."""
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")
        try:
            self.node.synchronize()
        finally:
            self._status.raise_failure()
        self._status.raise_input_error(self._looked())

    def take_input_errors(self) -> dict[Phase, tuple[int, int, int]]:
        return {} if self._closed else self.node.take_input_errors() | self._status.take_input_errors()

    def flags(self) -> Flags:
        return self.node.flags()

    def close(self) -> None:
        """As of `EPCommunicator`."""
        if not self._closed:
            self._closed = True
            self._release(self)


def _tensors(given: DispatchInput) -> tuple[torch.Tensor | None, ...]:
    """Those that a dispatch reads."""
    scale = given.input_scale if isinstance(given.input_scale, torch.Tensor) else None
    return given.x, given.topk_ids, given.router_weights, scale, given.scales, given.row_scales
