"""The calls of FlashInfer's `MoeAlltoAll` on CPU ranks: payloads and sums against loops over tokens."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.api.errors import EPConfigError
from cute_ep.integrations.common import pools
from cute_ep.testing.compare import assert_bits

from . import upstream
from .flashinfer_library import (
    EXPERTS,
    HIDDEN,
    MOST,
    SLOTS,
    bits,
    inputs,
    library_of,
    random_rows,
    rows_of,
    sums,
)
from .groups import entries, on_groups

RANKS = 3
LOCAL = EXPERTS // RANKS
Patch = pytest.MonkeyPatch


@pytest.fixture(params=["stubs", "real"])
def made_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module under test, over stubs or the installed library."""
    with library_of(request.param):
        yield importlib.import_module("cute_ep.integrations.flashinfer.alltoall")


def make(module: Any, group: Any, **changes: Any) -> Any:
    """As SGLang makes it: with a size of a workspace in place of hidden_size."""
    mapping = SimpleNamespace(moe_ep_rank=group.rank(), moe_ep_size=group.size())
    config = SimpleNamespace(comm_backend=SimpleNamespace(_group=group))
    sizes = {"max_num_tokens": MOST, "top_k": SLOTS, "num_experts": EXPERTS, "workspace_size_per_rank": 1 << 20}
    return module.MoeAlltoAll(mapping, **{**sizes, "mnnvl_config": config, **changes})


def on_ranks(patch: Patch, module: Any, program: Callable[[Any], Any], **changes: Any) -> list:
    """What program(alltoall) returns on each rank."""

    def run(group: Any) -> Any:
        one = make(module, group, **changes)
        try:
            return program(one)
        finally:
            one.destroy()

    return on_groups(patch, RANKS, run)


