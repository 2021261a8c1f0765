"""More ranks than a token may have entries: 33 on 3 nodes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.integrations.common import pools
from cute_ep.integrations.deep_ep import Buffer
from cute_ep.testing.compare import assert_bits
from cute_ep.testing.workloads import RankInputs, make_inputs

from . import vllm_parts
from .groups import ThreadGroup, entries, on_buffers, on_groups, wide_ids
from .refusals import refused
from .test_training_refusals import options
from .upstream import installed

RANKS, PER_NODE, EXPERTS, SLOTS, HIDDEN, TMAX = 33, 11, 66, 4, 128, 5
TOKENS = [rank % (TMAX + 1) for rank in range(RANKS)]

Patch = pytest.MonkeyPatch


def inputs() -> list[RankInputs]:
    cfg = EPConfig(HIDDEN, EXPERTS, SLOTS, TMAX, RANKS, ranks_per_node=PER_NODE)
    return make_inputs(cfg, TOKENS, "masked", 3)


def test_deep_eps_normal_mode(monkeypatch: Patch) -> None:
    """Rows, weights and numbers of rows that are told by an exchange of counts; and sums of rows and weights."""
    given = inputs()
    ids = wide_ids(given)

    def program(buffer: Buffer) -> tuple:
        own, entry = given[buffer.rank], ids[buffer.rank]
        by_rank, by_node, by_expert, goes, _ = buffer.get_dispatch_layout(entry, EXPERTS)
        layout: Any = own.x, None, by_rank, by_node, goes, by_expert
        rows, local, weights, counts, handle, _ = buffer.dispatch(*layout, entry, own.router_weights)
        out, total, _ = buffer.combine(rows, handle, weights)
        words = "is_token_in_rank: must be of get_dispatch_layout with more than 32 ranks, here 33"
        layout = own.x, None, by_rank, by_node, goes.clone(), by_expert
        refused(lambda: buffer.dispatch(*layout), words)
        return rows, local, weights, counts, out, total, goes

    results = on_buffers(monkeypatch, RANKS, program, ranks_per_node=PER_NODE)
    for rank, (rows, local, weights, counts, out, total, goes) in enumerate(results):
        places = entries(EXPERTS, RANKS, rank, ids)
        want = torch.stack([given[s].x[t] for s, t, _ in places]) if places else given[0].x[:0]
        assert_bits(rows, want, f"rank {rank} rows")
        want_ids, want_weights = torch.full((len(places), SLOTS), -1), torch.zeros(len(places), SLOTS)
        for row, (source, token, own) in enumerate(places):
            for slot, expert in own.items():
                want_ids[row, slot] = expert
                want_weights[row, slot] = given[source].router_weights[token, slot]
        assert_bits(local, want_ids, f"rank {rank} ids")
        assert_bits(weights, want_weights, f"rank {rank} weights")
        chosen = [expert for _, _, own in places for expert in own.values()]
        assert counts == [chosen.count(expert) for expert in range(EXPERTS // RANKS)]
        assert torch.equal(out, given[rank].x * goes.sum(1, keepdim=True))
        assert torch.equal(total, torch.where(ids[rank] >= 0, given[rank].router_weights, 0))


def test_deep_eps_low_latency_mode(monkeypatch: Patch) -> None:
    given = inputs()
    ids = wide_ids(given)

    def program(buffer: Buffer) -> tuple:
        own, entry = given[buffer.rank], ids[buffer.rank]
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(own.x, entry, TMAX, EXPERTS, use_fp8=False)
        out, _, _ = buffer.low_latency_combine(rows, entry, torch.ones(entry.shape), handle)
        return counts, out

    for rank, (counts, out) in enumerate(on_buffers(monkeypatch, RANKS, program, ranks_per_node=PER_NODE)):
        every = torch.cat(ids)
        local = range(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
        assert counts.tolist() == [int((every == expert).sum()) for expert in local]
        assert torch.equal(out, given[rank].x * (ids[rank] >= 0).sum(1, keepdim=True))


@pytest.mark.parametrize("batched", [False, True], ids=["standard", "batched"])
def test_vllms_layers(monkeypatch: Patch, batched: bool) -> None:
    """The standard one counts rows. Outputs are those of the tokens' experts, each of which changes a row alike."""
    given, local = inputs(), EXPERTS // RANKS
    sizes = {"RANKS": RANKS, "EXPERTS": EXPERTS, "SLOTS": SLOTS, "HIDDEN": HIDDEN, "TMAX": TMAX}
    for name, size in sizes.items():
        monkeypatch.setattr(vllm_parts, name, size)

    def program(one: vllm_parts.Layer) -> torch.Tensor:
        own = replace(given[one.rank], router_weights=torch.ones(given[one.rank].topk_ids.shape))
        rows, _, meta, ids, _ = vllm_parts.prepare(one, own)
        assert torch.equal(meta.expert_num_tokens, counts[one.rank * local : (one.rank + 1) * local])
        assert batched or len(rows) == len(ids) == meta.expert_num_tokens.sum()
        out = torch.empty_like(own.x)
        vllm_parts.finalize(one, out, rows)
        return out

    counts = torch.stack([(torch.cat(wide_ids(given)) == expert).sum() for expert in range(EXPERTS)]).int()
    with installed("vllm", "cute_ep.integrations.vllm") as stubs:
        vllm_parts.import_adapter(stubs, monkeypatch)
        made = vllm_parts.run(
            monkeypatch, program, top_k=SLOTS, batched=batched, ranks_per_node=PER_NODE, static_rows=0
        )
    for own, out in zip(given, made, strict=True):
        assert torch.equal(out, own.x * (own.topk_ids >= 0).sum(1, keepdim=True))


def test_megatrons_manager(monkeypatch: Patch) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install megatron-core==0.16.1")
    megatron: Any = importlib.import_module("cute_ep.integrations.megatron")
    given = inputs()

    def program(group: ThreadGroup) -> torch.Tensor:
        own, local = given[group.rank()], EXPERTS // RANKS
        one = megatron.CuteEPManager(group, local, SLOTS, EXPERTS, options())
        shape, ids = (len(own.x), RANKS, local), wide_ids([own])[0]
        routing = torch.zeros(len(own.x), EXPERTS + 1, dtype=torch.bool).scatter_(1, ids % (EXPERTS + 1), True)
        one.setup_metadata(routing[:, :EXPERTS].reshape(shape), torch.ones(shape))
        try:
            with torch.no_grad():
                return one.combine(one.dispatch(own.x))
        finally:
            pools.release(group, None)  # type: ignore[arg-type]

    for own, out in zip(given, on_groups(monkeypatch, RANKS, program, ranks_per_node=PER_NODE), strict=True):
        assert torch.equal(out, own.x * (own.topk_ids >= 0).sum(1, keepdim=True))
