"""Checks of combine's arguments that the communicators and the reference share; `validate` has those of dispatch.

Nothing here reads a tensor's elements, so no check waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_ep.api.buffers import routed_shape
from cute_ep.api.calls import SumOptions
from cute_ep.api.config import EPConfig, is_integer
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPInputError
from cute_ep.api.provenance import Origin
from cute_ep.api.row_tensors import ID_TYPES
from cute_ep.api.tensors import check_apart, check_detached, check_tensor, check_written, overlap
from cute_ep.api.validate import check_router_weights
from cute_ep.layouts.maps.arena import MAX_SLICES, HeaderWord
from cute_ep.layouts.maps.formats import VECTOR_BYTES
from cute_ep.layouts.maps.routing import OutputType
from cute_ep.layouts.maps.variants import COMBINE_MODES, NO_HOOKS, Hooks


def check_mode(cfg: EPConfig, mode: str, dispatched: Dispatched) -> None:
    """EPInputError unless `mode` is one of COMBINE_MODES, and for rank-major rows the partial one, or the batch was
    derived with other ids."""
    if cfg.is_rank_major and mode != "partial" and not dispatched.row_per_entry:
        raise EPInputError(f"mode = {mode!r}: must be 'partial' for rank-major rows, of which a rank has one per token")
    if mode not in COMBINE_MODES:
        modes = [known for known in COMBINE_MODES if known != "unweighted" or not cfg.fused_shared_expert]
        raise EPInputError(f"mode = {mode!r}: must be one of {', '.join(modes)}")


def check_batch(origin: Origin, dispatched: Dispatched) -> None:
    """EPInputError unless `dispatched` is a batch of this communicator, and its buffers still hold it. One of which
    something was replaced is looked at; one that was put together from tensors has no origin."""
    if isinstance(dispatched, Dispatched) and dispatched.is_whole(origin):
        return  # its tensors were checked when it was made
    cfg, rank, device, _ = origin
    if not isinstance(dispatched, Dispatched):
        raise EPInputError(f"dispatched = {type(dispatched).__name__}: must be what dispatch returned")
    stamp = dispatched.stamp
    if stamp is not None:
        if stamp.origin is not origin:
            raise EPInputError(
                f"dispatched = batch of another communicator (its rank {stamp.origin.rank}): must be what a "
                f"dispatch of this communicator, rank {rank}, returned"
            )
        if stamp.number != dispatched.buffers.memory.generation.number:
            raise EPInputError(
                "dispatched: is not the batch that its buffers hold: a later dispatch was given them as `out` (combine "
                "before that, or give each batch in flight buffers of its own), or they are copies"
            )
    if dispatched.rank != rank:
        raise EPInputError(f"dispatched.rank = {dispatched.rank}: must be {rank}, the rank that combines")
    check_tensor("dispatched.tokens", dispatched.tokens, device=device, strict=False)
    if not dispatched.tokens.dim():
        raise EPInputError("dispatched.tokens.shape = (): must have a dimension of rows")
    slices, most = dispatched.return_slices_log2, MAX_SLICES.bit_length() - 1
    if not (is_integer(slices) and 0 <= slices <= most):
        raise EPInputError(f"dispatched.return_slices_log2 = {slices!r}: must be an integer in [0, {most}]")
    offsets = (cfg.groups + 1,)
    check_tensor("dispatched.row_offsets", dispatched.row_offsets, shape=offsets, dtype=torch.int32, device=device)
    if dispatched.num_rows is not None:
        check_tensor("dispatched.num_rows", dispatched.num_rows, shape=(1,), dtype=torch.int32, device=device)
    check_tensor("dispatched.row_map", dispatched.row_map, shape=routed_shape(cfg), dtype=torch.int32, device=device)
    headers = (cfg.peers, len(HeaderWord))
    check_tensor("dispatched.headers", dispatched.headers, shape=headers, dtype=torch.int32, device=device)
    if dispatched.weights is not None:
        check_tensor(
            "dispatched.weights", dispatched.weights, shape=routed_shape(cfg), dtype=torch.float32, device=device
        )
    if cfg.nodes > 1:
        shape = None, cfg.top_k
        check_tensor("dispatched.frame_ids", dispatched.frame_ids, shape=shape, dtype=torch.int32, device=device)
    ids = dispatched.topk_ids
    check_tensor("dispatched.topk_ids", ids, shape=(None, cfg.top_k), dtype=ID_TYPES, device=device)
    if ids.shape[0] > cfg.max_tokens_per_rank:
        raise EPInputError(
            f"dispatched.topk_ids.shape[0] = {ids.shape[0]}: must not exceed max_tokens_per_rank = "
            f"{cfg.max_tokens_per_rank} tokens"
        )
    if cfg.nodes > 1:
        assert dispatched.frame_ids is not None
        frame, rows = cfg.frame_rows(dispatched.frame), dispatched.frame_ids.shape[0]
        most = min(cfg.max_tokens_per_rank, rows // cfg.nodes)
        if not (is_integer(frame) and max(ids.shape[0], 1) <= frame <= most):
            least = f"dispatched.topk_ids.shape[0] = {ids.shape[0]}" if len(ids) else "1"
            raise EPInputError(
                f"dispatched.frame = {frame!r}: must be an integer from {least} to {most}, which the {rows} rows of "
                f"dispatched.frame_ids hold for each of {cfg.nodes} nodes"
            )


def check_sent(origin: Origin, dispatched: Dispatched, mode: str) -> None:
    """EPInputError unless the sending half of a combine can take this batch and mode. Exact mode may be given its
    weights by the receiving half."""
    check_batch(origin, dispatched)
    if mode == "exact":
        check_mode(origin.cfg, mode, dispatched)
    else:
        combine_weights(origin.cfg, mode, None, dispatched)


def check_rows(cfg: EPConfig, rows: torch.Tensor, device: torch.device | str) -> None:
    """EPInputError unless experts' outputs are [N, hidden] bfloat16 on `device`, 16-byte aligned.

    N >= num_rows is the caller's promise: num_rows is on the device.
    """
    check_tensor("rows", rows, shape=(None, cfg.hidden), dtype=torch.bfloat16, device=device, alignment=VECTOR_BYTES)


def combine_weights(
    cfg: EPConfig,
    mode: str,
    router_weights: torch.Tensor | None,
    dispatched: Dispatched,
    hooks: Hooks = NO_HOOKS,
) -> torch.Tensor | None:
    """The [T, top_k] weights that a rank multiplies what comes home by: in exact mode the argument, else what dispatch
    was given. None in the others: in partial mode the expert ranks multiply by what dispatch brought them, or nobody
    does, of rank-major rows. Those that a dispatch has checked are not checked again.

    Raises:
        EPInputError: unknown mode, no weights in exact mode, in partial mode expert-major rows of a dispatch that was
            given none, an argument in another mode than exact, a shared expert in unweighted mode, another mode than
            partial for rank-major rows, or a wrong shape or type.
    """
    check_mode(cfg, mode, dispatched)
    if mode == "unweighted":
        if router_weights is not None:
            raise EPInputError("router_weights = tensor: must be None in unweighted mode")
        if cfg.fused_shared_expert:
            raise EPInputError("mode = 'unweighted': has no sum that a fused shared expert could be added to")
        return None
    if mode == "partial":
        if router_weights is not None:
            rule = "give them to dispatch, or use mode='exact'"
            if cfg.is_rank_major:
                rule = "rank-major rows come home as they are, multiply them before"
            raise EPInputError(f"router_weights = tensor: must be None in partial mode; {rule}")
        if dispatched.weights is None:
            raise EPInputError("dispatched.weights = None: must be what dispatch wrote, partial combine reads it")
        if not (dispatched.weighted or cfg.is_rank_major):
            raise EPInputError(
                "dispatched.weighted = False: must be True in partial mode, which multiplies rows by the router "
                "weights that came with them; give router_weights to dispatch, ones for a plain sum"
            )
        return None
    weights = dispatched.router_weights if router_weights is None else router_weights
    if weights is None:
        raise EPInputError("router_weights = None: exact combine needs them, give them to dispatch or combine")
    stamp = dispatched.stamp
    checked = router_weights is None and stamp is not None and stamp.router_weights is weights
    if not checked:
        check_router_weights(cfg, weights, dispatched.topk_ids.shape[0], dispatched.topk_ids.device, hooks)
    elif weights.requires_grad:
        check_detached("dispatched.router_weights", weights)
    return weights


OUTPUT_TYPES = {torch.bfloat16: OutputType.BF16, torch.float16: OutputType.FP16, torch.float32: OutputType.F32}
"""Element types that combine can return."""


def check_output(
    cfg: EPConfig, mode: str, tokens: int, options: SumOptions, device: torch.device | str
) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, type) of combine's output: [T, hidden], unweighted [T, top_k, hidden]; `dtype`, unless there is an `out`.

    Raises:
        EPInputError: `out` does not have that shape, or the type is not in OUTPUT_TYPES.
    """
    name, out, dtype = "dtype", options.out, options.dtype
    shape = (tokens, cfg.top_k, cfg.hidden) if mode == "unweighted" else (tokens, cfg.hidden)
    if out is not None:
        if type(out) is not Tensor or out.requires_grad or out.is_inference():
            check_written("out", out)
        check_tensor("out", out, shape=shape, device=device, alignment=VECTOR_BYTES)
        name, dtype = "out.dtype", out.dtype
    if not isinstance(dtype, torch.dtype) or dtype not in OUTPUT_TYPES:
        raise EPInputError(f"{name} = {dtype}: must be one of {', '.join(map(str, OUTPUT_TYPES))}")
    return shape, dtype


