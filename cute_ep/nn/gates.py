"""What experts compute between their two matmuls: as a kernel of cute_ep where no gradient is wanted, else in plain
torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_ep.api.errors import EPConfigError
from cute_ep.api.gates import SWIGLU, Gate
from cute_ep.ops import fused_silu

GATES: dict[str, Gate] = {
    "swiglu": SWIGLU,
    "swiglu_clamped": Gate(alpha=1.702, limit=7.0, offset=1),
    "geglu_tanh": Gate("gelu_tanh"),
    "relu2": Gate("relu2"),
}
"""silu(gate) * up; its clamped form as gpt-oss has it; gelu(gate) * up with the tanh approximation; relu squared."""


def gate_named(gate: str | Gate) -> Gate:
    """The gate of that name, or the given one; EPConfigError lists the known names."""
    if isinstance(gate, Gate):
        return gate
    if not isinstance(gate, str) or gate not in GATES:
        raise EPConfigError(f"gate = {gate!r}: must be one of {', '.join(GATES)}, or a cute_ep.Gate")
    return GATES[gate]


def apply(gate: Gate, rows: Tensor, row_offsets: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """A gate of each row.

    The kernel rounds once; without it each step is rounded to the type of the rows.

    Args:
        rows: [N, gate.columns * inner]; the kernel takes bfloat16, and other types go through torch.
        row_offsets: [G + 1] int32 on the device: the kernel computes only the first row_offsets[G] rows. None: all.
        bias: [G, gate.columns * inner], added to the rows of each group; with row_offsets only.

    Returns:
        [N, inner] of the same type. Rows behind the last one hold anything.
    """
    wanted = torch.is_grad_enabled() and (rows.requires_grad or (bias is not None and bias.requires_grad))
    if wanted or rows.dtype != torch.bfloat16:
        return plain(gate, rows if bias is None or row_offsets is None else add_bias(rows, row_offsets, bias))
    if bias is not None:
        bias = bias.detach().to(torch.bfloat16).contiguous()
    return fused_silu(rows.contiguous(), row_offsets, gate=gate, bias=bias)


def add_bias(rows: Tensor, row_offsets: Tensor, bias: Tensor) -> Tensor:
    """rows + bias[g] for the rows of each group g, in torch."""
    row = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    nobody = (0, 0, 0, 1)  # a bias for rows behind the last one, whose gradients may be NaN
    return rows + F.pad(bias.to(rows.dtype), nobody)[torch.searchsorted(row_offsets[1:], row, right=True)]


def plain(gate: Gate, rows: Tensor) -> Tensor:
    """A gate in torch functions, which autograd differentiates."""
    if gate.columns == 1:
        return F.relu(rows).square()
    g, up = rows.chunk(2, dim=-1)
    if gate.limit is not None:
        g, up = g.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    if gate.offset:
        up = up + gate.offset
    if gate.kind == "gelu_tanh":
        return F.gelu(g, approximate="tanh") * up
    return (F.silu(g) if gate.alpha is None else g * torch.sigmoid(gate.alpha * g)) * up
