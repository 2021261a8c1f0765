"""Fixtures of tests of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cute_ep.integrations import deep_ep
from perf import deepep_works, elastic_works, flashinfer_works, nccl_ep_works, nccl_works
from tests.perf.one_rank import SHAPE, STREAM, TOKENS, Here, OnCpu


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """A rank in a default group of its own; no buffer of an earlier test is left."""
    for cached in (
        nccl_works.known_buffers,
        deepep_works.normal_buffer,
        deepep_works.low_latency_buffer,
        elastic_works.elastic_buffer,
        nccl_ep_works.communicator,
        nccl_ep_works.group,
        nccl_ep_works.window,
        flashinfer_works.all_to_all,
    ):
        cached.cache_clear()
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", deep_ep.Buffer.num_sms)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with OnCpu():
        yield Here(0, 1, SHAPE, list(TOKENS))
    dist.destroy_process_group()
