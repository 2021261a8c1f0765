"""How DeepEP V1 does a round. Functions and memory are as in `perf.nccl_works`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist

from perf import deepep_tuning
from perf.peer_list import NORMAL_SMS
from perf.peer_timing import SETS, Rank, Work, relative_error

LOW_LATENCY_TOKENS = 128
"""Most tokens per rank of the low-latency kernels, whose buffer grows with them."""
NORMAL_BYTES = 2 * 10**9
BLOCK = 128
"""Elements of one float32 scale of DeepEP's FP8 rows."""


def from_fp8(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """BF16 rows [..., hidden] of FP8 ones and their float32 scales [..., hidden / BLOCK]."""
    return (rows.float().unflatten(-1, (-1, BLOCK)) * scales.float().unsqueeze(-1)).flatten(-2).bfloat16()


@cache
def low_latency_buffer(world: int, hidden: int, experts: int):
    """DeepEP's buffer for the low-latency kernels. RDMA queues are set up although only NVLink is used: the kernels
    check that each local expert has one."""
    import deep_ep

    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(LOW_LATENCY_TOKENS, hidden, world, experts)
    return deep_ep.Buffer(
        dist.group.WORLD,
        0,
        size,
        low_latency_mode=True,
        num_qps_per_rank=experts // world,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
    )


def deepep_low_latency(me: Rank) -> Iterator[Work]:
    """Dispatch to [local expert, slot, hidden], weighted combine."""
    import deep_ep

    shape, most = me.shape, LOW_LATENCY_TOKENS
    buffer = low_latency_buffer(me.world, shape.hidden, shape.num_experts)
    slots = (me.local_experts, most * me.world, shape.hidden)
    rows = torch.randn(slots, dtype=torch.bfloat16, device="cuda")
    for tokens in (count for count in me.tokens if count <= most):
        inputs = me.inputs(tokens)
        ids = [one.ids.to(deep_ep.topk_idx_t) for one in inputs]
        sums = [torch.empty_like(one.x) for one in inputs]
        for fmt in ("bf16", "fp8"):
            handles: list = [None] * SETS
            arrived: list = [None] * SETS

            def dispatch(index: int, fmt=fmt, inputs=inputs, ids=ids, handles=handles, arrived=arrived) -> None:
                found = buffer.low_latency_dispatch(
                    inputs[index].x,
                    ids[index],
                    most,
                    shape.num_experts,
                    use_fp8=fmt == "fp8",
                    async_finish=False,
                    return_recv_hook=False,
                )
                arrived[index], handles[index] = found[0], found[2]

            def combine(
                index: int, fmt=fmt, inputs=inputs, ids=ids, handles=handles, arrived=arrived, sums=sums
            ) -> None:
                made = rows if fmt == "fp8" else arrived[index]
                buffer.low_latency_combine(made, ids[index], inputs[index].weights, handles[index], out=sums[index])

            dispatch(0)
            if fmt == "fp8":  # the experts' outputs are what has arrived, this once
                same = from_fp8(*arrived[0])
                buffer.low_latency_combine(same, ids[0], inputs[0].weights, handles[0], out=sums[0])
                del same
            else:
                combine(0)
            error = relative_error(sums[0], inputs[0].x)
            yield Work(fmt, tokens, dispatch, combine, error)


@cache
def normal_buffer():
    """DeepEP's buffer for the normal kernels over NVLink."""
    import deep_ep

    deep_ep.Buffer.set_num_sms(NORMAL_SMS)
    return deep_ep.Buffer(dist.group.WORLD, NORMAL_BYTES, 0, explicitly_destroy=True)


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3 with a float32 scale for BLOCK elements, scales column-major."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448
    rows = (blocks / scales[:, :, None]).to(torch.float8_e4m3fn).flatten(1)
    return rows, scales.T.contiguous().T


def normal_works(me: Rank, budgets: Sequence[int] | None = None) -> Iterator[Work]:
    """Layout and dispatch with a worst-case number of rows, and the sum over ranks.

    Args:
        me: the rank.
        budgets: numbers of SMs out of which the fastest is taken, with the fastest chunk sizes; None: DeepEP's default
            chunk sizes.
    """
    import deep_ep

    buffer = normal_buffer()
    for tokens in me.tokens:
        inputs = me.inputs(tokens)
        ids = [one.ids.to(deep_ep.topk_idx_t) for one in inputs]
        most = tokens * me.world
        rows = torch.randn(most, me.shape.hidden, dtype=torch.bfloat16, device="cuda")
        for fmt in ("bf16", "fp8"):
            payloads = [to_fp8(one.x) if fmt == "fp8" else one.x for one in inputs]
            handles: list = [None] * SETS
            arrived: list = [None] * SETS
            sums: list = [None] * SETS

            def dispatch(
                index: int,
                config=None,
                inputs=inputs,
                ids=ids,
                payloads=payloads,
                handles=handles,
                arrived=arrived,
                most=most,
            ) -> None:
                layout = buffer.get_dispatch_layout(ids[index], me.shape.num_experts)
                found = buffer.dispatch(
                    payloads[index],
                    num_tokens_per_rank=layout[0],
                    num_tokens_per_expert=layout[2],
                    is_token_in_rank=layout[3],
                    topk_idx=ids[index],
                    topk_weights=inputs[index].weights,
                    num_worst_tokens=most,
                    config=config,
                )
                arrived[index], handles[index] = found[0], found[4]

            def combine(
                index: int, config=None, fmt=fmt, handles=handles, arrived=arrived, rows=rows, sums=sums
            ) -> None:
                made = rows if fmt == "fp8" else arrived[index]
                sums[index] = buffer.combine(made, handles[index], config=config)[0]

            configs, about = (None, None), {}
            if budgets is not None:
                choice = deepep_tuning.fastest(me, (tokens, fmt, tuple(budgets)), dispatch, combine, NORMAL_BYTES)
                configs, about = deepep_tuning.configs(choice), choice.about
            there, back = partial(dispatch, config=configs[0]), partial(combine, config=configs[1])
            there(0)
            if fmt == "fp8":  # as above
                sums[0] = buffer.combine(from_fp8(*arrived[0]), handles[0], config=configs[1])[0]
            else:
                back(0)
            hit = torch.zeros(tokens, me.world, device="cuda").scatter_(1, inputs[0].ids // me.local_experts, 1.0)
            wanted = inputs[0].x.float() * hit.sum(dim=1, keepdim=True)
            yield Work(fmt, tokens, there, back, relative_error(sums[0], wanted), about=about)


def deepep_normal(me: Rank) -> Iterator[Work]:
    """With DeepEP's default chunk sizes."""
    return normal_works(me)


def deepep_normal_tuned(me: Rank) -> Iterator[Work]:
    """With the fastest chunk sizes."""
    return normal_works(me, (NORMAL_SMS,))


def deepep_normal_any_sms(me: Rank) -> Iterator[Work]:
    """With the fastest number of SMs and chunk sizes."""
    return normal_works(me, deepep_tuning.SMS)
