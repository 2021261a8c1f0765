"""Gradients of the functional ops: a backward pass makes rounds of its own, which every rank must make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_ep.api.dispatched import BUFFERS
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.layouts.maps.formats import BF16
from cute_ep.layouts.maps.variants import NO_HOOKS
from cute_ep.ops.library import LIBRARY, NAMESPACE
from cute_ep.ops.registry import communicator_of


def check_differentiable(comm: str, mode: str | None = None, *, weights: bool = False) -> None:
    """EPInputError unless there are gradients with this communicator.

    Args:
        mode: of combine; None for dispatch.
        weights: whether the router weights require a gradient.
    """
    communicator = communicator_of(comm)
    cfg, name = communicator.cfg, "x" if mode is None else "rows or router_weights"
    if cfg.dispatch_format != BF16.name:
        raise EPInputError(
            f"{name}.requires_grad = True: must be False with dispatch_format {cfg.dispatch_format}, gradients travel "
            f"as {BF16.name} rows; use a communicator in {BF16.name} and quantise what dispatch returns, or no_grad()"
        )
    if communicator.hooks != NO_HOOKS:
        raise EPInputError(
            f"{name}.requires_grad = True: must be False with hooks, whose gradient is unknown; apply the functions "
            "outside of the kernels, or use no_grad()"
        )
    if mode == "unweighted":
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


def dispatch_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, topk_ids, _, _, comm, _, _ = inputs
    check_differentiable(comm)
    ctx.comm = comm
    batch = dict(zip(BUFFERS, output, strict=True))
    ctx.save_for_backward(topk_ids, *(batch[name] for name in ("row_offsets", "row_map", "headers", "weights")))
    ctx.mark_non_differentiable(*(one for name, one in batch.items() if name != "tokens"))


def dispatch_backward(ctx: Any, grad_tokens: Tensor, *others: Any) -> tuple:
    """Each token gets the sum of its rows' gradients: one exact combine with weights of 1, of rank-major rows a partial
    one."""
    topk_ids, *batch = ctx.saved_tensors
    ones = torch.ones(topk_ids.shape, dtype=torch.float32, device=topk_ids.device)
    mode = "partial" if communicator_of(ctx.comm).cfg.is_rank_major else "exact"
    grad_x = torch.ops.cute_ep.combine(grad_tokens, topk_ids, ones, *batch, ctx.comm, mode, torch.bfloat16)
    return grad_x, *[None] * 6


def combine_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, topk_ids, router_weights, row_offsets, row_map, headers, weights, comm, mode, _ = inputs
    ctx.for_rows, ctx.for_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    check_differentiable(comm, mode, weights=ctx.for_weights)
    ctx.comm, ctx.capacity = comm, rows.shape[0]
    kept = rows if ctx.for_weights else None
    ctx.save_for_backward(kept, topk_ids, router_weights, row_offsets, row_map, headers, weights)


def combine_backward(ctx: Any, grad: Tensor) -> tuple:
    capacity = ctx.capacity if ctx.for_rows else None
    grad_rows, grad_weights = torch.ops.cute_ep.combine_backward(grad, *ctx.saved_tensors, ctx.comm, capacity)
    return (
        grad_rows if ctx.for_rows else None,
        None,
        grad_weights if ctx.for_weights else None,
        *[None] * 7,
    )


def no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise EPError("combine has no second derivative: call backward without create_graph")


torch.library.register_autograd(
    f"{NAMESPACE}::dispatch", dispatch_backward, setup_context=dispatch_context, lib=LIBRARY
)
torch.library.register_autograd(f"{NAMESPACE}::combine", combine_backward, setup_context=combine_context, lib=LIBRARY)
torch.library.register_autograd(f"{NAMESPACE}::combine_backward", no_second_derivative, lib=LIBRARY)
