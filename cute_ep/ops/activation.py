"""`cute_ep.fused_silu` as a torch op, for compiled code."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from cute_ep.api.errors import EPInputError
from cute_ep.api.gates import SWIGLU, Gate
from cute_ep.api.row_tensors import SwigluRows
from cute_ep.api.types import FormatName, ScaleLayout, SwigluFormat
from cute_ep.ops.bypass import needs_op
from cute_ep.ops.library import LIBRARY, NAMESPACE

OP = "fused_silu"
ARGUMENTS = ("x", "row_offsets", "bias", "scales_offsets", "input_scales", "fmt", "interleaved", "scale_layout")
"""Of the op, before the numbers of the gate."""


@overload
def fused_silu(
    x: Tensor,
    row_offsets: Tensor | None = None,
    *,
    fmt: Literal["bf16"] = "bf16",
    gate: Gate = SWIGLU,
    bias: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor: ...


@overload
def fused_silu(
    x: Tensor,
    row_offsets: Tensor | None = None,
    *,
    fmt: SwigluFormat,
    gate: Gate = SWIGLU,
    bias: Tensor | None = None,
    interleaved: bool = False,
    scale_layout: ScaleLayout | None = None,
    scales_offsets: Tensor | None = None,
    input_scales: Tensor | None = None,
) -> SwigluRows: ...


def fused_silu(
    x: Tensor,
    row_offsets: Tensor | None = None,
    *,
    fmt: FormatName = "bf16",
    gate: Gate = SWIGLU,
    bias: Tensor | None = None,
    interleaved: bool = False,
    scale_layout: ScaleLayout | None = None,
    scales_offsets: Tensor | None = None,
    input_scales: Tensor | None = None,
) -> Tensor | SwigluRows:
    """`cute_ep.fused_silu` into memory of its own, in eager code and without a graph break in compiled code.

    Args, returns, raises: as there. It has no gradient: EPInputError where one is required, in a transform of
    torch.func, and for a tensor with a tangent (forward mode).
    """
    arguments = (x, row_offsets, bias, scales_offsets, input_scales, fmt, interleaved, scale_layout)
    tensors = {"row_offsets": row_offsets, "bias": bias, "scales_offsets": scales_offsets, "input_scales": input_scales}
    if needs_op(x=x, **tensors):
        made = torch.ops.cute_ep.fused_silu(*arguments, gate.kind, gate.alpha, gate.limit, gate.offset)
    else:
        made = _fused(gate, *arguments)
    return made[0] if len(made) == 1 else SwigluRows(*made)


def _fused(gate: Gate, *arguments: Any) -> list[Tensor]:
    """arguments: ARGUMENTS of `cute_ep.fused_silu`."""
    from cute_ep.runtime import local_ops  # which imports the reference and the driver: most users of ops need neither

    given: dict[str, Any] = dict(zip(ARGUMENTS, arguments, strict=True))
    made = local_ops.fused_silu(gate=gate, **given)
    return [made] if isinstance(made, Tensor) else list(made)


def _run(*arguments: Any) -> list[Tensor]:
    *given, kind, alpha, limit, offset = arguments
    return _fused(Gate(kind, alpha, limit, offset), *given)


def _shapes(*arguments: Any) -> list[Tensor]:
    x, row_offsets, _, _, _, fmt, _, scale_layout, kind, *_ = arguments
    from cute_ep.runtime.local_ops import empty_rows

    groups = 1 if row_offsets is None else row_offsets.shape[0] - 1
    return empty_rows(fmt, scale_layout, x, x.shape[1] // Gate(kind).columns, groups)


def _no_gradient(ctx: Any, inputs: tuple, output: Any) -> None:
    for name, needed in zip(("x", "bias"), (ctx.needs_input_grad[0], ctx.needs_input_grad[2]), strict=True):
        if needed:
            raise EPInputError(
                f"{name}.requires_grad = True: must be False, fused_silu has no gradient; use no_grad(), or a gate in "
                "torch functions"
            )


def _backward(ctx: Any, *grads: Any) -> tuple:
    raise EPInputError("fused_silu has no gradient")


LIBRARY.define(
    f"{OP}(Tensor x, Tensor? row_offsets, Tensor? bias, Tensor? scales_offsets, Tensor? input_scales, str fmt, "
    "bool interleaved, str? scale_layout, str kind, float? alpha, float? limit, int offset) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl(OP, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{OP}", _shapes, lib=LIBRARY)
torch.library.register_autograd(f"{NAMESPACE}::{OP}", _backward, setup_context=_no_gradient, lib=LIBRARY)
