"""Checks of call arguments that the communicators and the reference share: devices, what dispatch is given, numbers.
`tensors` has the rules for one tensor, `validate_combine` those of combine.

Nothing here reads a tensor's elements, so no check waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_ep.api.buffers import DispatchBuffers, buffer_shapes, check_blocks, most_capacity
from cute_ep.api.calls import DispatchInput
from cute_ep.api.config import EPConfig, is_integer, is_number
from cute_ep.api.errors import EPConfigError, EPInputError
from cute_ep.api.provenance import Origin
from cute_ep.api.row_tensors import ID_TYPES, payload_columns, payload_dtype, payload_types, scale_types
from cute_ep.api.tensors import check_detached, check_tensor, check_written
from cute_ep.layouts.maps.formats import VECTOR_BYTES, Format
from cute_ep.layouts.maps.variants import NO_HOOKS, Hooks

GLOBAL_SCALE_LIMIT = 2.0**100
"""A global scale lies in [1 / limit, limit]: no intermediate of the quantisation then leaves float32's normal
range unless its result saturates or rounds to zero anyway."""


def _device_of(name: object) -> torch.device | None:
    """The device that is named so, if there is one."""
    try:
        return torch.device(name if isinstance(name, torch.device) else str(name))
    except RuntimeError:
        return None


def check_devices(devices: Sequence[str | torch.device], ranks: int | None = None) -> list[torch.device]:
    """The devices of all ranks, one each; EPConfigError unless they are named as such, or for GPUs where torch finds
    none. ranks: how many there must be; None: any number."""
    if isinstance(devices, str | torch.device):
        named = _device_of(devices) or "cpu"
        raise EPConfigError(
            f'devices = {str(devices)!r}: must be a list, one per rank, such as ["{named}"] * {ranks or 2}'
        )
    rule = 'must be a list of names, one device per rank, such as ["cuda:0", "cuda:1"] or ["cpu"] * 2'
    if not isinstance(devices, Sequence):
        raise EPConfigError(f"devices = {type(devices).__name__}: {rule}")
    chosen = [device for one in devices if (device := _device_of(one)) is not None]
    if len(chosen) < len(devices):
        raise EPConfigError(f"devices = {devices!r}: {rule}")
    if ranks is not None and len(chosen) != ranks:
        raise EPConfigError(f"devices = {len(chosen)} entries: must be world_size = {ranks}")
    if chosen and all(device.type == "cuda" for device in chosen) and not torch.cuda.device_count():
        raise EPConfigError(
            f"devices = {[str(device) for device in chosen]}: torch finds no CUDA GPU here; for the reference backend "
            f'give ["cpu"] * {len(chosen)}'
        )
    return chosen


def check_input(origin: Origin, given: DispatchInput) -> None:
    """EPInputError unless this communicator can dispatch what it is given; no tensor is read."""
    cfg, _, device, hooks = origin
    check_tokens(cfg, given, device, hooks)
    scale = given.input_scale
    if scale is None:
        return
    if given.scales is not None:
        check_unscaled(scale)
    if hooks.input_scale is not None:
        check_tensor("input_scale", scale, device=device)
        return
    check_input_scale(cfg.format, scale)
    if isinstance(scale, torch.Tensor):
        check_tensor("input_scale", scale.view(1), device=device)


def check_tokens(
    cfg: EPConfig, given: DispatchInput, device: torch.device | str | None = None, hooks: Hooks = NO_HOOKS
) -> None:
    """Check one rank's dispatch arguments, but for `input_scale`, against `cfg`; expert ids are not read.

    Args:
        given: x 16-byte aligned, contiguous or with even rows (`has_even_rows`); scales and row_scales of quantised
            rows in torch's own types, too.
        device: where all of them must be; None: where `x` is.
        hooks: with one for `router_weights` these are of any type.

    Raises:
        EPInputError: a tensor breaks its rule.
    """
    x, topk_ids, router_weights, _, scales, row_scales, frame = given
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
    if frame is not None:
        check_frame(cfg, frame, tokens)
    check_tensor("topk_ids", topk_ids, shape=(tokens, cfg.top_k), dtype=ID_TYPES, device=place)
    if router_weights is not None:
        check_router_weights(cfg, router_weights, tokens, place, hooks)


def check_frame(cfg: EPConfig, frame: int, tokens: int) -> None:
    """EPInputError unless a rank can send so many rows for its tokens."""
    if not (is_integer(frame) and max(tokens, 1) <= frame <= cfg.max_tokens_per_rank):
        least = f"x.shape[0] = {tokens}" if tokens else "1"
        raise EPInputError(
            f"frame = {frame!r}: must be an integer from {least} to max_tokens_per_rank = {cfg.max_tokens_per_rank}"
        )


def check_router_weights(
    cfg: EPConfig,
    router_weights: torch.Tensor,
    tokens: int,
    device: torch.device | str | None = None,
    hooks: Hooks = NO_HOOKS,
) -> None:
    """EPInputError unless `router_weights` are [tokens, top_k] float32, of any type where a hook reads them."""
    dtype = None if hooks.router_weights else torch.float32
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
    as_made = out.memory.cfg is cfg and rows.dtype == payload_dtype(cfg.format)  # `without_rows` has others
    if as_made and rows.device == device and not rows.requires_grad:
        if torch.is_inference_mode_enabled() or not rows.is_inference():
            return  # they cannot have changed
    capacity, most = rows.shape[0], most_capacity(cfg)
    if capacity > most:
        raise EPInputError(f"out.tokens.shape[0] = {capacity}: must not exceed {most}")
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
