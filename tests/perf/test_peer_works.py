"""What NCCL and DeepEP are asked to do, on the CPU and with our adapter in DeepEP's place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_ep.integrations import deep_ep
from perf import deepep_tuning, deepep_works, elastic_works, nccl_works
from perf.peer_timing import Rank, Work, relative_error
from perf.peers import MAX_ERROR
from tests.perf.one_rank import SHAPE, Here, check


def test_fp8_rows_of_peers_are_within_their_error() -> None:
    x = torch.randn(3, 256).bfloat16()
    rows, scales = deepep_works.to_fp8(x)
    error = relative_error(deepep_works.from_fp8(rows, scales), x)
    assert 0.02 < error < MAX_ERROR["fp8"]


def test_nccl_gathers_and_sums_home(here: Here) -> None:
    check(nccl_works.nccl_ag_rs(here), ("bf16",))
    check(nccl_works.nccl_all_to_all(here), ("bf16",))


@pytest.mark.parametrize("symmetric", [False, True], ids=["registered", "windows"])
def test_nccl_is_told_of_buffers_that_are_there(here: Here, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is registered once, after all memory that the collectives use has been taken from it."""
    done: list[Any] = []
    pools = SimpleNamespace(MemPool=lambda allocator: f"pool of {allocator}", use_mem_pool=lambda pool: nullcontext())
    pools.synchronize = lambda: done.append("allocated")
    backend = SimpleNamespace(mem_allocator="ncclMemAlloc")
    backend.register_mem_pool = lambda pool, **options: done.append((pool, options))
    monkeypatch.setattr(torch, "cuda", pools)
    monkeypatch.setattr(nccl_works, "backend_of_group", lambda group, device: backend)
    works = nccl_works.nccl_ag_rs_windows if symmetric else nccl_works.nccl_ag_rs_registered
    check(works(here), ("bf16",))
    check(works(here), ("bf16",))
    assert done == ["allocated", ("pool of ncclMemAlloc", {"symm": True} if symmetric else {})]


@pytest.fixture
def deepep(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """The rank, with our adapter in DeepEP's place."""
    names = {name: getattr(deep_ep, name) for name in ("Buffer", "ElasticBuffer", "Config")}
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(**names, topk_idx_t=torch.int64))
    return here


@pytest.mark.parametrize("works", [elastic_works.deepep_v2, elastic_works.deepep_v2_expanded])
def test_elastic_buffers_return_what_was_sent(
    deepep: Here, works: Callable[[Rank], Iterator[Work]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_works, "AT_ONCE", 5)
    for work in check(works(deepep), ("bf16", "fp8")):
        assert work.about["how"] == f"{work.about['sms']} SMs, epilogues all"


def test_normal_and_low_latency_buffers_return_what_was_sent(deepep: Here) -> None:
    for work in check(deepep_works.deepep_normal(deepep), ("bf16", "fp8")):
        assert work.about == {}
    check(deepep_works.deepep_low_latency(deepep), ("bf16", "fp8"))


def test_chosen_chunk_sizes_are_those_that_are_called_with(deepep: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for once for each batch size and format, out of numbers of SMs whose channels fit into the buffer."""
    asked: list[Any] = []
    given: list[Any] = []

    def choose(budgets: list[int], *rest: Any) -> deepep_tuning.Choice:
        asked.append(budgets)
        return deepep_tuning.Choice(24, 20, 7)

    class Config(deep_ep.Config):
        def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
            assert (hidden_bytes, num_ranks) == (2 * SHAPE.hidden, 1)
            return deepep_works.NORMAL_BYTES + (self.num_sms > 96)

    def config_of(sms: int, chunk: int) -> Config:
        given.append((sms, chunk))
        return Config(sms, chunk, deepep_tuning.RECEIVE_TOKENS)

    monkeypatch.setattr(deepep_tuning, "choose", choose)
    monkeypatch.setattr(deepep_tuning, "config_of", config_of)
    monkeypatch.setattr(deepep_tuning, "_CHOSEN", {})
    for _ in range(2):
        for work in check(deepep_works.deepep_normal_any_sms(deepep), ("bf16", "fp8")):
            assert work.about == {"how": "24 SMs, chunks of 20 and 7", "sms": 24}
    assert asked == [[16, 24, 32, 48, 64, 96]] * 4
    assert given.count((24, 20)) == given.count((24, 7)) == 8


def test_the_choice_is_that_of_the_slowest_rank() -> None:
    """By the sum of a dispatch and a combine on as many SMs; here another rank is slow with chunks of 4."""
    chunks = len(deepep_tuning.DISPATCH_CHUNKS)
    asked: list[tuple[str, int]] = []

    def agree(seconds: Any) -> list[float]:
        return [9.0 if len(seconds) == chunks and number == 0 else one for number, one in enumerate(seconds)]

    def time_dispatch(sms: int, chunk: int) -> float:
        asked.append(("dispatch", sms))
        return chunk / sms

    def time_combine(sms: int, chunk: int) -> float:
        asked.append(("combine", sms))
        return abs(chunk - 5) + (2.0 if sms == 64 else 0.0)

    assert deepep_tuning.choose([24, 32, 64], time_dispatch, time_combine, agree) == (32, 6, 5)
    assert list(dict.fromkeys(asked)) == [(name, sms) for sms in (24, 32, 64) for name in ("dispatch", "combine")]
