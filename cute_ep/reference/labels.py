"""What `label_rows` and `mark_entries` (`cute_ep.runtime.labels`) write where tensors are on the CPU."""

from __future__ import annotations

import torch

from cute_ep.api.modes import no_modes


@no_modes()
def label_rows(
    row_offsets: torch.Tensor,
    row_counts: torch.Tensor,
    groups: range,
    elsewhere: int,
    experts: torch.Tensor,
    ones: torch.Tensor | None,
) -> None:
    """Fill `experts`, [rows, 1], by groups of rows, and `ones`. Reads no element on the host."""
    row = torch.arange(len(experts), dtype=torch.int32, device=experts.device)
    group = torch.searchsorted(row_offsets[1:], row, right=True).clamp(max=len(groups) - 1)
    inside = row - row_offsets[group] < row_counts[group]
    experts.copy_(torch.where(inside, group + groups.start, elsewhere)[:, None])
    if ones is not None:
        ones.fill_(1)


@no_modes()
def mark_entries(
    local: torch.Tensor,
    given: torch.Tensor,
    first: int,
    elsewhere: int,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
) -> None:
    """Fill `experts`, and `weights` from those that are `given`, by [rows, K] local experts."""
    experts.copy_(torch.where(local >= 0, local + first, elsewhere))
    if weights is not None:
        weights.copy_(torch.where(local >= 0, given, 0))
