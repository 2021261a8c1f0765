"""A dense expert."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_ep.api.config import is_integer
from cute_ep.api.errors import EPConfigError
from cute_ep.api.gates import Gate
from cute_ep.nn.gates import apply, gate_named

INNER_MULTIPLE = 8
"""A row of bfloat16 must be a multiple of 16 bytes, for grouped matmuls and for the SwiGLU kernel."""


class GatedMLP(torch.nn.Module):
    """A dense expert that every rank computes for its own tokens, to be a layer's `shared`.

    Attributes:
        gate_up: [columns, hidden] parameter, as of `MoELayer`.
        down: [hidden, inner] parameter.

    Args:
        hidden, inner: sizes, multiples of 8.
        gate, device, dtype: as of `MoELayer`.

    Raises:
        EPConfigError: an argument breaks its rule.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        gate: str | Gate = "swiglu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        for name, size in (("hidden", hidden), ("inner", inner)):
            if not (is_integer(size) and size > 0 and size % INNER_MULTIPLE == 0):
                raise EPConfigError(f"{name} = {size!r}: must be a positive multiple of {INNER_MULTIPLE}")
        self.gate = gate_named(gate)
        where = {"device": device, "dtype": dtype}
        self.gate_up = torch.nn.Parameter(torch.empty(self.gate.columns * inner, hidden, **where))
        self.down = torch.nn.Parameter(torch.empty(hidden, inner, **where))
        with torch.no_grad():
            self.gate_up.normal_(std=hidden**-0.5)
            self.down.normal_(std=inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] of the type of `x`, computed in the type of the parameters."""
        between = F.linear(x.to(self.gate_up.dtype), self.gate_up)
        return F.linear(apply(self.gate, between), self.down).to(x.dtype)
