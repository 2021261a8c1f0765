"""A dispatch that brings each row's router weight along, with gradients of tokens and weights.

It is for experts that multiply by the weights themselves: `cute_ep.ops.combine` has gradients of weights that it
applies, but for these it needs the experts' outputs again. Here a gradient of 4 bytes a row goes home, as a row of its
own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_ep.adjoints import ones_for
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.ops.batches import Batch, PlainBatch
from cute_ep.ops.calls import combine, dispatch, dispatch_rows
from cute_ep.ops.registry import communicator_of

SCALAR_HIDDEN = VECTOR_BYTES // 2
"""`EPConfig.hidden` of the communicator on which gradients of weights go home: the least, one vector of bfloat16."""


class WeightedRows(NamedTuple):
    """Rows of a batch and their weights.

    Attributes:
        tokens: [capacity, hidden] bfloat16 by expert, zeros in padding if `zero_padding`; behind the last row
            anything.
        weights: [capacity] float32, 0 for padding; behind the last row anything.
        batch: for `cute_ep.ops.combine`, without rows; combine adds a token's rows up unweighted in both modes.
    """

    tokens: Tensor
    weights: Tensor
    batch: Batch | PlainBatch


def dispatch_weighted(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor,
    comm: str,
    scalars: str,
    capacity: int,
    frame: int | None = None,
    rows: int | None = None,
) -> WeightedRows:
    """As `cute_ep.ops.dispatch`, differentiable in tokens and router weights.

    The backward pass makes a combine for tokens that require a gradient; then, for weights that do, a dispatch and a
    combine on `scalars`. It makes them for all outputs, also those that nothing has used, so all ranks do the same.

    Args:
        x: [T, hidden] bfloat16.
        topk_ids: [T, K] int32 or int64, -1 masks an entry.
        router_weights: [T, K] float32.
        comm: name of the communicator of the tokens, in bfloat16.
        scalars: name of one that differs from it by its `hidden`, SCALAR_HIDDEN.
        capacity: rows to make room for; as many as come, or experts must leave those behind the last one alone.
        frame: as of `cute_ep.ops.dispatch`.
        rows: on one node, how many come, and are returned of those that there is room for; None: all are returned.

    Raises:
        EPInputError, EPTimeout: as `EPCommunicator.dispatch`.
    """
    return WeightedRows(*_Dispatch.apply(x, topk_ids, router_weights, _Way(comm, scalars, capacity, frame, rows)))


def weighted_rows(batch: Batch | PlainBatch) -> WeightedRows:
    """A batch with the weights of its rows, which experts will apply. Has no gradients."""
    return WeightedRows(batch.tokens, batch.row_weights, sums_of(batch))


def sums_of(batch: Batch | PlainBatch) -> Batch | PlainBatch:
    """The batch for sums that are not weighted, in exact and in partial mode."""
    if isinstance(batch, PlainBatch):
        return batch.sums()
    ones, travelled = ones_for(batch.topk_ids, batch.weights)
    nothing = ones.new_empty(0)
    return batch._replace(
        router_weights=ones,
        weights=travelled,
        tokens=nothing,
        src_info=nothing,
        row_weights=nothing,
    )


class _Way(NamedTuple):
    """Which way rows go and come home: the communicators of tokens and of scalars, room for how many rows, frames, how
    many rows come if that is known."""

    comm: str
    scalars: str
    capacity: int
    frame: int | None
    rows: int | None

    def dispatch(self, comm: str, x: Tensor, ids: Tensor, weights: Tensor | None) -> Batch | PlainBatch:
        """On one of the communicators."""
        come = self.rows
        if come is None:
            return dispatch(x, ids, weights, comm, capacity=self.capacity, frame=self.frame)
        return dispatch_rows(x, ids, weights, communicator_of(comm), self.capacity, lambda: come)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, way: _Way
    ) -> tuple[Tensor, Tensor, Batch | PlainBatch]:
        batch = way.dispatch(way.comm, x, ids, weights)
        sums = sums_of(batch)
        ctx.way = way
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            whole = sums.whole() if isinstance(sums, PlainBatch) else sums
            ctx.save_for_backward(*whole[1:])
        return batch.tokens, batch.row_weights, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: Tensor, grad_weights: Tensor, _: None) -> tuple[Tensor | None, ...]:
        sums = Batch(ctx.way.comm, *ctx.saved_tensors)
        of_tokens = None
        if ctx.needs_input_grad[0]:
            of_tokens = combine(grad_tokens.contiguous(), sums, mode="partial")
        of_weights = _send_home(grad_weights, sums.topk_ids, ctx.way) if ctx.needs_input_grad[2] else None
        return of_tokens, None, of_weights, None


def _send_home(values: Tensor, ids: Tensor, way: _Way) -> Tensor:
    """[T, K] float32 of [capacity] float32 values of rows, bit for bit; 0 where masked."""
    nothing = torch.zeros(len(ids), SCALAR_HIDDEN, dtype=torch.bfloat16, device=ids.device)
    batch = way.dispatch(way.scalars, nothing, ids, None)
    rows = torch.zeros(len(values), VECTOR_BYTES // 4, dtype=torch.float32, device=ids.device)
    rows[:, 0] = values
    home = combine(rows.view(torch.bfloat16), batch, mode="unweighted")
    return home.view(torch.float32)[:, :, 0]
