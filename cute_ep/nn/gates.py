"""What experts compute between their two matmuls: as a kernel of cute_ep where there is one and no gradient is wanted,
else in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_ep.api.config import is_number
from cute_ep.api.errors import EPConfigError
from cute_ep.ops.library import NAMESPACE
from cute_ep.runtime.local_ops import fused_silu

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OP = "swiglu"


@dataclass(frozen=True)
class Gate:
    """A function between the two matmuls of an expert.

    Attributes:
        function: from [rows, columns * inner] to [rows, inner] of the same type, row by row, in torch functions that
            autograd differentiates.
        columns: columns of the first matmul for each of the second: 2 with gate columns followed by up columns, 1
            without a gate.
        fused: whether cute_ep's SwiGLU kernel computes it too.
        alpha, limit: of the clamped form; None in the plain one.
    """

    function: Callable[[Tensor, float | None, float | None], Tensor]
    columns: int = 2
    fused: bool = False
    alpha: float | None = None
    limit: float | None = None

    def __call__(self, rows: Tensor, row_offsets: Tensor | None = None) -> Tensor:
        """The function of each row.

        The kernel rounds once; the plain functions round each step to the type of the rows.

        Args:
            rows: [N, columns * inner]; the kernel takes bfloat16, and other types go through torch.
            row_offsets: [G + 1] int32 on the device: the kernel computes only the first row_offsets[G] rows. None: all.

        Returns:
            [N, inner] of the same type. Rows behind the last one hold anything.
        """
        wanted = torch.is_grad_enabled() and rows.requires_grad
        if not self.fused or wanted or rows.dtype != torch.bfloat16:
            return self.function(rows, self.alpha, self.limit)
        if torch.compiler.is_compiling():
            return torch.ops.cute_ep.swiglu(rows, row_offsets, self.alpha, self.limit)
        return _fused(rows, row_offsets, self.alpha, self.limit)


def _fused(rows: Tensor, row_offsets: Tensor | None, alpha: float | None, limit: float | None) -> Tensor:
    return fused_silu(rows.contiguous(), row_offsets, alpha=alpha, limit=limit)


def _shape_fused(rows: Tensor, *arguments: object) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


LIBRARY.define(
    f"{OP}(Tensor rows, Tensor? row_offsets, float? alpha, float? limit) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl(OP, _fused, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{OP}", _shape_fused, lib=LIBRARY)


def _swiglu(rows: Tensor, alpha: float | None, limit: float | None) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def _clamped_swiglu(rows: Tensor, alpha: float | None, limit: float | None) -> Tensor:
    assert alpha is not None and limit is not None
    gate, up = rows.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _geglu_tanh(rows: Tensor, alpha: float | None, limit: float | None) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _relu2(rows: Tensor, alpha: float | None, limit: float | None) -> Tensor:
    return F.relu(rows).square()


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Gate:
    """(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit); the defaults are gpt-oss's.

    Raises:
        EPConfigError: a value is no finite number, or the limit is not positive.
    """
    for name, value in (("alpha", alpha), ("limit", limit)):
        if not (is_number(value) and abs(value) < torch.finfo(torch.float32).max):
            raise EPConfigError(f"{name} = {value!r}: must be a finite float32 number")
    if limit <= 0:
        raise EPConfigError(f"limit = {limit!r}: must be positive")
    return Gate(_clamped_swiglu, fused=True, alpha=float(alpha), limit=float(limit))


GATES: dict[str, Gate] = {
    "swiglu": Gate(_swiglu, fused=True),
    "swiglu_clamped": clamped_swiglu(),
    "geglu_tanh": Gate(_geglu_tanh),
    "relu2": Gate(_relu2, columns=1),
}
"""silu(gate) * up; `clamped_swiglu` as gpt-oss has it; gelu(gate) * up with the tanh approximation; relu squared."""


def gate_named(gate: str | Gate) -> Gate:
    """The gate of that name, or the given one; EPConfigError lists the known names."""
    if isinstance(gate, Gate):
        return gate
    if not isinstance(gate, str) or gate not in GATES:
        raise EPConfigError(f"gate = {gate!r}: must be one of {', '.join(GATES)}, or a cute_ep.nn.Gate")
    return GATES[gate]
