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


def row_input(row: torch.Tensor, topk_ids: torch.Tensor, hidden: int) -> DispatchInput:
    """Tokens that are all one row: the first elements of contiguous memory, as bfloat16."""
    return DispatchInput(row.view(torch.bfloat16)[:hidden].expand(topk_ids.shape[0], -1), topk_ids)


class SumOptions(NamedTuple):
    """How a rank sums what comes home, and where to: arguments of `EPCommunicator.combine`, which describes them."""

    router_weights: torch.Tensor | None = None
    out: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    epilogue_data: torch.Tensor | None = None
