"""FlashInfer's backend in real processes over gloo, and what it launches on a GPU."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_ep.api.config import EPConfig
from cute_ep.runtime import process_connection
from cute_ep.runtime.communicator import Communicator
from tests.fake_gpu import Launches, MakeRank
from tests.processes import WITHOUT_GPU, run_page, run_ranks

from .flashinfer_library import INSTALLED, stubs
from .groups import ThreadGroup


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_outputs_are_those_of_a_model_of_all_ranks(tmp_path: Path, world: int) -> None:
    run_ranks("tests.integrations.flashinfer_worker", world, tmp_path / "store", environment=[WITHOUT_GPU] * world)


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs FlashInfer")
def test_the_script_of_the_page_runs_without_a_gpu(tmp_path: Path) -> None:
    said = run_page("flashinfer.md", tmp_path)
    assert sorted(re.findall(r"rank \d: 64 tokens", said)) == ["rank 0: 64 tokens", "rank 1: 64 tokens"]


TOKENS, HIDDEN = 16, 1024


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_nothing_waits_on_the_host(
    monkeypatch: pytest.MonkeyPatch, make_rank: MakeRank, launches: Launches, no_wait: None, kind: str
) -> None:
    made: list[Communicator] = []

    def connect(check: object, cfg: EPConfig, group: object, sms: int | None) -> Communicator:
        made.append(make_rank(cfg))
        return made[-1]

    monkeypatch.setattr(process_connection, "connect_checked", connect)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # kernels write nothing
    group: Any = ThreadGroup(0, 2, threading.Barrier(1), [])
    ids, weights = torch.rand(TOKENS, 8).topk(4).indices, torch.rand(TOKENS, 4)
    with stubs() as (moe_ep, adapter):
        wanted = moe_ep.QuantFormat["NVFP4"] if kind == "nvfp4" else None
        params = moe_ep.MoEEpCommParams(8, 4, TOKENS, HIDDEN, dispatch_format=wanted)
        comm = adapter.CuteEPCommunication(moe_ep.BootstrapConfig(2, 0, process_group=group), params)
        x = torch.randn(TOKENS, HIDDEN).bfloat16()
        given = x if kind == "bf16" else torch.zeros(TOKENS, HIDDEN // 2, dtype=torch.uint8)
        scale = None if kind == "bf16" else torch.zeros(TOKENS, HIDDEN // 16, dtype=torch.uint8)
        rows = x.repeat(2, 1)
        for _ in range(2):
            got = comm.dispatch(given, ids, weights, hidden_states_scale=scale)
            assert launches.last("dispatch").values("input.x") == (given.data_ptr(),)
            comm.combine(rows)
            assert launches.last("combine").values("rows.data", "rows.capacity") == (rows.data_ptr(), 2 * TOKENS)
        assert got.hidden_states.shape[0] == 2 * TOKENS
    assert [cfg.cfg.dispatch_format for cfg in made] == [kind]
    assert launches.kernels == ["dispatch_rank_major", "combine_partial"] * 2
