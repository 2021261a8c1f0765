"""How DeepEP V2's `ElasticBuffer` does a round, without host synchronisation. Functions and memory are as in
`perf.nccl_works`. The kernels are compiled when they are first called."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.distributed as dist

from perf.cases import Shape
from perf.deepep_works import from_fp8, to_fp8
from perf.peer_timing import SETS, Rank, Work, relative_error

AT_ONCE = 8192
"""Rows of the worst case that are decoded at a time, for each takes several times its memory."""


@cache
def elastic_buffer(most: int, shape: Shape):
    """DeepEP's buffer for up to `most` tokens a rank of one NVLink domain; BF16 rows, which take more, set its size."""
    import deep_ep

    return deep_ep.ElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=most,
        hidden=shape.hidden,
        num_topk=shape.top_k,
        use_fp8_dispatch=False,
        allow_hybrid_mode=False,
        explicitly_destroy=True,
    )


def decoded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`from_fp8` of many rows."""
    parts = zip(rows.split(AT_ONCE), scales.split(AT_ONCE), strict=True)
    return torch.cat([from_fp8(*part) for part in parts])


def elastic_works(me: Rank, expanded: bool) -> Iterator[Work]:
    """Dispatch into memory for the most rows that can arrive, and the sum.

    Args:
        me: the rank.
        expanded: whether rows are expert-major, one for each (token, expert), which a combine sums before it sends.
    """
    import deep_ep

    shape, most = me.shape, max(me.tokens)
    buffer = elastic_buffer(most, shape)
    sms = buffer.get_theoretical_num_sms(shape.num_experts, shape.top_k)
    about: dict[str, str | int] = {"how": f"{sms} SMs, epilogues all", "sms": sms}
    for tokens in me.tokens:
        inputs = me.inputs(tokens)
        ids = [one.ids.to(deep_ep.topk_idx_t) for one in inputs]
        for fmt in ("bf16", "fp8"):
            payloads = [to_fp8(one.x) if fmt == "fp8" else one.x for one in inputs]
            handles: list = [None] * SETS
            arrived: list = [None] * SETS
            sums: list = [None] * SETS

            def dispatch(
                index: int, inputs=inputs, ids=ids, payloads=payloads, handles=handles, arrived=arrived
            ) -> None:
                found = buffer.dispatch(
                    payloads[index],
                    topk_idx=ids[index],
                    topk_weights=inputs[index].weights,
                    num_experts=shape.num_experts,
                    num_max_tokens_per_rank=most,
                    expert_alignment=1,
                    num_sms=sms,
                    do_handle_copy=False,
                    do_cpu_sync=False,
                    do_expand=expanded,
                )
                arrived[index], handles[index] = found[0], found[3]

            dispatch(0)
            first = decoded(*arrived[0]) if fmt == "fp8" else arrived[0]
            sums[0] = buffer.combine(first, handles[0], num_sms=sms)[0]
            hit = torch.zeros(tokens, me.world, device="cuda").scatter_(1, inputs[0].ids // me.local_experts, 1.0)
            copies = shape.top_k if expanded else hit.sum(dim=1, keepdim=True)
            error = relative_error(sums[0], inputs[0].x.float() * copies)
            rows = first if fmt == "fp8" else None  # what experts would have made of FP8 rows, for all rounds

            def combine(index: int, handles=handles, arrived=arrived, rows=rows, sums=sums) -> None:
                made = arrived[index] if rows is None else rows
                sums[index] = buffer.combine(made, handles[index], num_sms=sms)[0]

            del first
            yield Work(fmt, tokens, dispatch, combine, error, about=about)


def deepep_v2(me: Rank) -> Iterator[Work]:
    """Rank-major rows, one for each (token, rank)."""
    return elastic_works(me, expanded=False)


def deepep_v2_expanded(me: Rank) -> Iterator[Work]:
    """Expert-major rows."""
    return elastic_works(me, expanded=True)
