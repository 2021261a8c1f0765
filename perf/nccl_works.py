"""How NCCL's collectives do a round. A function of each name in `perf.peer_list.PEERS` yields what is to be timed; it
is called twice, and what it allocates for a batch size is freed when the next one is asked for. Buffers that NCCL knows
stay, with room for the largest size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_ep.torch_internals import backend_of_group
from perf.peer_timing import SETS, Rank, Work, relative_error


class Buffers(NamedTuple):
    """Memory of the input sets: tokens [T, H] and their sums, all ranks' tokens [R * T, H], in bfloat16."""

    tokens: list[torch.Tensor]
    gathered: list[torch.Tensor]
    sums: list[torch.Tensor]


def buffers(world: int, most: int, hidden: int) -> Buffers:
    """Buffers for up to `most` tokens, not initialised, all in one allocation. So registering what a pool has makes one
    window, with the same offsets on all ranks: of several, the ranks might register different ones together."""
    counts = [*[most] * SETS, *[world * most] * SETS, *[most] * SETS]
    parts = torch.empty(sum(counts), hidden, dtype=torch.bfloat16, device="cuda").split(counts)
    return Buffers(*(list(parts[first : first + SETS]) for first in range(0, len(counts), SETS)))


@cache
def known_buffers(world: int, most: int, hidden: int, symmetric: bool) -> tuple[Buffers, object]:
    """Buffers in memory of NCCL's own allocator that is registered with the communicator, as a symmetric window
    or not, and their pool, which must live as long. Collective."""
    group = dist.group.WORLD
    assert group is not None
    backend = backend_of_group(group, torch.device("cuda"))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        made = buffers(world, most, hidden)
    torch.cuda.synchronize()
    if symmetric:
        backend.register_mem_pool(pool, symm=True)
    else:
        backend.register_mem_pool(pool)
    return made, pool


def gather_and_scatter(me: Rank, make: Callable[[int, int, int], Buffers]) -> Iterator[Work]:
    """All tokens to all ranks, and a sum over the ranks home; views of the same offsets on all ranks."""
    most = max(me.tokens)
    for tokens in me.tokens:
        known = make(me.world, most, me.shape.hidden)
        given = [all_[:tokens] for all_ in known.tokens]
        gathered = [all_[: me.world * tokens] for all_ in known.gathered]
        sums = [all_[:tokens] for all_ in known.sums]
        for view in given:
            view.normal_()
        for view in (*gathered, *sums):
            view.fill_(float("nan"))

        def dispatch(index: int, given=given, gathered=gathered) -> None:
            dist.all_gather_into_tensor(gathered[index], given[index])

        def combine(index: int, gathered=gathered, sums=sums) -> None:
            dist.reduce_scatter_tensor(sums[index], gathered[index])

        dispatch(0)
        combine(0)
        yield Work("bf16", tokens, dispatch, combine, relative_error(sums[0], given[0].float() * me.world))


def nccl_ag_rs(me: Rank) -> Iterator[Work]:
    """With memory that NCCL does not know."""
    made = buffers(me.world, max(me.tokens), me.shape.hidden)
    yield from gather_and_scatter(me, lambda *sizes: made)


def nccl_ag_rs_registered(me: Rank) -> Iterator[Work]:
    """With registered buffers."""
    yield from gather_and_scatter(me, lambda *sizes: known_buffers(*sizes, False)[0])


def nccl_ag_rs_windows(me: Rank) -> Iterator[Work]:
    """With symmetric windows."""
    yield from gather_and_scatter(me, lambda *sizes: known_buffers(*sizes, True)[0])


nccl_ag_rs_new = nccl_ag_rs_engines = nccl_ag_rs_windows
"""In processes with another NCCL, and with one that may use copy engines."""


def nccl_all_to_all(me: Rank) -> Iterator[Work]:
    """A row for each (token, expert) there and back, gathered before and summed with the weights after."""
    for tokens in me.tokens:
        inputs = me.inputs(tokens)
        orders, sent, received, arrived, returned, weights = [], [], [], [], [], []
        for one in inputs:
            order = one.ids.flatten().argsort(stable=True)
            owners = one.all_ids // me.local_experts
            orders.append(order // me.shape.top_k)
            weights.append(one.weights.flatten()[order, None])
            sent.append(torch.bincount(owners[me.rank].flatten(), minlength=me.world).tolist())
            received.append((owners == me.rank).sum(dim=(1, 2)).tolist())
            arrived.append(torch.empty(sum(received[-1]), me.shape.hidden, dtype=torch.bfloat16, device="cuda"))
            returned.append(torch.empty(order.shape[0], me.shape.hidden, dtype=torch.bfloat16, device="cuda"))
        sums = torch.empty(tokens, me.shape.hidden, device="cuda")

        def dispatch(index: int, inputs=inputs, orders=orders, arrived=arrived, sent=sent, received=received) -> None:
            dist.all_to_all_single(arrived[index], inputs[index].x[orders[index]], received[index], sent[index])

        def combine(
            index: int,
            orders=orders,
            arrived=arrived,
            sent=sent,
            received=received,
            returned=returned,
            weights=weights,
            sums=sums,
        ) -> None:
            dist.all_to_all_single(returned[index], arrived[index], sent[index], received[index])
            sums.zero_().index_add_(0, orders[index], returned[index].float() * weights[index])

        dispatch(0)
        combine(0)
        yield Work("bf16", tokens, dispatch, combine, relative_error(sums, inputs[0].x))
