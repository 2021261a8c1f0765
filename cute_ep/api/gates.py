"""Gate: what experts compute between their two matmuls."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, get_args

from cute_ep.api.config import is_number
from cute_ep.api.errors import EPConfigError

GateKind = Literal["silu", "gelu_tanh", "relu2"]
"""Functions of a gate."""
KINDS: tuple[GateKind, ...] = get_args(GateKind)


@dataclass(frozen=True)
class Gate:
    """A function of gate g and up u of each column; docs/numerics.md has the formulas.

    With a limit g is at most `limit`, and u between -limit and limit. Without any argument it is SwiGLU, silu(g) * u.

    Attributes:
        kind: "silu", g * sigmoid(alpha * g) * (u + offset); "gelu_tanh", gelu(g) * (u + offset) with the tanh
            approximation; "relu2", max(g, 0)^2, which has no u and none of the numbers below.
        alpha: factor in silu's sigmoid; None: 1.
        limit: positive; None: none.
        offset: 0 or 1.

    Raises:
        EPConfigError: an argument breaks its rule.
    """

    kind: GateKind = "silu"
    alpha: float | None = None
    limit: float | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EPConfigError(f"kind = {self.kind!r}: must be one of {', '.join(KINDS)}")
        if self.kind != "silu" and self.alpha is not None:
            raise EPConfigError(f"alpha = {self.alpha!r}: must be None, {self.kind} has no factor")
        if self.alpha is not None and not (is_number(self.alpha) and _is_float32(self.alpha)):
            raise EPConfigError(f"alpha = {self.alpha!r}: must be None or a finite float32 number")
        if self.columns == 1 and (self.limit is not None or self.offset != 0):
            raise EPConfigError(
                f"limit = {self.limit!r}, offset = {self.offset!r}: must be None and 0, {self.kind} has no up"
            )
        finite = self.limit is None or (is_number(self.limit) and _is_float32(self.limit))
        if not finite or (self.limit is not None and _float32(self.limit) <= 0):
            raise EPConfigError(f"limit = {self.limit!r}: must be None or a positive finite float32 number")
        if self.offset not in (0, 1):
            raise EPConfigError(f"offset = {self.offset!r}: must be 0 or 1")

    @property
    def columns(self) -> int:
        """Columns of the first matmul for each of the second: 2, or 1 without a gate."""
        return 1 if self.kind == "relu2" else 2


SWIGLU = Gate()


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return rounded


def _is_float32(value: float) -> bool:
    """Whether the nearest float32 is finite."""
    try:
        return abs(_float32(value)) < float("inf")
    except OverflowError:
        return False
