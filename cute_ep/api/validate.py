"""Checks of call arguments that the communicators and the reference share; `tensors` has the rules for one tensor.

Nothing here reads a tensor's elements, so no check waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_ep.api.calls import DispatchInput
from cute_ep.api.config import EPConfig, is_integer, is_number
from cute_ep.api.dispatched import DispatchBuffers, Dispatched, buffer_shapes, check_blocks, routed_shape
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.row_tensors import ID_TYPES, payload_columns, payload_types, scale_types
from cute_ep.api.tensors import check_detached, check_tensor, check_written
from cute_ep.api.use import Origin
from cute_ep.layouts.maps.arena import MAX_SLICES, HeaderWord
from cute_ep.layouts.maps.formats import VECTOR_BYTES, Format
from cute_ep.layouts.maps.routing import OutputType
from cute_ep.layouts.maps.variants import COMBINE_MODES

GLOBAL_SCALE_LIMIT = 2.0**100
"""A global scale lies in [1 / limit, limit]: no intermediate of the quantisation then leaves float32's normal
range unless its result saturates or rounds to zero anyway."""


def check_devices(devices: Sequence[str | torch.device], ranks: int | None = None) -> list[torch.device]:
    """The devices of all ranks, one each; EPConfigError unless they are named as such, or for GPUs where torch finds
    none. ranks: how many there must be; None: any number."""
    if isinstance(devices, str | torch.device):
        raise EPConfigError(
            f'devices = {str(devices)!r}: must be a list, one per rank, such as ["{devices}"] * {ranks or 2}'
        )
    rule = 'must be a list of names, one device per rank, such as ["cuda:0", "cuda:1"] or ["cpu"] * 2'
    if not isinstance(devices, Sequence):
        raise EPConfigError(f"devices = {type(devices).__name__}: {rule}")
    chosen = []
    for device in devices:
        try:
            chosen.append(torch.device(device if isinstance(device, torch.device) else str(device)))
        except RuntimeError:
            raise EPConfigError(f"devices = {devices!r}: {rule}") from None
    if ranks is not None and len(chosen) != ranks:
        raise EPConfigError(f"devices = {len(chosen)} entries: must be world_size = {ranks}")
    if chosen and all(device.type == "cuda" for device in chosen) and not torch.cuda.device_count():
        raise EPConfigError(
            f"devices = {[str(device) for device in chosen]}: torch finds no CUDA GPU here; for the reference backend "
            f'give ["cpu"] * {len(chosen)}'
        )
    return chosen


def check_tokens(
    cfg: EPConfig,
    given: DispatchInput,
    device: torch.device | str | None = None,
    weights_dtype: torch.dtype | None = torch.float32,
) -> None:
    """Check one rank's dispatch arguments, but for `input_scale`, against `cfg`; expert ids are not read.

    Args:
        given: x 16-byte aligned, contiguous or with even rows (`has_even_rows`); scales and row_scales of quantised
            rows in torch's own types, too.
        device: where all of them must be; None: where `x` is.
        weights_dtype: type of `router_weights`; None: any (a hook reads them).

    Raises:
        EPInputError: a tensor breaks its rule.
    """
    x, topk_ids, router_weights, _, scales, row_scales = given
    fmt, columns = cfg.format, cfg.hidden
    dtype: torch.dtype | tuple[torch.dtype, ...] = torch.bfloat16
    if scales is not None:
        if not fmt.scale:
            raise EPInputError(f"scales = {type(scales).__name__}: must be None, {fmt.name} has no scale factors")
        columns, dtype = payload_columns(fmt, cfg.hidden), payload_types(fmt)
    check_tensor("x", x, shape=(None, columns), dtype=dtype, device=device, alignment=VECTOR_BYTES, strided=True)
    tokens, place = x.shape[0], x.device
    if scales is not None:
        shape = (tokens, cfg.hidden // fmt.block)
        check_tensor("scales", scales, shape=shape, dtype=scale_types(fmt), device=place)
    if (row_scales is not None) != (scales is not None and fmt.row_scale):
        told = "None" if row_scales is None else "tensor"
        raise EPInputError(f"row_scales = {told}: must be given with quantised rows of formats that have them")
    if row_scales is not None:
        check_tensor("row_scales", row_scales, shape=(tokens,), dtype=torch.bfloat16, device=place)
    if tokens > cfg.max_tokens_per_rank:
        raise EPInputError(
            f"x.shape[0] = {tokens}: must not exceed max_tokens_per_rank = {cfg.max_tokens_per_rank} tokens"
        )
    check_tensor("topk_ids", topk_ids, shape=(tokens, cfg.top_k), dtype=ID_TYPES, device=place)
    if router_weights is not None:
        check_router_weights(cfg, router_weights, tokens, place, weights_dtype)


def check_router_weights(
    cfg: EPConfig,
    router_weights: torch.Tensor,
    tokens: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> None:
    """Check `router_weights`: [tokens, top_k] of a type (None: of any), else EPInputError."""
    check_tensor("router_weights", router_weights, shape=(tokens, cfg.top_k), dtype=dtype, device=device)


def check_input_scale(fmt: Format, input_scale: float | torch.Tensor | None, name: str = "input_scale") -> None:
    """Check a global scale argument: None, a number in [2**-100, 2**100], or a float32 tensor of one element.

    The value of a tensor is not read (`reference.quantize` does read it).

    Raises:
        EPInputError: `fmt` has no global scale but one was given, or the argument breaks the rule above.
    """
    if input_scale is None:
        return
    if not fmt.global_scale:
        given = "tensor" if isinstance(input_scale, torch.Tensor) else repr(input_scale)
        raise EPInputError(f"{name} = {given}: must be None, format {fmt.name} has no global scale")
    if isinstance(input_scale, torch.Tensor):
        if input_scale.numel() != 1 or input_scale.dtype != torch.float32:
            raise EPInputError(
                f"{name} = {input_scale.dtype} tensor of shape {tuple(input_scale.shape)}: "
                "must have one float32 element"
            )
        check_detached(name, input_scale)
        return
    check_global_scale(input_scale, name)


def check_global_scale(value: float, name: str = "global_scale") -> None:
    """EPInputError unless `value` is a number in [2**-100, 2**100] (so positive and finite)."""
    if not (is_number(value) and 1 / GLOBAL_SCALE_LIMIT <= value <= GLOBAL_SCALE_LIMIT):
        raise EPInputError(f"{name} = {value!r}: must be a number in [2**-100, 2**100]")


def check_row_offsets(row_offsets: torch.Tensor, device: torch.device | str) -> int:
    """How many groups of rows they are of; EPInputError unless they are [G + 1] int32, of at least one group."""
    if isinstance(row_offsets, Tensor) and (row_offsets.dim() != 1 or row_offsets.shape[0] < 2):
        raise EPInputError(f"row_offsets.shape = {tuple(row_offsets.shape)}: must be (G + 1,), of at least 2 elements")
    check_tensor("row_offsets", row_offsets, dtype=torch.int32, device=device)
    return row_offsets.shape[0] - 1


def check_unscaled(input_scale: float | torch.Tensor | None) -> None:
    """EPInputError when rows that are quantised already come with an input scale."""
    if input_scale is not None:
        given = "tensor" if isinstance(input_scale, torch.Tensor) else repr(input_scale)
        raise EPInputError(f"input_scale = {given}: must be None, the rows are quantised already")


def check_mode(cfg: EPConfig, mode: str, dispatched: Dispatched) -> None:
    """EPInputError unless `mode` is one of COMBINE_MODES, and for rank-major rows the partial one, or the batch was
    derived with other ids."""
    if cfg.is_rank_major and mode != "partial" and not dispatched.derived_ids:
        raise EPInputError(f"mode = {mode!r}: must be 'partial' for rank-major rows, of which a rank has one per token")
    if mode not in COMBINE_MODES:
        modes = [known for known in COMBINE_MODES if known != "unweighted" or not cfg.fused_shared_expert]
        raise EPInputError(f"mode = {mode!r}: must be one of {', '.join(modes)}")


def check_batch(
    cfg: EPConfig, rank: int, dispatched: Dispatched, device: torch.device | str, origin: Origin | None = None
) -> None:
    """EPInputError unless `dispatched` is a batch of the communicator with this origin, and its buffers still hold it.
    Of a batch that was put together from tensors the shapes are compared: its origin is None."""
    if not isinstance(dispatched, Dispatched):
        raise EPInputError(f"dispatched = {type(dispatched).__name__}: must be what dispatch returned")
    if dispatched.origin is not None:
        if dispatched.origin is not origin:
            raise EPInputError(
                f"dispatched = batch of another communicator (its rank {dispatched.origin.rank}): must be what a "
                f"dispatch of this communicator, rank {rank}, returned"
            )
        if dispatched.turn != dispatched.use.turn:
            raise EPInputError(
                "dispatched: is not the batch that its buffers hold: a later dispatch was given them as `out` (combine "
                "before that, or give each batch in flight buffers of its own), or they are copies"
            )
    if dispatched.rank != rank:
        raise EPInputError(f"dispatched.rank = {dispatched.rank}: must be {rank}, the rank that combines")
    check_tensor("dispatched.tokens", dispatched.tokens, device=device)
    if not dispatched.tokens.dim():
        raise EPInputError("dispatched.tokens.shape = (): must have a dimension of rows")
    slices, most = dispatched.return_slices, MAX_SLICES.bit_length() - 1
    if not (is_integer(slices) and 0 <= slices <= most):
        raise EPInputError(f"dispatched.return_slices = {slices!r}: must be an integer in [0, {most}]")
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
    ids = dispatched.topk_ids
    check_tensor("dispatched.topk_ids", ids, shape=(None, cfg.top_k), dtype=ID_TYPES, device=device)
    if ids.shape[0] > cfg.max_tokens_per_rank:
        raise EPInputError(
            f"dispatched.topk_ids.shape[0] = {ids.shape[0]}: must not exceed max_tokens_per_rank = "
            f"{cfg.max_tokens_per_rank} tokens"
        )


def check_rows(cfg: EPConfig, rows: torch.Tensor, dispatched: Dispatched) -> None:
    """Check expert outputs: [N, hidden] bfloat16 beside `dispatched`, 16-byte aligned, else EPInputError.

    N >= num_rows is the caller's promise: num_rows is on the device.
    """
    device = dispatched.row_map.device
    check_tensor("rows", rows, shape=(None, cfg.hidden), dtype=torch.bfloat16, device=device, alignment=VECTOR_BYTES)


def combine_weights(
    cfg: EPConfig,
    mode: str,
    router_weights: torch.Tensor | None,
    dispatched: Dispatched,
    weights_dtype: torch.dtype | None = torch.float32,
    *,
    checked: bool = False,
) -> torch.Tensor | None:
    """The [T, top_k] weights that a rank multiplies what comes home by: in exact mode the argument, else what dispatch
    was given. None in the others: in partial mode the expert ranks multiply by what dispatch brought them, or nobody
    does, of rank-major rows.

    Args:
        checked: whether those of `dispatched` need no check.

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
    if router_weights is not None or not checked:
        check_router_weights(cfg, weights, dispatched.topk_ids.shape[0], dispatched.topk_ids.device, weights_dtype)
    elif weights.requires_grad:
        check_detached("dispatched.router_weights", weights)
    return weights