def check_epilogue_data(
    mode: str, epilogue: str | None, epilogue_data: torch.Tensor | None, device: torch.device | str
) -> None:
    """Check what the `epilogue` hook reads: None, or a 16-byte aligned tensor where a combine in `mode` has one, else
    EPInputError."""
    if epilogue_data is None:
        return
    if epilogue is None or mode == "unweighted":
        raise EPInputError(f"epilogue_data = tensor: must be None, {mode} combine has no epilogue here")
    check_tensor("epilogue_data", epilogue_data, device=device, alignment=VECTOR_BYTES)


def check_sum(
    origin: Origin, rows: torch.Tensor, dispatched: Dispatched, mode: str, options: SumOptions
) -> tuple[torch.Tensor | None, tuple[int, ...], torch.dtype]:
    """(`combine_weights`, shape and type of the output) of a combine of a batch that was checked. EPInputError: an
    option does not fit."""
    cfg, _, device, hooks = origin
    weights = combine_weights(cfg, mode, options.router_weights, dispatched, hooks)
    shape, dtype = check_output(cfg, mode, dispatched.topk_ids.size(0), options, device)
    check_epilogue_data(mode, hooks.epilogue, options.epilogue_data, device)
    out = options.out
    if out is not None and overlap(rows, out):
        check_apart("out", out, rows=rows)
    return weights, shape, dtype
