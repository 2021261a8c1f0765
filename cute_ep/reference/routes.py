"""What `count_routes` (`cute_ep.runtime.routes`) counts where tensors are on the CPU, or its kernel cannot."""

from __future__ import annotations

import torch

from cute_ep.api.modes import no_modes
from cute_ep.layouts.maps.routing import count_words

NO_EXPERT = 2**31 - 1
"""In place of an id that does not fit 32 bits."""


@no_modes()
def count_routes(
    topk_ids: torch.Tensor, num_experts: int, ranks: int, mask: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(counts, goes, ids, last_ids) of `RouteCounts`, on the device of the ids; no shape depends on these, so the host
    waits for nothing."""
    topk_ids, (tokens, top_k), device = topk_ids.contiguous(), topk_ids.shape, topk_ids.device
    ids = torch.where(topk_ids == topk_ids.int(), topk_ids, NO_EXPERT).int()
    chosen = (ids >= 0) & (ids < num_experts)
    if mask:
        ids = torch.where(chosen, ids, -1)
    # entries that are no expert's count for one more expert, of one more rank
    expert = torch.where(chosen, ids, num_experts).long()
    rank = torch.where(chosen, expert // -(-num_experts // ranks), ranks)
    goes = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=device).scatter_(1, rank, True)
    goes = goes[:, :ranks].contiguous()
    by_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    by_expert.scatter_add_(0, expert.flatten(), torch.ones_like(ids).flatten())
    same = rank[:, :, None] == rank[:, None, :]
    followed = (same & torch.ones((top_k, top_k), dtype=torch.bool, device=device).triu(1)).any(2)
    counts = torch.zeros(count_words(ranks, num_experts), dtype=torch.int32, device=device)
    counts[:ranks] = goes.sum(0)
    counts[ranks : ranks + num_experts] = by_expert[:num_experts]
    counts[ranks + num_experts] = tokens
    return counts, goes, ids, torch.where(chosen & ~followed, ids, -1)
