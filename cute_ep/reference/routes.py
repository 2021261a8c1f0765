"""What `count_routes` (`cute_ep.runtime.routes`) counts where tensors are on the CPU."""

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
    """(counts, goes, ids, last_ids) of `RouteCounts`."""
    ids = torch.where(topk_ids == topk_ids.int(), topk_ids, NO_EXPERT).int()
    chosen = (ids >= 0) & (ids < num_experts)
    if mask:
        ids = torch.where(chosen, ids, -1)
    rank = torch.where(chosen, ids // -(-num_experts // ranks), -1)
    on_rank = rank[:, None, :] == torch.arange(ranks)[None, :, None]
    goes = on_rank.any(2)
    by_expert = torch.bincount(ids[chosen], minlength=num_experts)
    same = rank[:, :, None] == rank[:, None, :]
    followed = (same & torch.ones(same.shape[1:], dtype=torch.bool).triu(1)).any(2)
    counts = torch.zeros(count_words(ranks, num_experts), dtype=torch.int32)
    counts[: ranks + num_experts] = torch.cat([goes.sum(0), by_expert])
    counts[ranks + num_experts] = len(ids)
    return counts, goes, ids, torch.where(chosen & ~followed, ids, -1)
