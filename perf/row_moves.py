"""Which rows a dispatch or a combine moves, and where: the bytes of `cute_ep.bench.traffic`, row by row. No device is
involved.

A place is a row of a buffer of a rank, an int64: `buffer_of(rank, name) << ROW_BITS | row`; NONE stands where there is
none. The buffers of a rank, for T tokens on each of R ranks, top-k K:

    x         [T]      its tokens
    messages  [R * T]  tokens that others have sent, by source and token
    rows      [N]      its experts' rows, by expert, source and token, or in rank-major order by source and token
    returns   [R * T]  what other ranks have sent of partial sums, by owner and token; [K * T] by slot: of exact ones
    out       [T]      its sums
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cute_ep.api.config import EPConfig

BUFFERS = ("x", "messages", "rows", "returns", "out")
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
NONE = -1
SEED = 1


class Moves(NamedTuple):
    """What one rank does: item i reads the rows `sources[i]`, and writes their sum to each of `targets[i]`.

    Attributes:
        sources: [N, S] int64 places of this rank, then NONE.
        targets: [N, D] int64 places of any rank, then NONE.
    """

    sources: torch.Tensor
    targets: torch.Tensor


def buffer_of(rank: int, name: str) -> int:
    """Number of a buffer among all buffers of all ranks."""
    return rank * len(BUFFERS) + BUFFERS.index(name)


def places(rank: int, name: str, rows: torch.Tensor) -> torch.Tensor:
    """The places of rows of a buffer; a row NONE is none."""
    return torch.where(rows < 0, NONE, rows + (buffer_of(rank, name) << ROW_BITS))


def to_the_front(table: torch.Tensor) -> torch.Tensor:
    """A [N, K] table of places with those of each line before its NONE, in their order, as wide as the longest."""
    most = int((table >= 0).sum(dim=1).max()) if table.numel() else 0
    return table.gather(1, (table < 0).to(torch.int8).argsort(dim=1, stable=True))[:, :most]


def rows_of_entries(cfg: EPConfig, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The owner of each entry, and its row there in the order of the configuration.

    Args:
        ids: [R, T, K] experts, -1 masks an entry.

    Returns:
        [R, T, K] int64 ranks and rows, NONE where an entry has no row: it is masked, or in rank-major order not its
        token's last one there.
    """
    ranks, tokens, _ = ids.shape
    owner = torch.where(ids < 0, NONE, ids.long() // cfg.local_experts)
    if cfg.is_rank_major:
        goes_on = (owner[..., :, None] == owner[..., None, :]).triu(1).any(dim=-1)
        owner = owner.masked_fill(goes_on, NONE)
    key = owner if cfg.is_rank_major else ids.long()
    key = torch.where(owner < 0, cfg.num_experts, key)
    arrival = torch.arange(ranks * tokens).view(ranks, tokens, 1)
    order = (key * ranks * tokens + arrival).flatten().argsort(stable=True)
    number = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel())).view(ids.shape)
    begin = (owner[None] == torch.arange(ranks).view(-1, 1, 1, 1)).sum(dim=(1, 2, 3)).cumsum(0)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), begin])
    return owner, torch.where(owner < 0, NONE, number - before[owner.clamp(min=0)])


def buffer_rows(cfg: EPConfig, ids: torch.Tensor, operation: str) -> list[dict[str, int]]:
    """Of each rank the buffers that an operation uses, with their rows."""
    ranks, tokens, top_k = ids.shape
    owner, _ = rows_of_entries(cfg, ids)
    sizes = []
    for rank in range(ranks):
        rows = {"rows": int((owner == rank).sum())}
        if operation == "dispatch":
            sizes.append(rows | {"x": tokens, "messages": ranks * tokens})
        else:
            returns = (top_k if operation == "combine_exact" else ranks) * tokens
            sizes.append(rows | {"returns": returns, "out": tokens})
    return sizes


