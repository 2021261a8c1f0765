"""How many rows come to each rank: what a caller that allocates exactly that many must ask the others first."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cute_ep.layouts.maps.record import align_up


def counts_to_tell(counts: Tensor, tokens: int, ranks: int) -> Tensor:
    """What `exchange_counts` sends: [R, E/R + 1], by the rank that it is for."""
    own = counts.view(ranks, -1)
    return torch.cat([own, own.new_full((ranks, 1), tokens)], dim=1)


def exchange_counts(counts: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Tell every rank what this one sends to it. One small all-to-all, on the device: nothing waits on the host.

    Args:
        counts: [E] entries of this rank's tokens by expert, of the same integer type on all ranks; rank r has experts
            [r * E/R, ...).
        tokens: of this rank.

    Returns:
        [R, E/R + 1] of that type, by source rank: entries for each of this rank's experts, and the source's tokens.
    """
    told = counts_to_tell(counts, tokens, group.size())
    heard = torch.empty_like(told)
    dist.all_to_all_single(heard, told, group=group)
    return heard


def expert_rows(heard: Tensor, alignment: int = 1) -> Tensor:
    """[E/R] int64, the rows of each of this rank's experts, on the device of `heard`.

    Args:
        heard: what `exchange_counts` returned.
        alignment: multiple to which each expert's rows are padded.
    """
    rows = heard[:, :-1].sum(0)
    return rows if alignment == 1 else align_up(rows, alignment)
