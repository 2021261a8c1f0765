"""What callers give to dispatch and combine, as the backends hand it on."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DispatchInput(NamedTuple):
    """What a rank sends: the arguments of `EPCommunicator.dispatch`, which describes them."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    router_weights: torch.Tensor | None = None
    input_scale: float | torch.Tensor | None = None
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    frame: int | None = None


class SumOptions(NamedTuple):
    """How a rank sums what comes home, and where to: arguments of `EPCommunicator.combine`, which describes them."""

    router_weights: torch.Tensor | None = None
    out: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    epilogue_data: torch.Tensor | None = None
