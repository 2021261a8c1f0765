"""How NCCL EP does a round. Functions and memory are as in `perf.nccl_works`. The kernels are compiled when they are
first called.

There is one handle for a group, which every dispatch binds to its routing: two handles of a group share its buffers
(NVIDIA/nccl#2303). So a combine belongs to the last dispatch, and only pairs are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from perf.cases import Shape
from perf.deepep_works import LOW_LATENCY_TOKENS
from perf.peer_timing import Inputs, Rank, Work, relative_error


def stream() -> int:
    """The current stream, as NCCL EP takes it."""
    return torch.cuda.current_stream().cuda_stream


def wrapped(tensors: Sequence[torch.Tensor]) -> list:
    """Descriptors of tensors, which keep them."""
    from nccl import ep

    return [ep.Tensor(tensor) for tensor in tensors]


@cache
def communicator(rank: int, world: int):
    """NCCL EP's own communicator. Collective."""
    from nccl import core

    sent = [core.get_unique_id().as_bytes if rank == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    return core.Communicator.init(nranks=world, rank=rank, unique_id=core.UniqueId.from_bytes(sent[0]))


@cache
def window(rank: int, world: int, rows: int, hidden: int) -> tuple[torch.Tensor, Any]:
    """Rows [rows, hidden] for dispatches of high throughput, and the window that they are in. Collective.
    RuntimeError: there are no windows here."""
    from nccl import core

    memory = core.torch.empty((rows, hidden), dtype=torch.bfloat16, device=torch.device("cuda", rank))
    found = communicator(rank, world).register_window(memory, flags=core.WindowFlag.COLL_SYMMETRIC)
    if not found.is_valid:
        raise RuntimeError("NCCL registered no window")
    return memory, found


class Group:
    """A group for up to `most` tokens a rank, of low latency (expert-major blocks) or high throughput (flat rows, which
    arrive in a window), and its handle. Collective."""

    def __init__(self, rank: int, world: int, shape: Shape, low_latency: bool, most: int) -> None:
        from nccl import ep

        self._group = ep.Group.create(
            communicator(rank, world),
            ep.GroupConfig(
                algorithm=ep.Algorithm.LOW_LATENCY if low_latency else ep.Algorithm.HIGH_THROUGHPUT,
                num_experts=shape.num_experts,
                max_dispatch_tokens_per_rank=most,
                max_recv_tokens_per_rank=most * world,
                max_token_bytes=2 * shape.hidden,
                zero_copy=ep.ZeroCopyMode.AUTO if low_latency else ep.ZeroCopyMode.ON,
            ),
        )
        self._layout = ep.Layout.EXPERT_MAJOR if low_latency else ep.Layout.FLAT
        self.handle: Any = None

    def bind(self, ids: Any, counters: Any = None) -> None:
        """Bind the handle to routing `ids` [T, K]; of high throughput the ranks exchange them. Collective."""
        if self.handle is None:
            self.handle = self._group.create_handle(self._layout, ids, layout_info=counters, stream=stream())
        else:
            self.handle.update(ids, layout_info=counters, stream=stream())


group = cache(Group)
"""The same for all batch sizes."""


def error_of(inputs: Inputs, sums: torch.Tensor, copies: torch.Tensor | float) -> float:
    """That of a round whose result should be so many times the tokens."""
    torch.cuda.synchronize()
    return relative_error(sums, inputs.x.float() * copies)


def nccl_ep_low_latency(me: Rank) -> Iterator[Work]:
    """Dispatch to [local expert, slot, hidden], weighted combine."""
    from nccl import ep

    most = LOW_LATENCY_TOKENS
    own = group(me.rank, me.world, me.shape, True, most)
    slots = (me.local_experts, most * me.world, me.shape.hidden)
    arrived = torch.zeros(slots, dtype=torch.bfloat16, device="cuda")
    counts = torch.zeros(me.local_experts, dtype=torch.int32, device="cuda")
    rows, counted = wrapped([arrived, counts])
    there, info = ep.DispatchOutputs(tokens=rows), ep.LayoutInfo(expert_counters=counted)
    made = ep.CombineInputs(tokens=rows)
    for tokens in (count for count in me.tokens if count <= most):
        inputs = me.inputs(tokens)
        sums = [torch.full_like(one.x, float("nan")) for one in inputs]
        ids = wrapped([one.ids.long().contiguous() for one in inputs])
        sent = [ep.DispatchInputs(tokens=x) for x in wrapped([one.x for one in inputs])]
        weights = wrapped([one.weights.contiguous() for one in inputs])
        pairs = zip(wrapped(sums), weights, strict=True)
        home = [ep.CombineOutputs(tokens=total, topk_weights=weight) for total, weight in pairs]

        def dispatch(index: int, ids=ids, sent=sent) -> None:
            own.bind(ids[index])
            own.handle.dispatch(sent[index], there, layout_info=info, config=ep.DispatchConfig(), stream=stream())

        def combine(index: int, home=home) -> None:
            own.handle.combine(made, home[index], config=ep.CombineConfig(), stream=stream())

        dispatch(0)
        combine(0)
        yield Work("bf16", tokens, dispatch, combine, error_of(inputs[0], sums[0], 1.0), alone=False)


def nccl_ep_high_throughput(me: Rank) -> Iterator[Work]:
    """Exchange of the routing, dispatch to [row, hidden], and the sum over ranks."""
    from nccl import ep

    most = max(me.tokens)
    own = group(me.rank, me.world, me.shape, False, most)
    rows, memory = window(me.rank, me.world, most * me.world, me.shape.hidden)
    arrived = ep.Tensor(rows, window=memory, window_offset=0)
    routed = [
        torch.zeros(len(rows), me.shape.top_k, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.int64)
    ]
    weights_there, ids_there = wrapped(routed)
    there = ep.DispatchOutputs(tokens=arrived, topk_weights=weights_there, topk_idx=ids_there)
    made = ep.CombineInputs(tokens=arrived)
    counts = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in (me.local_experts, 1)]
    by_expert, total_rows = wrapped(counts)
    counters = ep.LayoutInfo(expert_counters=by_expert, recv_total_counter=total_rows)
    for tokens in me.tokens:
        inputs = me.inputs(tokens)
        sums = [torch.full_like(one.x, float("nan")) for one in inputs]
        ids = wrapped([one.ids.long().contiguous() for one in inputs])
        given = [wrapped([one.x, one.weights.contiguous()]) for one in inputs]
        sent = [ep.DispatchInputs(tokens=x, topk_weights=weights) for x, weights in given]
        home = [ep.CombineOutputs(tokens=total) for total in wrapped(sums)]

        def dispatch(index: int, ids=ids, sent=sent) -> None:
            own.bind(ids[index], counters)
            own.handle.dispatch(sent[index], there, config=ep.DispatchConfig(), stream=stream())

        def combine(index: int, home=home) -> None:
            own.handle.combine(made, home[index], config=ep.CombineConfig(), stream=stream())

        dispatch(0)
        combine(0)
        hit = torch.zeros(tokens, me.world, device="cuda").scatter_(1, inputs[0].ids // me.local_experts, 1.0)
        error = error_of(inputs[0], sums[0], hit.sum(dim=1, keepdim=True))
        yield Work("bf16", tokens, dispatch, combine, error, alone=False)
