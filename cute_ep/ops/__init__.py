"""cute_ep as torch ops: with gradients, and for torch.compile (docs/ops.md)."""

from __future__ import annotations

from cute_ep.ops.activation import fused_silu
from cute_ep.ops.calls import Batch, combine, combine_into, dispatch, dispatch_into
from cute_ep.ops.registry import register

__all__ = ["Batch", "combine", "combine_into", "dispatch", "dispatch_into", "fused_silu", "register"]
