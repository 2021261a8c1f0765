"""The communicator over several nodes: an exchange along the rail around the calls of the own node's communicator.

A dispatch exchanges frames, and is then one ordinary dispatch of the node, to whose ranks the frames of a rail are one
rank's tokens. A combine is the node's partial combine, an exchange of its sums, and their sum (`docs/protocol.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import cast

import torch

from cute_ep.api.buffers import DispatchBuffers, tensors_of
from cute_ep.api.calls import DispatchInput, SumOptions
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError, EPTimeout
from cute_ep.api.flags import Flags
from cute_ep.api.host import refuse_capture
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.provenance import Origin
from cute_ep.api.rounds import PendingCombine, PendingDispatch, Plan, Rounds
from cute_ep.api.row_tensors import QuantizedRows
from cute_ep.api.types import CombineMode, ScaledFormat
from cute_ep.api.validate import check_buffers, check_input
from cute_ep.api.validate_combine import OUTPUT_TYPES, check_batch, check_rows, check_sum
from cute_ep.layouts.maps.arena import HeaderWord
from cute_ep.layouts.maps.mail import Channel
from cute_ep.layouts.maps.routing import Phase
from cute_ep.runtime.communicator import wait_for
from cute_ep.runtime.flags import over_nodes
from cute_ep.runtime.local_ops import quantize
from cute_ep.runtime.mail import Frame, RankMail, SumsOf
from cute_ep.runtime.meeting import close_after
from cute_ep.runtime.node_entries import choose_rows, exact_sums, unweighted_rows
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


class NodesPending(PendingDispatch):
    """A dispatch over nodes that was sent: `of_node` is the node's."""

    of_node: PendingDispatch


class SentSums(PendingCombine):
    """A combine over nodes that was sent: what the own node has for all nodes, sums [nodes * F, hidden] or rows of
    entries [nodes * F, top_k, hidden], where that of the others lands, and what all of it is of."""

    sums: torch.Tensor
    landing: int | torch.Tensor
    of: SumsOf


