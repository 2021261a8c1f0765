"""DeepEP's low-latency mode on CPU ranks: blocks, scale factors and weighted sums against loops over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.integrations.deep_ep import Buffer
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import ROUTINGS, RankInputs, make_inputs

from .groups import entries, on_buffers, wide_ids

HIDDEN, EXPERTS, SLOTS, MOST = 1024, 12, 3, 10
TOKENS = {2: (9, 5), 3: (9, 0, 7), 4: (9, 0, 7, 3)}
NODES = pytest.mark.parametrize(("ranks", "per_node"), [(2, None), (3, None), (3, 1), (4, 2)])
RANKS = pytest.mark.parametrize("ranks", [2, 3])
HOOK = pytest.mark.parametrize("hook", [False, True], ids=["at once", "hook"])
ROWS = {
    "bfloat16": ({"use_fp8": False}, "bf16"),
    "fp8": ({}, "fp8"),
    "power of two": ({"round_scale": True}, "fp8_pow2"),
    "ue8m0": ({"round_scale": True, "use_ue8m0": True}, "fp8_pow2"),
}

Patch = pytest.MonkeyPatch


def inputs(ranks: int, routing: str) -> list[RankInputs]:
    return make_inputs(EPConfig(HIDDEN, EXPERTS, SLOTS, MOST, ranks), TOKENS[ranks], routing, 7)


def call(method: Any, *arguments: Any, hook: bool, **options: Any) -> tuple:
    """What a call returns once it has received."""
    *got, event, receive = method(*arguments, return_recv_hook=hook, async_finish=not hook, **options)
    if hook:
        assert event.event is None
        receive()
        receive()  # nothing more
    else:
        event.current_stream_wait()
        assert receive is None
    return tuple(got)


@NODES
@HOOK
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("routing", ["masked", "one_rank"])
def test_dispatch_fills_a_block_per_expert(
    monkeypatch: Patch, ranks: int, per_node: int | None, hook: bool, kind: str, routing: str
) -> None:
    """Over nodes by rail, then node."""
    given, (options, fmt) = inputs(ranks, routing), ROWS[kind]
    ids, local = wide_ids(given), EXPERTS // ranks

    def program(buffer: Buffer) -> tuple:
        stats = torch.full((local,), 5, dtype=torch.int32)
        arguments = given[buffer.rank].x, ids[buffer.rank], MOST, EXPERTS
        more = {"cumulative_local_expert_recv_stats": stats, **options}
        return *call(buffer.low_latency_dispatch, *arguments, hook=hook, **more), stats

    made = on_buffers(monkeypatch, ranks, program, ranks_per_node=per_node)
    for rank, (rows, counts, handle, stats) in enumerate(made):
        payload, scales = rows if isinstance(rows, tuple) else (rows, None)
        src_info, layout_range, *sizes = handle
        assert tuple(sizes) == (MOST, HIDDEN, EXPERTS) and payload.shape == (local, ranks * MOST, HIDDEN)
        assert layout_range.dtype == torch.int64 and src_info.dtype == counts.dtype == torch.int32
        if scales is not None:
            factors = HIDDEN // (512 if kind == "ue8m0" else 128)
            assert scales.shape == (local, ranks * MOST, factors) and scales.stride(1) == 1
        for expert in range(local):
            places = [(s, t) for s, t, own in entries(EXPERTS, ranks, rank, ids) for e in own.values() if e == expert]
            places.sort(key=lambda one: (one[0] % (per_node or ranks), one))
            count = len(places)
            assert counts[expert] == count and stats[expert] == 5 + count
            assert src_info[expert, :count].tolist() == [t for _, t in places]
            for source, packed in enumerate(layout_range[expert].tolist()):
                begin, number = packed >> 32, packed & 0xFFFFFFFF
                assert [s for s, _ in places[begin : begin + number]] == [source] * number
                assert number == sum(s == source for s, _ in places)
            x = torch.stack([given[s].x[t] for s, t in places]) if places else given[0].x[:0]
            want = reference.quantize(x, fmt)
            assert_bits(payload[expert, :count], want.payload, "rows")
            if scales is not None:
                got = scales[expert, :count].clone(memory_format=torch.contiguous_format)
                if kind == "ue8m0":  # as DeepEP's tests decode it
                    got = (got.view(torch.uint8).int() << 23).view(torch.float32)
                assert_bits(got, want.scales, "scales")


@NODES
@HOOK
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "repeated"])
def test_combine_adds_weighted_rows(
    monkeypatch: Patch, ranks: int, per_node: int | None, hook: bool, kind: str, routing: str
) -> None:
    """Bit for bit, in float32 by slot; with rows given or in the combine buffer, twice, into given memory or not."""
    given, (options, _) = inputs(ranks, routing), ROWS[kind]
    ids, local = wide_ids(given), EXPERTS // ranks
    shape = (local, ranks * MOST, HIDDEN)
    outputs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(ranks)]

    def program(buffer: Buffer) -> list:
        own, rank = given[buffer.rank], buffer.rank
        _, _, handle = call(buffer.low_latency_dispatch, own.x, ids[rank], MOST, EXPERTS, hook=hook, **options)
        again = ids[rank], own.router_weights, handle
        (first,) = call(buffer.low_latency_combine, outputs[rank], *again, hook=hook)
        buffer.get_next_low_latency_combine_buffer(handle)[:] = outputs[rank]
        out = torch.empty_like(first)
        empty = torch.full(shape, torch.nan).bfloat16()
        (second,) = call(buffer.low_latency_combine, empty, *again, hook=hook, zero_copy=True, out=out)
        assert second is out
        return [first, second]

    place: dict[tuple[int, int, int], torch.Tensor] = {}
    for rank in range(ranks):
        filled = [0] * local
        by_rail = sorted(entries(EXPERTS, ranks, rank, ids), key=lambda one: (one[0] % (per_node or ranks), *one[:2]))
        for source, token, own in by_rail:
            for slot, expert in own.items():
                place[source, token, slot] = outputs[rank][expert, filled[expert]]
                filled[expert] += 1
    for rank, totals in enumerate(on_buffers(monkeypatch, ranks, program, ranks_per_node=per_node)):
        want = torch.zeros(TOKENS[ranks][rank], HIDDEN)
        for token in range(len(want)):
            for slot in range(SLOTS):
                if (rank, token, slot) in place:
                    want[token] += given[rank].router_weights[token, slot] * place[rank, token, slot].float()
        for total in totals:
            assert_bits(total, want.bfloat16(), f"rank {rank}")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_entries_masked_after_dispatch_have_weight_zero(monkeypatch: Patch, dtype: torch.dtype) -> None:
    """Where they stand, too."""
    given = inputs(2, "uniform")

    def program(buffer: Buffer) -> torch.Tensor:
        own = given[buffer.rank]
        ids = own.topk_ids.to(dtype, copy=True)
        rows, _, handle = call(buffer.low_latency_dispatch, own.x, ids, MOST, EXPERTS, hook=False, use_fp8=False)
        ids[:, 1:] = -1
        rows = rows.masked_fill(rows.isnan(), 0)
        (out,) = call(buffer.low_latency_combine, rows, ids, torch.ones(ids.shape), handle, hook=False)
        return out

    for rank, out in enumerate(on_buffers(monkeypatch, 2, program)):
        assert torch.equal(out, given[rank].x)


def test_two_halves_may_be_outstanding(monkeypatch: Patch) -> None:
    """Of two micro-batches, as callers overlap them; a third is refused."""
    given = inputs(2, "uniform")
    ids = wide_ids(given)

    def program(buffer: Buffer) -> list[torch.Tensor]:
        own = given[buffer.rank]
        arguments = ids[buffer.rank], MOST, EXPERTS
        options = {"use_fp8": False, "return_recv_hook": True}
        sent = [buffer.low_latency_dispatch(x, *arguments, **options) for x in (own.x, own.x * 2)]
        with pytest.raises(EPInputError, match=r"2 hook\(s\) of earlier calls have not been called"):
            buffer.low_latency_dispatch(own.x, *arguments, **options)
        with pytest.raises(EPInputError, match="the dispatch's hook must be called"):
            buffer.low_latency_combine(sent[0][0], ids[buffer.rank], own.router_weights, sent[0][2])
        for *_, receive in sent:
            receive()
        back = [
            buffer.low_latency_combine(rows, ids[buffer.rank], own.router_weights, handle, return_recv_hook=True)
            for rows, _, handle, _, _ in sent
        ]
        for *_, receive in back:
            receive()
        return [out for out, *_ in back]

    for rank, (first, second) in enumerate(on_buffers(monkeypatch, 2, program)):
        torch.testing.assert_close(first, given[rank].x, rtol=2**-6, atol=0)
        assert_bits(second, first * 2, f"rank {rank}")


def test_both_modes_may_be_mixed(monkeypatch: Patch) -> None:
    given = inputs(2, "uniform")
    ids = wide_ids(given)

    def program(buffer: Buffer) -> None:
        own, rank = given[buffer.rank], buffer.rank
        for _ in range(2):
            by_rank, _, by_expert, goes, _ = buffer.get_dispatch_layout(ids[rank], EXPERTS)
            rows, *_, handle, _ = buffer.dispatch(own.x, None, by_rank, None, goes, by_expert)
            assert torch.equal(buffer.combine(rows, handle)[0], own.x * goes.sum(1, keepdim=True))
            buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
            blocks, _, handle, *_ = buffer.low_latency_dispatch(own.x, ids[rank], MOST, EXPERTS, use_fp8=False)
            out, *_ = buffer.low_latency_combine(blocks, ids[rank], own.router_weights, handle)
            torch.testing.assert_close(out, own.x, rtol=2**-6, atol=0)

    on_buffers(monkeypatch, 2, program)


def test_what_there_is_not_is_named(monkeypatch: Patch) -> None:
    def program(buffer: Buffer) -> None:
        for missing in ("internode_dispatch", "get_local_buffer_tensor", "low_latency_update_mask_buffer"):
            with pytest.raises(EPError, match=f"{missing}: this adapter does not have it"):
                getattr(buffer, missing)(1)

    on_buffers(monkeypatch, 2, program)
