"""The torch ops: schemas, what they compute, their shapes, and that a compiler keeps all of them in their order.

Order is data. Every op says that it writes `order`, one tensor for all communicators of a device (`registry.order_of`),
which none reads or writes in fact. So each call depends on the one before, in forward and backward passes: no pass of
a compiler can drop, merge or reorder calls, whatever becomes of their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_ep.adjoints import inner_products, weighted
from cute_ep.api.buffers import BUFFERS, DispatchBuffers, buffer_shapes, rows_for, tensors_of
from cute_ep.api.config import EPConfig
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.tensors import takes_strides
from cute_ep.ops.registry import communicator_of, registered

OLDEST_TORCH = "2.10"
NAMESPACE = "cute_ep"
SENT = "Tensor x, Tensor topk_ids, Tensor? router_weights, Tensor? input_scale, str comm"
RECEIVED = ", ".join(["Tensor"] * len(BUFFERS))
WRITTEN = ", ".join(f"Tensor(a{index}!)? {name}" for index, name in enumerate(BUFFERS))
KEPT = (
    "Tensor topk_ids, Tensor? router_weights, Tensor row_offsets, Tensor row_map, Tensor headers, Tensor weights, "
    "Tensor frame_ids"
)
"""What combine reads of a batch."""
ORDER = "Tensor(z!) order"
SCHEMAS = {
    "dispatch": f"({SENT}, SymInt? capacity, bool clear, SymInt? frame, {ORDER}) -> ({RECEIVED})",
    "combine": f"(Tensor rows, {KEPT}, str comm, str combine_mode, ScalarType dtype, {ORDER}) -> Tensor",
    "combine_backward": f"(Tensor grad, Tensor? rows, {KEPT}, str comm, SymInt? capacity, {ORDER}) -> (Tensor, Tensor)",
    "dispatch_out": f"({SENT}, SymInt? frame, {ORDER}, {WRITTEN}) -> ()",
    "combine_out": f"(Tensor rows, {KEPT}, str comm, str combine_mode, {ORDER}, Tensor(a!) out) -> ()",
}
"""By name. torch has an argument `mode` of its own where it makes in-place ops functional, so none is called that."""
FORWARD_OPS = ("dispatch", "combine")
"""Those of a forward pass whose results a backward pass needs."""

if torch.__version__ < OLDEST_TORCH:
    raise ImportError(f"torch = {torch.__version__}: must be {OLDEST_TORCH} or newer for cute_ep.ops")
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


# ---- what they compute


def new_buffers(comm: str, capacity: int | None) -> DispatchBuffers:
    """Buffers for `capacity` rows in which what dispatch leaves alone is defined: rows behind the last one are zeros,
    their `src_info` and the `row_map` of tokens that do not exist -1."""
    communicator = communicator_of(comm)
    buffers = DispatchBuffers.allocate(communicator.cfg, communicator.device, capacity)
    for tensor in (buffers.tokens, buffers.scales, buffers.row_scales, buffers.weights, buffers.row_weights):
        if tensor is not None:
            tensor.zero_()
    buffers.row_map.fill_(-1)
    buffers.src_info.fill_(-1)
    return buffers


def as_sent(x: Tensor, topk_ids: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same with strides that a communicator takes."""
    x = x if takes_strides(x) else x.clone(memory_format=torch.contiguous_format)
    return x, topk_ids.contiguous(), None if weights is None else weights.contiguous()


def dispatch_into(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor | None,
    input_scale: Tensor | float | None,
    comm: str,
    frame: int | None,
    buffers: DispatchBuffers | None,
) -> Dispatched:
    """Dispatch into these buffers, or into new ones for any routing, and remember what combine needs on the host."""
    communicator = communicator_of(comm)
    batch = communicator.dispatch(*as_sent(x, topk_ids, router_weights), input_scale, buffers, frame=frame)
    cfg = communicator.cfg
    sent = topk_ids.shape[0] if cfg.nodes == 1 else cfg.nodes * cfg.frame_rows(frame)
    registered(comm).slices[sent] = batch.return_slices_log2
    return batch