class NodesCommunicator(EPCommunicator):
    """One rank of several nodes on a GPU. Where all ranks are in one process combine takes mode "partial" only.

    Args:
        node: the communicator of the own node, of `node_config`, in whose `group` all ranks of the process are.
        mail: the rank's mail.
        status: its records.
        release: called by `close`, once.
    """

    def __init__(
        self, node: EPCommunicator, mail: RankMail, status: Status, *, release: Callable[[NodesCommunicator], None]
    ) -> None:
        cfg, rank = mail.cfg, mail.parts.rank
        self.cfg, self.rank, self.device, self.group = cfg, rank, node.device, node.group
        self.node, self.mail, self._status, self._release = node, mail, status, release
        self.origin, self.stream = Origin(cfg, rank, node.device), node.stream
        self._dispatches, self._combines = Rounds("dispatch"), Rounds("combine")
        self._streams: set[int] = set()  # raw handles of the streams that were given work since `synchronize`

    @property
    def failed(self) -> bool:
        return self.mail.interrupted or self._status.failed or self.node.failed

    @property
    def shares_device(self) -> bool:
        return self.node.shares_device

    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        self._check_usable()
        return DispatchBuffers.allocate(self.cfg, self.device, capacity)

    # ---- dispatch

    def _dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Dispatched:
        self._check_dispatch(given, out)
        self._look(given)
        with self._work(*_tensors(given), *_received(out)):
            buffers = DispatchBuffers.allocate(self.cfg, self.device) if out is None else out
            assert buffers.frame_ids is not None
            rows, frame = self._prepare(given, buffers.frame_ids)
            with self._sending():
                self._exchange(given, rows, frame)
                batch = self.node.dispatch(**_arguments(frame), out=_of_node(buffers))
                self.mail.free(Channel.FRAMES)
                self._dispatches.count_fused()
        sent = PendingDispatch(given.topk_ids, given.router_weights, batch.return_slices_log2, (), given.frame)
        return Dispatched.received(buffers, self.origin, sent)

    def _plan_dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Plan[Dispatched]:
        self._check_dispatch(given, out)
        return Plan(lambda: self._dispatch(given, out))

    def _check_dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> None:
        self._check_usable()
        self._dispatches.check_fused()
        check_input(self.origin, given)
        self._check_buffers(out)

    def _check_buffers(self, out: DispatchBuffers | None) -> None:
        if out is not None:
            check_buffers(self.cfg, out, self.device)

    def _send_dispatch(self, given: DispatchInput) -> PendingDispatch:
        self._look(given)
        with self._work(*_tensors(given)):
            count = self.cfg.nodes * self.cfg.frame_rows(given.frame)
            ids = torch.empty(count, self.cfg.top_k, dtype=torch.int32, device=self.device)
            rows, frame = self._prepare(given, ids)
            with self._sending():
                self._exchange(given, rows, frame)
                sent = self.node.dispatch_async(**_arguments(frame))
                self.mail.free(Channel.FRAMES)
                kept = (frame.topk_ids, frame.router_weights)
                slices = sent.return_slices_log2
                pending = NodesPending(given.topk_ids, given.router_weights, slices, kept, given.frame)
                pending.of_node = sent
                self._dispatches.count_sent(pending)
        return pending

    def _receive_dispatch(self, pending: PendingDispatch, out: DispatchBuffers | None) -> Dispatched:
        assert isinstance(pending, NodesPending)
        self._check_buffers(out)
        with self._work(*_received(out), *pending.keep_alive):
            buffers = DispatchBuffers.allocate(self.cfg, self.device) if out is None else out
            assert buffers.frame_ids is not None
            ids = pending.of_node.topk_ids
            with self._sending():
                self.node.dispatch_wait(pending.of_node, _of_node(buffers))
                buffers.frame_ids[: len(ids)].copy_(ids)
                _keep(ids)
                self._dispatches.count_received()
        return Dispatched.received(buffers, self.origin, pending)

    def _prepare(self, given: DispatchInput, ids: torch.Tensor) -> tuple[QuantizedRows, Frame]:
        """This rank's rows in the dispatch format, and memory for all nodes' frames, `ids` for their ids."""
        rows = QuantizedRows(given.x, given.scales, given.row_scales)
        if given.scales is None and self.cfg.format.scale:
            scale = given.input_scale
            if not (scale is None or isinstance(scale, torch.Tensor)):
                scale = torch.full((1,), scale, dtype=torch.float32, device=self.device)
            rows = quantize(given.x.contiguous(), cast("ScaledFormat", self.cfg.dispatch_format), scale)
        return rows, self.mail.empty_frame(self.cfg.frame_rows(given.frame), ids)

    def _exchange(self, given: DispatchInput, rows: QuantizedRows, into: Frame) -> None:
        """Send this rank's frame, and have all nodes'."""
        frame = self.cfg.frame_rows(given.frame)
        self.mail.send_frame(rows, given.topk_ids, given.router_weights, frame)
        self.mail.unpack(into, frame)

    # ---- combine

    def _combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> torch.Tensor:
        self._check_combine(rows, dispatched, mode)
        with self._work(rows, options.out, *_returned(dispatched)):
            weights, out = self._output(rows, dispatched, mode, options)
            with self._sending():
                self._add(self._send_sums(rows, dispatched, mode, at_once=True), weights, out)
                self._combines.count_fused()
        return out

    def _plan_combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> Plan[torch.Tensor]:
        self._check_combine(rows, dispatched, mode)
        check_sum(self.origin, rows, dispatched, mode, options)
        return Plan(lambda: self._combine(rows, dispatched, mode, options))

    def _check_combine(self, rows: torch.Tensor, dispatched: Dispatched, mode: str) -> None:
        self._check_usable()
        self._combines.check_fused()
        check_batch(self.origin, dispatched)
        self._check_return(rows, dispatched, mode)

    def _check_return(self, rows: torch.Tensor, dispatched: Dispatched, mode: str) -> None:
        """EPInputError unless a combine over nodes can return these rows of this batch."""
        why = self.mail.engine.entries_refused
        if mode != "partial" and why:
            raise EPInputError(f"mode = {mode!r}: must be 'partial' over {self.cfg.nodes} nodes {why}")
        stamp = dispatched.stamp
        if stamp is not None and dispatched.topk_ids is not stamp.topk_ids:
            raise EPInputError("dispatched.topk_ids: must be those of dispatch over nodes, whose other ranks know them")
        if stamp is not None and dispatched.frame != stamp.frame:
            given = self.cfg.frame_rows(stamp.frame)
            raise EPInputError(f"dispatched.frame = {dispatched.frame}: must be {given}, that of dispatch")
        check_rows(self.cfg, rows, self.device)

    def _send_combine(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode) -> PendingCombine:
        self._check_return(rows, dispatched, mode)
        with self._work(rows, *_returned(dispatched)), self._sending():
            pending = self._send_sums(rows, dispatched, mode, at_once=False)
            self._combines.count_sent(pending)
        return pending

    def _receive_combine(self, pending: PendingCombine, options: SumOptions) -> torch.Tensor:
        assert isinstance(pending, SentSums)
        dispatched, mode, rows = pending
        with self._work(options.out, pending.sums):
            weights, out = self._output(rows, dispatched, mode, options)
            with self._sending():
                self._add(pending, weights, out)
                self._combines.count_received()
        return out

    def _output(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: str, options: SumOptions
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The weights of "exact", and where the result goes."""
        weights, shape, dtype = check_sum(self.origin, rows, dispatched, mode, options)
        return weights, torch.empty(shape, dtype=dtype, device=self.device) if options.out is None else options.out

    def _send_sums(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, *, at_once: bool) -> SentSums:
        """The node's combine, whose sums, or rows of entries, go to the other nodes' ranks."""
        pending = SentSums(dispatched, mode, rows)
        of_node: CombineMode = "partial" if mode == "partial" else "unweighted"
        pending.sums = self.node.combine(rows, self._of_node(dispatched), mode=of_node)
        send = self.mail.send_sums if mode == "partial" else self.mail.send_entries
        batch = dispatched.headers.data_ptr() + 4 * HeaderWord.ROUND
        pending.of = SumsOf(self.cfg.frame_rows(dispatched.frame), batch, at_once)
        pending.landing = send(pending.sums, pending.of)
        return pending

    def _of_node(self, dispatched: Dispatched) -> Dispatched:
        """The batch as the own node's communicator knows it: of frames, in the same buffers."""
        assert dispatched.frame_ids is not None
        ids = dispatched.frame_ids[: self.cfg.nodes * self.cfg.frame_rows(dispatched.frame)]
        slices = dispatched.return_slices_log2
        return Dispatched(dispatched.buffers, self.node.rank, ids, None, slices, dispatched.row_per_entry, True)

    def _add(self, pending: SentSums, weights: torch.Tensor | None, out: torch.Tensor) -> None:
        """The sums of all nodes for this rank's tokens, or their rows."""
        dispatched, mode, _ = pending
        frame, node = pending.of.frame, self.cfg.node(self.rank)
        own = pending.sums[node * frame : (node + 1) * frame]
        if isinstance(pending.landing, int):
            self.mail.add_sums(own, out, OUTPUT_TYPES[out.dtype], pending.of, pending.landing)
        else:
            rows = self.mail.take_entries(pending.landing, pending.of)
            rows[node] = own
            chosen, served = choose_rows(self.cfg, rows, dispatched.topk_ids)
            if mode == "exact":
                assert weights is not None
                out.copy_(exact_sums(chosen, served, weights, out.dtype))
            else:
                out.copy_(unweighted_rows(chosen, out.dtype))
            _keep(pending.landing)
        _keep(pending.sums)

    # ---- the rest

    @contextmanager
    def _work(self, *tensors: torch.Tensor | None) -> Iterator[None]:
        """With the rank's device current, the stream of the node's calls, after what the caller's has been given: where
        ranks share a GPU the node's own, which then also uses the caller's tensors."""
        if self.device.type != "cuda":
            yield
            return
        caller = torch.cuda.current_stream(self.device)
        stream = self.stream if self.shares_device and self.stream is not None else caller
        self._streams.add(stream.cuda_stream)
        if stream != caller:
            stream.wait_stream(caller)
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """What other ranks see, whole: after an error in it host and device may count different rounds, so no call is
        taken."""
        try:
            yield
        except BaseException:
            self.mail.interrupted = True
            raise

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Give an EPTimeout of the node the flags of this communicator, if they can be read."""
        try:
            yield
        except EPTimeout as failure:
            with suppress(EPError, RuntimeError):  # of a device that has failed
                failure.flags = self.flags()
            raise

    def _check_usable(self) -> None:
        self._check_open()
        self._status.raise_failure(self.flags)
        with self._telling():
            self.node._check_usable()
        if self.mail.interrupted:
            raise EPError(f"rank {self.rank}: a call was interrupted while it was launched; close, and connect again")

    def _check_open(self) -> None:
        if self._closed:
            raise EPError(f"rank {self.rank}: the communicator is closed")

    def synchronize(self) -> None:
        """Wait for this rank's work and raise what its kernels reported, of the mail first."""
        self._check_open()
        refuse_capture(self.device, "synchronize")
        used, self._streams = self._streams, set()
        try:
            if used:
                here = (torch.cuda.current_stream(self.device), self.stream)
                wait_for(self.device, used, *(stream for stream in here if stream is not None))
        except BaseException:
            self._streams |= used
            raise
        others = self._looked()
        try:
            with self._telling():
                self.node.synchronize()
        except EPInputError as error:
            others.append(str(error).partition(": ")[2])
        finally:
            self._status.raise_failure(self.flags)
        self._status.raise_input_error(others)

    def take_input_errors(self) -> dict[Phase, tuple[int, int, int]]:
        return {} if self._closed else self.node.take_input_errors() | self._status.take_input_errors()

    def flags(self) -> Flags:
        self._check_open()
        second = self.mail.words(1) if self.mail.parts.second else ()
        return over_nodes(self.cfg, self.rank, self.node.flags(), self.mail.words(), second)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)

    def close(self) -> None:
        """As of `EPCommunicator`."""
        if not self._closed:
            refuse_capture(self.device, "close")
            self._closed = True
            self._release(self)


