"""Batches, as ops take and return them, and those that no op has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_ep.api.buffers import BUFFERS, DispatchBuffers, buffer_shapes
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.types import CombineMode
from cute_ep.ops import library
from cute_ep.ops.registry import communicator_of, register, registered


class Batch(NamedTuple):
    """One rank's share of a dispatched batch as plain tensors: those of `DispatchBuffers`, and these.

    Tensors that the configuration has not are empty, in batches of adapters also what neither experts nor combine read,
    and `frame_ids` has the rows of the batch's frames. Rows behind the last one and their `src_info` hold anything, and
    so does `row_map` of tokens that do not exist, unless dispatch was told to clear them.

    Attributes:
        comm: name of the communicator.
        topk_ids, router_weights: this rank's own, as dispatch was given them.
    """

    comm: str
    topk_ids: Tensor
    router_weights: Tensor | None
    tokens: Tensor
    scales: Tensor
    row_scales: Tensor
    row_offsets: Tensor
    row_counts: Tensor
    scales_offsets: Tensor
    expert_ids: Tensor
    src_info: Tensor
    num_rows: Tensor
    row_map: Tensor
    headers: Tensor
    weights: Tensor
    row_weights: Tensor
    row_expert_ids: Tensor
    source_ranges: Tensor
    frame_ids: Tensor

    def dispatched(self) -> Dispatched:
        """The batch as the rest of the library takes it, such as `dequantize`. Not in compiled code."""
        shapes = buffer_shapes(communicator_of(self.comm).cfg, self.tokens.shape[0])
        tensors: dict[str, Any] = {name: None if shapes[name] is None else getattr(self, name) for name in BUFFERS}
        return replace(
            library.batch_of(*read_by_combine(self.tokens, self, "exact")), buffers=DispatchBuffers(**tensors)
        )


class PlainBatch:
    """A batch on one node as its communicator has made it, without the tensors and names that ops need: for calls
    without gradients, of adapters whose host knows how many rows have come.

    Attributes:
        tokens, row_weights: the rows that have come, and their weights.
        router_weights: this rank's own; None for sums without weights.
    """

    __slots__ = ("_communicator", "_dispatched", "_received", "_rows", "_unweighted", "_whole", "router_weights")

    def __init__(
        self,
        communicator: EPCommunicator,
        dispatched: Dispatched,
        router_weights: Tensor | None,
        rows: int,
        received: Sequence[Tensor] | None = None,
        *,
        unweighted: bool = False,
    ) -> None:
        """received: `tokens`, and `row_weights` if it has these; None: the first `rows` of the batch's."""
        self._communicator, self._dispatched, self._rows = communicator, dispatched, rows
        self.router_weights, self._unweighted = router_weights, unweighted
        self._whole: Batch | None = None
        names = "tokens", "row_weights"
        self._received = dispatched.buffers.first_of(names, rows) if received is None else received

    @property
    def tokens(self) -> Tensor:
        return self._received[0]

    @property
    def row_weights(self) -> Tensor:
        return self._received[1]

    @property
    def topk_ids(self) -> Tensor:
        """This rank's own."""
        return self._dispatched.topk_ids

    @property
    def row_offsets(self) -> Tensor:
        """As of `DispatchBuffers`."""
        return self._dispatched.row_offsets

    @property
    def row_counts(self) -> Tensor:
        """As of `DispatchBuffers`."""
        return self._dispatched.row_counts

    def sums(self) -> PlainBatch:
        """The batch, without its rows, for sums that are not weighted, in exact and in partial mode."""
        kept = self._dispatched.without_rows(self._communicator.ones)
        return PlainBatch(self._communicator, kept, None, self._rows, (kept.tokens,), unweighted=True)

    def combine(self, rows: Tensor, *, mode: CombineMode, dtype: torch.dtype) -> Tensor:
        """As `cute_ep.ops.combine`, where no op is needed."""
        weights = self._ones() if self._unweighted and mode == "exact" else None
        return self._communicator.combine(rows.contiguous(), self._dispatched, weights, mode=mode, dtype=dtype)

    def whole(self) -> Batch:
        """As ops take it; always the same."""
        if self._whole is None:
            self._whole = self._make_whole()
        return self._whole

    def _make_whole(self) -> Batch:
        comm, own = register(self._communicator), self._dispatched
        registered(comm).slices[own.topk_ids.shape[0]] = own.return_slices_log2
        made = dict.fromkeys(BUFFERS, own.topk_ids.new_empty(0, dtype=torch.bfloat16))  # as ops have them
        made |= {name: getattr(own, name) for name in ("row_offsets", "row_counts", "row_map", "headers", "weights")}
        if self._unweighted:
            return Batch(comm, own.topk_ids, self._ones(), **made)
        made |= {"tokens": self.tokens, "row_weights": self.row_weights}
        return Batch(comm, own.topk_ids, self.router_weights, **made)

    def _ones(self) -> Tensor:
        """[T, top_k]."""
        ids = self._dispatched.topk_ids
        return self._communicator.ones.view(-1, ids.shape[1])[: ids.shape[0]]


def read_by_combine(rows: Tensor, batch: Batch, mode: str) -> tuple[Tensor, tuple[Tensor | None, ...], str]:
    """(rows, KEPT of the batch, its communicator): what a combine reads. EPInputError: it is no `Batch`."""
    if not isinstance(batch, Batch):
        raise EPInputError(f"batch = {type(batch).__name__}: must be what dispatch of cute_ep.ops returned")
    weights = None if mode == "unweighted" else batch.router_weights
    return (
        rows,
        (batch.topk_ids, weights, batch.row_offsets, batch.row_map, batch.headers, batch.weights, batch.frame_ids),
        batch.comm,
    )
