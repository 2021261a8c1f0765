"""Functions over the ops: they take and return batches, and call the library directly where no op is needed.

A call goes through torch's dispatcher only where something there looks at it: a compiler, a mode. Otherwise it saves
that time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cute_ep.api.buffers import BUFFERS, DispatchBuffers
from cute_ep.api.errors import EPInputError
from cute_ep.api.interface import EPCommunicator
from cute_ep.api.types import CombineMode
from cute_ep.ops import gradients, library
from cute_ep.ops.batches import Batch, PlainBatch, read_by_combine
from cute_ep.ops.bypass import PLAIN, needs_op
from cute_ep.ops.registry import register, registered


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
    communicator: EPCommunicator,
    capacity: int,
    rows: Callable[[], int],
) -> Batch | PlainBatch:
    """`dispatch` on one node for adapters whose host waits for the number of rows. These share memory that has room for
    `capacity` of them.

    Args:
        communicator: one that `register` takes.
        rows: how many rows come. It is asked when the dispatch was sent; before where something else sees the call.

    Raises:
        EPInputError, EPTimeout: as `dispatch`, `register`.
    """
    if communicator.shares_device:
        register(communicator)  # which says why not
    if needs_op(x=x, topk_ids=topk_ids, router_weights=router_weights):
        return dispatch(x, topk_ids, router_weights, register(communicator), capacity=rows())
    travelling = router_weights
    if travelling is not None and travelling.requires_grad:
        travelling = travelling.detach()

    def send(x: Tensor) -> PlainBatch:
        buffers = DispatchBuffers.carve(communicator.cfg, communicator.device, capacity)
        batch = communicator.dispatch(*library.as_sent(x, topk_ids, travelling), out=buffers)
        return PlainBatch(communicator, batch, router_weights, rows())

    if not _needs_gradient(x):
        return send(x)
    tokens, batch = gradients.DispatchRows.apply(register(communicator), send, x)
    whole: Batch = batch._replace(tokens=tokens)
    return whole


def combine(
    rows: Tensor, batch: Batch | PlainBatch, mode: CombineMode = "partial", *, dtype: torch.dtype = torch.bfloat16
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
    if isinstance(batch, PlainBatch):
        weights = batch.router_weights
        if not (needs_op(rows=rows, router_weights=weights) or _needs_gradient(rows, weights)):
            return batch.combine(rows, mode=mode, dtype=dtype)
    given = batch.whole() if isinstance(batch, PlainBatch) else batch
    rows, kept, comm = read_by_combine(rows, given, mode)
    if needs_op(rows=rows, router_weights=kept[1], row_map=given.row_map):
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
    rows, kept, comm = read_by_combine(rows, batch, mode)
    _refuse_gradient(rows=rows, router_weights=kept[1])
    if needs_op(rows=rows, router_weights=kept[1], out=out):
        torch.ops.cute_ep.combine_out(rows, *kept, comm, mode, _order(comm, rows), out)
    else:
        library.combine_out(rows, *kept, comm, mode, None, out)
    return out