ROWS: dict[str, tuple[int, torch.dtype, int, torch.dtype]] = {
    "bf16": (HIDDEN, torch.bfloat16, 0, torch.uint8),
    "mxfp8": (HIDDEN, torch.float8_e4m3fn, HIDDEN // 32, torch.uint8),
    "mxfp8 bytes": (HIDDEN, torch.uint8, HIDDEN // 32, torch.uint8),
    "deepseek": (HIDDEN, torch.float8_e4m3fn, HIDDEN // 128, torch.float32),
    "mxfp4": (HIDDEN // 2, torch.uint8, HIDDEN // 32, torch.uint8),
    "nvfp4": (HIDDEN // 2, torch.uint8, HIDDEN // 16, torch.float8_e4m3fn),
}
"""Columns and types of rows and of scale factors by name."""


@pytest.mark.parametrize("invalid", [None, EXPERTS, 0], ids=["none", "no expert", "an expert"])
@pytest.mark.parametrize("name", ROWS)
def test_a_round_is_that_of_loops_over_tokens(monkeypatch: Patch, made_of: Any, name: str, invalid: int | None) -> None:
    """Payloads come in the order in which they were given, in their types; the output is the sum over ranks."""
    columns, dtype, factors, kind = ROWS[name]
    given = inputs(RANKS, "uniform" if invalid == 0 else "masked")
    ids = [one.topk_ids.int() for one in given]
    sent = [one.masked_fill(one < 0, invalid) if invalid == EXPERTS else one for one in ids]
    rows = [bits(len(one.x), columns, dtype, 5 + rank) for rank, one in enumerate(given)]
    scales = [[bits(len(one.x), factors, kind, 50 + rank)] if factors else [] for rank, one in enumerate(given)]
    outputs = [random_rows(RANKS * MOST, rank) for rank in range(RANKS)]

    def program(one: Any) -> tuple:
        rank = one.ep_rank
        payloads = [rows[rank], *scales[rank], sent[rank], given[rank].router_weights]
        index = 1 + len(scales[rank])
        got = one.dispatch(sent[rank], payloads, MOST, invalid, None if invalid is None else index)
        memory = one.get_combine_payload_tensor_in_workspace(MOST, HIDDEN, torch.bfloat16)
        memory.copy_(outputs[rank].view(memory.shape))
        total = one.combine(memory, MOST, payload_in_workspace=True)
        one.synchronize()
        return got, total

    known = [one.topk_ids for one in given]
    want = sums(RANKS, known, outputs, MOST)
    for rank, (got, total) in enumerate(on_ranks(monkeypatch, made_of, program)):
        payload, *factor, got_ids, weights = got
        assert [one.dtype for one in got] == [dtype, *([kind] if factors else []), torch.int32, torch.float32]
        assert all(one.shape[:2] == (RANKS, MOST) and one.is_contiguous() for one in got)
        want_ids = torch.full((RANKS * MOST, SLOTS), -1 if invalid is None else invalid, dtype=torch.int32)
        want_weights = torch.zeros(RANKS * MOST, SLOTS)
        found = entries(EXPERTS, RANKS, rank, known)
        for row, (source, token, own) in zip(rows_of(found, MOST), found, strict=True):
            place = divmod(row, MOST)
            assert_bits(payload[place], rows[source][token], f"rank {rank} row {row}")
            for one in factor:
                assert_bits(one[place], scales[source][0][token], f"rank {rank} scales {row}")
            for slot, expert in own.items():
                want_ids[row, slot] = expert + rank * LOCAL
                want_weights[row, slot] = given[source].router_weights[token, slot]
        assert_bits(got_ids.flatten(0, 1), want_ids, f"rank {rank} ids")
        assert_bits(weights.flatten(0, 1), want_weights, f"rank {rank} weights")
        assert_bits(total, want[rank].bfloat16(), f"rank {rank} sums")


def test_rounds_may_have_fewer_rows_and_payloads(monkeypatch: Patch, made_of: Any) -> None:
    given = inputs(RANKS, "uniform")
    strides = [9, 9, 4]

    def program(one: Any) -> list:
        own, totals = given[one.ep_rank], []
        for count, stride in enumerate(strides):
            x, ids = own.x[:stride], own.topk_ids[:stride].long()
            payloads = [[x], [x, ids], [x, ids, own.router_weights[:stride].bfloat16()]][count]
            got = one.dispatch(ids, payloads, stride)
            assert len(got) == len(payloads) and [x.dtype for x in got] == [x.dtype for x in payloads]
            out = torch.empty_like(x)
            assert one.combine(got[0], stride, output=out) is out
            totals.append(out)
        return totals

    for rank, totals in enumerate(on_ranks(monkeypatch, made_of, program, hidden_size=HIDDEN)):
        own = given[rank]
        times = torch.stack([(own.topk_ids // LOCAL == r).any(1) for r in range(RANKS)], 1).sum(1)
        for total, stride in zip(totals, strides, strict=True):
            assert torch.equal(total, (own.x.float() * times[:, None]).bfloat16()[:stride])


def test_it_takes_calls_as_flashinfers_class_does(made_of: Any) -> None:
    with upstream.installed("flashinfer") as stubs:
        theirs: Any = stubs["flashinfer.comm.trtllm_moe_alltoall"]
    base, ours = theirs.MoeAlltoAll, made_of.MoeAlltoAll
    assert not upstream.differences(ours, base) and ours.eplb_gathered_stats is None
    mine, want = (list(inspect.signature(one.__init__).parameters.values()) for one in (ours, base))
    assert [(one.name, one.kind, one.default) for one in mine] == [(one.name, one.kind, one.default) for one in want]


def test_the_group_must_be_that_of_the_mapping(made_of: Any) -> None:
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    wrong = SimpleNamespace(comm_backend=SimpleNamespace(_group=SimpleNamespace(rank=lambda: 1, size=lambda: 4)))
    for changes, rule in (
        ({"mnnvl_config": wrong}, "mapping.moe_ep_rank, mapping.moe_ep_size = 0, 2: must be those .* 1, 4"),
        ({"mnnvl_config": None}, "needs a default group"),
    ):
        with pytest.raises(EPConfigError, match=rule):
            make(made_of, group, **changes)
    assert not pools.SHARED