def moves_of(cfg: EPConfig, ids: torch.Tensor, operation: str) -> list[Moves]:
    """What each rank moves in one operation of `cute_ep.bench.traffic.LAUNCHES`: BF16 rows, without a shared expert.

    What a rank sends and what it has received take turns, by chance, so that links and memory work all the time. Run
    twice, in any order, the items leave everywhere what the operation would: the second time all has been sent.

    Args:
        ids: [R, T, K] int32 experts of all ranks' tokens, on the CPU; -1 masks an entry.
    """
    owner, row = rows_of_entries(cfg, ids)
    ranks, tokens, top_k = ids.shape
    every = torch.arange(tokens).view(-1, 1)
    random = torch.Generator().manual_seed(SEED)

    def own_rows(rank: int, source: int) -> torch.Tensor:
        """[T, K] places of the rows of a source's tokens."""
        return places(rank, "rows", torch.where(owner[source] == rank, row[source], NONE))

    def is_sent(source: int, to: int) -> torch.Tensor:
        """[T, 1] whether a token has an entry there."""
        return (owner[source] == to).any(dim=1, keepdim=True)

    def others(rank: int) -> list[int]:
        return [other for other in range(ranks) if other != rank]

    def dispatch(rank: int) -> list[Moves]:
        sent = [
            places(to, "messages", torch.where(is_sent(rank, to), rank * tokens + every, NONE)) for to in others(rank)
        ]
        received = [
            Moves(places(rank, "messages", source * tokens + every), own_rows(rank, source)) for source in others(rank)
        ]
        return [Moves(places(rank, "x", every), torch.cat([*sent, own_rows(rank, rank)], dim=1)), *received]

    def combine_partial(rank: int) -> list[Moves]:
        came = [
            places(rank, "returns", torch.where(is_sent(rank, to), to * tokens + every, NONE)) for to in others(rank)
        ]
        sums = Moves(torch.cat([own_rows(rank, rank), *came], dim=1), places(rank, "out", every))
        home = {to: torch.where(is_sent(to, rank), rank * tokens + every, NONE) for to in others(rank)}
        return [sums, *(Moves(own_rows(rank, to), places(to, "returns", home[to])) for to in home)]

    def combine_exact(rank: int) -> list[Moves]:
        slot = torch.arange(top_k) * tokens + every
        came = places(rank, "returns", torch.where((owner[rank] < 0) | (owner[rank] == rank), NONE, slot))
        found = [Moves(torch.cat([own_rows(rank, rank), came], dim=1), places(rank, "out", every))]
        for to in others(rank):
            home = places(to, "returns", torch.where(owner[to] == rank, slot, NONE))
            found.append(Moves(own_rows(rank, to).view(-1, 1), home.view(-1, 1)))
        return found

    make = {"dispatch": dispatch, "combine_partial": combine_partial, "combine_exact": combine_exact}[operation]
    return [mixed(make(rank), random) for rank in range(ranks)]


def mixed(parts: Sequence[Moves], random: torch.Generator) -> Moves:
    """Lists of items as one, each in its order but for neighbours; without items that have nothing to read or write."""
    kept = []
    for part in parts:
        wanted = (part.sources >= 0).any(dim=1) & (part.targets >= 0).any(dim=1)
        kept.append(Moves(to_the_front(part.sources[wanted]), to_the_front(part.targets[wanted])))
    turns = [
        (torch.arange(len(part.sources)) + torch.rand(len(part.sources), generator=random)) / max(1, len(part.sources))
        for part in kept
    ]
    order = torch.cat(turns).argsort()

    def joined(tables: Sequence[torch.Tensor]) -> torch.Tensor:
        width = max(table.shape[1] for table in tables)
        padded = (torch.nn.functional.pad(table, (0, width - table.shape[1]), value=NONE) for table in tables)
        return torch.cat(list(padded))[order]

    return Moves(joined([part.sources for part in kept]), joined([part.targets for part in kept]))