OUTPUT_TYPES = {torch.bfloat16: OutputType.BF16, torch.float16: OutputType.FP16, torch.float32: OutputType.F32}
"""Element types that combine can return."""


def check_output(
    cfg: EPConfig, mode: str, tokens: int, dtype: torch.dtype, out: torch.Tensor | None, device: torch.device | str
) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, type) of combine's output: [T, hidden], unweighted [T, top_k, hidden]; `dtype`, unless there is an `out`.

    Raises:
        EPInputError: `out` does not have that shape, or the type is not in OUTPUT_TYPES.
    """
    shape = (tokens, cfg.top_k, cfg.hidden) if mode == "unweighted" else (tokens, cfg.hidden)
    name = "dtype"
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


MOVED_BY_VECTORS = ("tokens", "scales", "src_info", "headers")
"""Tensors of `DispatchBuffers` that kernels access 8 or 16 bytes at a time."""


def check_buffers(cfg: EPConfig, out: DispatchBuffers, device: torch.device | str) -> None:
    """Check caller-owned dispatch buffers; their capacity is `out.tokens.shape[0]` rows.

    Raises:
        EPInputError: a tensor has not the shape, type, device or alignment that `DispatchBuffers.allocate` gives it, or
            the capacity is no multiple of the row alignment, or makes no blocks.
    """
    if not isinstance(out, DispatchBuffers):
        raise EPInputError(f"out = {type(out).__name__}: must be a DispatchBuffers")
    rows = out.tokens
    if out.made_for is cfg and rows.device == device and not rows.requires_grad:
        if torch.is_inference_mode_enabled() or not rows.is_inference():
            return  # they cannot have changed
    capacity = rows.shape[0]
    check_blocks(cfg, "out.tokens.shape[0]", capacity)
    if cfg.block_rows is None and capacity % cfg.alignment:
        raise EPInputError(f"out.tokens.shape[0] = {capacity}: must be a multiple of row_alignment = {cfg.alignment}")
    for name, want in buffer_shapes(cfg, capacity).items():
        if want is not None:
            alignment = VECTOR_BYTES if name in MOVED_BY_VECTORS else 1
            shape, dtype = want
            tensor = getattr(out, name)
            if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_inference():
                check_written(f"out.{name}", tensor)
            check_tensor(f"out.{name}", tensor, shape=shape, dtype=dtype, device=device, alignment=alignment)