def frame_of(cfg: EPConfig, frame_ids: Tensor) -> int | None:
    """Rows of each node's frame in a batch; None on one node."""
    return None if cfg.nodes == 1 else frame_ids.shape[0] // cfg.nodes


def dispatch(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor | None,
    input_scale: Tensor | float | None,
    comm: str,
    capacity: int | None,
    clear: bool,
    frame: int | None,
    order: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The tensors of `DispatchBuffers`, in their order; those that the configuration has not are empty, and `frame_ids`
    has the rows of its frames only. `clear`: in `new_buffers`; else what dispatch leaves alone holds anything."""
    made = _dispatched(x, topk_ids, router_weights, input_scale, comm, capacity, clear, frame)
    return tuple([x.new_empty(0) if tensor is None else tensor for tensor in made])  # an op returns none twice


def dispatch_directly(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """`dispatch`, as no op: all that is empty is one tensor. arguments: its others."""
    *given, _ = arguments
    nothing = x.new_empty(0)
    return tuple([nothing if tensor is None else tensor for tensor in _dispatched(x, *given)])


def _dispatched(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor | None,
    input_scale: Tensor | float | None,
    comm: str,
    capacity: int | None,
    clear: bool,
    frame: int | None,
) -> list[Tensor | None]:
    """`dispatch`, with None for what the configuration has not."""
    buffers = None
    if clear:
        buffers = new_buffers(comm, capacity)
    elif capacity is not None:
        buffers = communicator_of(comm).allocate(capacity)
    batch = dispatch_into(x, topk_ids, router_weights, input_scale, comm, frame, buffers)
    made = tensors_of(batch.buffers)
    if frame is not None and (frame_ids := made["frame_ids"]) is not None:
        made["frame_ids"] = frame_ids[: communicator_of(comm).cfg.nodes * frame]
    return list(made.values())


def batch_of(rows: Tensor, kept: Sequence[Any], comm: str) -> Dispatched:
    """The batch of which combine returns `rows`; `kept` is KEPT. EPInputError: this process knows no such dispatch."""
    topk_ids, router_weights, row_offsets, row_map, headers, weights, frame_ids = kept
    known, communicator = registered(comm), communicator_of(comm)
    name, given = ("topk_ids", topk_ids) if communicator.cfg.nodes == 1 else ("frame_ids", frame_ids)
    sent = given.shape[0]
    if sent not in known.slices:
        raise EPInputError(
            f"{name}.shape[0] = {sent}: must be that of a dispatch that this process made with cute_ep.ops"
        )
    tensors = {"tokens": rows, "row_offsets": row_offsets, "row_map": row_map, "headers": headers, "weights": weights}
    if communicator.cfg.nodes > 1:
        tensors["frame_ids"] = frame_ids
    return Dispatched.of_tensors(
        tensors,
        rank=communicator.rank,
        topk_ids=topk_ids.contiguous(),
        router_weights=None if router_weights is None else router_weights.contiguous(),
        return_slices_log2=known.slices[sent],
        weighted=router_weights is not None,
        frame=frame_of(communicator.cfg, frame_ids),
    )


def combine(rows: Tensor, *arguments: Any) -> Tensor:
    """As `EPCommunicator.combine`. arguments: KEPT, comm, mode, dtype, order."""
    *kept, comm, mode, dtype, _ = arguments
    rows = rows.contiguous()
    return communicator_of(comm).combine(rows, batch_of(rows, kept, comm), mode=mode, dtype=dtype)


def combine_backward(grad: Tensor, rows: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Gradients of an exact or partial combine: by a dispatch those of the rows, by an unweighted combine those of the
    router weights. One op, so that compiled code gives the same bits.

    Args:
        grad: [T, hidden], of the output.
        rows: [N, hidden], what was combined; None: no gradient of the router weights is wanted.
        arguments: KEPT, comm, N (None: no gradient of the rows is wanted), order.

    Returns:
        grad_rows: [N, hidden] bfloat16, weight * grad of each token's row, of rank-major rows without weight; grad
            travels as bfloat16, the product is rounded once more. Zeros in other rows.
        grad_weights: [T, top_k] float32, the inner product of the token's grad and the row; zeros where masked.
        What is not wanted is empty.
    """
    *kept, comm, capacity, _ = arguments
    communicator, (topk_ids, weights, *_, frame_ids) = communicator_of(comm), kept
    grad_rows, grad_weights = grad.new_empty(0, dtype=torch.bfloat16), grad.new_empty(0, dtype=torch.float32)
    if capacity is not None:
        buffers = communicator.allocate(capacity)
        for tensor in (buffers.tokens, buffers.row_weights):  # dispatch leaves rows behind the last one alone
            tensor.zero_()
        frame = frame_of(communicator.cfg, frame_ids)
        batch = dispatch_into(grad.to(torch.bfloat16), topk_ids, weights, None, comm, frame, buffers)
        grad_rows = batch.tokens[:capacity]
        if not communicator.cfg.is_rank_major:
            grad_rows = weighted(batch.tokens, batch.row_weights)[:capacity]
    if rows is not None:
        rows = rows.contiguous()
        returned = communicator.combine(rows, batch_of(rows, kept, comm), mode="unweighted")
        grad_weights = inner_products(returned, grad)
    return grad_rows, grad_weights


def dispatch_out(
    x: Tensor,
    topk_ids: Tensor,
    router_weights: Tensor | None,
    input_scale: Tensor | None,
    comm: str,
    frame: int | None,
    order: Tensor,
    *buffers: Tensor | None,
) -> None:
    """`dispatch` into given memory: the tensors of `DispatchBuffers`, in their order."""
    tensors: dict[str, Any] = dict(zip(BUFFERS, buffers, strict=True))
    dispatch_into(x, topk_ids, router_weights, input_scale, comm, frame, DispatchBuffers(**tensors))


def combine_out(rows: Tensor, *arguments: Any) -> None:
    """`combine` into given memory. arguments: KEPT, comm, mode, order, out."""
    *kept, comm, mode, _, out = arguments
    rows = rows.contiguous()
    communicator_of(comm).combine(rows, batch_of(rows, kept, comm), mode=mode, out=out)


# ---- their shapes


def shape_dispatch(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Empty tensors as `dispatch` returns; arguments: its others."""
    *_, comm, capacity, _, frame, _ = arguments
    cfg = communicator_of(comm).cfg
    shapes = buffer_shapes(cfg, rows_for(cfg, capacity))
    if cfg.nodes > 1:
        shapes["frame_ids"] = (cfg.nodes * cfg.frame_rows(frame), cfg.top_k), torch.int32
    wanted = (shapes[name] or ((0,), x.dtype) for name in BUFFERS)
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in wanted)


def shape_combine(rows: Tensor, topk_ids: Tensor, *arguments: Any) -> Tensor:
    """An empty tensor as `combine` returns; arguments: its others."""
    *_, comm, mode, dtype, _ = arguments
    leading = topk_ids.shape if mode == "unweighted" else topk_ids.shape[:1]
    return rows.new_empty((*leading, communicator_of(comm).cfg.hidden), dtype=dtype)


def shape_combine_backward(grad: Tensor, rows: Tensor | None, topk_ids: Tensor, *arguments: Any) -> tuple:
    """Empty tensors as `combine_backward` returns; arguments: its others."""
    *_, capacity, _ = arguments
    of_rows = (0,) if capacity is None else (capacity, grad.shape[1])
    of_weights = (0,) if rows is None else topk_ids.shape
    return grad.new_empty(of_rows, dtype=torch.bfloat16), grad.new_empty(of_weights, dtype=torch.float32)


def shape_nothing(*arguments: Any) -> None:
    """In-place ops return nothing."""


# ---- registration


def _register() -> None:
    computed = {
        "dispatch": (dispatch, shape_dispatch),
        "combine": (combine, shape_combine),
        "combine_backward": (combine_backward, shape_combine_backward),
        "dispatch_out": (dispatch_out, shape_nothing),
        "combine_out": (combine_out, shape_nothing),
    }
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        real, fake = computed[name]
        LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


_register()
