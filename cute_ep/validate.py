"""Checks of call arguments that the communicators and the reference share.

Nothing here reads a tensor's elements, so no check waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cute_ep.config import EPConfig
from cute_ep.dispatched import DispatchBuffers, Dispatched
from cute_ep.errors import EPInputError
from cute_ep.layouts.arena import HeaderWord
from cute_ep.layouts.formats import VECTOR_BYTES, Format
from cute_ep.layouts.scales import ATOM_COLUMNS, ATOM_ROWS, scale_blocks, scale_columns

GLOBAL_SCALE_LIMIT = 2.0**100
"""A global scale lies in [1 / limit, limit]: no intermediate of the quantisation then leaves float32's normal
range unless its result saturates or rounds to zero anyway."""

COMBINE_MODES = ("exact", "partial")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    alignment: int = 1,
) -> None:
    """Check one argument: a row-major contiguous tensor of the given extents, type and place.

    Args:
        name: how the caller calls it; begins the message.
        shape: expected extents; None accepts any extent.
        device: expected device; None accepts any.
        alignment: bytes that the address of the first element must be a multiple of.

    Raises:
        EPInputError: the first rule that `tensor` breaks, with its name, value and the rule.
    """
    if not isinstance(tensor, torch.Tensor):
        raise EPInputError(f"{name} = {type(tensor).__name__}: must be a torch.Tensor")
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(want not in (None, got) for got, want in zip(actual, shape, strict=True)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise EPInputError(f"{name}.shape = {actual}: must be ({wanted})")
    if tensor.dtype != dtype:
        raise EPInputError(f"{name}.dtype = {tensor.dtype}: must be {dtype}")
    if device is not None and tensor.device != torch.device(device):
        raise EPInputError(f"{name}.device = {tensor.device}: must be {torch.device(device)}")
    if not tensor.is_contiguous():
        raise EPInputError(f"{name}.stride() = {tensor.stride()}: must be row-major contiguous")
    if tensor.data_ptr() % alignment:
        raise EPInputError(f"{name}.data_ptr() = {tensor.data_ptr():#x}: must be a multiple of {alignment} bytes")


def check_tokens(
    cfg: EPConfig,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    router_weights: torch.Tensor | None,
    device: torch.device | str | None = None,
) -> None:
    """Check one rank's dispatch arguments against `cfg`; expert ids are not read.

    Args:
        x: [T, hidden] bfloat16, 0 <= T <= max_tokens_per_rank, 16-byte aligned.
        topk_ids: [T, top_k] int32.
        router_weights: [T, top_k] float32, or None.
        device: where all of them must be; None: where `x` is.

    Raises:
        EPInputError: a tensor breaks its rule.
    """
    check_tensor("x", x, shape=(None, cfg.hidden), dtype=torch.bfloat16, device=device, alignment=VECTOR_BYTES)
    tokens = x.shape[0]
    if tokens > cfg.max_tokens_per_rank:
        raise EPInputError(
            f"x.shape[0] = {tokens}: must not exceed max_tokens_per_rank = {cfg.max_tokens_per_rank} tokens"
        )
    check_tensor("topk_ids", topk_ids, shape=(tokens, cfg.top_k), dtype=torch.int32, device=x.device)
    if router_weights is not None:
        check_router_weights(cfg, router_weights, tokens, x.device)


def check_router_weights(
    cfg: EPConfig, router_weights: torch.Tensor, tokens: int, device: torch.device | str | None = None
) -> None:
    """Check `router_weights`: [tokens, top_k] float32, else EPInputError."""
    check_tensor(
        "router_weights",
        router_weights,
        shape=(tokens, cfg.top_k),
        dtype=torch.float32,
        device=device,
    )


def check_input_scale(fmt: Format, input_scale: float | torch.Tensor | None) -> None:
    """Check a global scale argument: None, a number in [2**-100, 2**100], or a float32 tensor of one element.

    The value of a tensor is not read (`reference.quantize` does read it).

    Raises:
        EPInputError: `fmt` has no global scale but one was given, or the argument breaks the rule above.
    """
    if input_scale is None:
        return
    if not fmt.global_scale:
        raise EPInputError(f"input_scale = {input_scale!r}: must be None, format {fmt.name} has no global scale")
    if isinstance(input_scale, torch.Tensor):
        if input_scale.numel() != 1 or input_scale.dtype != torch.float32:
            raise EPInputError(
                f"input_scale = {input_scale.dtype} tensor of shape {tuple(input_scale.shape)}: "
                "must have one float32 element"
            )
        return
    check_global_scale(input_scale)


def check_global_scale(value: float) -> None:
    """EPInputError unless `value` is a number in [2**-100, 2**100] (so positive and finite)."""
    ok = isinstance(value, (int, float)) and math.isfinite(value)
    if not (ok and 1 / GLOBAL_SCALE_LIMIT <= value <= GLOBAL_SCALE_LIMIT):
        raise EPInputError(f"global_scale = {value!r}: must be in [2**-100, 2**100]")


def check_mode(mode: str) -> None:
    """EPInputError unless `mode` is one of COMBINE_MODES."""
    if mode not in COMBINE_MODES:
        raise EPInputError(f"mode = {mode!r}: must be one of {', '.join(COMBINE_MODES)}")


def check_rows(cfg: EPConfig, rows: torch.Tensor, dispatched: Dispatched) -> None:
    """Check expert outputs: [N, hidden] bfloat16 beside `dispatched`, 16-byte aligned, else EPInputError.

    N >= num_rows is the caller's promise: num_rows is on the device.
    """
    device = dispatched.row_map.device
    check_tensor("rows", rows, shape=(None, cfg.hidden), dtype=torch.bfloat16, device=device, alignment=VECTOR_BYTES)


def combine_weights(
    cfg: EPConfig, mode: str, router_weights: torch.Tensor | None, dispatched: Dispatched
) -> torch.Tensor:
    """The [T, top_k] float32 weights that a communicator's combine applies.

    Exact: the argument, else what dispatch was given. Partial: what dispatch was given, since the expert
    ranks multiply and only dispatch carries weights to them.

    Raises:
        EPInputError: unknown mode, no weights at all, an argument in partial mode, or a wrong shape or type.
    """
    check_mode(mode)
    if mode == "partial" and router_weights is not None:
        raise EPInputError("router_weights = tensor: must be None in partial mode, give them to dispatch")
    weights = dispatched.router_weights if router_weights is None else router_weights
    if weights is None:
        where = "dispatch" if mode == "partial" else "dispatch or combine"
        raise EPInputError(f"router_weights = None: {mode} combine needs them, give them to {where}")
    check_router_weights(cfg, weights, dispatched.topk_ids.shape[0], dispatched.topk_ids.device)
    return weights


def check_buffers(cfg: EPConfig, out: DispatchBuffers, device: torch.device | str) -> None:
    """Check caller-owned dispatch buffers; their capacity is `out.tokens.shape[0]` rows.

    Raises:
        EPInputError: a tensor has not the shape, type or device that `DispatchBuffers.allocate` gives it.
    """
    if not isinstance(out, DispatchBuffers):
        raise EPInputError(f"out = {type(out).__name__}: must be a DispatchBuffers")
    fmt, experts = cfg.format, cfg.local_experts
    routed = (cfg.world_size, cfg.max_tokens_per_rank, cfg.top_k)
    columns, element = (cfg.hidden, torch.bfloat16) if fmt.bits == 16 else (fmt.payload_bytes(cfg.hidden), torch.uint8)
    check_tensor("out.tokens", out.tokens, shape=(None, columns), dtype=element, device=device, alignment=VECTOR_BYTES)
    capacity = out.tokens.shape[0]
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "row_offsets": ((experts + 1,), torch.uint32),
        "expert_ids": ((experts,), torch.int32),
        "src_info": ((capacity, 2), torch.int32),
        "num_rows": ((1,), torch.int32),
        "row_map": (routed, torch.int32),
        "headers": ((cfg.world_size, len(HeaderWord)), torch.int32),
        "weights": (routed, torch.float32),
    }
    if fmt.scale:
        tiles = scale_columns(fmt.scale_bytes(cfg.hidden))
        atom = (scale_blocks(capacity, experts), tiles, 32, ATOM_ROWS // 32, ATOM_COLUMNS)
        expected["scales"] = (atom, torch.uint8)
        expected["scales_offsets"] = ((experts,), torch.uint32)
    for name, (shape, dtype) in expected.items():
        check_tensor(f"out.{name}", getattr(out, name), shape=shape, dtype=dtype, device=device)
