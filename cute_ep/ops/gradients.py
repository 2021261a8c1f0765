"""Gradients of the functional ops: a backward pass makes rounds of its own, which every rank must make."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from cute_ep.adjoints import ones_for
from cute_ep.api.buffers import BUFFERS
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.layouts.maps.formats import BF16
from cute_ep.layouts.maps.variants import NO_HOOKS
from cute_ep.ops.batches import Batch, PlainBatch
from cute_ep.ops.library import LIBRARY
from cute_ep.ops.registry import communicator_of, registered
from cute_ep.torch_internals import BELOW_AUTOGRAD, BelowAutograd, activation_memory_budget, get_proxy_mode

KEPT = ("row_offsets", "row_map", "headers", "weights", "frame_ids")
"""Tensors of a batch that backward passes read."""


def check_differentiable(comm: str, combine_mode: str | None = None, *, weights: bool = False) -> None:
    """EPInputError unless there are gradients with this communicator.

    Args:
        combine_mode: of combine; None for dispatch.
        weights: whether the router weights require a gradient.
    """
    communicator = communicator_of(comm)
    cfg, name = communicator.cfg, "x" if combine_mode is None else "rows or router_weights"
    if cfg.dispatch_format != BF16.name:
        raise EPInputError(
            f"{name}.requires_grad = True: must be False with dispatch_format {cfg.dispatch_format}, gradients travel "
            f"as {BF16.name} rows; use a communicator in {BF16.name} and quantise what dispatch returns, or no_grad()"
        )
    if not cfg.zero_padding and cfg.alignment > 1 and cfg.block_rows is None:
        raise EPInputError(
            f"{name}.requires_grad = True: must be False without zero_padding where row_alignment = {cfg.alignment}, "
            "gradients of experts' weights are sums over padding; configure zero_padding=True, or use no_grad()"
        )
    if communicator.hooks != NO_HOOKS:
        raise EPInputError(
            f"{name}.requires_grad = True: must be False with hooks, whose gradient is unknown; apply the functions "
            "outside of the kernels, or use no_grad()"
        )
    if combine_mode == "unweighted":
        raise EPInputError(
            "rows.requires_grad = True: must be False in unweighted mode, which has no gradient; use exact or partial "
            "mode, or no_grad()"
        )
    if weights and cfg.is_rank_major:
        raise EPInputError(
            "router_weights.requires_grad = True: must be False with rank-major rows, which combine does not multiply; "
            "give router_weights.detach()"
        )
    if weights and cfg.fused_shared_expert:
        raise EPInputError(
            "router_weights.requires_grad = True: must be False with fused_shared_expert, which has no gradient of "
            "them; compute the shared expert beside the layer, or give router_weights.detach()"
        )


class Dispatch(torch.autograd.Function):
    """Each token's gradient is the sum of its rows' gradients: one partial combine with weights of 1."""

    @staticmethod
    def forward(ctx: Any, call: Callable, *inputs: Any) -> tuple[Tensor, ...]:
        _, topk_ids, _, _, comm, *_, order = inputs
        check_differentiable(comm)
        output = call(*inputs)
        ctx.comm, ctx.order = comm, order
        batch = dict(zip(BUFFERS, output, strict=True))
        ctx.save_for_backward(topk_ids, *(batch[name] for name in KEPT))
        ctx.mark_non_differentiable(*(one for name, one in batch.items() if name != "tokens"))
        return output

    @staticmethod
    def backward(ctx: Any, grad_tokens: Tensor, *others: Any) -> tuple:
        return None, _home(ctx, grad_tokens), *[None] * 8


class DispatchRows(torch.autograd.Function):
    """`Dispatch` where `send` makes a `PlainBatch` of tokens: its rows, and the batch. It saves what `Dispatch` saves,
    since a recomputation may be seen by a mode where the first pass was not."""

    @staticmethod
    def forward(ctx: Any, comm: str, send: Callable[[Tensor], PlainBatch], x: Tensor) -> tuple[Tensor, Batch]:
        check_differentiable(comm)
        batch = send(x).whole()
        ctx.comm, ctx.order = comm, registered(comm).order
        ctx.save_for_backward(batch.topk_ids, *(getattr(batch, name) for name in KEPT))
        return batch.tokens, batch

    @staticmethod
    def backward(ctx: Any, grad_tokens: Tensor, _: None) -> tuple[None, None, Tensor]:
        return None, None, _home(ctx, grad_tokens)


def _home(ctx: Any, grad_tokens: Tensor) -> Tensor:
    """Gradients of tokens, of those of their rows and what a dispatch has saved."""
    topk_ids, *batch, weights, frame_ids = ctx.saved_tensors
    ones, travelled = ones_for(topk_ids, weights)
    read = grad_tokens, topk_ids, ones, *batch, travelled, frame_ids
    gradient: Tensor = torch.ops.cute_ep.combine(*read, ctx.comm, "partial", torch.bfloat16, ctx.order)
    return gradient


class Combine(torch.autograd.Function):
    """Gradients of the rows and of the router weights, by rounds of `combine_backward`."""

    @staticmethod
    def forward(ctx: Any, call: Callable, *inputs: Any) -> Tensor:
        rows, *kept, comm, mode, _, order = inputs
        ctx.for_rows, ctx.for_weights = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        check_differentiable(comm, mode, weights=ctx.for_weights)
        ctx.comm, ctx.capacity, ctx.order = comm, rows.shape[0], order
        ctx.save_for_backward(rows if ctx.for_weights else None, *kept)
        return call(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        capacity = ctx.capacity if ctx.for_rows else None
        of_rows, of_weights = torch.ops.cute_ep.combine_backward(
            grad, *ctx.saved_tensors, ctx.comm, capacity, ctx.order
        )
        return (
            None,
            of_rows if ctx.for_rows else None,
            None,
            of_weights if ctx.for_weights else None,
            *[None] * 9,
        )


class CombineBackward(torch.autograd.Function):
    """There are no second derivatives."""

    @staticmethod
    def forward(ctx: Any, call: Callable, *inputs: Any) -> tuple[Tensor, Tensor]:
        return call(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise EPError("combine has no second derivative: call backward without create_graph")


def made_once(call: Callable[[], Any]) -> Any:
    """call(), which a compiler's backward pass does not make again, whatever a checkpoint or its policy says. A round
    made again would begin from the `order` of the forward pass: nothing would order it behind those rounds of the
    backward pass that come before it in eager code."""
    tracing = get_proxy_mode()
    if tracing is None:
        return call()
    nodes = tracing.tracer.graph.nodes
    before = len(nodes)
    made = call()
    for node in islice(reversed(nodes), len(nodes) - before):
        if node.meta.get("partitioner_tag") != "is_backward":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return made


def check_compiler() -> None:
    """EPInputError where a compiler has a budget of memory: for that it makes calls again or not by their sizes."""
    if get_proxy_mode() is not None and (budget := activation_memory_budget()) != 1:
        raise EPInputError(
            f"torch._functorch.config.activation_memory_budget = {budget}: must be 1 where dispatch and combine are "
            "compiled with gradients, else ranks would make other rounds again; use torch.utils.checkpoint"
        )


def _register(name: str, function: type[torch.autograd.Function]) -> None:
    """torch's own `register_autograd` takes no op that writes an argument, as all of these say of `order`."""
    op = getattr(torch.ops.cute_ep, name).default

    def differentiable(keyset: Any, *inputs: Any) -> Any:
        below = keyset & BELOW_AUTOGRAD

        def call(*inputs: Any) -> Any:
            with BelowAutograd():
                return made_once(lambda: op.redispatch(below, *inputs))

        if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
            check_compiler()
            return function.apply(call, *inputs)
        return call(*inputs)

    LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)


_register("dispatch", Dispatch)
_register("combine", Combine)
_register("combine_backward", CombineBackward)
