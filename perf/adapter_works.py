"""What `perf.adapters` asks of adapters that need no framework, and the same of a communicator. As in
`perf.framework_works`, a function of each name in `perf.adapters.ADAPTERS` yields what is to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

import cute_ep
import cute_ep.ops
from perf.adapter_problem import INNER, LOW_LATENCY_TOKENS, Native, Rank, Work, swiglu_experts
from perf.peer_list import NORMAL_SMS


def normal_dispatch(
    buffer: Any, experts: int, x: Any, ids: torch.Tensor, weights: torch.Tensor, worst: int = 0
) -> tuple:
    """Layout and dispatch of a buffer with DeepEP V1's interface, ours or its own.

    Args:
        x: [T, hidden] bfloat16, or FP8 rows and their scales.
        ids, weights: [T, K], ids as `topk_idx_t`.
        worst: `num_worst_tokens`; 0: the host waits for numbers of rows.

    Returns:
        What the buffer's `dispatch` returns, the handle as [4].
    """
    by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids, experts)
    sizes = {"num_tokens_per_rank": by_rank, "num_tokens_per_expert": by_expert}
    sizes |= {"is_token_in_rank": goes, "num_worst_tokens": worst}
    return buffer.dispatch(x, **sizes, topk_idx=ids, topk_weights=weights)


def deepep_normal(me: Rank) -> Iterator[Work]:
    """With the host's wait for the number of rows, and without it."""
    from cute_ep.integrations.deep_ep import Buffer

    Buffer.set_num_sms(NORMAL_SMS)
    buffer = Buffer(me.group)
    for tokens in me.tokens:
        given = me.inputs(tokens)
        ids, weights = given.ids.long(), given.weights
        for fmt in ("bf16", "fp8"):
            quantised = cute_ep.quantize(given.x, "fp8") if fmt == "fp8" else None
            x: Any = given.x if quantised is None else (quantised.payload, quantised.scales)
            layout = {} if quantised is None else {"dispatch_format": "fp8", "scale_layout": "linear"}
            native = Native(me, given, "partial", rows=quantised, sms=Buffer.num_sms, **layout)
            for worst in (0, tokens * me.world):
                last = SimpleNamespace()

                def dispatch(x=x, ids=ids, weights=weights, worst=worst, last=last) -> None:
                    found = normal_dispatch(buffer, me.shape.num_experts, x, ids, weights, worst)
                    last.rows, last.handle = found[0], found[4]

                dispatch()
                rows = torch.randn(len(last.handle.recv_src_idx), me.shape.hidden, device=me.device).bfloat16()

                def combine(rows=rows, last=last) -> None:
                    buffer.combine(rows, last.handle)

                waits = frozenset() if worst else frozenset(["dispatch"])
                calls, about = {"dispatch": dispatch, "combine": combine}, "num_worst_tokens" if worst else ""
                yield Work(fmt, tokens, native.count, calls, native.calls, waits, about)
    buffer.destroy()


def deepep_low_latency(me: Rank) -> Iterator[Work]:
    from cute_ep.integrations.deep_ep import Buffer

    buffer = Buffer(me.group)
    for tokens in [count for count in me.tokens if count <= LOW_LATENCY_TOKENS]:
        given, slots = me.inputs(tokens), tokens * me.world
        ids, last = given.ids.long(), SimpleNamespace()
        shape = me.shape.num_experts // me.world, slots, me.shape.hidden
        rows = torch.randn(shape, device=me.device).bfloat16()
        for fmt in ("bf16", "fp8"):
            layout = {"dispatch_format": fmt, "scale_layout": "transposed" if fmt == "fp8" else None}
            native = Native(me, given, "exact", late=True, block_rows=slots, **layout)

            def dispatch(fmt=fmt, given=given, ids=ids, tokens=tokens, last=last) -> None:
                sizes = tokens, me.shape.num_experts
                _, _, last.handle, *_ = buffer.low_latency_dispatch(given.x, ids, *sizes, use_fp8=fmt == "fp8")

            def combine(given=given, ids=ids, rows=rows, last=last) -> None:
                buffer.low_latency_combine(rows, ids, given.weights, last.handle)

            yield Work(fmt, tokens, native.count, {"dispatch": dispatch, "combine": combine}, native.calls)
    buffer.destroy()


def deepep_elastic(me: Rank) -> Iterator[Work]:
    """V2, one row per (token, rank), with the host's wait for the number of rows and without it; and expanded."""
    from cute_ep.integrations.deep_ep import ElasticBuffer

    for tokens in me.tokens:
        given, last = me.inputs(tokens), SimpleNamespace()
        ids = given.ids.long()
        buffer = ElasticBuffer(me.group, num_max_tokens_per_rank=tokens, hidden=me.shape.hidden)
        sms = buffer.get_theoretical_num_sms(me.shape.num_experts, me.shape.top_k)
        native = Native(me, given, "partial", sms=sms)
        for sync, expand in ((True, False), (False, False), (False, True)):

            def dispatch(given=given, ids=ids, buffer=buffer, last=last, sync=sync, expand=expand) -> None:
                sizes = {"num_experts": me.shape.num_experts, "do_cpu_sync": sync, "do_expand": expand}
                last.rows, _, _, last.handle, _ = buffer.dispatch(given.x, ids, given.weights, **sizes)

            def combine(buffer=buffer, last=last) -> None:
                buffer.combine(last.rows, last.handle)

            about = ", ".join(["do_cpu_sync=False"] * (not sync) + ["do_expand"] * expand)
            waits = frozenset(["dispatch"] if sync else [])
            calls = {"dispatch": dispatch, "combine": combine}
            yield Work("bf16", tokens, native.count, calls, native.calls, waits, about)
        buffer.destroy()


def ops(me: Rank) -> Iterator[Work]:
    """Into new memory with room for any routing, which is cleared, and into the caller's."""
    for tokens in me.tokens:
        given, last = me.inputs(tokens), SimpleNamespace()
        native = Native(me, given, "partial")
        comm, out = cute_ep.ops.register(native.ep), torch.empty_like(given.x)
        sent, buffers = (given.x, given.ids, given.weights, comm), native.ep.allocate()

        def dispatch(sent=sent, last=last) -> None:
            last.batch = cute_ep.ops.dispatch(*sent)

        def combine(last=last) -> None:
            cute_ep.ops.combine(last.batch.tokens, last.batch, mode="partial")

        def dispatch_into(sent=sent, buffers=buffers, last=last) -> None:
            last.batch = cute_ep.ops.dispatch_into(*sent, buffers)

        def combine_into(last=last, out=out) -> None:
            cute_ep.ops.combine_into(last.batch.tokens, last.batch, out, mode="partial")

        yield Work("bf16", tokens, native.count, {"dispatch": dispatch, "combine": combine}, native.calls)
        calls = {"dispatch": dispatch_into, "combine": combine_into}
        yield Work("bf16", tokens, native.count, calls, native.calls, about="dispatch_into, combine_into")


def layer(me: Rank) -> Iterator[Work]:
    """`cute_ep.nn.MoELayer` behind its router."""
    from cute_ep.nn import MoELayer

    for tokens in me.tokens:
        given = me.inputs(tokens)
        native = Native(me, given, "partial")
        module = MoELayer(native.ep.cfg, INNER, mode="partial", device=me.device)
        module.attach(native.ep)
        native.compute = swiglu_experts(module.gate_up, module.down)

        def forward(module=module, given=given) -> None:
            module.experts(given.x, given.ids, given.weights)

        yield Work("bf16", tokens, native.count, {"layer": forward}, {"layer": native.pair})
