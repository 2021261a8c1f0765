"""Functions over the ops: they take and return batches, and call the library directly where no op is needed.

A call goes through torch's dispatcher only where something there looks at it: a compiler, a mode. Otherwise it saves
that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_ep.api.buffers import BUFFERS, DispatchBuffers, buffer_shapes
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.types import CombineMode
from cute_ep.ops import gradients, library
from cute_ep.ops.bypass import PLAIN, needs_op
from cute_ep.ops.registry import communicator_of, registered


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
        return replace(library.batch_of(*_read(self.tokens, self, "exact")), buffers=DispatchBuffers(**tensors))


def _read(rows: Tensor, batch: Batch, mode: str) -> tuple[Tensor, tuple[Tensor | None, ...], str]:
    """(rows, KEPT of the batch, its communicator): what a combine reads. EPInputError: it is no `Batch`."""
    if not isinstance(batch, Batch):
        raise EPInputError(f"batch = {type(batch).__name__}: must be what dispatch of cute_ep.ops returned")
    weights = None if mode == "unweighted" else batch.router_weights
    return (
        rows,
        (batch.topk_ids, weights, batch.row_offsets, batch.row_map, batch.headers, batch.weights, batch.frame_ids),
        batch.comm,
    )


def _order(comm: str, sent: Tensor) -> Tensor:
    """What orders a call (`registry.order_of`); among fake tensors, which send nothing, one of their kind."""
    if torch.compiler.is_compiling() or type(sent) in PLAIN:
        return registered(comm).order
    return sent.new_zeros(1, dtype=torch.int32)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse_gradient(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items() if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            raise EPInputError(
                f"{name}.requires_grad = True: must be False, calls into given memory compute no gradient; call under "
                "torch.no_grad(), or use dispatch and combine"
            )


def dispatch(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor | None,
    comm: str,
    *,
    input_scale: Tensor | None = None,
    capacity: int | None = None,
    clear: bool = False,
    frame: int | None = None,
) -> Batch:
    """As `EPCommunicator.dispatch`, differentiable in `x`. The backward pass makes a combine in partial mode.

    Args:
        x, topk_ids, router_weights: as there; those with strides that it does not take are copied. Router weights get
            their gradient from `combine`.
        comm: what `register` returned.
        input_scale: as there, but a tensor, no number.
        capacity: rows of the batch; None: as many as any routing can bring, `cfg.max_rows`. If more come, all rows of
            this rank are lost.
        frame: as there; the backward passes of this call and of combine send frames of as many rows.
        clear: write zeros to all rows first, which takes time. False is for what reads only rows within `row_offsets`,
            as grouped matmuls and their gradients do.

    Raises:
        EPInputError: as there; or `x` requires a gradient, and the communicator has a format with scale factors or
            hooks; or the call is in a transform of torch.func, or a tensor has a tangent (forward mode).
        EPTimeout: as there.
    """
    sent = None if router_weights is None else router_weights.detach()
    if needs_op(x=x, topk_ids=topk_ids, router_weights=router_weights):
        call = torch.ops.cute_ep.dispatch
    elif _needs_gradient(x):
        call = partial(gradients.Dispatch.apply, library.dispatch)
    else:
        call = library.dispatch_directly
    made = call(x, topk_ids, sent, input_scale, comm, capacity, clear, frame, _order(comm, x))
    return Batch(comm, topk_ids, router_weights, *made)


def dispatch_rows(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor | None,
    comm: str,
    capacity: int,
    rows: Callable[[], int],
) -> Batch:
    """`dispatch` on one node for adapters whose host waits for the number of rows: without gradients, and with those
    tensors of the batch that experts and combine read, of which those of rows have as many as come. All others are
    empty, so `Batch.dispatched` is of no use. They share memory that has room for `capacity` rows.

    Args:
        rows: how many rows come. It is asked when the dispatch was sent; before where something else sees the call.

    Raises:
        EPInputError, EPTimeout: as `dispatch`.
    """
    if needs_op(x=x, topk_ids=topk_ids, router_weights=router_weights):
        return dispatch(x, topk_ids, router_weights, comm, capacity=rows())
    communicator = communicator_of(comm)
    buffers = DispatchBuffers.carve(communicator.cfg, communicator.device, capacity)
    library.dispatch_into(x, topk_ids, router_weights, None, comm, None, buffers)
    count = rows()
    made = dict.fromkeys(BUFFERS, x.new_empty(0))
    made |= {name: buffers.first(name, count) for name in ("tokens", "row_weights")}
    made |= {name: getattr(buffers, name) for name in ("row_offsets", "row_map", "headers", "weights")}
    return Batch(comm, topk_ids, router_weights, **made)


def combine(
    rows: Tensor, batch: Batch, mode: CombineMode = "partial", *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """As `EPCommunicator.combine`, differentiable in `rows` and in the batch's `router_weights`.

    The backward pass makes a dispatch if rows require a gradient, then a combine in unweighted mode if router weights
    do. Gradients of rows are bfloat16, zeros in rows of no token.

    Args:
        rows: [N >= num_rows, hidden] bfloat16; a strided tensor is copied.
        batch: what `dispatch` or `dispatch_into` returned.
        mode, dtype: as there.

    Raises:
        EPInputError: as there; or a gradient is required in unweighted mode, of router weights with rank-major rows or
            a fused shared expert, or where dispatch has none.
        EPTimeout: as there.
    """
    rows, kept, comm = _read(rows, batch, mode)
    if needs_op(rows=rows, router_weights=kept[1], row_map=batch.row_map):
        call = torch.ops.cute_ep.combine
    elif _needs_gradient(rows, kept[1]):
        call = partial(gradients.Combine.apply, library.combine)
    else:
        call = library.combine
    return call(rows, *kept, comm, mode, dtype, _order(comm, rows))


def dispatch_into(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor | None,
    comm: str,
    buffers: DispatchBuffers,
    *,
    input_scale: Tensor | None = None,
    frame: int | None = None,
) -> Batch:
    """`dispatch` into memory of the caller, which it overwrites. Computes no gradient.

    Args:
        buffers: what `EPCommunicator.allocate` returned. Rows behind the last one keep what they held.
        frame: as of `dispatch`.

    Returns:
        The batch in these buffers, until another call is given them.

    Raises:
        EPInputError, EPTimeout: as `EPCommunicator.dispatch`; `x` or `router_weights` requires a gradient.
    """
    _refuse_gradient(x=x, router_weights=router_weights)
    tensors = [getattr(buffers, name) for name in BUFFERS]
    if needs_op(x=x, topk_ids=topk_ids, router_weights=router_weights):
        order = _order(comm, x)
        torch.ops.cute_ep.dispatch_out(x, topk_ids, router_weights, input_scale, comm, frame, order, *tensors)
    else:
        library.dispatch_into(x, topk_ids, router_weights, input_scale, comm, frame, buffers)
    nothing = x.new_empty(0)
    tensors = [nothing if tensor is None else tensor for tensor in tensors]
    batch = Batch(comm, topk_ids, router_weights, *tensors)
    return batch if frame is None else batch._replace(frame_ids=batch.frame_ids[: registered(comm).nodes * frame])


def combine_into(rows: Tensor, batch: Batch, out: Tensor, mode: CombineMode = "partial") -> Tensor:
    """`combine` into memory of the caller. Computes no gradient.

    Args:
        out: [T, hidden], unweighted [T, top_k, hidden], of a type that `combine` returns; overwritten, and returned.

    Raises:
        EPInputError, EPTimeout: as `EPCommunicator.combine`; `rows` or router weights require a gradient.
    """
    rows, kept, comm = _read(rows, batch, mode)
    _refuse_gradient(rows=rows, router_weights=kept[1])
    if needs_op(rows=rows, router_weights=kept[1], out=out):
        torch.ops.cute_ep.combine_out(rows, *kept, comm, mode, _order(comm, rows), out)
    else:
        library.combine_out(rows, *kept, comm, mode, None, out)
    return out
