"""Gradients of dispatch and combine: each is a round of the other operation, whoever makes the rounds.

| gradient of | is |
| --- | --- |
| tokens that were dispatched | a combine of the rows' gradients, with weights of 1 (`ones_for`) |
| rows that were combined | a dispatch of the output's gradient, in bfloat16, times the rows' weights (`weighted`) |
| router weights of combine | each row, which an unweighted combine returns, times its token's gradient \
(`inner_products`) |

`cute_ep.ops` makes the rounds of one rank, `cute_ep.integrations` those of all ranks of a process.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ones_for(topk_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights with which a combine adds a token's rows up as they are.

    Args:
        topk_ids: [T, top_k], of the batch.
        weights: `Dispatched.weights`, which came with the rows.

    Returns:
        Router weights, which exact mode reads, and such `weights`, which partial mode reads.
    """
    return torch.ones(topk_ids.shape, dtype=torch.float32, device=topk_ids.device), torch.ones_like(weights)


def weighted(rows: Tensor, row_weights: Tensor) -> Tensor:
    """[N, hidden] bfloat16 rows, each times its weight, [N] float32, and rounded once; in place."""
    return rows.mul_(row_weights[:, None])


def inner_products(rows: Tensor, grad: Tensor) -> Tensor:
    """[T, top_k] float32, of each token's gradient with its rows.

    Args:
        rows: [T, top_k, hidden] bfloat16, as an unweighted combine returns them: zeros where masked.
        grad: [T, hidden] of a floating type.
    """
    wide = grad.float()
    return torch.stack([(rows[:, slot] * wide).sum(1) for slot in range(rows.shape[1])], dim=1)
