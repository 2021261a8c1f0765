"""The row of every entry of this rank's tokens, as all nodes have brought them: chosen, or weighted and summed.

For the modes "exact" and "unweighted" top_k rows of a token travel, where "partial" brings one of each node. Plain
torch does the rest: multiplications and additions that round each by itself, as docs/numerics.md wants them.
"""

from __future__ import annotations

import torch

from cute_ep.api.config import EPConfig

NAN_BITS = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}
"""Of the one NaN that sums are rounded to."""


def choose_rows(cfg: EPConfig, rows: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the entries of T tokens, and which entries have one.

    Args:
        rows: [nodes, F, top_k, hidden] bfloat16, each node's for this rank's tokens, anything where it has none.
        topk_ids: [T, top_k]; masked and wrong ones have no row.

    Returns:
        [T, top_k, hidden] bfloat16, +0 for entries without one, and [T, top_k] bool.
    """
    served = (topk_ids >= 0) & (topk_ids < cfg.num_experts)
    nodes = torch.where(served, topk_ids, 0).long() // (cfg.num_experts // cfg.nodes)
    tokens, slots = (torch.arange(count, device=topk_ids.device) for count in topk_ids.shape)
    chosen = rows[nodes, tokens[:, None], slots[None]]
    return torch.where(served[..., None], chosen, chosen.new_zeros(())), served


def unweighted_rows(chosen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`choose_rows` in a type. bfloat16 keeps all bits, float32 has zeros after them."""
    return rounded(chosen.float(), dtype) if dtype == torch.float16 else chosen.to(dtype)


def exact_sums(chosen: torch.Tensor, served: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, hidden] of `dtype`: over the entries that have a row, k ascending, acc += w * row in float32 from +0."""
    total = torch.zeros_like(chosen[:, 0], dtype=torch.float32)
    for slot in range(chosen.shape[1]):
        product = weights[:, slot, None] * chosen[:, slot].float()
        total = torch.where(served[:, slot, None], total + product, total)
    return rounded(total, dtype)


def rounded(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 in a type, to nearest even, with the NaN of sums."""
    made = total.to(dtype, copy=True)
    made.view(torch.int32 if made.itemsize == 4 else torch.int16).masked_fill_(total.isnan(), NAN_BITS[dtype])
    return made