def _keep(tensor: torch.Tensor) -> None:
    """Keep a tensor that callers do not see until the current stream has used it, which may be another than made it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _of_node(buffers: DispatchBuffers) -> DispatchBuffers:
    """What the node's dispatch writes of them."""
    return buffers.changed({"frame_ids": None})


def _tensors(given: DispatchInput) -> tuple[torch.Tensor | None, ...]:
    """Those that a dispatch reads."""
    scale = given.input_scale if isinstance(given.input_scale, torch.Tensor) else None
    return given.x, given.topk_ids, given.router_weights, scale, given.scales, given.row_scales


def _received(out: DispatchBuffers | None) -> Iterable[torch.Tensor | None]:
    """Those that a dispatch writes."""
    return () if out is None else tensors_of(out).values()


def _returned(dispatched: Dispatched) -> tuple[torch.Tensor | None, ...]:
    """Those that a combine reads of a batch."""
    return dispatched.row_map, dispatched.headers, dispatched.weights, dispatched.frame_ids


def _arguments(frame: Frame) -> dict[str, torch.Tensor | None]:
    """Of the node's dispatch of all nodes' frames."""
    rows = frame.rows
    return {
        "x": rows.payload,
        "topk_ids": frame.topk_ids,
        "router_weights": frame.router_weights,
        "scales": rows.scales,
        "row_scales": rows.row_scales,
    }
